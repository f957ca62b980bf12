"""Log-probs of a real server equal the trainer's forward, before and after an update by each transport."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.http import Http
from rlkit.rollout.engines.servers.tensors import FromChanges
from rlkit.rollout.engines.sglang import FromDisk, FromGroup, FromTensors, Probe, Server, SGLang, WeightMismatch
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
PROMPT = list(b"the quick brown fox jumps over the lazy dog")
PARAMS = SamplingParams(max_new_tokens=40)
LONG = SamplingParams(max_new_tokens=1500)  # ten of them fit into the server's cache
Models = list[torch.nn.Module]
Forward = Callable[..., list[float]]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
async def engine(server: Server, models: Models) -> AsyncIterator[SGLang]:
    """The server with its initial weights and version, whatever other tests have loaded."""
    async with SGLang(server.url) as engine:
        await engine.update_weights(stream_weights(models[0]), version=0)
        yield engine


async def assert_equal_forward(engine: SGLang, model: torch.nn.Module, forward_logp: Forward, version: int) -> None:
    """The same prompts at every call: a prefix cache that was not flushed would show."""
    out = await asyncio.gather(*(engine.generate([*PROMPT, i], params=PARAMS) for i in range(4)))
    for i, one in enumerate(out):
        assert one.versions == [version] * len(one.ids)
        assert one.logp == pytest.approx(forward_logp(model, [*PROMPT, i], one.ids), abs=1e-4)


async def gone_on(until: Until, *, running: int = 1) -> None:
    """Wait until requests have sampled for a while: SGLang publishes its counts at a prefill and every 15 tokens."""
    published: set[float] = set()

    def enough(load: dict[str, Any]) -> bool:
        if load["num_running_reqs"] >= running:
            published.add(load["timestamp"])
        return len(published) > 6

    await until(enough)


async def under_way(engine: SGLang, prompts: list[list[int]], until: Until) -> list[asyncio.Task]:
    """Long requests that have all sampled some tokens. They must fit into the server's cache."""
    tasks = [asyncio.create_task(engine.generate(p, params=LONG)) for p in prompts]
    await gone_on(until, running=len(prompts))
    return tasks


async def more_sampled(engine: SGLang, until: Until, *, running: int = 1) -> None:
    """Let requests continue for a while after an update, then abort them."""
    await gone_on(until, running=running)
    await engine.abort()


@pytest.mark.parametrize("kind", ["tensors", "small buckets", "disk", "group"])
async def test_every_transport_gives_the_trainer_s_log_probs(
    kind: str, engine: SGLang, server: Server, models: Models, forward_logp: Forward, tmp_path: Path
) -> None:
    transport = {
        "tensors": lambda: FromTensors(),
        "small buckets": lambda: FromTensors(bucket_bytes=10_000),
        "disk": lambda: FromDisk(tmp_path, file_bytes=100_000),
        "group": lambda: FromGroup(backend="gloo", bucket_bytes=100_000),
    }[kind]()
    await assert_equal_forward(engine, models[0], forward_logp, 0)
    async with SGLang(server.url, transport=transport) as ours:
        for version, model in [(1, models[1]), (2, models[2]), (3, models[0])]:
            await ours.update_weights(stream_weights(model), version=version)
            await assert_equal_forward(ours, model, forward_logp, version)


async def test_a_server_loads_the_copy_that_the_command_keeps(
    engine: SGLang, server: Server, models: Models, forward_logp: Forward, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "rlkit", "patch", str(tmp_path / "shared"), str(tmp_path / "copy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as patcher:
        try:
            transport = FromChanges(tmp_path / "shared", file_bytes=100_000)
            async with SGLang(server.url, transport=transport) as ours:
                for version, model in [(1, models[1]), (2, models[1]), (3, models[2]), (4, models[0])]:
                    with torch.no_grad():
                        model.model.layers[0].self_attn.q_proj.weight[version] *= -1
                    await ours.update_weights(stream_weights(model), version=version)
                    await assert_equal_forward(ours, model, forward_logp, version)
                    with torch.no_grad():
                        model.model.layers[0].self_attn.q_proj.weight[version] *= -1
        finally:
            patcher.terminate()
        told = (patcher.stdout.read() if patcher.stdout else "").splitlines()
        sizes = [[int(word.replace(",", "")) for word in line.split() if word[0].isdigit()] for line in told]
        assert len(sizes) == 4
        assert sizes[1][0] < sizes[1][1] / 50, "version 2 differs in two rows of a matrix"


async def test_retract_recomputes_the_cache_and_stamps_each_token(
    engine: SGLang, models: Models, forward_logp: Forward, until: Until
) -> None:
    """Also with a queue: more requests than fit into the cache, so that some have not begun (SGLang pull 31962)."""
    tasks = await under_way(engine, [[*PROMPT, i] for i in range(10)], until)
    more = [engine.generate([*PROMPT, i], params=LONG, rid=f"more {i}") for i in range(10, 24)]
    tasks += map(asyncio.create_task, more)
    await until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 24)
    await engine.update_weights(stream_weights(models[1]), version=1)
    for i in range(10, 24):  # the server may take those that had not begun before those that had
        await engine.abort(f"more {i}")
    await more_sampled(engine, until, running=10)
    for i, task in enumerate(tasks):
        out = await task
        assert out.versions == sorted(out.versions)
        old = out.versions.count(0)
        assert i >= 10 or 0 < old < len(out.ids)
        expected = forward_logp(models[0], [*PROMPT, i], out.ids)[:old]
        expected += forward_logp(models[1], [*PROMPT, i], out.ids)[old:]
        assert out.logp == pytest.approx(expected, abs=1e-4)


async def test_in_place_keeps_old_keys_of_running_requests_and_of_no_others(
    server: Server, engine: SGLang, models: Models, forward_logp: Forward, until: Until
) -> None:
    async with SGLang(server.url, pause="in_place") as ours:
        await assert_equal_forward(ours, models[0], forward_logp, 0)  # fills the prefix cache
        tasks = await under_way(ours, [[*PROMPT, 9, i] for i in range(3)], until)
        await ours.update_weights(stream_weights(models[1]), version=1)
        await assert_equal_forward(ours, models[1], forward_logp, 1)
        await more_sampled(ours, until)
        outs = [await task for task in tasks]
        spanning = [(i, out) for i, out in enumerate(outs) if len(set(out.versions)) == 2]
        assert spanning
        for i, out in spanning:
            old = out.versions.count(0)
            assert out.logp[:old] == pytest.approx(forward_logp(models[0], [*PROMPT, 9, i], out.ids)[:old], abs=1e-4)
            exact = forward_logp(models[1], [*PROMPT, 9, i], out.ids)[old:]
            assert out.logp[old:] != pytest.approx(exact, abs=1e-2)  # this is what in_place costs


async def test_pause_abort_returns_the_tokens_so_far(
    server: Server, engine: SGLang, models: Models, until: Until
) -> None:
    async with SGLang(server.url, pause="abort") as ours:
        tasks = await under_way(ours, [[*PROMPT, 5, i] for i in range(3)], until)
        await ours.update_weights(stream_weights(models[1]), version=1)
        outs = [await task for task in tasks]
        cut = [out for out in outs if out.finish_reason == "abort"]
        assert cut
        assert all(0 < len(out.ids) < 1500 and set(out.versions) == {0} for out in cut)


async def test_probe_accepts_the_trainer_and_stops_on_anything_else(
    server: Server, engine: SGLang, models: Models, forward_logp: Forward
) -> None:
    trainer = models[1]
    probe = Probe(PROMPT, lambda prompt, ids: forward_logp(trainer, prompt, ids), tolerance=1e-4)
    async with SGLang(server.url, probe=probe) as ours:
        await ours.update_weights(stream_weights(trainer), version=1)
        with pytest.raises(WeightMismatch, match=r"version 2 .* differ from the trainer's by"):
            await ours.update_weights(stream_weights(models[2]), version=2)
        trainer = models[2]
        await ours.update_weights(stream_weights(models[2]), version=3)
        trainer = models[1]
        with pytest.raises(WeightMismatch):  # what was refused stays refused, until an update that matches
            await ours.update_weights(stream_weights(models[2]), version=4)
        with pytest.raises(RuntimeError, match="version 4 was not finished"):
            await ours.generate(PROMPT, params=PARAMS)


async def test_after_a_partial_update_generate_raises_until_one_succeeds(
    engine: SGLang, models: Models, forward_logp: Forward, until: Until
) -> None:
    class Broken(Exception):
        pass

    def half() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(stream_weights(models[1]))[:5]
        raise Broken

    [running] = await under_way(engine, [PROMPT], until)
    with pytest.raises(Broken):
        await engine.update_weights(half(), version=1)
    assert set((await running).versions) <= {0}
    with pytest.raises(RuntimeError, match="version 1 was not finished"):
        await engine.generate(PROMPT, params=PARAMS)
    await engine.update_weights(stream_weights(models[2]), version=2)
    await assert_equal_forward(engine, models[2], forward_logp, 2)


async def test_weights_that_would_kill_the_server_are_refused(
    server: Server, engine: SGLang, models: Models, forward_logp: Forward, tmp_path: Path
) -> None:
    good = list(stream_weights(models[1]))
    narrow = [(name, t[..., :-1] if "q_proj" in name else t) for name, t in good]
    unknown = [(f"policy.{name}", t) for name, t in good]
    for transport in (FromTensors(), FromDisk(tmp_path), FromGroup(backend="gloo", timeout=60)):
        async with SGLang(server.url, transport=transport) as ours:
            with pytest.raises(ValueError, match=r"q_proj.weight: shape \(128, 63\), but the served model has"):
                await ours.update_weights(narrow, version=1)
            with pytest.raises(ValueError, match=r"no tensor 'policy\."):
                await ours.update_weights(unknown, version=1)
            with pytest.raises(ValueError, match=r"6 tensors that did not come, like .*mlp"):
                await ours.update_weights([(name, t) for name, t in good if "mlp" not in name], version=1)
            await ours.update_weights(stream_weights(models[2]), version=2)
            await assert_equal_forward(ours, models[2], forward_logp, 2)


async def test_an_update_clears_a_pause_and_session_of_a_killed_trainer(
    server: Server, engine: SGLang, models: Models, forward_logp: Forward
) -> None:
    """Killed in the middle of an update, it leaves generation paused and the session open."""
    http = Http()
    await http.request(f"{server.url}/pause_generation", {"mode": "retract"}, timeout=120)
    await http.request(f"{server.url}/begin_weight_update", {}, timeout=120)
    await http.close()
    await engine.update_weights(stream_weights(models[1]), version=1)
    await assert_equal_forward(engine, models[1], forward_logp, 1)


async def test_a_lost_process_group_is_an_error_and_is_made_again(
    server: Server, models: Models, forward_logp: Forward
) -> None:
    """Like a restarted server: the broadcast must not wait for it."""
    async with SGLang(server.url, transport=FromGroup(backend="gloo")) as ours:
        await ours.update_weights(stream_weights(models[0]), version=0)
        http = Http()
        gone = {"group_name": ours._transport._name}
        await http.request(f"{server.url}/destroy_weights_update_group", gone, timeout=120)
        await http.close()
        with pytest.raises((ValueError, RuntimeError), match=r"Group .* not in|onnection"):
            await ours.update_weights(stream_weights(models[1]), version=1)
        await ours.update_weights(stream_weights(models[2]), version=2)
        await assert_equal_forward(ours, models[2], forward_logp, 2)


async def test_memory_is_released_and_resumed(engine: SGLang, models: Models, forward_logp: Forward) -> None:
    await engine.release_memory("kv_cache")
    await engine.resume_memory("kv_cache")
    await assert_equal_forward(engine, models[0], forward_logp, 0)
