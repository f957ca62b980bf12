"""Runs inside these tests draw no picture; commands of test_grpo.py, test_imports.py and test_command_line.py do."""

import pytest


@pytest.fixture(autouse=True)
def _for_all(request):
    request.getfixturevalue("no_pictures")
