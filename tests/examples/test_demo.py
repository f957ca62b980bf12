"""The demo: SFT on a teacher that is usually wrong, GRPO that finds the right answer, and a report that is true."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_demo(output: Path, *flags: str) -> list[str]:
    """The lines that the script prints on stdout; what it leaves is in `output`."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(output), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = warm.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) <= 70
    return done.stdout.splitlines()


def greedy(output: Path, step: int) -> dict[str, str]:
    """Held-out question -> greedy answer after `step`, as the trajectories have it."""
    rows = rows_of(output / "grpo" / "trajectories" / f"eval_greedy_{step:06d}.jsonl")
    question = {row["group"]: re.search(r"user\n(\d{6})<", row["prompt"])[1] for row in rows}
    return {question[row["group"]]: row["completion"].removesuffix("<|im_end|>") for row in rows}


def accuracy(answers: dict[str, str]) -> float:
    return sum(answer == "".join(sorted(question)) for question, answer in answers.items()) / len(answers)


def test_the_teacher_is_usually_wrong_and_held_out_prompts_are_not_trained_on(tmp_path):
    demo = importlib.import_module("demo")
    for seed in range(3):
        demo.make_data(tmp_path, seed=seed)
        sft, train, held_out = (rows_of(tmp_path / f"{name}.jsonl") for name in ("sft", "train", "eval"))
        prompts = [row["prompt"] for row in sft + train + held_out]
        assert len({*prompts}) == len(prompts) == 9600 + 4096 + 256
        assert all(row["answer"] == "".join(sorted(row["prompt"])) for row in train + held_out)
        down = sum(row["response"] == "".join(sorted(row["prompt"], reverse=True)) for row in sft)
        right = sum(row["response"] == "".join(sorted(row["prompt"])) for row in sft)
        assert 0.23 < right / 9600 < 0.30, "a swap of two equal digits is right, too"
        assert 0.63 < down / 9600 < 0.67
        assert all(sorted(row["response"]) == sorted(row["prompt"]) for row in sft)


def test_questions_of_another_length_and_a_model_of_another_size(tmp_path, monkeypatch):
    demo = importlib.import_module("demo")
    demo.make_data(tmp_path, seed=0, digits=10)
    sft, train = (rows_of(tmp_path / f"{name}.jsonl") for name in ("sft", "train"))
    assert {len(row["prompt"]) for row in sft + train} == {10}
    assert all(sorted(row["response"]) == sorted(row["prompt"]) for row in sft)
    right = sum(row["response"] == "".join(sorted(row["prompt"])) for row in sft)
    assert 0.23 < right / 9600 < 0.30
    for wrong, name in [({"digits": 4}, "digits"), ({"hidden": 100}, "hidden")]:
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            demo.Args(**wrong)
    calls = {}
    for name in ("sft", "grpo"):
        monkeypatch.setattr(demo, name, replaced := SimpleNamespace(**vars(getattr(demo, name))))
        replaced.main = lambda args, name=name: calls.setdefault(name, args).schedule.output
    monkeypatch.setattr(demo, "report", lambda *_: None)
    demo.main(demo.Args(tmp_path / "demo", digits=7, hidden=64, layers=1))
    config = json.loads((tmp_path / "demo/random/config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]) == (64, 2, 1)
    assert (calls["sft"].optim.lr, calls["grpo"].optim.lr) == (2e-3, 3e-4)
    assert calls["grpo"].rollouts.max_new_tokens == 9
    assert {len(row["prompt"]) for row in rows_of(tmp_path / "demo/train.jsonl")} == {7}


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_short_demo_reports_what_it_measured(tmp_path, resumed):
    flags = ["--sft-steps", "51", "--eval-limit", "8", "--hidden", "64", "--layers", "1"]
    if resumed:
        lines = run_demo(tmp_path / "demo", *flags, "--grpo-steps", "1")
        assert [line.split()[0] for line in lines if re.match(" +\\d+ ", line)] == ["50", "51", "0", "1"]
        assert any(re.search("8 held-out prompts, 1 GRPO steps, \\d+ s$", line) for line in lines)
    lines = run_demo(tmp_path / "demo", *flags, "--grpo-steps", "2", *["--resume"] * resumed)
    before, after = greedy(tmp_path / "demo", 0), greedy(tmp_path / "demo", 2)
    result = f"greedy {accuracy(before):.1%} -> {accuracy(after):.1%} on 8 held-out prompts, 2 GRPO steps"
    assert any(line.startswith(result) for line in lines)
    shown = [line.split() for line in lines if re.match(r"\d{6} ", line)]
    first = [row["prompt"] for row in rows_of(tmp_path / "demo" / "eval.jsonl")[:3]]
    assert [row[0] for row in shown] == first, "the first prompts, not the best ones"
    for question, old, was, new, now in shown:
        assert (old, new) == (before[question], after[question])
        right = "".join(sorted(question))
        assert (was, now) == tuple("right" if answer == right else "wrong" for answer in (old, new))
    assert (tmp_path / "demo" / "grpo" / "metrics.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_improves_on_the_teacher(tmp_path, seed):
    lines = run_demo(tmp_path / "demo", "--seed", str(seed))
    assert accuracy(greedy(tmp_path / "demo", 0)) <= 0.3
    assert accuracy(greedy(tmp_path / "demo", 200)) >= 0.9
    assert not any("no learning signal" in line for line in lines)
