"""Several rewards as one: a weighted sum, or any function of them. Each is logged under its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.objectives import weighted_sum
from rlkit.rewards.call import Reward, RewardError, Sample, run_reward_each
from rlkit.rewards.timeouts import off_the_clock


def weighted(
    functions: Mapping[str, Callable[..., Any]], *, weights: Mapping[str, float], timeout_s: float = 60.0
) -> Callable[..., Any]:
    """A reward function that is the weighted sum of others.

        r_i = sum_k w_k r_ik

    See `combined` for what is logged and how failures count. The names of `weights` must be those of `functions`.
    """
    if set(functions) != set(weights):
        raise ValueError(f"functions and weights must have the same names, got {sorted(functions)}, {sorted(weights)}")
    coefficients = torch.tensor([float(weights[name]) for name in functions], dtype=torch.float64)
    return combined(
        functions, scalarize=lambda rewards: weighted_sum(rewards, weights=coefficients), timeout_s=timeout_s
    )


def combined(
    functions: Mapping[str, Callable[..., Any]], *, scalarize: Callable[[Tensor], Tensor], timeout_s: float = 60.0
) -> Callable[..., Any]:
    """A reward function that makes one number of several named ones, `[N, K] -> [N]`, K in the order of `functions`.

    The functions may have any form that `run_reward` accepts. They run concurrently, and `timeout_s` bounds each of
    their calls. `scalarize` may be one of `rlkit.objectives` (`functools.partial(tchebycheff, weights=..., ideal=...)`)
    or `lambda r: r.prod(1)`, which gives 0 for a wrong form. Each function's reward is logged under its name, its
    metrics and notes under `name/...`; `score` is the first `score` that a function gives. A sample that a function
    fails on is an error of that sample, with the function's name; there is no default.
    """
    if not functions or {"reward", "score"} & set(functions):
        raise ValueError(f"functions must have at least one name, other than reward and score; got {list(functions)}")

    async def reward(
        completions: list[str], rows: list[dict[str, Any]], *, index: list[int], **extra: Any
    ) -> list[Any]:
        samples = [
            Sample(completion, row, index[i], {name: column[i] for name, column in extra.items()})
            for i, (completion, row) in enumerate(zip(completions, rows))
        ]
        async with off_the_clock():  # each function has a deadline of its own
            runs = [run_reward_each(function, samples, timeout_s=timeout_s) for function in functions.values()]
            columns = await asyncio.gather(*runs)
        results = [_merged(functions, rewards) for rewards in zip(*columns)]
        good = [result for result in results if isinstance(result, dict)]
        if good:
            values = scalarize(torch.tensor([[r[name] for name in functions] for r in good], dtype=torch.float64))
            if values.shape != (len(good),):
                raise ValueError(f"scalarize must give one number per sample, [{len(good)}], got {list(values.shape)}")
            for result, value in zip(good, values.tolist()):
                result["reward"] = value
        return results

    return reward


def _merged(functions: Mapping[str, Any], rewards: tuple[Reward | RewardError, ...]) -> dict[str, Any] | RewardError:
    """The results of the functions for one sample, under their names."""
    merged: dict[str, Any] = {}
    for name, reward in zip(functions, rewards):
        if isinstance(reward, RewardError):
            failed = RewardError(f"{name}: {reward}", index=reward.index, cause=f"{name}: {reward.cause}")
            failed.__cause__ = reward
            return failed
        merged[name] = reward.reward
        merged.update({f"{name}/{key}": value for key, value in {**reward.metrics, **reward.notes}.items()})
        if reward.score is not None:
            merged.setdefault("score", reward.score)
    return merged
