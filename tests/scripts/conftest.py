"""Runs inside these tests draw no picture, as where matplotlib is not installed: it takes as long as a short run.

Commands of test_grpo.py, test_imports.py and test_command_line.py draw theirs.
"""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
