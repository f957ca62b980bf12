"""Runs the tests in `interpreted/`: Triton decides at import whether it interprets, so they need their own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
