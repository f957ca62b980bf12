"""For tests here that train: a picture takes as long as a short run."""

import sys

import pytest


@pytest.fixture
def no_pictures(monkeypatch):
    """Runs draw none, as where matplotlib is not installed."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
