"""The demo's task on four ranks: GRPO learns there what it learns in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_learns_to_sort_on_four_ranks(tmp_path):
    """Two ranks for a layer, two of those for the data: that layouts compute the same is in test_layouts.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(REPO / "examples/demo.py"), "--output", str(tmp_path / "demo"), "--grpo-steps", "50"]
    command += ["--parallel.tp", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("on 256 held-out prompts") == 1, "one rank reports"
    assert (tmp_path / "demo/grpo/metrics.png").exists()
    lines = [json.loads(line) for line in (tmp_path / "demo/grpo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(51))
    assert lines[0]["eval/greedy"] <= 0.3, "the teacher's most frequent answer is wrong"
    assert lines[-1]["eval/greedy"] >= 0.9
    assert max(line["mismatch/abs_mean"] for line in lines[1:]) < 1e-4
