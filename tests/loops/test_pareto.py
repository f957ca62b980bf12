"""The Pareto front of a run's evaluations: by hand, from a checkpoint, and as a run with several rewards leaves it."""

from __future__ import annotations

import json
import math

import nightly
import pytest

from rlkit.loops import pareto
from rlkit.scripts import grpo
from rlkit.scripts.args import Episodes
from rlkit.scripts.cli import run


def line(a, b):
    return {"eval/reward/a": a, "eval/reward/b": b, "eval/sampled": 9.0}


def test_the_front_and_its_hypervolume_by_hand(tmp_path):
    assert pareto.logged(["a", "b"], {"eval/reward/a": 1.0}, tmp_path, step=0) == {}
    found = []
    for step, point in enumerate([(1, 1), (3, 2), (2, 4), (2, 3), (0, 9), (math.nan, 5)]):
        evals = line(*map(float, point))
        found.append(pareto.logged(["a", "b"], evals, tmp_path, step=step)["pareto/hypervolume"])
        with (tmp_path / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, **evals}) + "\n")
    assert found == [0, 2, 2 + 2, 4, 4, 4]  # boxes above (1, 1): 2 x 1; with 1 x 3, of which 1 is new beside 2 x 1
    kept = json.loads((tmp_path / "pareto.json").read_text())
    assert [(x["step"], x["point"]) for x in kept["front"]] == [(1, [3, 2]), (2, [2, 4]), (4, [0, 9])]
    assert pareto.logged(["a", "c"], line(1.0, 1.0), tmp_path, step=6) == {}


REWARDS = "def low(completion, row):\n    return sum(ord(c) < 64 for c in completion) / 8\n"
REWARDS += "def short(completion, row):\n    return -len(completion) / 8\n"


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "how", nightly.only([[], ["--combine", "tchebycheff", "--ideal", "1", "0"], ["--combine", "normalize_then_sum"],
                         ["--combine", "lexicographic"]], ["--combine", "tchebycheff", "--ideal", "1", "0"]),
)  # fmt: skip
def test_a_run_with_several_rewards_keeps_the_front(how, make_task, tmp_path):
    task = make_task(train=[{"prompt": str(i)} for i in range(8)], reward=REWARDS)
    flags = [
        "--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--eval-data", str(task / "train.jsonl"),
        "--reward", f"{task / 'reward.py'}:low", f"{task / 'reward.py'}:short", "--device", "cpu", "--steps", "2",
        "--eval-steps", "1", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "6", "--lr", "1e-2",
        "--output", str(tmp_path / "run"), *how,
    ]  # fmt: skip
    run(grpo.main, grpo.Args, None, argv=flags)
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    kept = json.loads((tmp_path / "run" / "pareto.json").read_text())
    points = [(x["eval/reward/low"], x["eval/reward/short"]) for x in lines]
    assert kept["first"] == list(points[0])
    beaten = lambda i, p: any(
        q[0] >= p[0] and q[1] >= p[1] and (q != p or j < i) for j, q in enumerate(points)
    )  # the older of equal points stays
    front = {i for i, p in enumerate(points) if not beaten(i, p)}
    assert {x["step"] for x in kept["front"]} == front
    assert lines[-1]["pareto/size"] == len(front)
    assert lines[0]["pareto/hypervolume"] == 0
    assert lines[-1]["eval/sampled"] == pytest.approx(sum(points[-1]), abs=1e-6)  # of any combination: the plain sum
    trained = [x["reward/mean"] for x in lines[1:]]
    sums = [x["reward/low"] + x["reward/short"] for x in lines[1:]]
    if not how:
        assert trained == pytest.approx(sums, abs=1e-6)
    elif "lexicographic" in how:
        assert trained == pytest.approx([0.5, 0.5])
    elif "tchebycheff" in how:
        assert all(x <= -(1 - y["reward/low"]) + 1e-6 for x, y in zip(trained, lines[1:]))
    else:
        assert trained == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"combine": "lexicographic", "reward": "a.py:f"},
            "`combine` lexicographic needs several functions of `reward`",
        ),
        ({"combine": "tchebycheff", "ideal": (1.0,)}, "`ideal` has 1 numbers: give one for each of the 2 rewards"),
        ({"ideal": (1.0, 1.0)}, "`ideal` is for `combine` tchebycheff"),
        (
            {"combine": "lexicographic", "reward": ("a.py:f=2", "a.py:g")},
            "goes by the order of the rewards: drop their",
        ),
    ],
)
def test_a_combination_that_does_not_suit_the_rewards_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Episodes(**{"reward": ("a.py:f", "a.py:g"), **given})
