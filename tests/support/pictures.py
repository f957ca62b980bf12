"""Runs without a picture, which takes as long as a short run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_pictures() -> Iterator[None]:
    """Inside the block runs of this process draw none, as where matplotlib is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield
