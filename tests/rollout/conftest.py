"""Fixtures, and the helpers of this folder: pytest's importlib mode does not put it on the path."""

import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest

from rlkit.rollout.engines import process

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def forked_engines(monkeypatch):
    """On Linux, `launch` forks a process that has imported torch, where it would start an interpreter."""
    if sys.platform == "linux":
        monkeypatch.setattr(process, "multiprocessing", SimpleNamespace(get_context=forked.context))
