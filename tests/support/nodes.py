"""Two network namespaces with a cable between them as two nodes, and stand-ins of SLURM's commands that use them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

REPO = Path(__file__).parents[2]
STAND_INS = Path(__file__).with_name("slurm")
SBATCH = REPO / "launch" / "slurm.sbatch"
JOB = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1"}


def can_make_networks() -> bool:
    """Whether this machine lets a test make network namespaces."""
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    probe = "unshare -num mount --bind /etc/hosts /etc/hosts && ip link add left type veth peer name right"
    return subprocess.run(["unshare", "-Urn", "sh", "-c", probe], capture_output=True).returncode == 0


def beside_two_nodes(folder: Path, *command: str, timeout: float = 800, **env: str) -> tuple[str, int]:
    """Run a command that may call `srun`, `scontrol` and `scancel`; what it printed, and its status.

    `env` is beside this process's variables and those that SLURM gives a job. Whatever is left after `timeout` seconds
    is killed, and TimeoutExpired raised.
    """
    folder.mkdir(exist_ok=True)
    ours = {"PATH": f"{STAND_INS}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), **JOB, **env}
    with subprocess.Popen(
        ["unshare", "-Urn", STAND_INS / "two_nodes", folder, *command], env={**os.environ, **ours},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            return process.communicate(timeout=timeout)[0], process.returncode
        finally:
            if process.poll() is None:  # torchrun's ranks are in sessions of their own
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    each.kill()


def batch_script(path: Path, output: Path, train: Sequence[str], *, ranks: int = 2) -> Path:
    """Write launch/slurm.sbatch with a user's own values."""
    text, values = SBATCH.read_text(), {"PYTHON": sys.executable, "OUTPUT": str(output), "RANKS": str(ranks)}
    for name, value in values.items():
        text, found = re.subn(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        assert found == 1, name
    text, found = re.subn(
        r"^TRAIN=\(\n.*?^\)", lambda _: f"TRAIN=({shlex.join(train)})", text, flags=re.DOTALL | re.MULTILINE
    )
    assert found == 1
    path.write_text(text)
    return path
