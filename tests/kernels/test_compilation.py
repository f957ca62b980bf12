"""Runs `compile_kernels.py`: a process of its own, because the interpreter must be off where kernels are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_configuration_compiles_without_spills(arch: int) -> None:
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/kernels/compile_kernels.py"), str(arch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") >= 20
    assert done.stdout.endswith("0 failures\n")
