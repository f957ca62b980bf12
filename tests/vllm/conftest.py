"""One real vLLM server for the whole run, on the CPU. If its environment cannot be made, the tests fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from served import make_checkpoint, python_of
from transformers import AutoModelForCausalLM

from rlkit.rollout.engines.vllm import Server, launch

sys.path.append(str(Path(__file__).parents[1] / "rollout"))  # contract.py
ARGS = ["--max-model-len", "8192"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return python_of("vllm")


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
