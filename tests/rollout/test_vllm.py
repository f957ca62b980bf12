"""The vLLM engine against an exchange that was written by hand from vLLM's documented schema (no server was run)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_server import serving

from rlkit.rollout.engines.http import ReplicaError
from rlkit.rollout.engines.vllm import VLLM
from rlkit.types import Completion, SamplingParams

EXCHANGE = json.loads((Path(__file__).parent / "vllm_exchange.json").read_text())
PARAMS = SamplingParams(max_new_tokens=4, top_p=0.9, stop=("\n\n",), stop_token_ids=(151645,), seed=7)


def in_turn(*replies: Any) -> Callable[[int, dict], Any]:
    """These replies in turn, then the last one repeated."""
    return lambda number, _: replies[min(number, len(replies) - 1)]


async def test_the_exchange() -> None:
    async with serving(in_turn(EXCHANGE["response"])) as (url, seen):
        engine = VLLM(url, model="tiny", version=5)
        out = await engine.generate([9707, 11, 1246], params=PARAMS, rid="r0")
        await engine.close()
    assert seen == [EXCHANGE["request"]]
    logp = [-0.4054651, -0.1053605, -1.2039728, -2.3025851]
    assert out == Completion([525, 498, 30, 151645], logp, [5, 5, 5, 5], "stop")


def broken(path: list[Any], value: Any) -> dict[str, Any]:
    reply = copy.deepcopy(EXCHANGE["response"])
    place = reply["choices"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return reply


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (broken(["token_ids"], None), "not a completion with token ids"),
        (broken(["token_ids"], [525, 498]), "2 tokens but 4 log-probs"),
        (broken(["logprobs"], None), "not a completion with token ids and log-probs"),
        (broken(["logprobs", "token_logprobs"], [-0.1, None, -0.1, -0.1]), "token 1 has the log-prob None"),
        (broken(["finish_reason"], None), "finish_reason None"),
        ({"choices": []}, "not a completion"),
    ],
)
async def test_a_bad_reply_is_retried_and_then_an_error(reply: Any, message: str) -> None:
    async with serving(in_turn(reply)) as (url, seen):
        engine = VLLM(url, model="tiny")
        with pytest.raises(ReplicaError, match=message):
            await engine.generate([9707, 11, 1246], params=PARAMS)
        await engine.close()
    assert len(seen) == 3
    async with serving(in_turn(reply, EXCHANGE["response"])) as (url, seen):
        engine = VLLM(url, model="tiny")
        assert (await engine.generate([9707, 11, 1246], params=PARAMS)).ids == [525, 498, 30, 151645]
        await engine.close()


async def test_a_refusal_is_not_repeated() -> None:
    refusal = web.json_response({"error": {"message": "This model's maximum context length is 8"}}, status=400)
    async with serving(in_turn(refusal)) as (url, seen):
        engine = VLLM(url, model="tiny")
        with pytest.raises(ValueError, match="maximum context length is 8"):
            await engine.generate([1] * 9, params=PARAMS)
        await engine.close()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("processed", "params"),
    [
        (False, SamplingParams(temperature=0.7)),
        (True, SamplingParams(temperature=0.7, top_p=0.9)),
        (True, SamplingParams(top_k=5)),
        (True, SamplingParams(temperature=0.0)),
    ],
)
async def test_log_probs_of_another_distribution_are_refused(processed: bool, params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="processed_logprobs"):
        await VLLM("http://nowhere", model="tiny", processed_logprobs=processed).generate([1], params=params)
