"""Combine several rewards: a weighted sum, or any function of them. Each is logged under its name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkit.objectives import weighted_sum
from rlkit.rewards.call import RESERVED, Reward, RewardError, Sample, check_ours, run_reward_each
from rlkit.rewards.timeouts import off_the_clock


def weighted(
    functions: Mapping[str, Callable[..., Any]], *, weights: Mapping[str, float], timeout_s: float = 60.0
) -> Callable[..., Any]:
    """A reward function that is the weighted sum of others.

        r_i = sum_k w_k r_ik          over the functions k that did not return None for sample i

    A weight of 0 only logs the function's reward. A sample for which every function with another weight returned None
    is an error. See `combined` for what is logged and how failures count. The names of `weights` must be those of
    `functions`.

    Differs: in TRL a sample for which every function returned None has advantage 0.
    """
    if set(functions) != set(weights):
        raise ValueError(f"functions and weights must have the same names, got {sorted(functions)}, {sorted(weights)}")
    coefficients = torch.tensor([float(weights[name]) for name in functions], dtype=torch.float64)

    def scalarize(rewards: Tensor) -> Tensor:
        absent = rewards.isnan()
        lost = absent.any(1) & (absent | (coefficients == 0)).all(1)
        return weighted_sum(rewards.nan_to_num(0.0), weights=coefficients).masked_fill(lost, math.nan)

    logged_only = frozenset(name for name in functions if weights[name] == 0)
    return _combined(functions, scalarize, timeout_s, missing=math.nan, logged_only=logged_only)


def scalarized(
    functions: Mapping[str, Callable[..., Any]],
    *,
    weights: Mapping[str, float],
    scalarize: Callable[[Tensor, Tensor], Tensor],
    timeout_s: float = 60.0,
) -> Callable[..., Any]:
    """A reward function that makes one number of several, `scalarize(rewards [N, K], weights [K]) -> [N]`, where the N
    rows are the answers of one group.

    A weight of 0 only logs the function's reward, which is in neither tensor. `score`, which evaluations measure, is
    the weighted sum, unless a function gives one. See `combined` for the rest.
    """
    if set(functions) != set(weights):
        raise ValueError(f"functions and weights must have the same names, got {sorted(functions)}, {sorted(weights)}")
    used = torch.tensor([weights[name] != 0 for name in functions])
    w = torch.tensor([float(weights[name]) for name in functions], dtype=torch.float64)[used]
    logged_only = frozenset(name for name in functions if weights[name] == 0)
    return _combined(
        functions, lambda r: scalarize(r[:, used], w), timeout_s, logged_only=logged_only,
        score=lambda r: weighted_sum(r[:, used], weights=w),
    )  # fmt: skip


def for_source(
    function: Callable[..., Any], *, column: str, source: str, timeout_s: float = 60.0
) -> Callable[..., Any]:
    """A reward function for the rows whose `column` is `source`; it returns None for all others, and is not called.

    Of several, `weighted` makes one that judges each row by the function of its source:

        reward = weighted({"math": for_source(boxed, column="data_source", source="math"), "code": ...},
                          weights={"math": 1.0, "code": 1.0})

    Each is then logged under its name, as the mean over its own rows.
    """
    check_ours(function)

    async def reward(
        completions: list[str], rows: list[dict[str, Any]], *, index: list[int], **extra: Any
    ) -> list[Any]:
        chosen = [i for i, row in enumerate(rows) if dict.get(row, column) == source]
        samples = [Sample(completions[i], rows[i], index[i], {name: x[i] for name, x in extra.items()}) for i in chosen]
        results: list[Any] = [None] * len(rows)
        async with off_the_clock():
            judged = await run_reward_each(function, samples, timeout_s=timeout_s, missing=math.nan)
        for i, result in zip(chosen, judged):
            absent = isinstance(result, Reward) and math.isnan(result.reward)
            results[i] = None if absent else result
        return results

    return reward


def combined(
    functions: Mapping[str, Callable[..., Any]], *, scalarize: Callable[[Tensor], Tensor], timeout_s: float = 60.0
) -> Callable[..., Any]:
    """A reward function that makes one number of several named ones, `[N, K] -> [N]`, K in the order of `functions`.

    The functions may have any form that `run_reward` accepts (`rlkit.compat.rewards.adapted` makes one of a function of
    another system). They run concurrently, and `timeout_s` bounds each of their calls. `scalarize` may be one of
    `rlkit.objectives` (`functools.partial(tchebycheff, weights=..., ideal=...)`) or `lambda r: r.prod(1)`, which gives
    0 for a wrong form.
    Each function's reward is logged under its name, its metrics and notes under `name/...`; `score` is the first
    `score` that a function gives. A sample that a function fails on is an error of that sample, with the function's
    name; there is no default. None is such a failure, too.
    """
    return _combined(functions, scalarize, timeout_s)


def _combined(
    functions: Mapping[str, Callable[..., Any]],
    scalarize: Callable[[Tensor], Tensor],
    timeout_s: float,
    *,
    missing: float | None = None,
    logged_only: frozenset[str] = frozenset(),
    score: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Any]:
    """`combined`, with a `score` where no function gives one.

    With NaN as `missing`, None is NaN to `scalarize`, and an error only if that returns NaN.
    A `score` of the functions `logged_only` is not used.
    """
    if not functions or set(RESERVED) & set(functions):
        raise ValueError(f"functions must have at least one name, other than {RESERVED}; got {list(functions)}")
    for function in functions.values():
        check_ours(function)

    async def reward(
        completions: list[str], rows: list[dict[str, Any]], *, index: list[int], **extra: Any
    ) -> list[Any]:
        samples = [
            Sample(completion, row, index[i], {name: column[i] for name, column in extra.items()})
            for i, (completion, row) in enumerate(zip(completions, rows))
        ]
        async with off_the_clock():  # each function has a deadline of its own
            runs = [run_reward_each(f, samples, timeout_s=timeout_s, missing=missing) for f in functions.values()]
            columns = await asyncio.gather(*runs)
        results = [_merged(dict(zip(functions, rewards)), logged_only) for rewards in zip(*columns)]
        good = [(i, result) for i, result in enumerate(results) if isinstance(result, Reward)]
        if good:
            table = [[result.metrics.get(name, math.nan) for name in functions] for _, result in good]
            values = scalarize(torch.tensor(table, dtype=torch.float64))
            if values.shape != (len(good),):
                raise ValueError(f"scalarize must give one number per sample, [{len(good)}], got {list(values.shape)}")
            scores = [None] * len(good) if score is None else score(torch.tensor(table, dtype=torch.float64)).tolist()
            for (i, result), parts, value, plain in zip(good, table, values.tolist(), scores):
                absent = [name for name, part in zip(functions, parts) if math.isnan(part)]
                lost = math.isnan(value) and absent
                plain = plain if result.score is None else result.score
                results[i] = _no_reward(absent, index[i]) if lost else replace(result, reward=value, score=plain)
        return results

    return reward


def _no_reward(names: list[str], index: int) -> RewardError:
    """The error of a sample that only the named functions could have judged, which returned None."""
    cause = f"{' and '.join(names)} returned None, and nothing else gives a reward"
    fix = "return a number from one of the reward functions, or drop the row"
    return RewardError(f"no reward for row {index + 1}: {cause}; {fix}", index=index, cause=cause)


def _merged(rewards: Mapping[str, Reward | RewardError], logged_only: frozenset[str]) -> Reward | RewardError:
    """The results of the functions for one sample, under their names, without the combined reward."""
    merged = Reward(0.0)
    for name, reward in rewards.items():
        if isinstance(reward, RewardError):
            failed = RewardError(f"{name}: {reward}", index=reward.index, cause=f"{name}: {reward.cause}")
            failed.__cause__ = reward
            return failed
        if merged.score is None and name not in logged_only:
            merged = replace(merged, score=reward.score)
        merged.metrics.update({} if math.isnan(reward.reward) else {name: reward.reward})
        merged.metrics.update({f"{name}/{key}": value for key, value in reward.metrics.items()})
        merged.notes.update({f"{name}/{key}": value for key, value in reward.notes.items()})
    return merged
