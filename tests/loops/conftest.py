"""Lets the tests here import `small.py` by name: pytest's importlib mode leaves the folder off the path."""

import sys
from pathlib import Path

import pytest

from rlkit.run.folder import Run

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def without_plots(monkeypatch):
    """Drawing took as long as the runs that these tests start in this process, and none of them looks at a plot."""
    monkeypatch.setattr(Run, "plot", lambda run: None)
