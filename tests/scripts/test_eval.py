"""`rlkit eval`, and the flags of held-out sets in every command that has them."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch

from rlkit.data.load import Rows
from rlkit.data.turns import prompt_messages
from rlkit.run.folder import read_metrics
from rlkit.scripts import cli
from rlkit.scripts.args import Episodes, Evaluation
from rlkit.scripts.offline import asked
from rlkit.scripts.tools import eval as eval_command
from rlkit.scripts.trial import own_rewards

REWARD = """
def score(completion, row):
    return float(row["answer"] == "1")

def length(completion, row):
    return len(completion) / 10
"""


@pytest.fixture(scope="module")
def task(make_task):
    rows = [{"prompt": f"{i}?", "answer": str(i % 2)} for i in range(6)]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "1"}]
    return make_task(
        a=rows, b=rows[:3], turns=[{"messages": turns}] * 4,
        pairs=[{"prompt": "1", "chosen": "1", "rejected": "0"}] * 4, reward=REWARD,
    )  # fmt: skip


@pytest.fixture
def command(task, monkeypatch):
    monkeypatch.chdir(task)

    def call(script, *flags):
        given = {"eval": ["model"]}.get(script, ["--model", "model", "--device", "cpu"])
        cli.main([script, *given, *flags])

    return call


REWARDED = ("--reward", "reward.py:score", "--max-new-tokens", "4")


def test_a_model_is_measured_without_a_run(command, task, tmp_path, capsys):
    out = tmp_path / "out"
    command(
        "eval", "--eval-data", "half=a.jsonl", "short=b.jsonl", *REWARDED, "--samples", "4", "--output", str(out),
        "--eval-reward", "short=reward.py:length", "--eval-sampling", "short=max_new_tokens:2,samples:2",
    )  # fmt: skip
    found = json.loads((out / "metrics.json").read_text())
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in {row["kind"] for row in rows}}
    assert {kind: len(some) for kind, some in by_kind.items()} == {
        "eval_sampled_half": 24, "eval_greedy_half": 6, "eval_sampled_short": 6, "eval_greedy_short": 3,
    }  # fmt: skip
    assert {row["length"] for row in by_kind["eval_sampled_short"]} == {2}
    assert found["eval/half/pass@4"] == found["eval/half/majority"] == found["eval/half/greedy"] == 0.5
    error = stdev([0, 1] * 3) / 6**0.5
    assert found["eval/half/sampled_se"] == pytest.approx(error)
    assert found["eval/short/sampled"] == pytest.approx(fmean(row["reward"] for row in by_kind["eval_sampled_short"]))
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"sampled 0.5000 +- {1.96 * error:.4f}" in printed
    assert printed[0] == "half: 6 prompts"
    assert not list(task.glob("runs"))


def test_a_run_gives_its_system_prompt_and_sampling(command, tmp_path):
    """And its exported model: the answers of greedy decoding are those of the run's last evaluation."""
    run, out = tmp_path / "run", tmp_path / "out"
    command(
        "grpo", "--data", "a.jsonl", "--eval-data", "b.jsonl", *REWARDED, "--steps", "1", "--eval-steps", "1",
        "--prompts-per-step", "2", "--group-size", "2", "--system-prompt", "be", "--output", str(run),
    )  # fmt: skip
    cli.main(["eval", str(run), "--eval-data", "b.jsonl", "--reward", "reward.py:score", "--output", str(out)])
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    kept = (run / "trajectories" / "eval_greedy_000001.jsonl").read_text().splitlines()
    greedy = [row["completion"] for row in rows if row["kind"] == "eval_greedy"]
    assert sorted(greedy) == sorted(json.loads(line)["completion"] for line in kept)
    assert all("be" in row["prompt"] and row["length"] <= 4 for row in rows)


@pytest.mark.parametrize(("script", "data"), [("sft", "turns.jsonl"), ("dpo", "pairs.jsonl")])
@pytest.mark.slow
def test_training_on_fixed_data_measures_answers(script, data, command, tmp_path):
    """The gold answer is the response of the row: score gives 1 where it is "1"."""
    command(
        script, "--data", data, "--eval-data", f"same={data}", "--eval-reward", "same=reward.py:score",
        "--eval-sampling", "max_new_tokens:3,samples:2", "--steps", "1", "--eval-steps", "1", "--batch-size", "2",
        "--output", str(tmp_path),
    )  # fmt: skip
    last = read_metrics(tmp_path)[-1]
    assert last["eval/same/sampled"] == last["eval/greedy"] == last["eval/same/pass@2"] == 1.0
    assert last["eval/loss"] == last["eval/same/loss"]
    rows = (tmp_path / "trajectories" / "eval_sampled_same_000001.jsonl").read_text().splitlines()
    row = json.loads(rows[0])
    assert row["length"] == 3
    assert row["gold"] == "1"
    assert len(rows) == 8


def test_the_question_of_a_row_is_what_stands_before_its_last_answer():
    call = [{"role": "assistant", "content": "<call>"}, {"role": "tool", "content": "20 C"}]
    rest = [*call, {"role": "assistant", "content": "warm"}]
    user = {"role": "user", "content": "Rome?"}
    for row in (
        {"prompt": "Rome?", "completion": rest}, {"prompt": [user], "chosen": rest, "rejected": rest},
        {"messages": [user, *rest]}, {"prompt": "Rome?", "chosen": [user, *rest]},
    ):  # fmt: skip
        question = asked(row)
        assert prompt_messages(question) == [user, *call]
        assert question["answer"] == "warm"
    assert prompt_messages(asked({"prompt": "Rome?", "completion": [rest[-1]]})) == [user]


@pytest.mark.parametrize(
    "more",
    [
        {"reward": ("reward.py:score", "reward.py:length"), "combine": "lexicographic"},
        {"reward": ("reward.py:score", "reward.py:length"), "combine": "tchebycheff", "ideal": (1.0, 1.0)},
        {"reward": ("a=reward.py:score", "b=reward.py:length"), "reward_column": "answer"},
    ],
)
def test_a_reward_of_held_out_rows_is_combined_with_none_of_training(more, task, monkeypatch):
    monkeypatch.chdir(task)
    evaluation = Evaluation(eval_reward=("reward.py:score",))
    held_out = {"": Rows([{"prompt": "1?", "answer": "1"}], source="a", places=["row 1"])}
    assert [*own_rewards(evaluation, Episodes(**more), held_out)] == [""]


RL = ("--data", "a.jsonl", *REWARDED)
FIXED = ("--data", "turns.jsonl")


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("grpo", (*RL, "--eval-data", "x=a.jsonl", "x=b.jsonl"), "--eval-data has two sets x: give each file a name"),
        ("grpo", (*RL, "--eval-data", "x="), "--eval-data x=: no file after the name"),
        ("grpo", (*RL, "--eval-data", "x=c.jsonl"), "c.jsonl: no such file"),
        ("grpo", (*RL, "--eval-reward", "reward.py:length"), "--eval-reward requires --eval-data"),
        (
            "grpo", (*RL, "--eval-data", "x=a.jsonl", "--eval-sampling", "y=samples:2"),
            "--eval-sampling y=...: --eval-data has no set y; its names are x",
        ),
        (
            "grpo", (*RL, "--eval-data", "a.jsonl", "--eval-sampling", "y=samples:2"),
            "--eval-sampling y=...: --eval-data names no set",
        ),
        (
            "grpo", (*RL, "--eval-data", "a.jsonl", "--eval-sampling", "temp:1"),
            "--eval-sampling temp:1: temp:1 is not one of temperature, samples, top_p, top_k, min_p, max_new_tokens",
        ),
        (
            "grpo", (*RL, "--eval-data", "a.jsonl", "--eval-sampling", "temperature:0,samples:2"),
            "--eval-sampling temperature:0,samples:2: at temperature 0 all samples are the same",
        ),
        (
            "grpo", (*RL, "--eval-data", "a.jsonl", "--eval-sampling", "samples:2", "top_k:3"),
            "--eval-sampling is given twice: join by commas",
        ),
        (
            "ppo", (*RL, "--eval-data", "x=a.jsonl", "--eval-reward", "x=reward.py:gone"),
            "--eval-reward reward.py:gone: reward.py has no 'gone'",
        ),
        ("sft", (*FIXED, "--eval-data", "turns.jsonl", "--eval-sampling", "samples:2"), "--eval-sampling requires"),
        ("sft", (*FIXED, "--eval-data", "turns.jsonl", "--eval-reward", "x=reward.py:score"), "--eval-reward x=...:"),
        ("eval", ("--eval-data", "a.jsonl"), "give --reward, --env or --agent"),
        (
            "eval", ("--eval-data", "a.jsonl", *REWARDED, "--engine-threads", "2"),
            "--engine-threads is for training beside the engine: drop it",
        ),
        ("eval", ("--eval-data", "a.jsonl", *REWARDED, "--output", "model"), "--output must be a new folder"),
        ("eval", ("--eval-data", "a.jsonl", *REWARDED, "--rename", "x", "y"), "--rename x: --eval-data does not have"),
        ("eval", ("--eval-data", "x=a.jsonl", *REWARDED, "--max-prompt-tokens", "2"), "a.jsonl: all 6 prompts are"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_in_one_line(script, flags, message, command, tmp_path, capsys):
    more = () if script == "eval" else ("--output", str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="2"):
        command(script, *flags, *more)
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(printed) == 1
    assert " ".join(printed[0].split()).startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()


def test_flags_of_the_run_hold_where_none_is_given():
    args = eval_command.Args("m", "a.jsonl", Episodes(reward="reward.py:score"))
    saved = {"stop": ["###"], "max_new_tokens": 7, "temperature": 0.5, "system_prompt": "be"}
    flags = eval_command.flags_of_grpo(args, saved)
    assert flags.rollouts.stop == ("###",)
    assert (flags.rollouts.max_new_tokens, flags.rollouts.temperature) == (7, 0.5)
    assert flags.data.system_prompt == "be"
    assert eval_command.flags_of_grpo(replace(args, stop=("x",)), saved).rollouts.stop == ("x",)
    plain = saved | {"chat_template": False, "system_prompt": None}
    assert eval_command.flags_of_grpo(args, plain).data.chat_template is False
    assert eval_command.flags_of_grpo(replace(args, chat_template="a.jinja"), plain).data.chat_template == "a.jinja"
    assert eval_command.Args("m", "a.jsonl", args.episodes, system_prompt="").system_prompt == ""
    assert flags.model.device is None
    assert eval_command.chosen_device(flags.model.device) == ("cuda" if torch.cuda.is_available() else "cpu")
