"""Values of a parametrized test of which `make test` takes some, and `make nightly` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def only(values: Iterable[Any], *now: Any) -> list[Any]:
    """The values, or tuples of values, of which those not in `now` are marked slow."""
    found = list(values)
    assert all(x in found for x in now), now
    return [
        x if x in now else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in found
    ]
