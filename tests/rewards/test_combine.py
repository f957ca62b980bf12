from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

from rlkit.objectives import tchebycheff
from rlkit.rewards import RewardError, Sample, run_reward, run_reward_each
from rlkit.rewards.combine import combined, weighted

SAMPLES = [Sample("ab", {"answer": "ab"}, 4, {"n": 1}), Sample("cd", {"answer": "x"}, 5, {"n": 3})]


def right(completion, row):
    good = completion == row["answer"]
    return {"reward": good, "score": good, "seen": 7, "why": completion}


async def long(completion, row, n):
    await asyncio.sleep(0)
    return -float(n)


def firsts(completions, rows, index):
    return [c == "cd" and i == 5 for c, i in zip(completions, index)]


ALL = {"right": right, "long": long, "first": firsts}


async def test_a_weighted_sum_of_every_form_logs_each_by_name():
    one, two = await run_reward(weighted(ALL, weights={"long": 0.5, "first": 2.0, "right": 1.0}), SAMPLES, timeout_s=60)
    assert (one.reward, two.reward) == (1.0 - 0.5, 0.0 - 1.5 + 2.0)
    assert (one.score, two.score) == (1.0, 0.0)
    assert one.metrics == {"right": 1.0, "right/seen": 7.0, "long": -1.0, "first": 0.0}
    assert two.metrics == {"right": 0.0, "right/seen": 7.0, "long": -3.0, "first": 1.0}
    assert one.notes == {"right/why": "ab"}


async def test_another_way_to_make_one_number():
    gate = combined({"right": right, "long": long}, scalarize=lambda rewards: rewards.prod(1))
    assert [r.reward for r in await run_reward(gate, SAMPLES, timeout_s=60)] == [-1.0, 0.0]
    worst = partial(tchebycheff, weights=torch.tensor([1.0, 0.1]), ideal=torch.tensor([1.0, 0.0]))
    rewards = await run_reward(combined({"right": right, "long": long}, scalarize=worst), SAMPLES, timeout_s=60)
    assert [r.reward for r in rewards] == pytest.approx([-0.1, -1.0])


async def test_the_weighted_sum_is_that_of_its_parts_in_one_piece_and_two():
    nested = weighted(
        {"both": weighted(ALL, weights=dict.fromkeys(ALL, 1.0)), "long": long}, weights={"both": 2, "long": 1}
    )
    rewards = await run_reward(nested, SAMPLES, timeout_s=60)
    assert [r.reward for r in rewards] == [2 * 0.0 - 1.0, 2 * -2.0 - 3.0]
    assert rewards[0].metrics["both/right/seen"] == 7.0


async def test_a_failure_is_its_samples_and_names_the_function():
    def fails(completion, row):
        return 1 / (completion == "cd")

    both = weighted({"right": right, "fails": fails}, weights={"right": 1, "fails": 1})
    first, second = await run_reward_each(both, SAMPLES, timeout_s=60)
    assert isinstance(first, RewardError)
    assert first.index == 4
    assert first.cause.startswith("fails: ZeroDivisionError")
    assert second.reward == 1.0
    with pytest.raises(RewardError, match=r"fails: reward function .*fails failed on row 5: ZeroDivisionError"):
        await run_reward(both, SAMPLES, timeout_s=60)


async def test_each_function_has_its_own_deadline():
    async def slow(completion, row):
        await asyncio.sleep(0.3 if completion == "ab" else 60)
        return 1.0

    both = weighted({"slow": slow}, weights={"slow": 1}, timeout_s=1.8)
    first, second = await run_reward_each(both, SAMPLES, timeout_s=0.1)
    assert first.reward == 1.0
    assert "no result after 1.8 s" in second.cause


def test_what_is_refused():
    with pytest.raises(ValueError, match="must have the same names"):
        weighted({"a": right}, weights={"b": 1})
    with pytest.raises(ValueError, match="at least one name"):
        combined({}, scalarize=lambda r: r.sum(1))
    with pytest.raises(ValueError, match="other than reward and score"):
        combined({"score": right}, scalarize=lambda r: r.sum(1))


async def test_scalarize_must_give_one_number_per_sample():
    with pytest.raises(RewardError, match=r"one number per sample, \[2\], got \[\]"):
        await run_reward(combined({"right": right}, scalarize=lambda r: r.sum()), SAMPLES, timeout_s=60)
