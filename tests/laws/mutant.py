"""A wrong variant of a public function, and the law that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """`fn` in place of the function of the row `original`: `law` must fail on it, `mistake` says what is wrong."""

    original: str
    law: str
    mistake: str
    fn: Callable[..., Any]
