"""For mkdocstrings: every docstring of rlkit goes through `docstrings.markdown`, with the public names as links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import griffe
from docstrings import markdown


def members(home: Any) -> Iterator[Any]:
    """What a module or class defines, at any depth; nothing that it imports."""
    for member in home.members.values():
        if not member.is_alias:
            yield member
            if member.is_module or member.is_class:
                yield from members(member)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """A name is no link where two places define it, or where some function has a parameter of this name."""
        found = [pkg, *members(pkg)]
        homes: dict[str, list[str]] = defaultdict(list)
        for item in found:
            private = any(part.startswith("_") for part in item.path.split("."))
            if item.has_docstring and not private and ".scripts" not in item.path:
                homes[item.path.removeprefix("rlkit.")].append(item.path)
                if item.parent is not None and item.parent.is_module and not item.is_module:
                    homes[item.name].append(item.path)
        taken = {parameter.name for item in found if item.is_function for parameter in item.parameters}
        unique = {name: paths[0] for name, paths in homes.items() if len(set(paths)) == 1 and name not in taken}
        for item in found:
            if item.docstring is not None:
                others = {name: path for name, path in unique.items() if path != item.path}
                item.docstring.value = markdown(item.docstring.value, others)
