"""Names of rlkit 0.1 that have moved: who imports one is told where it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose old names are elsewhere: `places` has the names (with blanks) by place."""
    place_of = {name: place for place, names in places.items() for name in names.split()}

    def missing(name: str) -> Any:
        if name not in place_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(
            f"{module}.{name} of rlkit 0.1 is now {place_of[name]} (CHANGELOG.md lists all that has moved)"
        )

    return missing
