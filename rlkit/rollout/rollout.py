"""Groups of trajectories for prompts, over any engine (`Generate`) and any environment (an async function)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rlkit.types import Completion, Generate, SamplingParams, Trajectory

X = TypeVar("X")


class Prompt(Protocol):
    """What a rollout reads of a prompt: its tokens, and the data row that rewards and environments may need."""

    @property
    def ids(self) -> list[int]:
        """Rendered tokens, ready to be continued."""
        ...

    @property
    def row(self) -> dict[str, Any]:
        """The row of the data file."""
        ...

    @property
    def index(self) -> int:
        """Number of the row: names the prompt in dumps."""
        ...


Sample = Callable[[list[int]], Awaitable[Completion]]
Env = Callable[[Prompt, Sample], Coroutine[Any, Any, Trajectory]]
Score = Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]


async def single_turn(prompt: Prompt, sample: Sample) -> Trajectory:
    """The environment of a question and one answer: the policy continues the prompt, once."""
    out = await sample(prompt.ids)
    return Trajectory(
        prompt_ids=prompt.ids,
        ids=out.ids,
        mask=[True] * len(out.ids),
        logp=out.logp,
        versions=out.versions,
        truncated=out.finish_reason != "stop",
        info={"finish_reason": out.finish_reason},
    )


async def rollout(
    prompts: Sequence[Prompt],
    *,
    generate: Generate,
    params: SamplingParams,
    group_size: int,
    seed: int,
    env: Env = single_turn,
    score: Score | None = None,
    on_group: Callable[[Prompt, list[Trajectory]], None] | None = None,
) -> list[list[Trajectory]]:
    """`group_size` trajectories for every prompt, all sampled at once; groups come back in the prompts' order.

    `score` sees a group when its last sample is done and returns it with rewards; `on_group` is called right after
    (to write it down). The noise of each sample is a function of `seed`, the prompt's place, the sample's number and
    its turn, so that the same call samples the same trajectories. The first error cancels all the rest and is raised.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")

    async def one_group(place: int, prompt: Prompt) -> list[Trajectory]:
        samplers = [_sampler(generate, params, (seed, place, i)) for i in range(group_size)]
        group = await all_or_cancel([env(prompt, sample) for sample in samplers])
        if score is not None:
            group = await score(prompt, group)
        if on_group is not None:
            on_group(prompt, group)
        return group

    return await all_or_cancel([one_group(place, prompt) for place, prompt in enumerate(prompts)])


async def all_or_cancel(coroutines: Sequence[Coroutine[Any, Any, X]]) -> list[X]:
    """`asyncio.gather` that leaves nothing running: the first error cancels the others, waits, and is raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mix(*parts: int) -> int:
    """A 63-bit seed from integers: the same for the same parts, unrelated for any other (splitmix64, public domain)."""
    x = 0
    for part in parts:
        x = (x ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return x >> 1


_MASK = (1 << 64) - 1


def _sampler(generate: Generate, params: SamplingParams, key: tuple[int, ...]) -> Sample:
    turn = 0

    async def sample(prompt_ids: list[int]) -> Completion:
        nonlocal turn
        turn += 1
        return await generate(prompt_ids, params=replace(params, seed=mix(*key, turn)))

    return sample
