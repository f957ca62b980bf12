"""A real vLLM server on the CPU: the engine's contract, log-probs, versions, aborts, and weights through files."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from contract import Subject, check_engine, check_generate
from served import forward_logp

from rlkit.data.tiny import tiny_tokenizer
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.http import Http
from rlkit.rollout.engines.vllm import VLLM, FromDisk, FromGroup, FromTensors, Server, launch
from rlkit.rollout.engines.vllm.weights import metadata
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPT = list(b"pack my box with five dozen liquor jugs")
LONG = SamplingParams(max_new_tokens=5000)  # a quarter of a minute: a busy machine may be late with an update
Models = list[torch.nn.Module]


@pytest.fixture
async def engine(server: Server, models: Models, tmp_path: Path) -> AsyncIterator[VLLM]:
    """The server with its initial weights and version, whatever other tests have loaded."""
    async with VLLM(server.url, transport=FromDisk(tmp_path)) as engine:
        await engine.update_weights(stream_weights(models[0]), version=0)
        yield engine


async def test_a_server_is_an_engine(engine: VLLM, models: Models) -> None:
    subject = Subject(engine, weights=lambda: stream_weights(models[0]), seeded=False)  # a CPU server gets no seeds
    await check_generate(subject)
    await check_engine(subject)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=30),
        SamplingParams(max_new_tokens=30, temperature=0.6),
        SamplingParams(max_new_tokens=30, temperature=1.7, seed=2**64 + 5),
        SamplingParams(max_new_tokens=30, temperature=0.0),
    ],
)
async def test_log_probs_are_of_the_scaled_distribution(params: SamplingParams, engine: VLLM, models: Models) -> None:
    others = engine.generate(PROMPT, params=SamplingParams(max_new_tokens=30, temperature=0.9))
    out, _ = await asyncio.gather(engine.generate(PROMPT, params=params), others)  # in a batch of mixed parameters
    assert out.logp == pytest.approx(forward_logp(models[0], PROMPT, out.ids, params.temperature or 1.0), abs=1e-4)
    assert out.versions == [0] * len(out.ids)


async def test_what_the_server_would_report_wrong_is_refused(engine: VLLM) -> None:
    for truncated in (SamplingParams(top_p=0.9), SamplingParams(top_k=3)):
        with pytest.raises(ValueError, match="of the truncated distribution: sample without top_p, top_k and min_p"):
            await engine.generate(PROMPT, params=truncated)
    for bad in ([-1], [263], [1] * 8192):
        with pytest.raises(ValueError, match="prompt_ids must"):
            await engine.generate(bad, params=LONG)


async def test_a_seeded_prompt_longer_than_a_step_reads(engine: VLLM) -> None:
    """Of 2,048 tokens. vLLM's CPU build dies at a seeded request that is split: its generators cannot be set back."""
    out = await engine.generate(PROMPT * 80, params=SamplingParams(max_new_tokens=4, seed=1))
    assert len(out.ids) == 4


async def test_a_cpu_server_without_the_extension_takes_no_weights(
    vllm_python: str, checkpoints: list[Path], models: Models, tmp_path: Path
) -> None:
    args = ["--max-model-len", "256", "--worker-extension-cls", ""]
    with launch(checkpoints[0], device="cpu", python=vllm_python, args=args, log=tmp_path / "log.txt") as server:
        async with VLLM(server.url, transport=FromDisk(tmp_path)) as engine:
            with pytest.raises(ValueError, match="keeps the old weights of a head that is tied"):
                await engine.update_weights(stream_weights(models[1]), version=1)


async def test_the_tokens_of_a_stop_string_are_part_of_the_completion(engine: VLLM) -> None:
    letters = tuple("abcdefghijklm")
    out = await engine.generate(PROMPT, params=SamplingParams(max_new_tokens=1000, stop=letters))
    assert out.finish_reason == "stop"
    assert any(letter in tiny_tokenizer().decode(out.ids)[-len("assistant") :] for letter in letters)


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
async def test_an_update_in_the_middle_of_a_rollout(pause: str, server: Server, models: Models, tmp_path: Path) -> None:
    """Each token has the version, and the log-prob, of the weights that sampled it; the prompt is read again."""
    async with VLLM(server.url, transport=FromDisk(tmp_path), pause=pause) as engine:
        await engine.update_weights(stream_weights(models[0]), version=0)
        await engine.generate(PROMPT, params=SamplingParams(max_new_tokens=4))  # into the prefix cache
        call = asyncio.create_task(engine.generate(PROMPT, params=LONG))
        await asyncio.sleep(0.5)
        await engine.update_weights(stream_weights(models[1]), version=3)
        out = await call
        later = await engine.generate(PROMPT, params=SamplingParams(max_new_tokens=8))
    old = out.versions.count(0)
    assert 0 < old <= len(out.ids)
    assert out.versions == [0] * old + [3] * (len(out.ids) - old)
    assert (out.finish_reason, old < 5000) == (("abort", True) if pause == "abort" else ("length", True))
    assert out.logp[:old] == pytest.approx(forward_logp(models[0], PROMPT, out.ids)[:old], abs=1e-4)
    if pause == "retract":
        assert out.logp[old:] == pytest.approx(forward_logp(models[1], PROMPT, out.ids)[old:], abs=1e-4)
    assert later.versions == [3] * 8
    assert later.logp == pytest.approx(forward_logp(models[1], PROMPT, later.ids), abs=1e-4)


async def test_abort_ends_one_of_many_and_all(engine: VLLM) -> None:
    tasks = [asyncio.create_task(engine.generate([*PROMPT, i], params=LONG, rid=f"r{i}")) for i in range(12)]
    await asyncio.sleep(1.0)
    assert await engine.abort("r1") == 1
    assert (await tasks[1]).finish_reason == "abort"
    assert sum(not task.done() for task in tasks) == 11
    await engine.abort()
    outs = await asyncio.gather(*tasks)
    assert {out.finish_reason for out in outs} == {"abort"}
    assert all(0 < len(out.ids) < 5000 for out in outs)


async def test_a_wrong_tensor_is_refused_and_the_engine_waits_for_the_right_ones(engine: VLLM, models: Models) -> None:
    good = dict(stream_weights(models[0]))
    with pytest.raises(ValueError, match="has no tensor 'nobody'"):
        await engine.update_weights([*good.items(), ("nobody", torch.zeros(2))], version=1)
    with pytest.raises(RuntimeError, match="the update to version 1 was not finished"):
        await engine.generate(PROMPT, params=LONG)
    await engine.update_weights(good.items(), version=2)
    assert (await engine.generate(PROMPT, params=SamplingParams(max_new_tokens=2))).versions == [2, 2]


async def test_weights_on_the_cpu_go_through_files_only(server: Server, models: Models) -> None:
    async with VLLM(server.url) as engine:
        with pytest.raises(RuntimeError):  # the server has no transfer by IPC
            await engine.update_weights(stream_weights(models[0]), version=1)


async def test_the_requests_of_the_gpu_transports_are_those_of_the_server(server: Server) -> None:
    """Paths and fields that `FromTensors`, `FromGroup` and sleep use, in the OpenAPI of the real server."""
    http = Http()
    try:
        schema = await http.request(f"{server.url}/openapi.json", method="GET", timeout=60)
    finally:
        await http.close()
    paths = schema["paths"]
    source = "".join(inspect.getsource(kind) for kind in (FromTensors, FromGroup))
    for path in ("/init_weight_transfer_engine", "/update_weights", "/shutdown_weight_transfer_engine"):
        assert path in source
        assert "post" in paths[path]
    for path in ("/start_weight_update", "/finish_weight_update", "/sleep", "/wake_up", "/release_kv_cache_memory"):
        assert "post" in paths[path]
    tags = {p["name"] for p in paths["/sleep"]["post"]["parameters"]}
    assert {"level", "mode"} <= tags
    body = schema["components"]["schemas"]["Body_update_weights_update_weights_post"]
    assert "update_info" in body["properties"]
    assert set(metadata([("x", torch.zeros(2))])) == {"names", "dtype_names", "shapes"}


def test_a_server_that_dies_at_its_start_shows_its_log(
    vllm_python: str, checkpoints: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"the vLLM server exited at its start(.|\n)*no-such-flag"):
        launch(checkpoints[0], device="cpu", python=vllm_python, args=["--no-such-flag"], log=tmp_path / "log.txt")
