"""One real SGLang server for the whole run, on the CPU. If its environment cannot be made, the tests fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import torch
from served import make_checkpoint
from transformers import AutoModelForCausalLM

from rlkit.rollout.engines.http import Http
from rlkit.rollout.engines.servers.guard import shared_files
from rlkit.rollout.engines.sglang import Server, launch

sys.path.append(str(Path(__file__).parents[1] / "rollout"))  # contract.py
ARGS = ["--max-total-tokens", "16384"]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return served.python_of("sglang")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of three versions: 0 is served at the start, 1 and 2 are what training makes of it."""
    return [make_checkpoint(tmp_path_factory.mktemp("model") / str(i), seed=i) for i in range(3)]


@pytest.fixture(scope="session")
def models(checkpoints: list[Path]) -> list[torch.nn.Module]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]


@pytest.fixture(scope="session")
def forward_logp() -> Callable[..., list[float]]:
    """Log-probs of `ids` after `prompt` from Hugging Face's own forward."""
    return served.forward_logp


@pytest.fixture(scope="session")
def server(sglang_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with launch(checkpoints[0], device="cpu", python=sglang_python, args=ARGS, log=log) as running:
        yield running


@pytest.fixture
def until(server: Server) -> Callable[..., Awaitable[None]]:
    """Wait until `condition` holds for the server's own counts (SGLang's /v1/loads)."""

    async def until(condition: Callable[[dict[str, Any]], bool], *, seconds: float = 240) -> None:
        http, end = Http(), time.monotonic() + seconds
        try:
            while not condition((await http.request(f"{server.url}/v1/loads", method="GET", timeout=120))["loads"][0]):
                assert time.monotonic() < end, "it did not happen"
                await asyncio.sleep(0.05)
        finally:
            await http.close()

    return until


@pytest.fixture(scope="session")
def kill() -> Callable[[Server], None]:
    """Kill all processes at once, including the guard, and clean /dev/shm in its place."""

    def kill(server: Server) -> None:
        files = shared_files(server.pid)
        os.killpg(server.pid, signal.SIGKILL)
        for path in files:
            os.unlink(path)

    return kill


@pytest.fixture(scope="module")
def pair(
    sglang_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """Two servers that the tests of a file may kill."""
    logs = tmp_path_factory.mktemp("pair")
    servers = [
        launch(checkpoints[0], device="cpu", python=sglang_python, args=ARGS, log=logs / f"{i}.txt", wait=False)
        for i in range(2)
    ]
    try:
        yield [server.wait() for server in servers]
    finally:
        for running in servers:
            running.close()
