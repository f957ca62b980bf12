"""Group filters, loss masks and episode limits: plain functions to compose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from rlkit.rollout.groups import Env, Group, Prompt, Sampler, with_totals
from rlkit.types import Completion, Trajectory


def success(group: Sequence[Trajectory]) -> float:
    """Mean over the group's episodes of `episode_scores`."""
    scores = episode_scores(group)
    return sum(scores) / max(1, len(scores))


def episode_scores(group: Sequence[Trajectory]) -> list[float]:
    """The score of each episode, or without one its reward with those of its turns."""
    return [total if end.score is None else end.score for end, total in with_totals(group)]


def success_between(low: float, high: float) -> Callable[[Sequence[Trajectory]], bool]:
    """A filter for dynamic sampling: keep the groups with `low <= success(group) <= high`.

    Groups whose answers are all right or all wrong have advantages of 0 and give no gradient. With rewards of 0 and 1,
    (0.01, 0.99) drops them (for groups of fewer than 100). A group whose success is NaN is kept, so that the loop
    reports it.
    Differs: DAPO and verl `filter_groups` keep any group whose metric varies; ColossalAI's `filter_range` is the same.
    Reference: arXiv:2503.14476, section 3.2.
    """
    if not low <= high:
        raise ValueError(f"low must not be above high, got low={low}, high={high}")
    return lambda group: not (success(group) < low or success(group) > high)


def varies(group: Sequence[Trajectory]) -> bool:
    """Whether episodes of one role have different rewards, or rewards per token: else every group baseline gives 0."""
    rewards, roles = {(t.role, t.reward) for t in group}, {t.role for t in group}
    return len(rewards) > len(roles) or any(t.token_rewards is not None for t in group)


def mask_truncated(groups: Sequence[Sequence[Trajectory]]) -> list[Group]:
    """Exclude the tokens of truncated episodes from the loss; their rewards still count in the baseline.

    Differs: nothing from DAPO's over-long filtering and TRL `mask_truncated_completions`. For a penalty by length
    instead, see the soft over-long penalty of `rlkit.rewards`.
    Reference: arXiv:2503.14476, section 3.4.
    """

    def of_group(group: Sequence[Trajectory]) -> Group:
        out: Group = []
        cut = False
        for t in reversed(group):  # an episode is truncated if its last piece is
            if not (out and out[-1].continues):
                cut = t.truncated
            out.append(replace(t, mask=[False] * len(t.mask), token_rewards=None) if cut else t)
        return out[::-1]

    return [of_group(group) for group in groups]


def mask_off_policy(groups: Sequence[Sequence[Trajectory]], *, version: int) -> list[Group]:
    """Train only on tokens sampled by the weights of `version`; tokens of earlier weights stay as context.

    Differs: nothing from slime `--mask-offpolicy-in-partial-rollout`. Without it, `tis` corrects for the difference.
    """

    def on_policy(t: Trajectory) -> Trajectory:
        on = np.asarray(t.mask, bool)
        keep = on & (np.asarray(t.versions) == version)
        if (keep == on).all():
            return t
        rewards = None if t.token_rewards is None else (np.asarray(t.token_rewards) * keep).tolist()
        return replace(t, mask=keep.tolist(), token_rewards=rewards)

    return [[on_policy(t) for t in group] for group in groups]


def limited(
    env: Env,
    *,
    max_turns: int | None = None,
    max_total_tokens: int | None = None,
    max_sampled_tokens: int | None = None,
) -> Env:
    """Bound each episode of `env`: its turns, the context of a turn with the tokens it samples (`max_total_tokens`),
    and the sampled tokens of all turns together (`max_sampled_tokens`; tokens of the environment do not count).

    `SamplingParams.max_new_tokens` bounds each turn separately. A turn that reaches a bound is cut there, or not
    sampled at all: the environment gets the tokens so far with finish_reason "length", and ends as after any truncated
    turn. Under `max_sampled_tokens`, concurrent turns of an episode are sampled one after another, because each has
    the budget that the earlier ones left.
    """
    limits = {"max_turns": max_turns, "max_total_tokens": max_total_tokens, "max_sampled_tokens": max_sampled_tokens}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    async def bounded(prompt: Prompt, sample: Sampler) -> Any:
        turns = sampled = 0
        in_turn = nullcontext() if max_sampled_tokens is None else asyncio.Lock()

        async def one(prompt_ids: list[int], *, max_new_tokens: int | None = None, **more: Any) -> Completion:
            nonlocal turns, sampled
            turns += 1
            if max_turns is not None and turns > max_turns:
                return _NO_ROOM
            async with in_turn:
                rooms = [
                    None if max_total_tokens is None else max_total_tokens - len(prompt_ids),
                    None if max_sampled_tokens is None else max_sampled_tokens - sampled,
                    max_new_tokens,
                ]
                room = min((n for n in rooms if n is not None), default=None)
                if room is not None and room < 1:
                    return _NO_ROOM
                out = await sample(prompt_ids, max_new_tokens=room, **more)
                sampled += len(out.ids)
                return out

        return await env(prompt, one)

    return bounded


_NO_ROOM = Completion([], [], [], "length")
