"""`rlkit grpo --engine vllm`: a server that the run starts itself, and one that runs already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.rollout.engines.vllm import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STEPS = (
    "--steps 2 --prompts-per-step 2 --group-size 4 --max-new-tokens 12 --max-prompt-tokens 32 --eval-steps 0 --lr 3e-3"
)
REWARD = "def score(completion, row):\n    return len(completion) % 3\n"


def train(folder: Path, checkpoint: Path, python: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(8)))
    command = [sys.executable, "-m", "rlkit.scripts.grpo", "--device", "cpu", "--model", str(checkpoint)]
    command += ["--data", str(folder / "rows.jsonl"), "--output", str(folder / "run"), "--engine", "vllm"]
    command += ["--reward", f"{folder / 'reward.py'}:score", *STEPS.split(), *flags]
    env = {**os.environ, "RLKIT_VLLM_PYTHON": python, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def check(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Every step samples from the weights that the step before left."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-3
    assert max(line["staleness/max"] for line in lines) == 0
    assert min(line["grad_norm"] for line in lines) > 0


def test_a_server_that_the_run_starts(tmp_path, checkpoints, vllm_python):
    check(tmp_path, train(tmp_path, checkpoints[0], vllm_python, "--engine-args=--max-num-seqs 7"))
    assert "'max_num_seqs': 7" in (tmp_path / "run" / "vllm_0_0.log").read_text()
    assert sorted(int(path.name) for path in (tmp_path / "run" / "weights").iterdir()) == [1, 2]


def test_a_running_server(tmp_path, checkpoints, vllm_python, server: Server):
    given = ["--engine-urls", server.url, "--engine-pause", "in_place", "--weight-sync-folder", str(tmp_path / "w")]
    check(tmp_path, train(tmp_path, checkpoints[0], vllm_python, *given))


def test_a_way_of_the_weights_that_the_cpu_build_lacks_is_refused_at_once(tmp_path, checkpoints, vllm_python):
    done = train(tmp_path, checkpoints[0], vllm_python, "--weight-sync", "group")
    assert done.returncode == 2
    assert "--weight-sync group: vLLM on a CPU takes weights from files only" in done.stderr
