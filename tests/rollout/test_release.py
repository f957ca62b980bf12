"""Servers that free their GPU memory while the trainer works: the order of the requests, to both kinds of servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_server import running

from rlkit.rollout.engines.servers.kinds import kind_named
from rlkit.rollout.engines.sglang import FromDisk, SGLang
from rlkit.rollout.engines.vllm import VLLM
from rlkit.rollout.shared import SharedEngine, rest
from rlkit.settings import SERVERS
from rlkit.types import SamplingParams

OF_VLLM = {"vllm_config": {"model_config": {}, "parallel_config": {}}}
ASKED = {
    SGLang: [
        "/release_memory_occupation {'tags': ['weights', 'kv_cache']}",
        "/resume_memory_occupation {'tags': ['weights']}", "/pause_generation", "/update_weights_from_disk",
        "/flush_cache", "/continue_generation", "/resume_memory_occupation {'tags': ['kv_cache']}",
    ],
    VLLM: [
        "/sleep?level=2&mode=wait",
        "/wake_up?tags=weights", "/pause?mode=keep", "/collective_rpc", "/update_weight_version",
        "/reset_prefix_cache?reset_running_requests=true", "/resume", "/wake_up?tags=kv_cache",
    ],
}  # fmt: skip


@asynccontextmanager
async def server(config: Any = OF_VLLM["vllm_config"]) -> AsyncIterator[tuple[str, list[str]]]:
    """Answers everything, and lists the POST requests."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "POST":
            told: Any = await request.json() if request.can_read_body else None
            tags = f" {told}" if isinstance(told, dict) and "tags" in told else ""
            seen.append(str(request.rel_url) + tags)
        return web.json_response({"vllm_config": config} if "config_format" in request.query else {})

    app = web.Application()
    app.router.add_route("*", "/{page:.*}", answer)
    async with running(app) as url:
        yield url, seen


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize("kind", [kind_named(name).engine for name in SERVERS])
@pytest.mark.parametrize("shared", [False, True])
async def test_memory_is_free_from_the_last_sample_to_the_next_update(kind: Any, shared: bool, tmp_path: Path) -> None:
    async with server() as (url, seen):
        engine = kind(url, transport=FromDisk(tmp_path), release=True)
        outer = SharedEngine(engine) if shared else engine
        await outer.update_weights([("x", torch.zeros(1))], version=0)
        before = len(seen)
        await rest(outer)
        await rest(outer)  # twice is once
        with pytest.raises(RuntimeError, match="memory is released: call update_weights"):
            await engine.generate([1], params=SamplingParams())
        await outer.update_weights([("x", torch.zeros(1))], version=1)
        await engine.close()
    assert not [asked for asked in seen[:before] if "memory" in asked or "sleep" in asked or "wake" in asked]
    assert seen[before:] == ASKED[kind]


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_files_of_the_weights_are_gone_after_the_run(tmp_path: Path) -> None:
    """Each update's are as large as the model; two were left."""
    folder = tmp_path / "weights"
    async with server() as (url, _seen):
        engine = SGLang(url, transport=FromDisk(folder))
        for version in range(3):
            await engine.update_weights([("x", torch.zeros(1))], version=version)
        assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
        await engine.close()
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_no_weights_go_to_a_vllm_on_a_cpu_that_would_keep_its_tied_head(tmp_path: Path) -> None:
    """One that was started without rlkit's extension."""
    told = OF_VLLM["vllm_config"] | {"device_config": {"device": "cpu"}}
    async with server(told) as (url, seen):
        engine = VLLM(url, transport=FromDisk(tmp_path))
        with pytest.raises(ValueError, match="keeps the old weights of a head that is tied: start it by `launch`, or"):
            await engine.update_weights([("x", torch.zeros(1))], version=1)
        await engine.close()
    assert not [asked for asked in seen if "collective" in asked]


async def test_without_the_option_and_for_other_engines_nothing_is_freed(tmp_path: Path) -> None:
    async with server() as (url, seen):
        engine = SGLang(url, transport=FromDisk(tmp_path))
        await rest(engine)
        await rest(object())
        await engine.close()
    assert not seen


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_after_a_failed_update_the_next_one_wakes_the_servers_again(tmp_path: Path) -> None:
    async with server() as (url, seen):
        engine = SGLang(url, transport=FromDisk(tmp_path), release=True)
        await engine.rest()
        with pytest.raises(ValueError, match="no tensors"):
            await engine.update_weights([], version=1)
        with pytest.raises(RuntimeError, match="call update_weights"):
            await engine.generate([1], params=SamplingParams())
        before = len(seen)
        await engine.update_weights([("x", torch.zeros(1))], version=1)
        await engine.close()
    assert seen[before:] == ASKED[SGLang][2:], "the weights are back since the first try"


class Saver:
    """An SGLang server's memory: what is taken back must have been freed (`offload_tags.remove`), or it dies."""

    def __init__(self) -> None:
        self.freed: set[str] = set()
        self.version, self.refuses, self.faults = "default", "", list[str]()

    async def answer(self, request: web.Request) -> web.Response:
        told: Any = await request.json() if request.method == "POST" and request.can_read_body else {}
        path = request.path[1:]
        if path == "release_memory_occupation":
            self.freed |= {*(told["tags"] or ("weights", "kv_cache", "cuda_graph"))}
        if path == "resume_memory_occupation":
            if self.refuses in told["tags"]:
                self.refuses = ""  # once
                return web.json_response({"success": False}, status=400)
            self.faults += [tag for tag in told["tags"] if tag not in self.freed]
            self.freed -= {*told["tags"]}
        if path == "update_weights_from_disk":
            self.faults += ["weights"] * ("weights" in self.freed)
            self.version = told["weight_version"]
        return web.json_response({"weight_version": self.version} if path == "model_info" else {})


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize("refused", ["weights", "kv_cache"])
async def test_what_a_server_has_taken_back_it_is_not_told_to_take_again(refused: str, tmp_path: Path) -> None:
    """Another one failed meanwhile, before or after the weights; and a third was restarted while it rested."""
    savers = [Saver(), Saver(), Saver()]
    async with AsyncExitStack() as stack:
        urls = []
        for saver in savers:
            app = web.Application()
            app.router.add_route("*", "/{page:.*}", saver.answer)
            urls.append(await stack.enter_async_context(running(app)))
        engine = SGLang(urls, transport=FromDisk(tmp_path), release=True)
        await engine.update_weights([("x", torch.zeros(1))], version=0)
        for version in (1, 2):
            await engine.rest()
            assert all(saver.freed >= {"weights", "kv_cache"} for saver in savers)
            savers[2].freed, savers[2].version = set(), "default"
            savers[1].refuses = refused
            with pytest.raises(ValueError, match="status 400"):
                await engine.update_weights([("x", torch.zeros(1))], version=version)
            await engine.update_weights([("x", torch.zeros(1))], version=version)
            assert not any(saver.freed for saver in savers)
        await engine.close()
    assert [saver.faults for saver in savers] == [[], [], []]


async def test_requests_that_end_late_are_waited_for(tmp_path: Path) -> None:
    async with server() as (url, seen):
        engine = SGLang(url, transport=FromDisk(tmp_path), release=True)
        engine._calls["late"] = object()  # type: ignore[assignment]
        resting = asyncio.create_task(engine.rest())
        await asyncio.sleep(0.2)
        assert not seen
        del engine._calls["late"]
        await resting
        await engine.close()
    assert seen == ASKED[SGLang][:1]
