"""Sampling from a real server: parameters, stop strings, abort, cancel, and many concurrent requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import pytest
import torch

from rlkit.data.tiny import tiny_tokenizer
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import Server, SGLang
from rlkit.types import Completion, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
PROMPT = list(b"pack my box with five dozen liquor jugs")
LONG = SamplingParams(max_new_tokens=1200)  # twelve of them fit into the server's cache
Models = list[torch.nn.Module]
Forward = Callable[..., list[float]]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
async def engine(server: Server, models: Models) -> AsyncIterator[SGLang]:
    """The server with its initial weights and version, whatever other tests have loaded."""
    async with SGLang(server.url) as engine:
        await engine.update_weights(stream_weights(models[0]), version=0)
        yield engine


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=30),
        SamplingParams(max_new_tokens=30, temperature=0.6),
        SamplingParams(max_new_tokens=30, temperature=1.7, seed=2**64 + 5),
        SamplingParams(max_new_tokens=30, top_p=0.5),
        SamplingParams(max_new_tokens=30, temperature=0.8, top_k=3),
        SamplingParams(max_new_tokens=30, temperature=0.0),
    ],
)
async def test_log_probs_are_of_the_scaled_untruncated_distribution(
    params: SamplingParams, engine: SGLang, models: Models, forward_logp: Forward
) -> None:
    others = engine.generate(PROMPT, params=SamplingParams(max_new_tokens=30, temperature=0.9, top_k=5))
    out, _ = await asyncio.gather(engine.generate(PROMPT, params=params), others)  # in a batch of mixed parameters
    expected = forward_logp(models[0], PROMPT, out.ids, params.temperature or 1.0)
    assert out.logp == pytest.approx(expected, abs=1e-4)
    assert out.versions == [0] * len(out.ids)


async def test_sampling_obeys_top_k_top_p_and_greedy(engine: SGLang, models: Models) -> None:
    async def ranks_and_mass(**params: float) -> tuple[list[int], list[float]]:
        out = await engine.generate(PROMPT, params=SamplingParams(max_new_tokens=40, **params))
        with torch.no_grad():
            probs = models[0](torch.tensor([PROMPT + out.ids])).logits[0, len(PROMPT) - 1 : -1].softmax(-1)
        own = probs.gather(-1, torch.tensor(out.ids)[:, None])
        above = probs > own
        return above.sum(-1).tolist(), (probs * above).sum(-1).tolist()

    assert max((await ranks_and_mass(temperature=0.0))[0]) == 0
    assert 0 < max((await ranks_and_mass(top_k=4))[0]) < 4
    assert 0 < max((await ranks_and_mass(top_p=0.6))[1]) < 0.6 + 1e-4
    assert max((await ranks_and_mass(min_p=1.0))[0]) == 0


async def test_the_tokens_of_a_stop_string_are_part_of_the_completion(engine: SGLang) -> None:
    letters = tuple("abcdefghijklm")
    out = await engine.generate(PROMPT, params=SamplingParams(max_new_tokens=1000, stop=letters))
    assert out.finish_reason == "stop"
    text = tiny_tokenizer().decode(out.ids)
    assert any(letter in text[-len("assistant") :] for letter in letters)


async def test_invalid_prompts_are_refused(engine: SGLang) -> None:
    for bad in ([-1], [263], list(range(200)) * 200):
        with pytest.raises(ValueError, match="prompt_ids must"):
            await engine.generate(bad, params=LONG)
    with pytest.raises(ValueError, match="status 4"):  # more than the server's whole cache
        await engine.generate([1] * 20_000, params=LONG)


async def test_abort_of_one_of_many_and_of_all(engine: SGLang, server: Server, until: Until) -> None:
    assert engine.progress[:2] == (0, 0)
    tasks = [asyncio.create_task(engine.generate([*PROMPT, i], params=LONG, rid=f"r{i}")) for i in range(12)]
    await until(lambda load: load["num_running_reqs"] >= 12 and load["num_used_tokens"] > 12 * (len(PROMPT) + 9))
    assert sum(engine.progress[:2]) == 12
    assert await engine.abort("r1") == 1
    assert await engine.abort("nobody") == 0
    one = await asyncio.wait_for(tasks[1], 240)
    assert one.finish_reason == "abort"
    assert 0 < len(one.ids) == len(one.logp) == len(one.versions)
    assert sum(not t.done() for t in tasks) == 11, "r10 and r11 begin with r1 and must not have gone with it"
    assert await engine.abort() == 11
    outs = await asyncio.wait_for(asyncio.gather(*tasks), 240)
    assert {out.finish_reason for out in outs} == {"abort"}
    assert engine.progress == (0, 0, sum(len(out.ids) for out in outs))
    await until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)


async def test_abort_before_sampling_starts(engine: SGLang) -> None:
    now = asyncio.create_task(engine.generate(PROMPT, params=LONG))
    await asyncio.sleep(0)
    await engine.abort()
    assert (await asyncio.wait_for(now, 240)).finish_reason == "abort"
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(PROMPT, params=LONG))
    await asyncio.sleep(0.5)
    await engine.abort()
    await engine.resume()
    assert (await asyncio.wait_for(waiting, 240)).finish_reason == "abort"


async def test_an_aborted_completion_can_be_continued(
    engine: SGLang, models: Models, forward_logp: Forward, until: Until
) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, params=LONG))
    await until(lambda load: load["num_used_tokens"] > len(PROMPT) + 9)
    await engine.abort()
    first = await task
    rest = await engine.generate(PROMPT + first.ids, params=SamplingParams(max_new_tokens=20))
    ids, logp = first.ids + rest.ids, first.logp + rest.logp
    assert logp == pytest.approx(forward_logp(models[0], PROMPT, ids), abs=1e-4)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.2, 1.0])
async def test_cancel_leaks_no_task_request_or_connection(after: float, server: Server, until: Until) -> None:
    before = asyncio.all_tasks()
    engine = SGLang(server.url)
    tasks = [asyncio.create_task(engine.generate([*PROMPT, i], params=LONG)) for i in range(24)]
    await asyncio.sleep(after)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await engine.close()
    port = int(server.url.rsplit(":", 1)[1])

    def left() -> list[object]:
        ours = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]
        return [*(asyncio.all_tasks() - before), *(c for c in ours if c.status == psutil.CONN_ESTABLISHED)]

    async with asyncio.timeout(240):
        while left():
            await asyncio.sleep(0.05)
    # or the server goes on with requests that nobody waits for
    await until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 0)


async def test_two_thousand_concurrent_requests_do_not_block_control_requests(engine: SGLang, until: Until) -> None:
    def ask(num: int, params: SamplingParams) -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(engine.generate([*PROMPT, i % 256], params=params)) for i in range(num)]

    tasks = ask(400, LONG)
    await until(lambda load: load["num_running_reqs"] + load["num_waiting_reqs"] == 400)
    await engine.pause()  # answered at once, although hundreds of requests are in front of it
    assert not any(t.done() for t in tasks)
    assert await engine.abort() == 400
    await engine.resume()
    assert {out.finish_reason for out in await asyncio.gather(*tasks)} == {"abort"}
    outs = await asyncio.gather(*ask(2000, SamplingParams(max_new_tokens=6)))
    assert all(len(o.ids) == 6 and all(map(math.isfinite, o.logp)) and set(o.versions) == {0} for o in outs)
