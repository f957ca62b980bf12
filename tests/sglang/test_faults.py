"""The client with misbehaving servers. The faults are made with aiohttp, because SGLang cannot send half a reply on
demand; the form of a valid reply is checked against the real server elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from rlkit.rollout.engines import Unreachable
from rlkit.rollout.engines.http import Http, ReplicaError
from rlkit.rollout.engines.servers.replicas import Replicas
from rlkit.rollout.engines.sglang import FromGroup, SGLang
from rlkit.rollout.engines.sglang.api import SGLangApi
from rlkit.rollout.shared import publish
from rlkit.run.saving import unless_hung
from rlkit.run.signals import Stop
from rlkit.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=3)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def good_reply(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None], [-1.5, 9, None]],
        "completion_tokens": 3,
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
    }
    return {"text": "", "output_ids": [7, 8, 9], "meta_info": meta | changes}


async def good(_request: web.Request) -> web.Response:
    return web.json_response(good_reply())


async def status_500(_request: web.Request) -> web.Response:
    return web.Response(status=500, text="out of luck")


async def truncated(_request: web.Request) -> web.Response:
    return web.Response(body=json.dumps(good_reply())[:-20].encode(), content_type="application/json")


async def cut_off(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Length": "1000"})
    await reply.prepare(request)
    await reply.write(b'{"text": ')
    request.transport.close()
    return reply


async def slams(request: web.Request) -> web.StreamResponse:
    request.transport.close()
    return web.Response()


async def hangs(_request: web.Request) -> web.Response:
    await asyncio.sleep(3600)
    raise AssertionError


def replying(**changes: Any) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(good_reply(**changes))

    return handler


@asynccontextmanager
async def serving(*handlers: Handler, calls: list[str] | None = None, **pages: Handler):
    """Servers on free ports whose /generate is the handler; `pages` are other paths. Yields their URLs."""
    urls, runners = [], []
    for number, handler in enumerate(handlers):
        app = web.Application()

        async def counted(request: web.Request, handler: Handler = handler, number: int = number) -> web.StreamResponse:
            if calls is not None:
                calls.append(f"{number}{request.path}")
            return await handler(request)

        app.router.add_post("/generate", counted)
        for name, page in pages.items():
            app.router.add_route("*", f"/{name}", page)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    try:
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()


async def test_a_good_reply_is_read_whole() -> None:
    async with serving(good) as urls, SGLang(urls) as engine:
        out = await engine.generate([1, 2], params=PARAMS)
    assert out == type(out)([7, 8, 9], [-0.5, -1.0, -1.5], [3, 4, 4], "length")


BAD = {
    "status 500": status_500,
    "not JSON": truncated,
    "cut off": cut_off,
    "connection failed": slams,
    "3 tokens but 2 log-probs": replying(output_token_logprobs=[[-0.5, 7, None], [-1.0, 8, None]]),
    "not a reply of /generate": replying(output_token_logprobs=None),
    "not finite": replying(output_token_logprobs=[[-0.5, 7, None], [float("-inf"), 8, None], [-1.5, 9, None]]),
    "do not cover 3 tokens": replying(weight_versions=[{"version": "3", "start": 0, "end": 2}]),
    "the server gave up": replying(finish_reason={"type": "abort", "message": "out of memory", "status_code": 500}),
}


async def test_a_bad_reply_is_a_clear_error() -> None:
    async def fails(message: str) -> None:
        calls: list[str] = []
        async with serving(BAD[message], calls=calls) as urls, SGLang(urls) as engine:
            with pytest.raises(ReplicaError, match=message) as caught:
                await engine.generate([1, 2], params=PARAMS)
        assert urls[0] in str(caught.value)
        assert len(calls) == 3

    await asyncio.gather(*map(fails, BAD))  # each waits between its attempts


@pytest.mark.parametrize("message", BAD)
async def test_a_bad_reply_is_retried_and_each_call_returns_once(message: str) -> None:
    failed = set()

    async def at_first(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["input_ids"][1]
        first = prompt not in failed
        failed.add(prompt)
        return await (BAD[message] if first else good)(request)

    async with serving(at_first) as urls, SGLang(urls) as engine:
        outs = await asyncio.gather(*(engine.generate([1, i], params=PARAMS) for i in range(10)))
    assert [out.ids for out in outs] == [[7, 8, 9]] * 10


@pytest.mark.parametrize(("eos", "context", "reason"), [(9, 100, "stop"), (5, 5, "length"), (5, 6, "abort")])
async def test_an_abort_at_the_end_of_a_completion_is_that_end(eos: int, context: int, reason: str) -> None:
    """SGLang tests for it first: the reply is "abort", and has the model's own end or fills the context."""
    aborted = asyncio.Event()

    async def generate(_request: web.Request) -> web.Response:
        await aborted.wait()
        return web.json_response(good_reply(finish_reason={"type": "abort"}))

    async def abort(_request: web.Request) -> web.Response:
        aborted.set()
        return web.json_response({})

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model", "max_model_len": context}]})

    pages = {"abort_request": abort, "v1/models": models}
    tokenizer = SimpleNamespace(eos_token_id=eos)
    async with serving(generate, **pages) as urls, SGLang(urls, tokenizer=tokenizer) as engine:
        call = asyncio.create_task(engine.generate([1, 2], params=SamplingParams(max_new_tokens=9)))
        await asyncio.sleep(0.05)
        assert await engine.abort() == 1
        out = await call
    assert (out.ids, out.finish_reason) == ([7, 8, 9], reason)


async def test_a_refused_request_is_not_repeated() -> None:
    async def refuses(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "The input is longer than the context"}}, status=400)

    calls: list[str] = []
    async with serving(refuses, good, calls=calls) as urls, SGLang(urls) as engine:
        with pytest.raises(ValueError, match="longer than the context") as caught:
            await asyncio.gather(engine.generate([1], params=PARAMS), engine.generate([1], params=PARAMS))
    assert urls[0] in str(caught.value)
    assert calls.count("0/generate") == 1


@pytest.mark.slow
async def test_a_hanging_server_is_left_out_and_the_only_one_an_error() -> None:
    hanging = {"health": hangs, "model_info": hangs}

    async def beside_another() -> None:
        async with (
            serving(hangs, **hanging) as stuck,
            serving(good) as fine,
            SGLang([*stuck, *fine], stall=0.4) as engine,
        ):
            outs = await asyncio.gather(*(engine.generate([1, i], params=PARAMS) for i in range(20)))
        assert [out.ids for out in outs] == [[7, 8, 9]] * 20

    async def alone() -> None:
        async with serving(hangs, **hanging) as urls, SGLang(urls, stall=0.4) as engine:
            with pytest.raises(ReplicaError, match=r"no SGLang server is up(.|\n)*it hangs"):
                await engine.generate([1], params=PARAMS)

    await asyncio.gather(beside_another(), alone())


@pytest.mark.slow
async def test_a_slow_server_is_not_taken_for_a_hanging_one() -> None:
    async def slow(_request: web.Request) -> web.Response:
        await asyncio.sleep(1.5)
        return web.json_response(good_reply())

    calls: list[str] = []
    async with serving(slow, calls=calls, health=good) as urls, SGLang(urls, stall=0.3) as engine:
        assert (await engine.generate([1], params=PARAMS)).ids == [7, 8, 9]
    assert len(calls) == 1


@pytest.mark.slow
async def test_a_blocked_event_loop_is_not_taken_for_a_hanging_server() -> None:
    http = Http()
    async with serving(good, health=hangs) as urls:
        servers = Replicas(http, urls, SGLangApi(), stall=0.2)
        assert "no reply within 1.0 s" in await servers._answers(servers.all[0], "/health")
        question = asyncio.create_task(servers._answers(servers.all[0], "/health"))
        await asyncio.sleep(0.01)
        time.sleep(2.5)
        assert await question is None
        await http.close()


async def test_the_timeout_of_a_request_is_an_error_that_names_it() -> None:
    async with serving(hangs, health=good) as urls, SGLang(urls, timeout=0.3) as engine:
        with pytest.raises(TimeoutError, match=r"/generate: no reply within 0\.3 s"):
            await engine.generate([1], params=PARAMS)


async def test_no_server_is_an_error_with_its_address() -> None:
    async with serving(good) as urls:
        pass
    engine = SGLang(urls)
    with pytest.raises(ReplicaError, match=r"no SGLang server answers(.|\n)*Connect call failed"):
        await engine.generate([1], params=PARAMS)
    await engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        await engine.generate([1], params=PARAMS)


async def test_entering_without_a_server_leaves_no_session_open() -> None:
    async with serving(good) as urls:
        pass
    engine = SGLang(urls)
    with pytest.raises(ReplicaError, match=r"no SGLang server answers(.|\n)*Connect call failed"):
        async with engine:
            pass
    assert engine._http._session is None


async def test_requests_go_to_the_least_loaded_server() -> None:
    there = asyncio.Barrier(30)

    async def together(_request: web.Request) -> web.Response:
        await there.wait()  # none is answered before all have been sent
        return web.json_response(good_reply())

    calls: list[str] = []
    async with serving(together, together, together, calls=calls) as urls, SGLang(urls) as engine:
        await asyncio.gather(*(engine.generate([1, i], params=PARAMS) for i in range(30)))
    assert {path: calls.count(path) for path in set(calls)} == {f"{i}/generate": 10 for i in range(3)}


async def test_a_router_gets_the_requests_and_the_servers_the_weights() -> None:
    seen: list[str] = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"success": True})

    pages = ("pause_generation", "update_weights_from_tensor", "flush_cache", "continue_generation")
    calls: list[str] = []
    async with (
        serving(good, calls=calls, **dict.fromkeys(pages, note)) as urls,
        serving(good) as router,
        SGLang(urls, router=router[0]) as engine,
    ):
        await engine.generate([1], params=PARAMS)
        with pytest.warns(UserWarning, match="cannot read the checkpoint None"):
            await engine.update_weights([("w", torch.ones(3))], version=1)
        await engine.update_weights([("w", torch.ones(3))], version=2)
    assert calls == []
    # begin and end of a session are 404 here, as in SGLang before it had them
    assert seen == [f"/{page}" for page in pages] * 2


@pytest.mark.parametrize("fields", [{"weight_versions": None}, {"weight_versions": None, "weight_version": None}])
async def test_servers_without_versions_per_token(fields: dict[str, Any]) -> None:
    async with serving(replying(**fields)) as urls, SGLang(urls) as engine:
        engine.version = 6
        out = await engine.generate([1], params=PARAMS)
    assert out.versions == ([4, 4, 4] if "weight_version" not in fields else [6, 6, 6])


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_weight_updates_are_not_repeated() -> None:
    posts = 0

    async def fails(_request: web.Request) -> web.Response:
        nonlocal posts
        posts += 1
        return web.Response(status=500)

    async def fine(_request: web.Request) -> web.Response:
        return web.json_response({})

    pages = {"pause_generation": fine, "continue_generation": fine, "update_weights_from_tensor": fails}
    async with serving(good, **pages) as urls, SGLang(urls) as engine:
        with pytest.raises(ReplicaError, match="status 500"):
            await engine.update_weights([("w", torch.ones(3))], version=1)
        assert posts == 1
        with pytest.raises(RuntimeError, match="not finished"):
            await engine.generate([1], params=PARAMS)


def noting(seen: list[str], **answers: Any) -> dict[str, Handler]:
    """Pages of an update, which record their requests."""
    paths = "pause_generation begin_weight_update update_weights_from_tensor flush_cache end_weight_update"

    async def page(request: web.Request) -> web.Response:
        seen.append(request.path[1:])
        return web.json_response(*answers.get(request.path[1:], ({},)))

    return dict.fromkeys([*paths.split(), "continue_generation", "abort_request", "server_info", "model_info"], page)


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_an_update_skips_a_dead_server_and_leaves_none_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []
    async with serving(good, **noting(seen)) as alive:
        async with serving(good, **noting([])) as dead, SGLang([*dead, *alive]) as engine:
            pass
        engine = SGLang([*dead, *alive])
        await engine.update_weights([("w", torch.ones(3))], version=1)
        assert seen[-1] == "continue_generation"
        assert (await engine.generate([1], params=PARAMS)).ids == [7, 8, 9]
        async with serving(good, **noting(seen)) as back:
            engine._servers.all[0].url = back[0]  # as if it had been restarted at its address
            await engine.update_weights([("w", torch.ones(3))], version=2)
            assert [r.life for r in engine._servers.all] == [1, 0], "a process group has to be made anew"
        await engine.close()
    said = [record.getMessage() for record in caplog.records if record.name == "rlkit.rollout"]
    assert len(said) == 2, "once each"
    assert said[0].startswith(f"SGLang server {dead[0]} is left out: {dead[0]}/model_info: connection failed")
    assert said[1] == f"SGLang server {back[0]} is back"


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
@pytest.mark.parametrize("page", ["pause_generation", "begin_weight_update", "flush_cache", "end_weight_update"])
async def test_a_failed_update_refuses_requests_at_once_and_resumes_the_servers(page: str) -> None:
    seen: list[str] = []
    refused: list[BaseException] = []

    async def aborting(request: web.Request) -> web.Response:
        seen.append("abort_request")
        try:
            await engine.generate([1], params=PARAMS)
        except RuntimeError as error:  # not only when the update has ended: it would sample from a mixture of weights
            refused.append(error)
        return web.json_response({})

    pages = noting(seen)

    async def fails(request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "out of luck"}, status=400)

    async with serving(good, **{**pages, "abort_request": aborting, page: fails}) as urls, SGLang(urls) as engine:
        with pytest.raises(ValueError, match=f"{page}: status 400: .*out of luck"):
            await engine.update_weights([("w", torch.ones(3))], version=1)
        assert "version 1 was not finished" in str(refused[0])
        assert seen[-1] == "continue_generation"


async def test_layouts_that_load_from_disk_only_are_refused() -> None:
    seen: list[str] = []
    pages = noting(seen, server_info=({"tp_size": 2, "dp_size": 4},))
    async with serving(good, **pages) as urls:
        engine = SGLang(urls)  # an update may be its first call
        with pytest.raises(ValueError, match="pp_size 1 and dp_size 4"):
            await engine.update_weights([("w", torch.ones(3))], version=1)
        await engine.close()
    assert "pause_generation" not in seen


@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_a_refused_process_group_is_an_error_at_once() -> None:
    async def refuses(_request: web.Request) -> web.Response:
        return web.json_response({"success": False, "message": "no such backend"}, status=400)

    pages = {**noting([]), "init_weights_update_group": refuses}
    async with serving(good, **pages) as urls, SGLang(urls, transport=FromGroup(backend="gloo")) as engine:
        with pytest.raises(ValueError, match=r"init_weights_update_group: status 400: .*no such backend"):
            await asyncio.wait_for(engine.update_weights([("w", torch.ones(3))], version=1), 120)


def stuck(seen: list[str]) -> dict[str, Handler]:
    """As a server that waits in a collective: it answers what it is, and no other request about its weights."""

    async def waits(request: web.Request) -> web.Response:
        seen.append(request.path)
        return await hangs(request)

    return {**noting(seen), **dict.fromkeys(["init_weights_update_group", "end_weight_update", "abort_request"], waits)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_a_server_that_does_not_join_the_group_is_one_line_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a far machine whose name stands for a loopback address. It was repeated 5 times, each with 600 s of cleaning
    up, and the error was that of the last request."""
    monkeypatch.setattr("rlkit.rollout.engines.servers.engine.CLEAN_UP_S", 0.5)
    seen: list[str] = []
    async with serving(good, **stuck(seen)) as urls:
        engine = SGLang(urls, transport=FromGroup(backend="gloo", timeout=1.0))
        with pytest.raises(Unreachable, match=r"no gloo group for the weights from 127.0.0.1 \(limit 1 s\)") as caught:
            await asyncio.wait_for(publish(engine, lambda: [("w", torch.ones(3))], version=1), 20)
        await engine.close()
    assert urls[0] in str(caught.value)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value)
    assert [path for path in seen if "init" in path] == ["/init_weights_update_group"], "not repeated"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")
async def test_a_stop_request_ends_an_update_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.rollout.engines.silence.HUNG_AFTER_S", 1.0)
    monkeypatch.setattr("rlkit.rollout.engines.servers.engine.CLEAN_UP_S", 0.5)
    said: list[str] = []
    stop, run = Stop(), SimpleNamespace(say=said.append)
    async with serving(good, **stuck([])) as urls:
        engine = SGLang(urls, transport=FromGroup(backend="gloo"), wait_s=900.0)
        sending = engine.update_weights([("w", torch.ones(3))], version=1)
        waiting = asyncio.ensure_future(unless_hung(sending, engine=engine, stop=stop, run=run))
        await asyncio.sleep(1.5)
        assert not waiting.done(), "nobody asked to stop"
        stop.requested = True
        assert await asyncio.wait_for(waiting, 10) is None
        sampling = engine.generate([1], params=PARAMS)  # which waits for the next update
        assert await asyncio.wait_for(unless_hung(sampling, engine=engine, stop=stop, run=run), 10) is None
        await asyncio.wait_for(engine.close(), 10)
    assert said[0].startswith("stopping without the engine")


async def test_progress_counts_the_queues_of_the_servers() -> None:
    release = asyncio.Event()

    async def waits(request: web.Request) -> web.Response:
        if (await request.json())["input_ids"] != [1]:
            await release.wait()
        return web.json_response(good_reply())

    async def loads(_request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 2}]})

    async with serving(waits, **{"v1/loads": loads}) as urls, SGLang(urls) as engine:
        assert engine.progress == (0, 0, 0)
        tasks = [asyncio.create_task(engine.generate([2], params=PARAMS)) for _ in range(5)]
        await engine.generate([1], params=PARAMS)
        async with asyncio.timeout(120):
            while engine.progress != (3, 2, 3):
                await asyncio.sleep(0.01)
        release.set()
        await asyncio.gather(*tasks)
        assert engine.progress == (0, 0, 18)


async def test_an_update_from_disk_does_not_change_the_known_checkpoint(tmp_path: Path) -> None:
    """SGLang then reports the folder of the update as its model, which has no config and is deleted later."""
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    paths = iter([str(tmp_path), "/updates/3"])

    async def info(_request: web.Request) -> web.Response:
        return web.json_response({"model_path": next(paths)})

    async with serving(good, server_info=info) as urls, SGLang(urls) as engine:
        await engine._servers.learn()
        with pytest.raises(ValueError, match=r"must be in \[0, 9\), got 9"):
            await engine.generate([9], params=PARAMS)


@pytest.mark.parametrize("urls", [[], "localhost:3000"])
def test_addresses_are_checked(urls: Any) -> None:
    with pytest.raises(ValueError, match=r"http://127.0.0.1:30000"):
        SGLang(urls)


async def test_one_engine_serves_one_event_loop_after_another() -> None:
    async with serving(good) as urls:
        engine = SGLang(urls)

        async def once(engine: SGLang) -> list[int]:
            return (await engine.generate([1], params=PARAMS)).ids

        assert await asyncio.to_thread(asyncio.run, once(engine)) == [7, 8, 9]
        assert await asyncio.to_thread(asyncio.run, once(engine)) == [7, 8, 9]
