"""launch/slurm.sbatch with SGLang: each of two nodes starts a server of its own, and both sample for one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import served
from nodes import batch_script, beside_two_nodes, can_make_networks


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
def test_the_servers_of_two_nodes_sample_what_four_ranks_train(sglang_python, checkpoints, tmp_path):
    """The server of the far node is killed after step 3 of 8, and comes back."""
    output, killed = tmp_path / "run", list[int]()
    (tmp_path / "reward.py").write_text(served.REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(8)))
    train = ["-m", "rlkit.scripts.grpo", "--model", str(checkpoints[0]), "--data", str(tmp_path / "rows.jsonl")]
    train += ["--reward", f"{tmp_path / 'reward.py'}:score", "--device", "cpu", *served.STEPS.split()]
    train += ["--steps", "8", "--max-new-tokens", "100"]
    train += ["--engine", "sglang", "--engine-args=--max-total-tokens 16384", "--parallel.tp", "2"]
    script = batch_script(tmp_path / "job", output, train)
    script.write_text(script.read_text().replace("export RLKIT_SGLANG_PYTHON=", "# "))
    env = {"RLKIT_SGLANG_PYTHON": sglang_python}
    watch = threading.Thread(target=kill_the_far_server, args=(output, killed), daemon=True)
    watch.start()
    said, status = beside_two_nodes(tmp_path / "slurm", "bash", str(script), timeout=1500, **env)
    served.check_trained(tmp_path, subprocess.CompletedProcess([], status, said, ""), steps=8)
    assert killed
    logs = {path.name: path.read_text() for path in output.glob("sglang_*.log")}
    assert sorted(logs) == ["sglang_0_0.log", "sglang_2_0.log"]
    assert f"status {-signal.SIGKILL}" in logs["sglang_2_0.log"]
    assert f"status {-signal.SIGKILL}" not in logs["sglang_0_0.log"]
    logs["sglang_2_0.log"] = logs["sglang_2_0.log"].partition("guard:")[2]  # once it was back
    assert all('"POST /generate HTTP/1.1" 200' in log for log in logs.values()), logs
    rows = [json.loads(line) for path in (output / "trajectories").glob("train_*") for line in path.open()]
    assert len(rows) == 8 * 2 * 4, "no sample is lost, and none comes twice"


def kill_the_far_server(output: Path, killed: list[int]) -> None:
    """Once three steps are logged, kill the server of rank 2, which is the first one of the second node."""
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        time.sleep(0.1)
    for process in psutil.process_iter(["cmdline"]):
        if str(output) in (process.info["cmdline"] or ()) and process.environ().get("RANK") == "2":
            killed.append(served.server_of(process.pid))
            os.kill(killed[-1], signal.SIGKILL)
