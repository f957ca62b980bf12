"""Lets the tests here import `small.py` by name: pytest's importlib mode leaves the folder off the path."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_pictures(no_pictures):
    """For all tests here."""
