"""Runs inside these tests draw no picture; commands of test_grpo.py, test_imports.py and test_command_line.py do."""

import pytest


@pytest.fixture(autouse=True)
def _no_pictures(no_pictures):
    """For all tests here."""
