"""Data that a package makes, by its name: rows, seeds, the package's own scorer, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from string import Template

import pytest

from rlkit._util.extras import MissingExtra
from rlkit.compat.rows import reasoning_gym
from rlkit.data import packages
from rlkit.data.load import load_rows, place_of
from rlkit.data.packages import PACKAGES, Package, gym_task
from rlkit.data.prompts import shared
from rlkit.data.sources import expand
from rlkit.rewards.packages import reasoning_gym as score
from rlkit.rewards.rows import check_rows
from rlkit.scripts import cli
from rlkit.scripts.args import Data
from rlkit.scripts.task import judged
from rlkit.scripts.trial import Episodes


def count(task, *, held_out, start=0, marks=("?",)):
    """A package of one's own: two questions of a task."""
    if task != "up":
        raise ValueError(f"there is no task {task!r}")
    return ({"prompt": f"{n}{marks[0]}", "answer": str(n)} for n in (start + 9 * held_out, start + 9 * held_out + 1))


@pytest.fixture(autouse=True)
def second_package(monkeypatch):
    monkeypatch.setitem(PACKAGES, "counting", Package(count, "own:counted"))


def test_a_package_is_a_row_of_the_table():
    spec = "counting:up(start=3, marks=['*', '?'])"
    rows = load_rows([spec, "counting:up"])
    assert [row["prompt"] for row in rows] == ["3*", "4*", "0?", "1?"]
    assert place_of(rows, 1) == f"{spec}, row 2"
    held_out = load_rows(spec, held_out=True, limit=1)
    assert (held_out[0]["answer"], held_out.source) == ("12", f"{spec} held out")
    assert expand(spec) == [spec], "no glob"
    for wrong, message in (
        ("counting:down", r"^counting:down: there is no task 'down'$"),
        ("counting:up(3)", r"^counting:up\(3\): arguments are keywords with literal values"),
        ("counting:up(marks=open('x'))", "arguments are keywords with literal values"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(wrong)


def test_a_mixture_has_weights_behind_the_arguments():
    data = Data(("counting:up(start=2)=2", "counting:up=1"), eval_data=("far=counting:up(start=2)",))
    assert data.parts() == [(["counting:up(start=2)"], 2.0), (["counting:up"], 1.0)]
    assert data.eval_files() == {"far": ["counting:up(start=2)"]}
    assert data.expanded() == data


def test_the_packages_scorer_is_the_reward_where_nothing_else_judges(caplog):
    assert judged(Episodes(), ["counting:up", "counting:up(start=2)"]).reward == "own:counted"
    assert "the reward is the package's own scorer of each task, own:counted" in caplog.text
    given = Episodes(reward="mine.py:f")
    assert judged(given, ["counting:up"]) is given
    for files in (["a.jsonl"], ["counting:up", "a.jsonl"], ["counting:up", "reasoning_gym:maze"]):
        with pytest.raises(ValueError, match="something has to judge"):
            judged(Episodes(), files)


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="the package is installed")
def test_a_package_that_is_not_installed_is_named_with_the_command():
    with pytest.raises(MissingExtra, match=r"^reasoning_gym is not installed here: pip install reasoning-gym$"):
        load_rows("reasoning_gym:chain_sum")
    assert "reasoning_gym" not in sys.modules


def test_an_answer_that_the_scorer_cannot_read_is_worth_nothing_but_a_broken_scorer_is_an_error(monkeypatch):
    row = {"data_source": "reasoning_gym:x", "question": "2+2", "answer": "4", "metadata": {"add": 0}}

    def right(answer, entry):
        return float(int(answer) == int(entry["answer"]) + entry["metadata"]["add"])

    monkeypatch.setattr("rlkit.rewards.packages._scorer", lambda _source: right)
    assert score("It is <answer>5</answer> or <answer> 4 </answer>.", row) == {"reward": 1.0, "score": 1.0}
    assert score("5? </think> 4 ", row)["reward"] == 1
    assert score("It is 4.", row) == {
        "reward": 0.0, "score": 0.0, "reason": "ValueError: invalid literal for int() with base 10: 'It is 4.'"
    }  # fmt: skip
    with pytest.raises(KeyError):
        score("4", {**row, "metadata": {}})
    with pytest.raises(ValueError, match=r"^row 1: packages\.py:reasoning_gym needs the column 'data_source'"):
        check_rows(score, [{"prompt": "2+2", "answer": "4"}])


@pytest.mark.slow
class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")

    def test_training_and_held_out_rows_have_other_seeds(self):
        spec = "reasoning_gym:chain_sum(size=40, min_terms=4, max_terms=5)"
        rows, held_out = load_rows(spec), load_rows(spec, held_out=True)
        assert (len(rows), len(held_out)) == (40, 40)
        assert shared([held_out], [rows]) == [""]
        assert rows == list(reasoning_gym("chain_sum", size=40, min_terms=4, max_terms=5))
        later = reasoning_gym("chain_sum", size=2, seed=7, min_terms=4, max_terms=5)
        assert [row["prompt"] for row in rows[7:9]] == [row["prompt"] for row in later]
        import reasoning_gym as gym

        theirs = gym.create_dataset("chain_sum", size=40, seed=packages._HELD_OUT, min_terms=4, max_terms=5)
        assert [row["question"] for row in held_out] == [entry["question"] for entry in theirs]
        assert {row["question"].count(" + ") + row["question"].count(" - ") for row in rows} == {3, 4}

    def test_each_task_has_its_own_scorer(self):
        """Of every task the package's own score of the right answer, in a tag too, and of answers that are none."""
        from reasoning_gym.factory import DATASETS

        solved = 0
        for task in sorted({*DATASETS} - {"composite"}):
            (row,) = reasoning_gym(task, size=1)
            own = gym_task(task, size=1, seed=0)
            entry = {name: row[name] for name in own[0]}
            assert entry == own[0] or task == "list_functions"  # of which the seed does not fix all
            expected = own.score_answer(entry["answer"], entry)
            for text in (f"{row['answer']}", f"hm</think> <answer>{row['answer']}</answer>"):
                if isinstance(row["answer"], str) and row["answer"] == row["answer"].strip():
                    assert score(text, row)["reward"] == pytest.approx(expected), (task, text)
            solved += expected == 1
            for text in ("", "abc", "[", '{"a": 1}', "1 2\n3 4"):
                assert 0 <= score(text, row)["reward"] <= 1, (task, text)
        assert solved >= 99
        (row,) = reasoning_gym("prime_factorization", size=1)
        assert score("abc", row)["reason"].startswith("ValueError: ")

    @pytest.mark.usefixtures("no_pictures")
    def test_the_recipe_runs_at_its_smallest(self, make_task, tmp_path):
        readme = (Path(__file__).parents[2] / "recipes/three_tasks/README.md").read_text()
        names = dict(re.findall(r'^    ([A-Z]+)="(.*)"$', readme, re.MULTILINE))
        commands = re.findall(r"rlkit ((?:sft|grpo) .*?)(?=\n    \S|\n\n)", readme, re.DOTALL)
        small = "--steps 1 --eval-steps 1 --eval-limit 2 --prompts-per-step 4 --group-size 2 --max-new-tokens 2"
        for command, changed in zip(commands, ("--steps 1 --batch-size 2", small), strict=True):
            words = [
                Template(x).substitute(names).replace("2000", "20") for x in shlex.split(command.replace("\\\n", " "))
            ]
            model, output = make_task() / "model", tmp_path / words[0]
            cli.main([*words, "--model", str(model), "--output", str(output), *changed.split()])
        (metrics,) = map(json.loads, (tmp_path / "grpo/metrics.jsonl").read_text().splitlines()[-1:])
        assert {"eval/sums/greedy", "eval/gcd/greedy", "eval/back/greedy"} <= metrics.keys()

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (("chain_sums", {}), r"no task 'chain_sums'; near it are chain_sum, "),
            (("chain_sum", {"max_term": 3}), r"chain_sum has no argument 'max_term'; it has max_terms, min_terms"),
            (("chain_sum", {"max_terms": 1}), "refuses the arguments: max_terms must be >= min_terms"),
            (("chain_sum", {"size": 0}), "size must be a whole number of at least 1, got 0"),
        ],
    )
    def test_what_the_package_lacks_is_named(self, given, message):
        with pytest.raises(ValueError, match=message):
            reasoning_gym(given[0], **given[1])
