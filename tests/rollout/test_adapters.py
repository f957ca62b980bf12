"""LoRA adapters on servers: only the adapter is sent, requests name it, and who cannot take it gets merged weights."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from lora_server import LoraServer, serving
from safetensors.torch import load_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.lora import adapter_weights, adapters, add_lora
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.servers.kinds import kind_named
from rlkit.rollout.engines.sglang import FromDisk, SGLang
from rlkit.rollout.engines.vllm import VLLM
from rlkit.settings import SERVERS
from rlkit.types import SamplingParams

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
KINDS = [kind_named(name).engine for name in SERVERS]
PARAMS = SamplingParams(max_new_tokens=5)
LONG = SamplingParams(max_new_tokens=4000)
NAME = "owner/model"
FULL = {SGLang: ["/update_weights_from_disk"], VLLM: ["/collective_rpc reload_weights", "/update_weight_version"]}
FLUSH = {SGLang: "/flush_cache", VLLM: "/reset_prefix_cache"}
PAUSE = {SGLang: "/pause_generation", VLLM: "/pause"}
LOAD = {SGLang: "/load_lora_adapter", VLLM: "/v1/load_lora_adapter"}
UNLOAD = {SGLang: "/unload_lora_adapter", VLLM: "/v1/unload_lora_adapter"}


def whole(kind: Any) -> list[str]:
    """The requests by which all weights are sent."""
    return [PAUSE[kind], *FULL[kind], FLUSH[kind]]


@asynccontextmanager
async def several(kind: Any, folder: Path, *servers: LoraServer) -> AsyncIterator[tuple[Any, ...]]:
    """An engine of several servers, and the servers."""
    async with AsyncExitStack() as stack:
        urls = [(await stack.enter_async_context(serving(server))).url for server in servers]
        yield await stack.enter_async_context(kind(urls, transport=FromDisk(folder))), *servers


@pytest.fixture(scope="module")
def base() -> Any:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    model.name_or_path = NAME
    return model


@pytest.fixture
def model(base: Any) -> Any:
    """With an adapter of rank 4 that has been trained."""
    adapted = add_lora(copy.deepcopy(base), rank=4)
    with torch.no_grad():
        for adapter in adapters(adapted).values():
            adapter.b.normal_(generator=torch.Generator().manual_seed(0))
    return adapted


def sent(folder: Path, version: int) -> dict[str, torch.Tensor]:
    """The weights that the servers were given through files."""
    found: dict[str, torch.Tensor] = {}
    for path in (folder / str(version)).glob("*.safetensors"):
        found |= load_file(path)
    return found


def equal(a: dict[str, torch.Tensor], b: Any) -> bool:
    return a.keys() == dict(b).keys() and all(torch.equal(x, a[name]) for name, x in dict(b).items())


@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_adapter_is_sent_and_requests_name_it(kind: Any, model: Any, tmp_path: Path) -> None:
    async with serving(LoraServer(NAME)) as server, kind(server.url, transport=FromDisk(tmp_path)) as engine:
        await engine.update_weights(stream_weights(model), version=0)
        assert server.seen == [LOAD[kind], "/update_weight_version"]
        out = await engine.generate([1, 2], params=PARAMS)
        assert out.versions == [0] * 5
        weights = stream_weights(model)
        await engine.update_weights(weights, version=7)
        assert server.seen[2:] == [UNLOAD[kind], LOAD[kind], "/update_weight_version"]
        out = await engine.generate([1, 2], params=PARAMS)
        assert out.versions == [7] * 5
        first, second = server.named
        assert (first[:8], second[:8]) == ("rlkit-0-", "rlkit-7-")
        [(name, loaded)] = server.adapters.items()
        assert name == second
        assert loaded.pop("r") == 4
        assert equal(loaded, adapter_weights(model))
        assert weights.num_bytes == sum(x.nbytes for x in loaded.values())
        assert [path.name for path in tmp_path.iterdir()] == [name], "no weights but the adapter, the old one removed"
    assert not tmp_path.exists(), "as of whole weights, nothing is left after the run"


@pytest.mark.slow_cases("in_place-SGLang", "retract-SGLang", "abort-SGLang", "abort-VLLM", "retract-VLLM")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
async def test_an_update_in_the_middle_of_a_rollout(kind: Any, pause: str, model: Any, tmp_path: Path) -> None:
    """What was in flight continues from its tokens with the new adapter, or ends; the old one is not used again."""
    options: Any = {"transport": FromDisk(tmp_path), "pause": pause}
    async with serving(LoraServer(NAME)) as server, kind(server.url, **options) as engine:
        await engine.update_weights(stream_weights(model), version=3)
        truth = await server.engine.generate([1, 2], params=SamplingParams(max_new_tokens=4000, seed=1))
        calls = [asyncio.create_task(engine.generate([1, 2], params=LONG, rid=f"{i}")) for i in range(3)]
        while len(server.named) < 3:
            await asyncio.sleep(0.001)
        update = asyncio.create_task(engine.update_weights(stream_weights(model), version=4))
        while not engine._calls["1"].aborted.is_set():
            await asyncio.sleep(0)
        await engine.abort("1")
        late = asyncio.create_task(engine.generate([1, 2], params=PARAMS))
        await update
        outs = await asyncio.gather(*calls)
        assert (await late).versions == [4] * 5
        for i, out in enumerate(outs):
            old = out.versions.count(3)
            assert out.versions == [3] * old + [4] * (len(out.ids) - old)
            assert out.ids == truth.ids[: len(out.ids)]
            aborted = pause == "abort" or i == 1
            assert (len(out.ids) < 4000, out.finish_reason) == ((True, "abort") if aborted else (False, "length"))
            assert old == len(out.ids) if aborted else 0 < old < 4000
    names = [name[:7] for name in server.named]
    assert names == sorted(names)


@pytest.mark.slow_cases("touched1-SGLang")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("touched", [{"version": "3"}, {"model_path": "owner/other"}])
async def test_a_server_with_other_weights_gets_the_base_once(
    kind: Any, touched: dict[str, str], base: Any, model: Any, tmp_path: Path
) -> None:
    """Those of an earlier run, or of another checkpoint."""
    fake = LoraServer(touched.get("model_path", NAME))
    vars(fake).update(touched)
    async with serving(fake) as server, kind(server.url, transport=FromDisk(tmp_path)) as engine:
        await engine.update_weights(stream_weights(model), version=0)
        assert server.seen == [*whole(kind), LOAD[kind], "/update_weight_version"]
        assert equal(sent(tmp_path, 0), stream_weights(base))
        await engine.update_weights(stream_weights(model), version=1)
        assert server.seen[len(whole(kind)) + 2 :] == [UNLOAD[kind], LOAD[kind], "/update_weight_version"]
        server.restart()  # again with its own weights, which are not the trainer's if its checkpoint is another
        before = len(server.seen)
        await engine.update_weights(stream_weights(model), version=2)
        again = whole(kind) if server.model_path != NAME else []
        assert server.seen[before:] == [*again, LOAD[kind], "/update_weight_version"]


MERGED = {
    "was started without LoRA": {"rank": 0},
    "takes adapters up to rank 2, and this one has 4": {"rank": 2},
    "they free their weights while the trainer works": {"release": True},
    "through a router": {"router": True},
    "is another machine, which reads an adapter from a shared folder": {"far": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", MERGED)
async def test_what_takes_no_adapter_gets_merged_weights_and_one_line_says_why(
    kind: Any, reason: str, model: Any, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = MERGED[reason]
    async with serving(LoraServer(NAME, rank=how.get("rank", 8))) as server:
        options: Any = {"transport": FromDisk(tmp_path), "release": "release" in how}
        options |= {"router": server.url} if "router" in how else {}
        if "far" in how:
            monkeypatch.setattr("rlkit.rollout.engines.servers.adapters.is_here", lambda _: False)
            options["transport"] = Hidden(FromDisk(tmp_path))
        async with kind(server.url, **options) as engine:
            for version in (0, 1):
                await engine.update_weights(stream_weights(model), version=version)
            assert server.seen == 2 * whole(kind)
            assert equal(sent(tmp_path, 1), stream_weights(model))
            assert (await engine.generate([1], params=PARAMS)).versions == [1] * 5
        async with kind(server.url, lora="adapter", **options) as strict:
            with pytest.raises(ValueError, match=reason):
                await strict.update_weights(stream_weights(model), version=2)
    said = [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]
    assert len(said) == 1
    assert reason in said[0]
    assert server.named == [None]


class Hidden:
    """A transport that says nothing of its folder."""

    sessions = here = False

    def __init__(self, real: FromDisk) -> None:
        self.send, self.close = real.send, real.close


@pytest.mark.parametrize("kind", KINDS)
async def test_merged_weights_where_they_are_asked_for_or_more_than_the_adapter_trains(
    kind: Any, model: Any, tmp_path: Path
) -> None:
    async with serving(LoraServer(NAME)) as server:
        async with kind(server.url, transport=FromDisk(tmp_path), lora="merged") as engine:
            await engine.update_weights(stream_weights(model), version=0)
        model.get_input_embeddings().weight.requires_grad_(True)
        async with kind(server.url, transport=FromDisk(tmp_path)) as engine:
            await engine.update_weights(stream_weights(model), version=1)
    assert server.seen == 2 * whole(kind)


@pytest.mark.parametrize("kind", KINDS)
async def test_after_a_refused_adapter_merged_weights_are_sent(kind: Any, model: Any, tmp_path: Path) -> None:
    async with (
        serving(LoraServer(NAME, loads=False)) as server,
        kind(server.url, transport=FromDisk(tmp_path)) as engine,
    ):
        with pytest.raises(EngineError, match=r"refused the adapter .*do not fit.*: call update_weights again, for"):
            await engine.update_weights(stream_weights(model), version=1)
        with pytest.raises(RuntimeError, match="the update to version 1 was not finished"):
            await engine.generate([1], params=PARAMS)
        await engine.update_weights(stream_weights(model), version=1)
        assert server.seen == [LOAD[kind], *whole(kind)]
        assert (await engine.generate([1], params=PARAMS)).versions == [1] * 5
        assert server.named == [None]


@pytest.mark.slow_cases("VLLM")
@pytest.mark.parametrize("kind", KINDS)
async def test_an_adapter_gives_way_to_merged_weights(kind: Any, model: Any, tmp_path: Path) -> None:
    """A second server, which takes none, comes up later: both get merged weights, and no request names an adapter."""
    async with several(kind, tmp_path, LoraServer(NAME, rank=8), LoraServer(NAME, rank=0)) as (engine, able, other):
        engine._servers.all[1].down = "it starts late"
        await engine._servers.learn()
        engine._servers._revive = engine._servers._learn  # the late one stays down
        await engine.update_weights(stream_weights(model), version=0)
        assert able.seen == [LOAD[kind], "/update_weight_version"]
        del engine._servers._revive
        await engine.update_weights(stream_weights(model), version=1)
        assert able.seen[2:] == [*whole(kind), UNLOAD[kind]]
        assert other.seen == whole(kind)
        outs = await asyncio.gather(*(engine.generate([1, i], params=PARAMS) for i in range(4)))
        assert all(out.versions == [1] * 5 for out in outs)
        assert {*able.named, *other.named} == {None}
        await engine.update_weights(stream_weights(model), version=2)
        assert able.seen[2:] == [*whole(kind), UNLOAD[kind], *whole(kind)]


@pytest.mark.slow_cases("0-VLLM")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, 5])
async def test_a_server_that_was_restarted_is_given_the_adapter_before_it_samples(
    kind: Any, version: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at version 0, which is what a new server reports."""
    monkeypatch.setattr("rlkit.rollout.engines.servers.engine.LOOK_EVERY", 0.02)
    options: Any = {"transport": FromDisk(tmp_path), "wait_s": 30.0}
    async with serving(LoraServer(NAME)) as server, kind(server.url, **options) as engine:
        await engine.update_weights(stream_weights(model), version=version)
        server.restart()
        calls = [asyncio.create_task(engine.generate([1, i], params=PARAMS)) for i in range(3)]
        await asyncio.wait_for(engine.lost(), 20)
        assert not any(call.done() for call in calls)
        before = len(server.seen)
        await engine.update_weights(stream_weights(model), version=version)
        assert server.seen[before:] == [LOAD[kind], "/update_weight_version"]
        assert all(out.versions == [version] * 5 for out in await asyncio.gather(*calls))
    assert {name[:8] for name in server.named} == {f"rlkit-{version}-"}


@pytest.mark.slow_cases("VLLM")
@pytest.mark.parametrize("kind", KINDS)
async def test_requests_go_on_elsewhere_while_one_server_lacks_the_adapter(
    kind: Any, model: Any, tmp_path: Path
) -> None:
    async with several(kind, tmp_path, LoraServer(NAME), LoraServer(NAME)) as (engine, *servers):
        await engine.update_weights(stream_weights(model), version=1)
        servers[0].restart()
        outs = await asyncio.gather(*(engine.generate([1, i], params=PARAMS) for i in range(6)))
        assert all(out.versions == [1] * 5 for out in outs)
        assert (servers[0].named, len(servers[1].named)) == ([], 6)
        await engine.update_weights(stream_weights(model), version=2)
        outs = await asyncio.gather(*(engine.generate([1, i], params=PARAMS) for i in range(6)))
        assert all(out.versions == [2] * 5 for out in outs)
        assert len(servers[0].named) == 3


class DiesInside(LoraServer):
    """It dies of its second adapter."""

    dead = False

    def load(self, path: str, body: dict[str, Any]) -> web.Response:
        self.dead = self.seen.count(path) == 2 and "unload" not in path
        return super().load(path, body)

    async def answer(self, request: web.Request) -> web.Response:
        out = await super().answer(request)
        if self.dead:
            request.transport.close()
        return out


@pytest.mark.slow_cases("VLLM")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_dies_of_an_adapter_does_not_have_the_others_sent_the_base(
    kind: Any, model: Any, tmp_path: Path
) -> None:
    """They have that adapter, and not the one before; a base in FP8 could not be sent at all."""
    async with several(kind, tmp_path, LoraServer(NAME), DiesInside(NAME)) as (engine, *servers):
        for server in servers:
            server.version = "3"  # so that their base is not what they were started with
        await engine.update_weights(stream_weights(model), version=1)
        assert [server.seen for server in servers] == [[*whole(kind), LOAD[kind], "/update_weight_version"]] * 2
        with pytest.raises(EngineError, match="connection failed"):
            await engine.update_weights(stream_weights(model), version=2)
        before = len(servers[0].seen)
        await engine.update_weights(stream_weights(model), version=2)
        assert servers[0].seen[before:] == [UNLOAD[kind], LOAD[kind], "/update_weight_version"]
        assert (await engine.generate([1], params=PARAMS)).versions == [2] * 5
        assert [*servers[0].adapters] == servers[0].named


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_folder_files_are_temporary_and_close_removes_them(
    kind: Any, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlkit.rollout.engines.servers.adapters.SHARED_MEMORY", tmp_path)
    async with serving(LoraServer(NAME)) as server:
        async with kind(server.url) as engine:
            for version in (0, 1):
                await engine.update_weights(stream_weights(model), version=version)
            assert len([*tmp_path.glob("rlkit-adapter-*/rlkit-*")]) == 1
        assert not [*tmp_path.iterdir()]
    assert server.seen.count(LOAD[kind]) == 2


async def test_a_bad_request_to_an_adapter_is_the_caller_s(model: Any, tmp_path: Path) -> None:
    async with serving(LoraServer(NAME)) as server, VLLM(server.url, transport=FromDisk(tmp_path)) as engine:
        await engine.update_weights(stream_weights(model), version=1)
        with pytest.raises(ValueError, match="top_p"):
            await engine.generate([1], params=SamplingParams(top_p=0.5))
        assert engine._servers.up()
