from __future__ import annotations

import math
from functools import partial

import pytest

from rlkit.rewards import Sample, run_reward
from rlkit.rewards.text import cosine, length_target, no_truncation, short_relative, soft_overlong


def test_soft_overlong_at_the_points_of_dapo():
    """Equation 13 with the paper's numbers: expected 16384 tokens, cache 4096."""
    at = {0: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 30000: -1.0}
    for length, penalty in at.items():
        assert soft_overlong("", {}, range(length), max_tokens=20480, cache_tokens=4096) == pytest.approx(penalty)
    with pytest.raises(ValueError, match="cache_tokens must be at most max_tokens"):
        soft_overlong("", {}, [], max_tokens=10, cache_tokens=11)
    with pytest.raises(ValueError, match="cache_tokens must be positive"):
        soft_overlong("", {}, [], max_tokens=10, cache_tokens=0)


def test_soft_overlong_is_the_area_of_a_ramp():
    """Summed over all lengths up to the limit: the triangle's exact sum."""
    total = sum(soft_overlong("", {}, range(n), max_tokens=100, cache_tokens=20) for n in range(101))
    assert total == pytest.approx(-sum(range(21)) / 20)


async def test_in_the_calling_convention():
    samples = [Sample("", {}, 0, {"completion_ids": [0] * n, "truncated": n > 9}) for n in (5, 9, 10)]
    rewards = await run_reward(partial(soft_overlong, max_tokens=10, cache_tokens=2), samples, timeout_s=60)
    assert [r.reward for r in rewards] == [0.0, -0.5, -1.0]
    rewards = await run_reward(partial(length_target, target=8, scale=0.5), samples, timeout_s=60)
    assert [r.reward for r in rewards] == [-1.5, -0.5, -1.0]
    assert [r.reward for r in await run_reward(no_truncation, samples, timeout_s=60)] == [0.0, 0.0, -1.0]


async def test_the_shortest_of_a_group_gains():
    lengths, correct = [10, 20, 30, 30], [True, False, True, False]
    samples = [Sample("", {}, 0, {"completion_ids": [0] * n, "correct": c}) for n, c in zip(lengths, correct)]
    rewards = await run_reward(short_relative, samples, timeout_s=60)
    assert [r.reward for r in rewards] == [0.5, 0.0, -0.5, -0.5]
    assert short_relative(["", ""], [{}, {}], [[1], [2]], [True, False]) == [0.0, 0.0]
    assert short_relative(["", ""], [{}, {}], [[1], [2, 3]], [False, False]) == [0.0, -0.5]


def test_cosine_at_its_ends_and_in_the_middle():
    value = partial(cosine, max_tokens=100, correct_range=(2.0, 1.0), wrong_range=(-10.0, 0.0), exceeded=-7.0)
    assert value(0, correct=True) == 2.0
    assert value(50, correct=True) == pytest.approx(1.5)
    assert value(50, correct=False) == pytest.approx(-5.0)
    assert value(25, correct=False) == pytest.approx(-10.0 * (2 + math.sqrt(2)) / 4)
    assert value(99, correct=False) == pytest.approx(0.0, abs=0.01)
    assert value(100, correct=True) == value(200, correct=False) == -7.0
