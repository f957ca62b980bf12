"""A wrong variant of a public function, and the law that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """`fn` replaces the function of the row `original`; `law` must fail on it; `mistake` describes the bug."""

    original: str
    law: str
    mistake: str
    fn: Callable[..., Any]
