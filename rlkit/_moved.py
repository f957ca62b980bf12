"""Names of rlkit 0.1 that have moved: who imports one is told where it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose old names are now in `places`; "*" stands for every other name."""

    def missing(name: str) -> Any:
        place = places.get(name) or (None if name.startswith("__") else places.get("*"))
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(f"{module}.{name} of rlkit 0.1 has moved: {place} (CHANGELOG.md lists what else has)")

    return missing
