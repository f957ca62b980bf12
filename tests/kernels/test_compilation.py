"""Compiles for GPUs without one, in processes of their own: the interpreter must be off where kernels are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *args: str) -> str:
    """What a script of this folder printed; it must succeed."""
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/kernels" / script), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags", [["--first"], pytest.param([], marks=pytest.mark.slow)], ids=["one of each kernel", "all"]
)
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 100))])
def test_configurations_compile_without_spills(arch: int, flags: list[str]) -> None:
    table = run("compile_kernels.py", str(arch), *flags)
    assert table.count(" ok\n") >= (10 if flags else 20)
    assert table.endswith("0 failures\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_function_gets_through_the_launcher() -> None:
    launched = run("launch_kernels.py")
    for kernel in ("stats", "gradient", "mark", "reduce", "carry", "apply"):
        assert f"'{kernel}_kernel': " in launched
