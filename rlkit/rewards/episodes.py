"""An exception in an environment, as an error that names its file, function and line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlkit.data.load import place_of_prompt
from rlkit.rewards.call import RewardError
from rlkit.rewards.failures import called, fix_of, name_of, place_in
from rlkit.rollout.calling import not_cancelled
from rlkit.rollout.groups import Env, Prompt, Sampler, Score, cancel_all, pieces_of, sample_group
from rlkit.types import Completion, Trajectory


class EpisodeError(RewardError):
    """An environment of the user failed. `__cause__` is the exception."""


def named(env: Env, foreign: Any, kind: str = "environment") -> Env:
    """The environment, whose exceptions and wrong results are an `EpisodeError` with the name of `foreign`.

    `foreign`, of a `kind`, is what the user wrote: the function, class or factory. Errors of the engine are raised as
    they are.
    """

    async def of_user(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        sampling: list[BaseException] = []

        async def sampled(prompt_ids: list[int], **limits: Any) -> Completion:
            try:
                return await sample(prompt_ids, **limits)
            except Exception as error:
                sampling.append(error)
                raise

        try:
            with not_cancelled():
                return pieces_of(await env(prompt, sampled))
        except Exception as error:
            if any(one in sampling for one in (error, error.__cause__, error.__context__)):
                raise
            raise _failed(f"{kind} {name_of(foreign)}", foreign, error, prompt) from error

    return of_user


def _failed(name: str, foreign: Any, error: Exception, prompt: Prompt) -> EpisodeError:
    place, text = place_in(foreign, error), " ".join(str(error).split())
    cause = f"{type(error).__name__}: {text}{place}" if place else text  # without a place, it is our own sentence
    fix = fix_of(foreign, error, prompt.row) or "correct it, or handle it there: return an episode with a reward"
    if isinstance(error, AttributeError) and "NoneType" in text and getattr(error, "name", "") in _OF_TURN:
        fix = "a turn is None where there is no room for another one: write `if turn is None: break` before this line"
    text = f"{name} failed on {place_of_prompt(prompt)}: {cause}" + f"\n  fix: {fix}" * bool(place)
    return EpisodeError(text, index=prompt.index, cause=cause)


async def try_env(env: Env, prompt: Prompt, *, ids: Sequence[int], score: Score | None, timeout_s: float) -> bool:
    """Play an episode of `env` until it asks for a second turn or ends, with `ids` as the first turn of the policy.

    `score` as in `sample_group`, for an episode that ends. Returns whether it came that far in `timeout_s`. Errors are
    those of the environment.
    """
    second = asyncio.Event()
    turns = 0

    async def sample(_prompt_ids: list[int], **_limits: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns > 1:
            second.set()
            await asyncio.Event().wait()  # until the episode is cancelled
        return Completion([*ids], [-1.0] * len(ids), [0] * len(ids), "stop")

    samplers: list[Any] = [sample]
    episode = asyncio.ensure_future(sample_group(prompt, samplers, env=env, score=score))
    waits = asyncio.ensure_future(second.wait())
    try:
        await asyncio.wait([episode, waits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if episode.done():
            await episode
        return episode.done() or waits.done()
    finally:
        await cancel_all([episode, waits])


async def any_reward(_prompt: Prompt, group: Sequence[Trajectory]) -> list[Trajectory]:
    """A `score` for episodes that a reward function would judge: 0."""
    return [replace(trajectory, reward=0.0) for trajectory in group]


_OF_TURN = ("text", "ids", "finish_reason")  # of `rlkit.rollout.envs.chat.Turn`


def made(make: Callable[[], Env], foreign: Any, spec: str) -> Env:
    """`make()`, which calls the user's factory or constructor; ValueError with file, line and fix if that fails."""
    return named(called(make, foreign, spec), foreign)
