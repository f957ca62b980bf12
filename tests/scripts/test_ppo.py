"""`rlkit ppo` as a user runs it, alone and on two ranks, with the same numbers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import screens
import warm
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlkit.run.folder import read_metrics
from rlkit.scripts import cli

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
    """What rank 0 logs. Ranks are started with what torchrun tells them."""
    command = [sys.executable, "-m", "rlkit.scripts.ppo", "--model", str(task / "model")]
    command += ["--data", str(task / "data.jsonl"), "--reward", f"{task / 'reward.py'}:score", "--steps", "2"]
    command += ["--prompts-per-step", "8", "--max-new-tokens", "8", "--minibatches", "2", "--kl-coef", "0.05"]
    command += ["--lr", "1e-3", "--critic-lr", "1e-3", "--critic-steps", "1", "--output", str(output)]
    command += ["--device", "cpu", *flags]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), **here} if ranks > 1 else {}
    names = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if sizes else {} for rank in range(ranks)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [warm.Popen(command, env=ENV | sizes | name, plots=False, **streams) for name in names]
    for process in started:
        _, err = process.communicate(timeout=280)
        assert process.returncode == 0, err[-4000:]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(output)]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_a_critic_with_bins_is_exported_and_a_run_that_starts_from_it_has_its_bins(task, tmp_path, capsys):
    flags = [
        "ppo", "--model", str(task / "model"), "--data", str(task / "data.jsonl"), "--device", "cpu", "--steps", "1",
        "--reward", f"{task / 'reward.py'}:score", "--prompts-per-step", "4", "--max-new-tokens", "4",
    ]  # fmt: skip
    cli.main([*flags, "--output", str(tmp_path / "a"), "--value-range", "0", "2", "--value-bins", "7"])
    critic = tmp_path / "a" / "critic"
    assert AutoModelForTokenClassification.from_pretrained(critic).score.weight.shape[0] == 7
    assert read_metrics(tmp_path / "a")[-1]["value/mean"] == pytest.approx(1.0, abs=0.05), "the middle"
    cli.main([*flags, "--output", str(tmp_path / "b"), "--critic", str(critic)])
    assert {"value/outside", "value/error"} <= {*read_metrics(tmp_path / "b")[-1]}
    capsys.readouterr()
    said = screens.refused(
        cli.main, [*flags, "--output", str(tmp_path / "c"), "--critic", str(critic), "--value-range", "0", "1"]
    )
    assert said.startswith(
        f"error: model '{critic}': its head has 7 bins from 0 to 2, not 51 bins from 0 to 1: drop --v"
    )
    assert "parameters on" not in capsys.readouterr().out, "before a model is loaded"


@pytest.mark.slow
def test_it_exports_policy_and_critic_and_two_ranks_log_the_same(task, tmp_path):
    alone = run(task, tmp_path / "alone")
    assert [line["step"] for line in alone] == [1, 2]
    assert "entropy" not in alone[0], "the critic learns alone"
    assert alone[1]["entropy"] > 1
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "alone/model")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "alone/critic")
    assert critic.score.weight.abs().sum() > 0
    again = run(task, tmp_path / "ranks", "--parallel.shard", "2", ranks=2)
    sent = [line.pop("sync/bytes") for line in again]  # ranks sample from a copy
    assert sent == [sum(x.nbytes for x in policy.parameters())] * 2
    for a, b in zip(alone, again, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5, nan_ok=True)
