"""The contract of `rlkit.types.Generate` and `rlkit.types.Engine`, as checks that any of them must pass.

`check_generate` and `check_engine` run a half each; the second ends with `close`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlkit.rollout.stream import Pausable
from rlkit.types import Completion, Engine, SamplingParams

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_new_tokens=1000)


@dataclass
class Subject:
    """`engine` needs `generate` only for the first half. `weights` gives what an update sends; `seeded`: seeds work."""

    engine: Any
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] = list
    seeded: bool = True

    async def sample(self, prompt: list[int] = PROMPT, *, rid: str | None = None, **params: Any) -> Completion:
        return await self.engine.generate(prompt, params=SamplingParams(**{"max_new_tokens": 8} | params), rid=rid)

    async def greedy(self, prompt: list[int] = PROMPT, **params: Any) -> Completion:
        return await self.sample(prompt, temperature=0.0, **params)

    async def under_way(self, num: int) -> list[asyncio.Task[Completion]]:
        """Long requests named "0", "1", ... that have sampled some tokens."""
        tasks = [asyncio.create_task(self.engine.generate([*PROMPT, i], params=LONG, rid=f"{i}")) for i in range(num)]
        await self.sample(max_new_tokens=20)
        assert not any(task.done() for task in tasks)
        return tasks


def check_whole(out: Completion) -> None:
    assert len(out.ids) == len(out.logp) == len(out.versions)
    assert all(type(i) is int and i >= 0 for i in out.ids)
    assert all(math.isfinite(x) and x <= 1e-4 for x in out.logp)
    assert all(type(v) is int for v in out.versions)
    assert out.versions == sorted(out.versions)


async def every_call_gets_its_own_whole_completion(subject: Subject) -> None:
    outs = await asyncio.gather(*(subject.sample([*PROMPT, n], max_new_tokens=n) for n in range(1, 9)))
    assert [(len(out.ids), out.finish_reason) for out in outs] == [(n, "length") for n in range(1, 9)]
    for out in outs:
        check_whole(out)


async def a_stop_token_ends_the_completion_and_is_part_of_it(subject: Subject) -> None:
    ids = (await subject.greedy()).ids
    out = await subject.greedy(stop_token_ids=(ids[4],))
    assert (out.ids, out.finish_reason) == (ids[: ids.index(ids[4]) + 1], "stop")


async def tokens_that_come_out_go_in_again(subject: Subject) -> None:
    prompt = list(PROMPT)
    ids = (await subject.greedy(prompt)).ids
    assert prompt == PROMPT
    assert (await subject.greedy(PROMPT + ids[:3], max_new_tokens=5)).ids == ids[3:]


async def a_seed_fixes_the_tokens_whatever_runs_beside(subject: Subject) -> None:
    if subject.seeded:
        alone = await subject.sample(seed=3)
        crowd = await asyncio.gather(*(subject.sample(seed=seed) for seed in (1, 2, 3)))
        assert crowd[2].ids == alone.ids
        assert len({tuple(out.ids) for out in crowd}) == 3


async def an_empty_prompt_is_refused(subject: Subject) -> None:
    with pytest.raises(ValueError, match="prompt"):
        await subject.sample([])


async def a_cancelled_call_disturbs_no_other(subject: Subject) -> None:
    call = asyncio.create_task(subject.engine.generate(PROMPT, params=LONG))
    other = asyncio.create_task(subject.greedy())
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await other).ids == (await subject.greedy()).ids


async def it_has_the_methods(subject: Subject) -> None:
    engine = subject.engine
    assert isinstance(engine, Engine)
    methods = engine.generate, engine.abort, engine.update_weights, engine.close
    assert all(map(inspect.iscoroutinefunction, methods))


async def an_update_stamps_what_is_sampled_afterwards(subject: Subject) -> None:
    for version in (4, 7):
        await subject.engine.update_weights(subject.weights(), version=version)
        out = await subject.sample()
        assert out.versions == [version] * 8
        check_whole(out)


async def a_request_in_flight_never_returns_to_older_weights(subject: Subject) -> None:
    await subject.engine.update_weights(subject.weights(), version=0)
    [call] = await subject.under_way(1)
    await subject.engine.update_weights(subject.weights(), version=1)
    assert (await subject.sample()).versions == [1] * 8
    await subject.engine.abort("0")
    out = await call
    check_whole(out)
    assert out.versions[0] == 0
    assert set(out.versions) <= {0, 1}


async def a_failed_update_is_never_served(subject: Subject) -> None:
    """An engine that reads the trainer's weights does not look at these, and cannot fail."""
    await subject.engine.update_weights(subject.weights(), version=1)
    served = {1}
    try:
        await subject.engine.update_weights([("no.such.weight", torch.zeros(2))], version=2)
        served = {2}
    except ValueError:
        pass
    [out] = await asyncio.gather(subject.sample(), return_exceptions=True)
    refused = isinstance(out, RuntimeError) and "call update_weights again" in str(out)
    assert refused or set(out.versions) == served
    await subject.engine.update_weights(subject.weights(), version=3)
    assert (await subject.sample()).versions == [3] * 8


async def abort_ends_one_request_or_all_and_counts_them(subject: Subject) -> None:
    calls = await subject.under_way(3)
    assert await subject.engine.abort("nobody") == 0
    assert await subject.engine.abort("1") == 1
    first = await calls[1]
    assert not calls[0].done()
    assert await subject.engine.abort() == 2
    for out in (first, await calls[0], await calls[2]):
        check_whole(out)
        assert out.finish_reason == "abort"
        assert 0 < len(out.ids) < LONG.max_new_tokens
    assert await subject.engine.abort() == 0


async def a_rid_is_unique_while_it_is_in_flight(subject: Subject) -> None:
    [call] = await subject.under_way(1)
    with pytest.raises(ValueError, match="rid"):
        await subject.sample(rid="0")
    await subject.engine.abort("0")
    await call
    assert len((await subject.sample(rid="0")).ids) == 8


async def progress_counts_requests_and_tokens(subject: Subject) -> None:
    before = subject.engine.progress
    assert (before.running, before.waiting) == (0, 0)
    calls = await subject.under_way(3)
    now = subject.engine.progress
    assert now.running + now.waiting == 3
    await subject.engine.abort()
    outs = await asyncio.gather(*calls)
    num_tokens = before.num_tokens + 20 + sum(len(out.ids) for out in outs)
    assert tuple(subject.engine.progress) == (0, 0, num_tokens)


async def an_aborted_call_can_be_continued(subject: Subject) -> None:
    truth = (await subject.greedy(max_new_tokens=60)).ids
    pausable = Pausable(subject.engine.generate, subject.engine.abort)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    call = asyncio.create_task(pausable.generate(PROMPT, params=params))
    for _ in range(3):
        await subject.sample(max_new_tokens=2)
        await pausable.pause()
        pausable.resume()
    out = await call
    check_whole(out)
    assert (out.ids, out.finish_reason) == (truth, "length")


async def close_ends_what_is_in_flight_and_refuses_more(subject: Subject) -> None:
    calls = await subject.under_way(2)
    await subject.engine.close()
    assert {out.finish_reason for out in await asyncio.gather(*calls)} == {"abort"}
    with pytest.raises(RuntimeError, match="closed"):
        await subject.sample()
    await subject.engine.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "no task of the engine is left"


async def check_generate(subject: Subject) -> None:
    """The half of `Generate`."""
    await every_call_gets_its_own_whole_completion(subject)
    await a_stop_token_ends_the_completion_and_is_part_of_it(subject)
    await tokens_that_come_out_go_in_again(subject)
    await a_seed_fixes_the_tokens_whatever_runs_beside(subject)
    await an_empty_prompt_is_refused(subject)
    await a_cancelled_call_disturbs_no_other(subject)


async def check_engine(subject: Subject) -> None:
    """The half that `Engine` adds; the engine is closed afterwards."""
    await it_has_the_methods(subject)
    await an_update_stamps_what_is_sampled_afterwards(subject)
    await a_request_in_flight_never_returns_to_older_weights(subject)
    await a_failed_update_is_never_served(subject)
    await abort_ends_one_request_or_all_and_counts_them(subject)
    await a_rid_is_unique_while_it_is_in_flight(subject)
    await progress_counts_requests_and_tokens(subject)
    await an_aborted_call_can_be_continued(subject)
    await close_ends_what_is_in_flight_and_refuses_more(subject)
