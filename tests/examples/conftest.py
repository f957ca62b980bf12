"""Fixtures of the examples: their folder on `sys.path`, and scripts on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))  # tests import the examples by their names


@pytest.fixture
def on_two_ranks(tmp_path):
    """`on_two_ranks(code, *arguments)`: run Python code under torchrun, with what is on `sys.path` here."""

    def run(code: str, *arguments: object) -> None:
        (tmp_path / "run.py").write_text(code)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [*launch, tmp_path / "run.py", *arguments]
        subprocess.run(command, check=True, env=environment, timeout=280)

    return run
