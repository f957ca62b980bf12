"""tyro's parsers of commands, read once in a process: each call of a command reads its settings anew, for 0.06 s."""

from __future__ import annotations

from typing import Any

from tyro._parsers import ParserSpecification


def keep() -> None:
    """From now on, `tyro.cli` reads a class of settings once. What it makes of the words is not kept."""
    read, kept = ParserSpecification.from_callable_or_type, {}

    def from_callable_or_type(f: Any, **options: Any) -> ParserSpecification:
        if options["parent_classes"]:  # a group of settings within those of the command
            return read(f, **options)
        key = f, options["description"]
        if key not in kept:
            kept[key] = read(f, **options)
        return kept[key]

    ParserSpecification.from_callable_or_type = staticmethod(from_callable_or_type)  # type: ignore[method-assign]
