"""`--deterministic` of the training scripts: it takes effect, and a resumed run repeats its bits."""

import importlib
import json
import os
import sys

import pytest
import warm

from rlkit.scripts.cli import flags_of

TRAINING = ["sft", "dpo", "kto", "reward_model", "grpo", "ppo"]
REWARD = """
import os, random, torch
def score(completion, row):
    return {
        "reward": random.random(),
        "on": torch.are_deterministic_algorithms_enabled(),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8",
    }
"""


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(data=[{"prompt": str(100 + i), "response": "7"} for i in range(20)], reward=REWARD)


def train(task, script, output, *flags):
    """The metrics of a run, without the clock's, as they stand in the file."""
    if script == "grpo":
        flags = (
            "--reward", f"{task / 'reward.py'}:score", "--prompts-per-step", "2", "--group-size", "2",
            "--max-prompt-tokens", "16", "--max-new-tokens", "4", "--lr", "1e-3", "--top-p", "0.9", *flags,
        )  # fmt: skip
    command = [
        sys.executable, "-m", f"rlkit.scripts.{script}", "--model", task / "model", "--data", task / "data.jsonl",
        "--output", output, "--save-steps", "1", *flags,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    warm.run([*map(str, command)], env=environment, plots=False, check=True, timeout=400)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


@pytest.mark.parametrize("script", TRAINING)
def test_every_training_script_has_the_flag(script):
    module = importlib.import_module(f"rlkit.scripts.{script}")
    assert "deterministic" in dict(flags_of(module.Args))


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_a_deterministic_run_sets_torch_and_is_bit_equal_after_a_resume(task, tmp_path):
    whole = train(task, "grpo", tmp_path / "whole", "--steps", "2", "--deterministic")
    assert [(row["reward/on"], row["reward/cublas"]) for row in whole] == [(1.0, 1.0)] * 2
    train(task, "grpo", tmp_path / "cut", "--steps", "1", "--deterministic")
    cut = train(task, "grpo", tmp_path / "cut", "--steps", "2", "--deterministic", "--resume")
    assert [json.dumps(row) for row in cut] == [json.dumps(row) for row in whole]


@pytest.mark.timeout(600)
def test_a_deterministic_sft_runs(task, tmp_path):
    rows = train(task, "sft", tmp_path / "sft", "--steps", "2", "--batch-size", "4", "--deterministic")
    assert len(rows) == 2
