"""Replies that are no answer, of any form: only the documented error leaves the engines behind HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_server import serving, vllm_reply
from hypothesis import given
from hypothesis import strategies as st

from rlkit.rollout.engines.http import ReplicaError
from rlkit.rollout.engines.sglang import SGLang
from rlkit.rollout.engines.vllm import VLLM
from rlkit.types import SamplingParams

PROMPT, VOCAB, DEEP = [5, 6], 100, "<200,000 nested lists>"
PARAMS = SamplingParams(max_new_tokens=3)


def sglang_reply(request: dict[str, Any]) -> dict[str, Any]:
    """As SGLang 0.5.23 answers, with the fields that a client reads."""
    meta = {
        "id": request["rid"], "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 2,
        "completion_tokens": 2, "output_token_logprobs": [[-0.5, 7, None], [0.0, 8, None]], "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }  # fmt: skip
    return {"text": "ab", "output_ids": [7, 8], "meta_info": meta}


def of_vllm(request: dict[str, Any]) -> dict[str, Any]:
    return vllm_reply({"token_ids": PROMPT, "request_id": "1"}, [7, 8], [-0.5, 0.0]) | {"request_id": None}


ENGINES: dict[str, Any] = {
    "sglang": (sglang_reply, lambda url: SGLang(url, vocab_size=VOCAB, tries=1, backoff_s=1e-3, busy_s=0.01)),
    "vllm": (of_vllm, lambda url: VLLM(url, vocab_size=VOCAB, tries=1, backoff_s=1e-3, busy_s=0.01)),
}
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.floats(), st.text(max_size=5),
    st.sampled_from([10**9, -(10**9), 2**63, 10**400, -(10**400), 1e300, -1e300, "9" * 5000, "1e9", DEEP, 503]),
    st.lists(st.integers(-1, 9), max_size=4),
    st.dictionaries(st.sampled_from(["type", "start", "end"]), st.integers(0, 3)),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, x in inside:
        yield from places(x, (*path, key))


@st.composite
def changed(draw: Any, good: dict[str, Any]) -> Any:
    """`good` with up to three of its values replaced, removed or repeated."""
    value: Any = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([*places(value)]))
        if not path:
            value = draw(junk)
            continue
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat"])):
            case "remove":
                del inside[path[-1]]
            case "repeat" if isinstance(inside, list):
                inside.append(inside[path[-1]])
            case _:
                inside[path[-1]] = draw(junk)
    return value


def as_text(value: Any) -> str:
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 200_000 + "]" * 200_000)


async def ask(name: str, text: str) -> Any:
    """What the engine returns, or the `ReplicaError` that it raises, for a reply with this body."""
    _, make = ENGINES[name]
    answer = web.Response(text=text, content_type="application/json")
    async with serving(lambda *_: answer) as (url, _):
        engine = make(url)
        try:
            return await engine.generate(PROMPT, params=PARAMS, rid=None)
        except ReplicaError as error:
            return error
        finally:
            await engine.close()


@pytest.mark.slow_cases("sglang")
@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data())
def test_any_reply_is_a_right_completion_or_the_documented_error(name: str, data: Any) -> None:
    good = ENGINES[name][0]({"rid": None, "prompt": PROMPT})
    got = asyncio.run(ask(name, as_text(data.draw(changed(good)))))
    if isinstance(got, ReplicaError):
        assert len(str(got)) < 3000
        return
    assert len(got.ids) == len(got.logp) == len(got.versions) <= PARAMS.max_new_tokens
    assert all(type(x) is int and 0 <= x < VOCAB for x in got.ids)
    assert all(math.isfinite(x) and -3.4e38 <= x <= 1e-4 for x in got.logp)
    assert all(type(v) is int and 0 <= v < 2**31 for v in got.versions)


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """At most `more` bytes above what this process has mapped now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow_cases("many")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("spans", [
    [{"version": "1", "start": 0, "end": 10**9}],
    [{"version": "1", "start": -(10**9), "end": 2}],
    [{"version": "1", "start": 0, "end": 2}, {"version": "1", "start": 10**9, "end": 2 * 10**9}],
    [{"version": "1", "start": 0, "end": 2}] * 200_000,  # each is right alone
], ids=["long", "negative", "far", "many"])  # fmt: skip
def test_the_spans_of_a_reply_do_not_decide_how_much_memory_is_taken(spans: list[dict[str, Any]]) -> None:
    good = sglang_reply({"rid": None})
    good["meta_info"]["weight_versions"] = spans
    with address_space(1 << 30):
        got = asyncio.run(ask("sglang", json.dumps(good)))
    assert isinstance(got, ReplicaError)
    assert "not a reply of /generate" in str(got)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("logp", [-(10**400), 10**400, -1e300], ids=["negative", "positive", "beyond fp32"])
def test_a_log_prob_that_no_float_holds_is_not_finite(name: str, logp: Any) -> None:
    text = as_text(ENGINES[name][0]({"rid": None, "prompt": PROMPT})).replace("-0.5", str(logp))
    got = asyncio.run(ask(name, text))
    assert isinstance(got, ReplicaError)
    assert "token 0 has the log-prob" in str(got)


@pytest.mark.slow_cases("vllm")
@pytest.mark.parametrize("name", ENGINES)
def test_a_body_without_an_end_is_given_up(name: str) -> None:
    """The server sends more than any completion has; the client stops reading."""
    sent = 0

    async def endless(_number: int, request: dict[str, Any]) -> web.StreamResponse:
        return Endless()

    class Endless(web.Response):
        async def write_eof(self, data: bytes = b"") -> None:
            nonlocal sent
            part = b" " * (1 << 20)
            while sent < 4 << 30:
                sent += len(part)
                await self.write(part)  # type: ignore[attr-defined]

        async def _start(self, request: Any) -> Any:
            self.headers.pop("Content-Length", None)
            self.enable_chunked_encoding()
            return await super()._start(request)

    async def go() -> ReplicaError:
        _, make = ENGINES[name]
        async with serving(endless) as (url, _):
            engine = make(url)
            with pytest.raises(ReplicaError, match="more than 256 MiB") as caught:
                await engine.generate(PROMPT, params=PARAMS)
            await engine.close()
            return caught.value

    asyncio.run(go())
    assert sent < 1 << 30


@pytest.mark.parametrize("told", [
    {"tp_size": 10**9}, {"tp_size": "two"}, {"tp_size": [2]}, {"model_path": ["x"]}, ["not an object"], 5, "x",
])  # fmt: skip
async def test_what_a_server_reports_of_itself_is_checked(told: Any) -> None:
    app = web.Application()

    async def info(_: web.Request) -> web.Response:
        return web.json_response(told)

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({})

    app.router.add_get("/server_info", info)
    app.router.add_get("/v1/models", nothing)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with pytest.raises(ReplicaError, match=r"not (what SGLang reports of itself|a reply of /server_info)"):
            async with SGLang(url):
                pass
    finally:
        await runner.cleanup()
