"""launch/slurm.sbatch with real servers: each of two nodes starts one of its own, and both sample for one run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import served
from nodes import batch_script, beside_two_nodes


def check_two_samplers(package: str, python: str, checkpoint: Path, folder: Path, *flags: str, asked: str) -> None:
    """Four ranks train on samples of two nodes; the far node's server is killed after step 3 of 8, and comes back.

    `asked`: what a server's log has for a completion.
    """
    output, killed = folder / "run", list[int]()
    (folder / "reward.py").write_text(served.REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": chr(97 + i)}) + "\n" for i in range(8)))
    train = ["-m", "rlkit.scripts.grpo", "--model", str(checkpoint), "--data", str(folder / "rows.jsonl")]
    train += ["--reward", f"{folder / 'reward.py'}:score", "--device", "cpu", *served.STEPS.split()]
    train += ["--steps", "8", "--max-new-tokens", "100", "--engine", package, "--parallel.tp", "2", *flags]
    script = batch_script(folder / "job", output, train)
    name = f"RLKIT_{package.upper()}_PYTHON"
    script.write_text(script.read_text().replace(f"export {name}=", "# "))
    watch = threading.Thread(target=_kill_the_far_server, args=(output, killed), daemon=True)
    watch.start()
    said, status = beside_two_nodes(folder / "slurm", "bash", str(script), timeout=1500, **{name: python})
    served.check_trained(folder, subprocess.CompletedProcess([], status, said, ""), steps=8)
    assert killed
    logs = {path.name: path.read_text() for path in output.glob(f"{package}_*.log")}
    near, far = f"{package}_0_0.log", f"{package}_2_0.log"
    assert sorted(logs) == [near, far]
    assert f"status {-signal.SIGKILL}" in logs[far]
    assert f"status {-signal.SIGKILL}" not in logs[near]
    logs[far] = logs[far].partition("guard:")[2]  # once it was back
    assert all(asked in log for log in logs.values()), logs
    rows = [json.loads(line) for path in (output / "trajectories").glob("train_*") for line in path.open()]
    assert len(rows) == 8 * 2 * 4, "no sample is lost, and none comes twice"


def _kill_the_far_server(output: Path, killed: list[int]) -> None:
    """Once three steps are logged, kill the server of rank 2, which is the first one of the second node."""
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        time.sleep(0.1)
    for process in psutil.process_iter(["cmdline"]):
        if str(output) in (process.info["cmdline"] or ()) and process.environ().get("RANK") == "2":
            killed.append(served.server_of(process.pid))
            os.kill(killed[-1], signal.SIGKILL)
