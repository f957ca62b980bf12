"""Servers that die and come back: started again where the run started them, and waited for."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nightly
import pytest
import torch
from aiohttp import web
from lora_server import LoraServer, serving
from ticking import small_model

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.http import ReplicaError
from rlkit.rollout.engines.servers import process
from rlkit.rollout.engines.servers.process import kept_running
from rlkit.rollout.engines.servers.replicas import Replica
from rlkit.rollout.engines.sglang import FromDisk, SGLang, launch
from rlkit.rollout.engines.vllm import weights
from rlkit.rollout.shared import shared_rollout
from rlkit.rollout.stream import Pausable
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.testing import FakeEngine
from rlkit.types import SamplingParams, Trajectory

PARAMS = SamplingParams(max_new_tokens=3, seed=1)
WEIGHTS = [("weight", torch.zeros(2))]
STEPS = 20
STAND_IN = f"""#!{sys.executable}
import os, sys, time
folder = sys.argv[sys.argv.index("--model-path") + 1]
with open(folder + "/pids", "a") as file:
    file.write(str(os.getpid()) + "\\n")
time.sleep(3600)
"""


class Restartable:
    """A server at one address that can be stopped, and started again without its weights."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.version, self.port, self._delay_s = "default", 0, delay_s
        self._fake, self._runner = FakeEngine(vocab_size=97), None

    async def start(self) -> None:
        self.version = "default"
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_get("/model_info", self._info)
        app.router.add_route("*", "/{page:.*}", self._nothing)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()  # may leave a connection open that hangs

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _generate(self, request: web.Request) -> web.Response:
        asked: Any = await request.json()
        await asyncio.sleep(self._delay_s)
        params = replace(PARAMS, seed=asked["sampling_params"]["sampling_seed"])
        out = await self._fake.generate(asked["input_ids"], params=params)
        pairs = [[x, i, None] for x, i in zip(out.logp, out.ids, strict=True)]
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": pairs, "weight_version": self.version}
        meta |= {"id": asked["rid"], "prompt_tokens": len(asked["input_ids"]), "completion_tokens": 3}
        return web.json_response({"text": "", "output_ids": out.ids, "meta_info": meta})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        told: Any = await request.json()
        await asyncio.sleep(self._delay_s)
        self.version = told["weight_version"]
        return web.json_response({"success": True, "message": ""})


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.rollout.engines.servers.engine.LOOK_EVERY", 0.02)


def engine_of(server: Restartable, folder: Path, **options: Any) -> SGLang:
    return SGLang(server.url, transport=FromDisk(folder), vocab_size=97, **{"wait_s": 30.0} | options)


@pytest.mark.slow_cases("True")
@pytest.mark.usefixtures("soon")
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize("forgets", [True, False])
async def test_requests_wait_for_a_server_and_for_its_weights(tmp_path: Path, forgets: bool) -> None:
    """One that comes back with the weights, after a broken network, is asked at once."""
    server = Restartable()
    await server.start()
    async with engine_of(server, tmp_path) as engine:
        await engine.update_weights(iter(WEIGHTS), version=7)
        true = await engine.generate([1, 2], params=PARAMS)
        assert true.versions == [7, 7, 7]
        await server.stop()
        calls = [asyncio.ensure_future(engine.generate([1, 2], params=PARAMS)) for _ in range(5)]
        lost = asyncio.ensure_future(engine.lost())
        await asyncio.sleep(0.3)
        assert not any(x.done() for x in [*calls, lost])
        await server.start()
        if forgets:
            await asyncio.wait_for(lost, 20)
            await asyncio.sleep(0.1)
            assert not any(call.done() for call in calls), "nothing is sampled from other weights"
            await engine.update_weights(iter(WEIGHTS), version=7)
            assert not engine._forgot.is_set()
        else:
            server.version = "7"
        assert await asyncio.wait_for(asyncio.gather(*calls), 20) == [true] * 5
        lost.cancel()
    await server.stop()


@pytest.mark.usefixtures("soon")
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_an_update_waits_for_a_server(tmp_path: Path) -> None:
    server = Restartable()
    await server.start()
    async with engine_of(server, tmp_path) as engine:
        await engine.update_weights(iter(WEIGHTS), version=1)
        await server.stop()
        update = asyncio.ensure_future(engine.update_weights(iter(WEIGHTS), version=2))
        await asyncio.sleep(0.3)
        assert not update.done()
        await server.start()
        await asyncio.wait_for(update, 20)
        assert (await engine.generate([1], params=PARAMS)).versions == [2, 2, 2]
    await server.stop()


class Hangs(Restartable):
    """From its second update on it accepts connections and answers nothing, until it stops."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def _update(self, request: web.Request) -> web.Response:
        if self.version != "default":
            self.answers.clear()
        await self.answers.wait()
        return await super()._update(request)

    async def _info(self, request: web.Request) -> web.Response:
        await self.answers.wait()
        return await super()._info(request)

    async def _nothing(self, request: web.Request) -> web.Response:
        await self.answers.wait()
        return await super()._nothing(request)

    async def stop(self) -> None:
        self.answers.set()
        await super().stop()


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_an_update_is_sent_again_without_a_server_that_hangs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Replica.post.__kwdefaults__, "timeout", 0.5)
    monkeypatch.setattr("rlkit.rollout.engines.servers.engine.CLEAN_UP_S", 0.5)
    servers = [Restartable(), Hangs()]
    for server in servers:
        await server.start()
    async with SGLang([x.url for x in servers], transport=FromDisk(tmp_path), vocab_size=97, stall=1.0) as engine:
        await engine.update_weights(iter(WEIGHTS), version=1)
        with pytest.raises(EngineError, match=r"no reply within 0\.5 s; the server hangs"):
            await engine.update_weights(iter(WEIGHTS), version=2)
        await engine.update_weights(iter(WEIGHTS), version=2)
        both = await asyncio.gather(*(engine.generate([1], params=PARAMS) for _ in range(2)))
        assert [out.versions for out in both] == [[2, 2, 2]] * 2
    for server in servers:
        await server.stop()


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_a_server_that_was_restarted_between_two_requests_samples_nothing(tmp_path: Path) -> None:
    """No request has failed: the version in its answer tells that it has the weights that it started with."""
    servers = [Restartable(), Restartable()]
    for server in servers:
        await server.start()
    urls = [server.url for server in servers]
    async with SGLang(urls, transport=FromDisk(tmp_path), vocab_size=97) as engine:
        for version in (0, 1, 2):  # 0 too: it may be a checkpoint that the servers were not started with
            await engine.update_weights(iter(WEIGHTS), version=version)
            assert [server.version for server in servers] == [str(version)] * 2
            servers[0].version = "default"
            calls = [engine.generate([1, 2], params=PARAMS) for _ in range(4)]
            assert [out.versions for out in await asyncio.gather(*calls)] == [[version] * 3] * 4
        servers[1].version = "1"
        with pytest.raises(EngineError, match="it was restarted and serves version 1, not 2: call update_weights"):
            await engine.generate([1, 2], params=PARAMS)
        await engine.update_weights(iter(WEIGHTS), version=0)
        for server in servers:
            server.version = "default"
        with pytest.raises(EngineError, match="it was restarted and serves version default, not 0"):
            await engine.generate([1, 2], params=PARAMS)
    for server in servers:
        await server.stop()


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_a_server_whose_samples_contradict_its_version_is_an_error(tmp_path: Path) -> None:
    """As two processes behind one address are, of which one was restarted."""

    class Two(Restartable):
        async def _info(self, _request: web.Request) -> web.Response:
            return web.json_response({"weight_version": "1"})

    server = Two()
    await server.start()
    async with SGLang([server.url], transport=FromDisk(tmp_path), vocab_size=97) as engine:
        await engine.update_weights(iter(WEIGHTS), version=1)
        assert (await engine.generate([1, 2], params=PARAMS)).versions == [1, 1, 1]
        server.version = "default"
        with pytest.raises(EngineError, match="says that it serves version 1, and samples of default"):
            await asyncio.wait_for(engine.generate([1, 2], params=PARAMS), 20)
    await server.stop()


@pytest.mark.usefixtures("soon")
async def test_servers_of_another_run_are_taken_back_as_they_are(tmp_path: Path) -> None:
    """An evaluation gives them no weights; they hold those of step 37."""
    server = Restartable()
    await server.start()
    server.version = "37"
    prompt = Prompt([1, 2], {"prompt": "x"}, 0)
    options: dict[str, Any] = {"params": PARAMS, "group_size": 1, "seed": 0}
    async with engine_of(server, tmp_path) as engine:
        await engine.generate([1], params=PARAMS)
        await server.stop()
        task = asyncio.ensure_future(shared_rollout([prompt], engine=engine, generate=engine.generate, **options))
        await asyncio.sleep(0.3)
        assert not task.done()
        await server.start()
        server.version = "37"
        ((sampled,),) = await asyncio.wait_for(task, 20)
        assert sampled.versions == [37] * 3
    await server.stop()


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_files_of_a_run_that_was_killed_are_deleted(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("5", "6", "7", "8", "best")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / ("model.safetensors" if name == "8" else "00000.safetensors")).touch()
    server = Restartable()
    await server.start()
    async with engine_of(server, tmp_path) as engine:
        await engine.update_weights(iter(WEIGHTS), version=9)
        left = {path.name for path in tmp_path.iterdir()}
        assert {"8", "9", "best"} < left
        assert len(left) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"8", "best"}
    await server.stop()


async def test_a_bucket_that_a_server_refuses_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for every rank, and vLLM's server that was restarted takes no part."""
    refusal = ReplicaError("status 500: the weight transfer engine is not initialized")
    never = threading.Event()
    monkeypatch.setattr(weights, "_broadcast", lambda *_: never.wait(60))

    async def post(*_: Any, **_options: Any) -> None:
        raise refusal

    transport = weights.FromGroup()
    server: Any = SimpleNamespace(life=0, post=post)
    transport._members = [(server, 0)]
    with pytest.raises(ReplicaError, match="not initialized"):
        await asyncio.wait_for(transport.send([server], WEIGHTS, version=1), 20)
    never.set()
    assert not transport._members


class FailsOnce(LoraServer):
    """Its second update of the weights fails."""

    async def answer(self, request: web.Request) -> web.Response:
        out = await super().answer(request)
        fails = self.seen.count("/update_weights_from_disk") == 2 and "update" in request.path
        return web.json_response({"message": "it died"}, status=500) if fails else out


@pytest.mark.usefixtures("soon")
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize(("pause", "wait_s"), [("retract", 30.0), ("in_place", 30.0), ("abort", 30.0), ("retract", 0)])
async def test_samples_in_flight_survive_a_failed_update(tmp_path: Path, pause: Any, wait_s: float) -> None:
    """They go on from their tokens under the weights that came at last, unless the engine does not wait for those."""
    params = SamplingParams(max_new_tokens=4000, seed=1)
    async with serving(FailsOnce("owner/model", rank=0)) as server:
        truth = await server.engine.generate([1, 2], params=params)
        options: Any = {"transport": FromDisk(tmp_path), "pause": pause, "wait_s": wait_s}
        async with SGLang(server.url, **options) as engine:
            await engine.update_weights(iter(WEIGHTS), version=1)
            call = asyncio.ensure_future(engine.generate([1, 2], params=params))
            while len(server.named) < 1:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineError, match="it died"):
                await engine.update_weights(iter(WEIGHTS), version=2)
            await asyncio.sleep(0.1)
            assert call.done() == (pause == "abort" or not wait_s)
            await engine.update_weights(iter(WEIGHTS), version=2)
            out = await asyncio.wait_for(call, 30)
            if pause == "abort" or not wait_s:
                assert out.finish_reason == "abort"
            else:
                assert (out.ids, out.finish_reason) == (truth.ids, truth.finish_reason)
                assert sorted(set(out.versions)) == out.versions[:: len(out.versions) - 1] == [1, 2]


@pytest.mark.usefixtures("soon")
async def test_a_pause_ends_the_wait(tmp_path: Path) -> None:
    """The tokens so far are kept: the call goes on after the pause."""
    server = Restartable()
    await server.start()
    async with engine_of(server, tmp_path) as engine:
        await engine.generate([1], params=PARAMS)
        await server.stop()
        paused = Pausable(engine.generate, engine.abort)
        call = asyncio.ensure_future(paused.generate([1, 2], params=PARAMS))
        await asyncio.sleep(0.2)
        await asyncio.wait_for(paused.pause(), 5)
        await server.start()
        paused.resume()
        assert len((await asyncio.wait_for(call, 20)).ids) == 3
    await server.stop()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("wait_s", [0.0, 0.3])
async def test_the_wait_ends_with_the_reason(tmp_path: Path, wait_s: float) -> None:
    server = Restartable()
    await server.start()
    async with engine_of(server, tmp_path, wait_s=wait_s) as engine:
        await engine.generate([1], params=PARAMS)
        await server.stop()
        with pytest.raises(EngineError, match="no SGLang server is up; restart one and resume the run"):
            await asyncio.wait_for(engine.generate([1], params=PARAMS), 20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[process.Server]:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    with launch(tmp_path, python=str(python), log=tmp_path / "log", wait=False) as launched:
        yield launched


def pids(folder: Path, *, count: int) -> list[int]:
    """The processes that were started, once there are `count`."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        written = (folder / "pids").read_text().split() if (folder / "pids").exists() else []
        if len(written) >= count:
            break
        time.sleep(0.05)
    assert len(written) == count
    return [*map(int, written)]


@pytest.mark.slow
def test_a_server_that_ends_is_started_again_a_few_times(
    tmp_path: Path, server: process.Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "RESTARTS", 2)
    url = server.url
    with kept_running([server]):
        for count in (1, 2, 3):
            os.kill(pids(tmp_path, count=count)[-1], signal.SIGKILL)
        time.sleep(2.5)
        pids(tmp_path, count=3)
    assert server.url == url
    said = [record.getMessage() for record in caplog.records]
    assert [message.partition("has ended: ")[2].partition(";")[0] for message in said] == [
        "it is started again", "it is started again", "after 2 starts it is left alone",
    ]  # fmt: skip
    assert all(str(server.log) in message for message in said)


@pytest.mark.slow
def test_nothing_is_started_after_the_end(tmp_path: Path, server: process.Server) -> None:
    with kept_running([server]):
        pids(tmp_path, count=1)
    server.close()
    time.sleep(2.0)
    pids(tmp_path, count=1)
    assert not server.alive


@pytest.mark.usefixtures("soon")
async def test_a_request_that_reached_no_server_has_killed_none() -> None:
    """Two servers that are away when it is sent: it is asked again once one is back."""
    servers = [Restartable(), Restartable()]
    for server in servers:
        await server.start()
    async with SGLang([server.url for server in servers], vocab_size=97, wait_s=60.0, tries=30) as engine:
        true = await engine.generate([1, 2], params=PARAMS)
        for server in servers:
            await server.stop()
        call = asyncio.ensure_future(engine.generate([1, 2], params=PARAMS))
        await asyncio.sleep(1.0)
        assert not call.done()
        await servers[1].start()
        assert (await asyncio.wait_for(call, 20)).ids == true.ids
    await servers[1].stop()


async def by_first_token(_prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
    return [replace(t, reward=float(t.ids[0] % 2)) for t in group]


async def kill_at_random(servers: list[Restartable], draw: random.Random, kills: list[float]) -> None:
    """Stop a server now and then, and start it again; 20 times."""
    for _ in range(20):
        await asyncio.sleep(draw.uniform(0.02, 0.25))
        server = draw.choice(servers)
        await server.stop()
        kills.append(time.monotonic())
        await asyncio.sleep(draw.uniform(0.0, 0.2))
        await server.start()


async def trained_on(folder: Path, *, kills: int | None) -> tuple[int, list[Any]]:
    """Train with two servers, killed at random from the seed `kills`: how often, and the samples of each step."""
    servers = [Restartable(delay_s=0.05), Restartable(delay_s=0.05)]
    for server in servers:
        await server.start()
    tokenizer, killed = tiny_tokenizer(), list[float]()
    prompts = [Prompt([3 + i, 4], {"question": str(i)}, i) for i in range(40)]
    urls = [server.url for server in servers]
    transport = FromDisk(folder / "weights")
    async with SGLang(urls, transport=transport, vocab_size=97, wait_s=60.0, stall=4.0, tries=30) as engine:
        killer = asyncio.create_task(
            kill_at_random(servers, random.Random(kills), killed) if kills is not None else asyncio.sleep(0)
        )
        await grpo(
            prepare_model(copy.deepcopy(small_model())), tokenizer, engine, Task(prompts, by_first_token),
            Rollouts(prompts_per_step=4, group_size=2, max_new_tokens=3),
            Schedule(folder / "run", steps=STEPS), Optim(lr=1e-3),
        )  # fmt: skip
        killer.cancel()
        await asyncio.wait([killer])
    for server in servers:
        await server.stop()
    steps = [
        [json.loads(line) for line in (folder / f"run/trajectories/train_{step:06d}.jsonl").read_text().splitlines()]
        for step in range(1, STEPS + 1)
    ]
    return len(killed), steps


@pytest.mark.usefixtures("soon")
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize("kills", nightly.only(range(4)))
async def test_servers_killed_at_random_lose_and_double_no_group(tmp_path: Path, kills: int) -> None:
    """Kills while sampling and while weights are sent: every step trains on the samples of an undisturbed run."""
    _, true = await trained_on(tmp_path / "true", kills=None)
    number, found = await trained_on(tmp_path / "found", kills=kills)
    assert number >= 8
    for step, (rows, expected) in enumerate(zip(found, true, strict=True)):
        assert [(row["prompt"], row["completion"]) for row in rows] == [
            (row["prompt"], row["completion"]) for row in expected
        ]
        assert all(row["versions"] == [step] for row in rows)
