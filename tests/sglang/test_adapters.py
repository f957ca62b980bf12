"""LoRA on a real SGLang server: only the adapter is sent, and its log-probs are those of the merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from adapted import RANK, Adapted, check_bytes, check_each_update, check_in_the_middle
from served import check_trained, kill_a_server
from served import train as train_with

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import FromDisk, FromTensors, Server, SGLang, launch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
train = partial(train_with, "sglang")
LORA = ["--lora-rank", str(RANK)]


@pytest.fixture(scope="module")
def adapted(checkpoints: list[Path]) -> Adapted:
    return Adapted(checkpoints[0])


@pytest.fixture(scope="module")
def lora_server(
    sglang_python: str, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    args = [
        "--max-total-tokens",
        "16384",
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--lora-target-modules",
        "all",
    ]
    args += ["--max-loras-per-batch", "2", "--lora-strict-loading"]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with launch(checkpoints[0], device="cpu", python=sglang_python, args=args, log=log) as running:
        yield running


@pytest.mark.slow
async def test_every_update_gives_the_log_probs_of_merged_weights(lora_server: Server, adapted: Adapted) -> None:
    await check_each_update(SGLang, lora_server.url, {}, adapted)


@pytest.mark.slow
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
async def test_an_update_in_the_middle_of_a_rollout(
    pause: str, lora_server: Server, adapted: Adapted, tmp_path: Path
) -> None:
    transport = FromDisk(tmp_path) if pause == "retract" else FromTensors()
    async with SGLang(lora_server.url, transport=transport, pause=pause) as engine:
        await check_in_the_middle(engine, adapted, tokens=1500, pause=pause)


@pytest.mark.slow
async def test_a_server_without_lora_gets_merged_weights(
    server: Server, adapted: Adapted, caplog: pytest.LogCaptureFixture
) -> None:
    async with SGLang(server.url) as engine:
        weights = stream_weights(adapted.models[1])
        await engine.update_weights(weights, version=1)
    assert weights.num_bytes == sum(x.nbytes for _, x in stream_weights(adapted.merged[1]))
    assert f"the servers get merged weights: {server.url} was started without LoRA" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["auto", "merged"])
def test_a_run_starts_its_server_for_the_adapter(
    how: str, tmp_path: Path, checkpoints: list[Path], sglang_python: str
) -> None:
    given = [*LORA, "--steps", "3", "--lr", "3e-2", "--weight-sync-lora", how]
    given += ["--engine-args=--max-total-tokens 4096"]
    check_trained(tmp_path, train(tmp_path, checkpoints[0], sglang_python, *given), steps=3)
    check_bytes(tmp_path, checkpoints[0], merged=how == "merged")


@pytest.mark.slow
def test_the_only_server_is_killed_and_gets_the_adapter_again(
    tmp_path: Path, checkpoints: list[Path], sglang_python: str
) -> None:
    kill_a_server("sglang", tmp_path, checkpoints[0], sglang_python, *LORA, "--lr", "3e-2")
    check_bytes(tmp_path, checkpoints[0], merged=False)


@pytest.mark.slow
def test_a_run_that_samples_while_it_trains(tmp_path: Path, checkpoints: list[Path], sglang_python: str) -> None:
    given = [*LORA, "--lr", "3e-2", "--overlap", "--steps", "6", "--max-new-tokens", "300"]
    done = train(tmp_path, checkpoints[0], sglang_python, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 7)]
    assert max(line["staleness/max"] for line in lines) == 1
    assert all(0 < line["mismatch/abs_mean"] < 1 for line in lines[1:]), "an adapter of one step before"
    check_bytes(tmp_path, checkpoints[0], merged=False)


@pytest.mark.slow
def test_a_server_of_two_ranks_adds_the_adapter(
    tmp_path: Path, checkpoints: list[Path], sglang_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    given = [*LORA, "--lr", "3e-2", "--engine-tp", "2", "--engine-args=--max-total-tokens 4096"]
    check_trained(tmp_path, train(tmp_path, checkpoints[0], sglang_python, *given))
    check_bytes(tmp_path, checkpoints[0], merged=False)
