"""GRPO on four ranks with a real SGLang server: the server samples with the weights of the sharded trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlkit.rollout.engines.sglang import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
REPO = Path(__file__).parents[2]
REWARD = """
def score(completion, row):
    return sum(map(str.isdigit, completion)) / max(1, len(completion))
"""


@pytest.mark.slow
def test_weights_from_tensor_parallel_and_sharded_ranks_sample_what_the_trainer_computes(
    server: Server, checkpoints: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(16)))
    (tmp_path / "reward.py").write_text(REWARD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "rlkit.scripts.grpo", "--model", str(checkpoints[1]), "--data", str(tmp_path / "data.jsonl")]
    command += ["--reward", f"{tmp_path / 'reward.py'}:score", "--engine", "sglang", "--engine-urls", server.url]
    command += ["--parallel.tp", "2", "--parallel.shard", "2", "--steps", "3", "--lr", "1e-2", "--max-new-tokens", "12"]
    command += ["--prompts-per-step", "4", "--group-size", "4", "--save-steps", "0", "--output", str(tmp_path / "run")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch/abs_max"] < 1e-4 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)
    before, after = _weight(checkpoints[1]), _weight(tmp_path / "run/model")
    assert (before - after).abs().max() > 1e-3  # the server had started on other weights than step 3 sampled with


def _weight(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
