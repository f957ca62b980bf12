"""launch/slurm.sbatch with SGLang: each of two nodes starts a server of its own, and both sample for one run."""

from __future__ import annotations

import json
import subprocess

import pytest
import served
from nodes import batch_script, beside_two_nodes, can_make_networks


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
def test_the_servers_of_two_nodes_sample_what_four_ranks_train(sglang_python, checkpoints, tmp_path):
    output = tmp_path / "run"
    (tmp_path / "reward.py").write_text(served.REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(8)))
    train = ["-m", "rlkit.scripts.grpo", "--model", str(checkpoints[0]), "--data", str(tmp_path / "rows.jsonl")]
    train += ["--reward", f"{tmp_path / 'reward.py'}:score", "--device", "cpu", *served.STEPS.split()]
    train += ["--engine", "sglang", "--engine-args=--max-total-tokens 16384", "--parallel.tp", "2"]
    script = batch_script(tmp_path / "job", output, train)
    script.write_text(script.read_text().replace("export RLKIT_SGLANG_PYTHON=", "# "))
    env = {"RLKIT_SGLANG_PYTHON": sglang_python}
    said, status = beside_two_nodes(tmp_path / "slurm", "bash", str(script), timeout=1500, **env)
    served.check_trained(tmp_path, subprocess.CompletedProcess([], status, said, ""))
    logs = {path.name: path.read_text() for path in output.glob("sglang_*.log")}
    assert sorted(logs) == ["sglang_0_0.log", "sglang_2_0.log"]
    assert all('"POST /generate HTTP/1.1" 200' in log for log in logs.values()), logs
