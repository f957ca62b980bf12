"""Lets the tests here import `small.py` by name: pytest's importlib mode leaves the folder off the path."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _for_all(request):
    request.getfixturevalue("no_pictures")
