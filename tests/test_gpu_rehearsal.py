"""`tests/test_gpu.py` on the CPU, in a process of its own: what a device is asked must at least run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_line_runs_without_a_device() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/test_gpu.py"]
    env = os.environ | {"RLKIT_GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "[100%]" in done.stdout
    assert "skipped" not in done.stdout
