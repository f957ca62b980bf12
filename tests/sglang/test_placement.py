"""`rlkit grpo --engine sglang` with servers that it starts itself: every way of the weights, arguments, two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.rollout.engines.sglang import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
STEPS = (
    "--steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 12 --max-prompt-tokens 32 --eval-steps 0 --lr 3e-3"
)
REWARD = "def score(completion, row):\n    return len(completion) % 3\n"


def train(folder: Path, checkpoint: Path, python: str, *flags: str, ranks: int = 1) -> list[dict]:
    """The lines of a run in a process of its own, or in two of torchrun."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(8)))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*(start if ranks > 1 else [sys.executable]), "-m", "rlkit.scripts.grpo", "--device", "cpu"]
    command += ["--model", str(checkpoint), "--data", str(folder / "rows.jsonl"), "--output", str(folder / "run")]
    command += ["--reward", f"{folder / 'reward.py'}:score", *STEPS.split(), "--engine", "sglang", *flags]
    env = {**os.environ, "RLKIT_SGLANG_PYTHON": python, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict]) -> None:
    """Every step samples from the weights that the step before left."""
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-3
    assert max(line["staleness/max"] for line in lines) == 0
    assert min(line["grad_norm"] for line in lines) > 0


def test_a_server_that_the_run_starts_takes_its_arguments_and_weights_through_files(
    tmp_path, checkpoints, sglang_python
):
    folder = tmp_path / "weights"
    sync = ["--weight-sync", "disk", "--weight-sync-folder", str(folder)]
    check(train(tmp_path, checkpoints[0], sglang_python, *sync, "--engine-args=--max-total-tokens 4096"))
    log = (tmp_path / "run" / "sglang_0_0.log").read_text()
    assert "max_total_tokens=4096" in log or "max_total_num_tokens=4096" in log
    assert sorted(int(path.name) for path in folder.iterdir()) == [1, 2]


def test_two_ranks_share_a_server_that_the_first_one_starts(tmp_path, checkpoints, sglang_python):
    lines = train(tmp_path, checkpoints[0], sglang_python, "--weight-sync", "group", ranks=2)
    check(lines)
    assert [path.name for path in (tmp_path / "run").glob("sglang_*.log")] == ["sglang_0_0.log"]


def test_a_running_server_takes_weights_through_a_group(tmp_path, checkpoints, sglang_python, server: Server):
    given = ["--engine-urls", server.url, "--weight-sync", "group", "--engine-pause", "in_place"]
    check(train(tmp_path, checkpoints[0], sglang_python, *given))
