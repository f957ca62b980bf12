"""Invalid replies of an HTTP server, through both engines behind HTTP."""

from __future__ import annotations

import asyncio
import copy
import resource
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from fake_server import serving, vllm_reply

from rlkit.rollout.engines import http
from rlkit.rollout.engines.http import Busy, ReplicaError
from rlkit.rollout.engines.sglang import SGLang
from rlkit.rollout.engines.vllm import VLLM
from rlkit.types import SamplingParams

PROMPT, VOCAB = [5, 6], 100
PARAMS = SamplingParams(max_new_tokens=3)
Engine = Callable[..., Any]
FAST = {"backoff_s": 1e-3}


def sglang(url: str, **options: Any) -> SGLang:
    return SGLang(url, vocab_size=VOCAB, **FAST, **options)


def vllm(url: str, **options: Any) -> VLLM:
    return VLLM(url, vocab_size=VOCAB, **FAST, **options)


def reply(request: dict[str, Any]) -> dict[str, Any]:
    """A valid reply to a request of either engine."""
    if "input_ids" in request:
        meta = {
            "id": request["rid"],
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(request["input_ids"]),
            "output_token_logprobs": [[-0.5, 7, None], [0.0, 8, None]],
            "completion_tokens": 2,
        }
        return {"output_ids": [7, 8], "meta_info": meta}
    return vllm_reply(request, [7, 8], [-0.5, 0.0])


def with_tokens(tokens: list[Any], logp: list[Any], reason: str = "stop") -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(good: dict[str, Any]) -> dict[str, Any]:
        if "meta_info" in good:
            entries = [list(pair) for pair in zip(logp, tokens, strict=False)]
            told = {"output_token_logprobs": entries, "completion_tokens": len(tokens)}
            return {"output_ids": tokens, "meta_info": good["meta_info"] | told | {"finish_reason": {"type": reason}}}
        request = {"request_id": good["request_id"].removeprefix("generate-tokens-"), "token_ids": PROMPT}
        return vllm_reply(request, tokens, logp, reason)

    return change


def of_another(good: dict[str, Any]) -> dict[str, Any]:
    good = copy.deepcopy(good)
    if "meta_info" in good:
        good["meta_info"]["id"] = "another"
    else:
        good["request_id"] = "generate-tokens-another"
    return good


def longer_prompt(good: dict[str, Any]) -> dict[str, Any]:
    good = copy.deepcopy(good)
    (good["meta_info"] if "meta_info" in good else good["usage"])["prompt_tokens"] = 3
    return good


WRONG = {
    "a wider id": (with_tokens([7, 100], [-0.5, -0.5]), r"token 1 has the id 100, which is not in \[0, 100\)"),
    "a negative id": (with_tokens([-1, 7], [-0.5, -0.5]), "token 0 has the id -1"),
    "a fraction": (with_tokens([7, 7.5], [-0.5, -0.5]), "token 1 has the id 7.5"),
    "too many": (with_tokens([7] * 4, [-0.5] * 4, "length"), "4 tokens, at most 3 were asked"),
    "none": (with_tokens([], []), "no token, and finish_reason 'stop'"),
    "a log-prob above 0": (with_tokens([7, 8], [-0.5, 0.01]), "token 1 has the log-prob 0.01, which is above 0"),
    "nan": (with_tokens([7, 8], [-0.5, float("nan")]), "token 1 has the log-prob nan, which is not finite"),
    "fewer log-probs": (with_tokens([7, 8], [-0.5]), "2 tokens(, and log-probs of 1 others| but 1 log-probs)"),
    "of another": (of_another, "it is of another request: (request_)?id is '(generate-tokens-)?another', '"),
    "of another prompt": (longer_prompt, "it is of another request: prompt_tokens is 3, 2 was asked"),
}


@pytest.mark.parametrize("make", [sglang, vllm])
async def test_a_valid_reply_is_accepted(make: Engine) -> None:
    async with serving(lambda _, request: reply(request)) as (url, _):
        engine = make(url)
        out = await engine.generate(PROMPT, params=PARAMS, rid="r7")
        await engine.close()
    assert (out.ids, out.logp, out.finish_reason) == ([7, 8], [-0.5, 0.0], "stop")


@pytest.mark.slow_cases("sglang")
@pytest.mark.parametrize("make", [sglang, vllm])
async def test_an_invalid_reply_is_retried_and_then_an_error(make: Engine) -> None:
    """All at once: SGLang's client waits before it retries."""
    await asyncio.gather(*(check_refused(make, name) for name in WRONG))


async def check_refused(make: Engine, name: str) -> None:
    change, said = WRONG[name]
    async with serving(lambda _, request: change(reply(request))) as (url, seen):
        engine = make(url, tries=2)
        with pytest.raises(ReplicaError, match=said) as caught:
            await engine.generate(PROMPT, params=PARAMS, rid="r7")
        await engine.close()
    assert url in str(caught.value)
    if name != "fewer log-probs":
        asked = seen[-1].get("rid") or seen[-1]["request_id"]
        assert f"request {asked} is wrong" in str(caught.value)
    assert len(seen) == 2
    async with serving(lambda n, request: reply(request) if n else change(reply(request))) as (url, seen):
        engine = make(url, tries=2)
        assert (await engine.generate(PROMPT, params=PARAMS, rid="r7")).ids == [7, 8]
        await engine.close()


async def test_every_parameter_goes_to_vllm() -> None:
    """What is missing from a request the server takes from the model's generation_config.json."""
    params = SamplingParams(max_new_tokens=3, temperature=0.7, stop=("\n\n",), stop_token_ids=(2,), seed=2**64 + 7)
    async with serving(lambda _, request: reply(request)) as (url, seen):
        engine = vllm(url)
        out = await engine.generate(PROMPT, params=params)
        await engine.close()
    assert out.versions == [0, 0]
    told = {
        "max_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": ["\n\n"], "stop_token_ids": [2],
        "include_stop_str_in_output": True, "detokenize": True, "logprobs": 0, "seed": 7,
    }  # fmt: skip
    [asked] = seen
    assert asked.pop("request_id")
    assert asked == {"token_ids": PROMPT, "stream": False, "sampling_params": told}


@pytest.mark.parametrize(
    ("mode", "params", "refused"),
    [
        (
            "raw_logprobs",
            {"temperature": 0.7},
            "temperature 0.7 needs a server with --logprobs-mode processed",
        ),
        ("raw_logprobs", {"top_p": 0.9}, None),
        ("raw_logprobs", {"temperature": 0.0}, None),
        ("processed_logprobs", {"temperature": 0.7, "top_p": 0.9}, "of the truncated distribution"),
        ("processed_logprobs", {"top_k": 5}, "of the truncated distribution"),
        ("processed_logprobs", {"min_p": 0.1}, "of the truncated distribution"),
        ("processed_logprobs", {"temperature": 0.0}, None),
    ],
)
async def test_log_probs_of_another_distribution_are_refused(mode: str, params: dict, refused: str | None) -> None:
    async with serving(lambda _, request: reply(request), mode=mode) as (url, seen):
        engine = vllm(url)
        call = engine.generate(PROMPT, params=SamplingParams(max_new_tokens=3, **params))
        if refused is None:
            await call
        else:
            with pytest.raises(ValueError, match=refused):
                await call
        await engine.close()
    assert len(seen) == (refused is None)


@pytest.mark.parametrize("make", [sglang, vllm])
@pytest.mark.parametrize("status", [408, 425, 429, 503])
async def test_a_busy_server_is_asked_again(make: Engine, status: int) -> None:
    """More often than `tries`, which is for failures."""
    async with serving(lambda n, request: web.Response(status=status) if n < 5 else reply(request)) as (url, seen):
        engine = make(url, tries=1)
        assert (await engine.generate(PROMPT, params=PARAMS)).ids == [7, 8]
        await engine.close()
    assert len(seen) == 6


async def test_a_full_queue_of_sglang_is_a_busy_server() -> None:
    full = {"finish_reason": {"type": "abort", "status_code": 503, "message": "the queue is full"}}

    def answer(number: int, request: dict[str, Any]) -> dict[str, Any]:
        good = reply(request)
        return good if number == 4 else {"meta_info": good["meta_info"] | full}

    async with serving(answer) as (url, seen):
        engine = sglang(url, tries=1)
        assert (await engine.generate(PROMPT, params=PARAMS)).ids == [7, 8]
        await engine.close()
    assert len(seen) == 5


@pytest.mark.parametrize("make", [sglang, vllm])
async def test_a_server_that_stays_busy_is_an_error_in_time(make: Engine) -> None:
    async with serving(lambda *_: web.Response(status=429, headers={"Retry-After": "3600"})) as (url, seen):
        engine = make(url)
        with pytest.raises(Busy, match=r"status 429.*tried once; the server asks to wait 3600 s"):
            await engine.generate(PROMPT, params=PARAMS)
        await engine.close()
    assert len(seen) == 1
    async with serving(lambda *_: web.Response(status=503)) as (url, seen):
        engine = make(url, busy_s=0.05)
        with pytest.raises(Busy, match=r"status 503.*tried (once|\d+ times)$") as error:
            await engine.generate(PROMPT, params=PARAMS)
        await engine.close()
    times = "once" if len(seen) == 1 else f"{len(seen)} times"  # on a busy machine the first try may take all the time
    assert str(error.value).endswith(f"tried {times}")


@pytest.mark.parametrize("make", [sglang, vllm])
async def test_other_refusals_are_not_retried(make: Engine) -> None:
    async with serving(lambda *_: web.Response(status=400, text="too long")) as (url, seen):
        engine = make(url)
        with pytest.raises(ValueError, match="status 400: too long"):
            await engine.generate(PROMPT, params=PARAMS)
        await engine.close()
    assert len(seen) == 1


async def test_an_abort_ends_the_wait_for_a_busy_server() -> None:
    async with serving(lambda *_: web.Response(status=429, headers={"Retry-After": "500"})) as (url, seen):
        engine = sglang(url)
        waiting = engine.generate(PROMPT, params=PARAMS, rid="r7")

        async def abort() -> None:
            while not seen or not await engine.abort("r7"):
                await engine._http.request(f"{url}/health", method="GET", timeout=60)

        out, _ = await asyncio.wait_for(asyncio.gather(waiting, abort()), 60)
        await engine.close()
    assert (out.ids, out.finish_reason) == ([], "abort")


@pytest.mark.parametrize(("soft", "hard", "set_to"), [
    (1024, resource.RLIM_INFINITY, [65536]),
    (1024, 4096, [4096]),
    (256, resource.RLIM_INFINITY, [65536, 10240]),  # macOS, whose kernel refuses the first
    (1 << 20, 1 << 20, []),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
])  # fmt: skip
def test_the_limit_of_open_files_is_raised_and_never_lowered(monkeypatch, soft, hard, set_to):
    """Other systems' limits: a process cannot give itself a higher hard one."""
    asked = []

    def set_limit(which, limits):
        asked.append(limits)
        if soft == 256 and limits[0] > 10240:
            raise ValueError("not allowed")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    http.raise_open_files()
    assert asked == [(limit, hard) for limit in set_to]
