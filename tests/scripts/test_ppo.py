"""`rlkit ppo` as a user runs it, alone and on two ranks, with the same numbers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import warm
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlkit.run.folder import read_metrics

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
REWARD = """
def score(completion, row):
    return sum(map(str.isdigit, completion)) / max(1, len(completion))
"""


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(data=[{"prompt": f"{i}+{i}="} for i in range(64)], reward=REWARD)


def run(task, output, *flags, ranks=1):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, "-m", "rlkit.scripts.ppo", "--model", str(task / "model")]
    command += ["--data", str(task / "data.jsonl"), "--reward", f"{task / 'reward.py'}:score", "--steps", "3"]
    command += ["--prompts-per-step", "8", "--max-new-tokens", "8", "--minibatches", "2", "--kl-coef", "0.05"]
    command += ["--lr", "1e-3", "--critic-lr", "1e-3", "--critic-steps", "1", "--output", str(output)]
    command += ["--device", "cpu", *flags]
    done = warm.run(command, env=ENV, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(output)]


def test_it_exports_policy_and_critic_and_two_ranks_log_the_same(task, tmp_path):
    alone = run(task, tmp_path / "alone")
    assert [line["step"] for line in alone] == [1, 2, 3]
    assert "entropy" not in alone[0], "the critic learns alone"
    assert alone[1]["entropy"] > 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "alone/model")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "alone/critic")
    assert critic.score.weight.abs().sum() > 0
    again = run(task, tmp_path / "ranks", "--parallel.shard", "2", ranks=2)
    for a, b in zip(alone, again, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5, nan_ok=True)
