"""LoRA on a real vLLM server: only the adapter is sent, and its log-probs are those of the merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from adapted import RANK, Adapted, check_bytes, check_each_update, check_in_the_middle
from served import check_trained, kill_a_server
from served import train as train_with

from rlkit.rollout.engines.vllm import VLLM, FromDisk, Server, launch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
train = partial(train_with, "vllm")
LORA = ["--lora-rank", str(RANK)]


@pytest.fixture(scope="module")
def adapted(checkpoints: list[Path]) -> Adapted:
    return Adapted(checkpoints[0])


@pytest.fixture(scope="module")
def lora_server(
    vllm_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    args = ["--max-model-len", "8192", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"]
    args += ["--max-cpu-loras", "1"]
    log, env = tmp_path_factory.mktemp("server") / "log.txt", {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with launch(checkpoints[0], device="cpu", python=vllm_python, args=args, env=env, log=log) as running:
        with suppress(OSError):  # as for `server`
            Path(f"/proc/{running.pid}/autogroup").write_text("19")
        yield running


async def test_every_update_gives_the_log_probs_of_merged_weights(
    lora_server: Server, adapted: Adapted, tmp_path: Path
) -> None:
    """The second client's base weights include a head that is tied, which the CPU build packs."""
    await check_each_update(VLLM, lora_server.url, {"transport": FromDisk(tmp_path)}, adapted)


@pytest.mark.parametrize("pause", ["retract", pytest.param("in_place", marks=pytest.mark.slow), "abort"])
async def test_an_update_in_the_middle_of_a_rollout(
    pause: str, lora_server: Server, adapted: Adapted, tmp_path: Path
) -> None:
    async with VLLM(lora_server.url, transport=FromDisk(tmp_path), pause=pause) as engine:
        await check_in_the_middle(engine, adapted, tokens=4000, pause=pause)


@pytest.mark.parametrize("how", ["auto", pytest.param("merged", marks=pytest.mark.slow)])
def test_a_run_starts_its_server_for_the_adapter(
    how: str, tmp_path: Path, checkpoints: list[Path], vllm_python: str
) -> None:
    given = [*LORA, "--steps", "3", "--lr", "3e-2", "--weight-sync-lora", how]
    check_trained(tmp_path, train(tmp_path, checkpoints[0], vllm_python, *given), steps=3)
    check_bytes(tmp_path, checkpoints[0], merged=how == "merged")


@pytest.mark.slow
def test_the_only_server_is_killed_and_gets_the_adapter_again(
    tmp_path: Path, checkpoints: list[Path], vllm_python: str
) -> None:
    kill_a_server("vllm", tmp_path, checkpoints[0], vllm_python, *LORA, "--lr", "3e-2")
    check_bytes(tmp_path, checkpoints[0], merged=False)
