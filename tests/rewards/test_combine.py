from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
import torch

from rlkit.compat.rewards import adapted
from rlkit.loops.evaluate import rollout_metrics
from rlkit.objectives import tchebycheff
from rlkit.rewards import RewardError, Sample, run_reward, run_reward_each
from rlkit.rewards.combine import combined, for_source, weighted
from rlkit.types import Trajectory

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


async def test_a_reward_of_one_source_is_called_for_its_rows_only():
    samples = [Sample(f"{i}", {"kind": kind, "answer": "1"}, i, {"n": i}) for i, kind in enumerate("abba")]
    samples.append(Sample("4", {}, 4, {"n": 4}))

    def even(completions, rows, index):
        assert [row["kind"] for row in rows] == ["a", "a"]
        return [{"reward": 10.0 + int(c), "seen": i} for c, i in zip(completions, index)]

    async def none_at_two(completion, row, n):
        return None if n == 2 else n + 0.5

    each = {"a": for_source(even, column="kind", source="a"), "b": for_source(none_at_two, column="kind", source="b")}
    both = weighted(each | {"first": firsts}, weights={"a": 1, "b": 2, "first": 1})
    results = await run_reward_each(both, samples, timeout_s=60)
    assert [r.reward for r in results] == [10.0, 3.0, 0.0, 13.0, 0.0]
    assert results[3].metrics == {"a": 13.0, "a/seen": 3.0, "first": 0.0}
    assert [*results[2].metrics] == [*results[4].metrics] == ["first"]
    alone = weighted(each, weights={"a": 1, "b": 2})
    results = await run_reward_each(alone, samples, timeout_s=60)
    assert [isinstance(r, RewardError) for r in results] == [False, False, True, False, True]
    assert "a and b returned None, and nothing else gives a reward" in str(results[2])


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
        await asyncio.sleep(0.2 if completion == "ab" else 60)
        return 1.0

    both = weighted({"slow": slow}, weights={"slow": 1}, timeout_s=0.7)
    first, second = await run_reward_each(both, SAMPLES, timeout_s=0.1)
    assert first.reward == 1.0
    assert "no result after 0.7 s" in second.cause


def test_what_is_refused():
    with pytest.raises(ValueError, match="must have the same names"):
        weighted({"a": right}, weights={"b": 1})
    with pytest.raises(ValueError, match="at least one name"):
        combined({}, scalarize=lambda r: r.sum(1))
    for name in ("mean", "std", "failed"):
        with pytest.raises(ValueError, match=r"other than \('mean', 'std', 'failed'\)"):
            combined({name: right}, scalarize=lambda r: r.sum(1))
    with pytest.raises(TypeError, match=r"must take \(completion, row\)"):
        combined({"short": lambda completion: 1.0}, scalarize=lambda r: r.sum(1))


async def test_scalarize_must_give_one_number_per_sample():
    with pytest.raises(RewardError, match=r"one number per sample, \[2\], got \[\]"):
        await run_reward(combined({"right": right}, scalarize=lambda r: r.sum()), SAMPLES, timeout_s=60)


def some(values):
    """A reward function of a group that returns these values, whatever the completions are."""

    def function(completions, rows):
        return values

    return function


async def test_a_sample_counts_only_in_the_functions_that_judge_it():
    table = np.array([[1.0, np.nan, 4.0], [np.nan, -2.0, 7.0]])
    columns = [[None if np.isnan(x) else x for x in column] for column in table.T]
    three = weighted(
        {name: some(column) for name, column in zip("abc", columns)}, weights={"a": 0.5, "b": 3.0, "c": 0.0}
    )
    rewards = await run_reward(three, SAMPLES, timeout_s=60)
    assert [r.reward for r in rewards] == np.nansum(table * [0.5, 3.0, 0.0], axis=1).tolist()
    assert [r.metrics for r in rewards] == [{"a": 1.0, "c": 4.0}, {"b": -2.0, "c": 7.0}]
    group = [Trajectory([1], [2], [True], [0.0], [0], info={"metrics": r.metrics}) for r in rewards]
    found = rollout_metrics([group], version=0)
    means = {name: float(found[f"reward/{name}"].total / found[f"reward/{name}"].count) for name in "abc"}
    assert means == dict(zip("abc", np.nanmean(table, axis=0)))


async def test_none_of_every_function_that_trains_is_an_error_of_the_sample():
    lost = weighted(
        {"f": some([None, 1.0]), "g": some([{"reward": None, "n": 3}, None]), "seen": some([5.0, 5.0])},
        weights={"f": 1.0, "g": 1.0, "seen": 0.0},
    )
    first, second = await run_reward_each(lost, SAMPLES, timeout_s=60)
    assert str(first) == (
        "no reward for row 5: f and g returned None, and nothing else gives a reward; "
        "return a number from one of the reward functions, or drop the row"
    )
    assert (first.index, second.reward, second.metrics) == (4, 1.0, {"f": 1.0, "seen": 5.0})
    with pytest.raises(RewardError, match="no reward for row 5: f returned None"):
        await run_reward(weighted({"f": some([None, 1.0])}, weights={"f": 1.0}), SAMPLES, timeout_s=60)
    product = combined({"f": some([None, 1.0])}, scalarize=lambda rewards: rewards.prod(1))
    with pytest.raises(RewardError, match="failed on row 5: returned NoneType None"):
        await run_reward(product, SAMPLES, timeout_s=60)


async def test_a_wrong_number_or_a_nan_names_the_function():
    for bad, message in ((some([1.0]), "returned 1 results for 2"), (some([float("nan"), 1.0]), "returned nan")):
        both = weighted({"right": right, "bad": bad}, weights={"right": 1.0, "bad": 1.0})
        with pytest.raises(
            RewardError, match=rf"bad: reward function test_combine.py:some.*function failed.*{message}"
        ):
            await run_reward(both, SAMPLES, timeout_s=60)


async def test_a_function_may_be_named_as_a_key_of_a_result():
    both = weighted({"score": right, "reward": long}, weights={"score": 1.0, "reward": 1.0})
    one, two = await run_reward(both, SAMPLES, timeout_s=60)
    assert (one.reward, one.score, two.reward) == (0.0, 1.0, -3.0)
    assert one.metrics == {"score": 1.0, "score/seen": 7.0, "reward": -1.0}


async def test_functions_of_five_libraries_are_summed():
    def of_trl(prompts, completions, completion_ids, solution, **columns):
        assert (prompts, columns["level"]) == (["q", "q"], [3, 3])
        return [None if c == "no" else float(c == s) + len(i) for c, s, i in zip(completions, solution, completion_ids)]

    def of_verl(solution_str, ground_truth):
        return {"score": float(solution_str == ground_truth), "acc": 0.25}

    def of_openrlhf(queries, prompts, labels):
        return torch.tensor([float(queries[0] == prompts[0] + labels[0])])

    async def of_slime(args, sample):
        return float(sample.response == sample.label)

    async def of_rl2(state, action, extra_info):
        return {"reward": float(action == extra_info["solution"]), "score": 0.5}

    def of_messages(messages, answer):
        return float(messages == said) + float(answer == "4")

    said = [{"role": "assistant", "content": "4"}]
    functions = {f.__name__: adapted(f) for f in (of_trl, of_verl, of_openrlhf, of_slime, of_rl2, of_messages)}
    weights = {name: 10.0**i for i, name in enumerate(functions)}
    row = {"prompt": "q", "solution": "4", "level": 3}
    extra = {"completion_ids": [7, 7], "messages": said}
    good, bad = await run_reward(
        weighted(functions, weights=weights), [Sample(c, row, 0, extra) for c in ("4", "no")], timeout_s=60
    )
    assert (good.reward, bad.reward) == (3 + 10 + 100 + 1000 + 10_000 + 200_000, 200_000)
    assert good.metrics == {
        "of_trl": 3.0, "of_verl": 1.0, "of_verl/acc": 0.25, "of_openrlhf": 1.0, "of_slime": 1.0,
        "of_rl2": 1.0, "of_messages": 2.0,
    }  # fmt: skip
    assert "of_trl" not in bad.metrics
