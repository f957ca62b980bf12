"""Named held-out sets, and the numbers of several samples, against enumeration and against the answers written down."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations, product
from math import comb, inf, nan
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import call, small_model, tokenizer

from rlkit.data.prompts import Prompt
from rlkit.loops.evaluate import EvalSet, answer_of, best_of, evaluate, evaluate_sets, majority, rollout_metrics
from rlkit.loops.grpo import grpo
from rlkit.loops.sft import sft
from rlkit.metrics import finalize
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import with_totals
from rlkit.rollout.limits import success
from rlkit.run.folder import read_metrics
from rlkit.settings import Optim, SamplingParams, Schedule
from rlkit.testing import FakeEngine
from rlkit.types import Trajectory

PROMPTS = [Prompt([20 + i, 60], {"answer": str(i)}, i) for i in range(4)]
NUMBERS = st.lists(st.floats(-5, 5), min_size=1, max_size=7)


def scored(function):
    return scorer(function, tokenizer=tokenizer(), timeout_s=60)


def share_of_ascii(completion, row):
    return sum(map(str.isascii, completion)) / max(1, len(completion))


@given(NUMBERS, st.data())
def test_the_best_of_k_is_the_mean_over_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    assert best_of(scores, k) == pytest.approx(fmean(map(max, combinations(scores, k))))


def test_the_best_of_k_of_zeros_and_ones_is_the_published_estimator():
    for n, c in product(range(1, 9), range(9)):
        for k in range(1, n + 1 if c <= n else 0):
            assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(1 - comb(n - c, k) / comb(n, k))
    assert best_of([0.5, inf, 0.1], 3) == inf
    assert best_of([nan, 0.1], 2) != best_of([nan, 0.1], 2)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(-5, 5)), min_size=1, max_size=8))
def test_the_majority_is_the_mean_over_broken_ties(samples):
    answers, scores = [a for a, _ in samples], [x for _, x in samples]
    votes = [a for a in answers if a is not None]
    winners = [a for a in {*votes} if votes.count(a) == max(map(votes.count, votes))]
    expected = fmean(fmean(x for a, x in samples if a == winner) for winner in winners) if votes else fmean(scores)
    assert majority(scores, answers) == pytest.approx(expected)


def test_the_answer_is_what_the_reward_names_or_what_the_text_ends_with():
    def text(words, **info):
        ids = tokenizer().encode(words)
        return Trajectory([1], ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids), 0.0, info=info)

    found = [
        answer_of(t, tokenizer=tokenizer())
        for t in (text(r"so \boxed{ 4 }"), text("is 4."), text("4", notes={"answer": "B"}), text("yes\nno"), text(""))
    ]
    assert found == ["4", "4", "B", "no", None]


def test_each_set_has_its_reward_and_its_sampling(tmp_path):
    """As written down in trajectories/; a set that names neither has those of training."""
    model = small_model()
    short = SamplingParams(max_new_tokens=2, temperature=0.5)
    sets = {
        "plain": EvalSet(PROMPTS[:3]),
        "own": EvalSet(PROMPTS[1:], scored(lambda completion, row: 10.0 + float(row["answer"])), short, 3),
    }
    flat = {
        "steps": 1, "eval_steps": 1, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "eval_samples": 2,
        "prompts": PROMPTS, "score": scored(share_of_ascii), "eval_sets": sets, "output": tmp_path,
    }  # fmt: skip
    asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model, max_len=64), **flat))
    last = read_metrics(tmp_path)[-1]
    assert last["eval/own/sampled"] == last["eval/own/best"] == last["eval/own/majority"] == pytest.approx(12.0)
    assert last["eval/own/greedy_se"] == pytest.approx(stdev([11, 12, 13]) / 3**0.5)
    assert last["eval/sampled"] == pytest.approx((last["eval/plain/sampled"] + 12) / 2), "the sets count the same"
    for name, samples, longest in (("plain", 2, 6), ("own", 3, 2)):
        text = (tmp_path / "trajectories" / f"eval_sampled_{name}_000001.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert max(row["length"] for row in rows) == longest
        assert len(rows) == 3 * samples
        assert last[f"eval/{name}/sampled"] == pytest.approx(fmean(row["reward"] for row in rows))
    assert "eval/plain/pass@2" in last
    assert "eval/best" not in last


def test_pass_at_k_and_majority_are_those_of_the_samples():
    """Four scripted answers to one prompt, then a greedy one: two right ones that agree, and two wrong ones."""
    words = ["It is 7", "7", "8", "9", "7"]
    script = [tokenizer().encode(text) for text in words]
    score = scored(lambda completion, row: float("7" in completion))
    found = asyncio.run(
        evaluate(
            PROMPTS[:1], generate=FakeEngine(script).generate, params=SamplingParams(max_new_tokens=16), score=score,
            seed=0, num_samples=4, name="seven", answer=lambda t: answer_of(t, tokenizer=tokenizer()),
        )
    )  # fmt: skip
    names = {"sampled": 0.5, "pass@2": 1 - 1 / 6, "pass@4": 1.0, "best": 1.0, "majority": 1.0, "greedy": 1.0}
    assert found == pytest.approx({f"eval/seven/{name}": value for name, value in names.items()})


def test_where_every_reward_failed_there_is_no_number():
    """0.0 would be drawn, compared and kept as if all answers were wrong."""

    def judge(completion, row):
        if row["answer"] in "01":
            raise ConnectionError("no server")
        return 0.5

    score = scorer(judge, tokenizer=tokenizer(), timeout_s=60, max_failed=0.9)
    sets = {"down": EvalSet(PROMPTS[:2]), "up": EvalSet(PROMPTS[2:])}
    found = asyncio.run(
        evaluate_sets(
            sets, generate=FakeEngine([[7]] * 8).generate, params=SamplingParams(max_new_tokens=2), score=score, seed=0
        )
    )
    assert found["eval/up/greedy"] == found["eval/greedy"] == found["eval/sampled"] == 0.5
    assert not [name for name in found if name.startswith("eval/down/") and "reward/" not in name]


def test_sft_measures_answers_and_the_loss_of_each_set(tmp_path, no_pictures):
    def example(text):
        ids = tokenizer().encode(text)
        return SimpleNamespace(ids=ids, mask=[True] * len(ids))

    some, others = [example("aaaa"), example("aaab")], [example("zz")]
    sets = {
        "": EvalSet(PROMPTS, scored(lambda completion, row: float(row["answer"])), SamplingParams(max_new_tokens=2))
    }
    sft(
        small_model(), tokenizer(), some, Schedule(tmp_path, steps=2, eval_steps=2), Optim(lr=0.05), batch_size=2,
        eval_examples={"seen": some, "other": others}, eval_sets=sets,
    )  # fmt: skip
    first, *_, last = read_metrics(tmp_path)
    assert first["eval/sampled"] == last["eval/greedy"] == 1.5
    assert last["eval/loss"] == pytest.approx((last["eval/seen/loss"] + last["eval/other/loss"]) / 2)
    assert last["eval/seen/loss"] < first["eval/seen/loss"] - 0.1
    assert len((tmp_path / "trajectories" / "eval_greedy_000002.jsonl").read_text().splitlines()) == 4


def test_the_reward_of_an_episode_has_those_of_its_turns():
    """One episode of two pieces (1 + 2 + 4), one of a single piece, one with a score of its own."""

    def piece(reward, tokens=None, **more):
        return Trajectory([1], [2, 3], [True, True], [-1.0, -1.0], [0, 0], reward, tokens, **more)

    group = [
        piece(1.0, [2.0, 0.0]),
        piece(1.0, [0.0, 4.0], continues=True),
        piece(3.0),
        piece(1.0, [0.5, 0.0], score=9),
    ]
    assert [total for _, total in with_totals(group)] == [7.0, 3.0, 1.5]
    assert success(group) == (7.0 + 3.0 + 9) / 3
    assert finalize(rollout_metrics([group], version=0))["reward/mean"] == pytest.approx(11.5 / 3)
