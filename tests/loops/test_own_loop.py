"""Both loops of docs/own-loop.md, for half of their steps: they learn, resume bit for bit, and stop on Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nightly
import pytest
import warm

from rlkit.run.folder import read_metrics

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

LONG, SHORT = "steps=20, eval_steps=10, save_steps=10", "steps=10, eval_steps=5, save_steps=5"
LOOPS = {"two functions": "asyncio.run", "its own form": "open_training"}  # what only its code has


def start(folder: Path, name: str, *flags: str) -> subprocess.Popen:
    page = (ROOT / "docs/own-loop.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.S) if LOOPS[name] in c)
    assert LONG in code
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(code.replace(LONG, SHORT))
    return warm.Popen(
        [sys.executable, "own.py", *flags],
        cwd=folder,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(run: Path, step: int, child: subprocess.Popen) -> None:
    while not (run / "metrics.jsonl").exists() or f'"step": {step},' not in (run / "metrics.jsonl").read_text():
        assert child.poll() is None, child.stdout.read()
        time.sleep(0.02)


def bits(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_it_learns_and_a_killed_run_repeats_its_bits(tmp_path, name):
    whole = start(tmp_path / "whole", name)
    out, _ = whole.communicate(timeout=250)
    assert whole.returncode == 0, out
    rows = bits(tmp_path / "whole/runs/own")
    assert [row["step"] for row in rows] == list(range(11))
    assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.1
    assert rows[-1].keys() >= {"reward/mean", "grad_norm", "eval/greedy"}
    assert (tmp_path / "whole/runs/own/model/model.safetensors").exists()
    killed = start(tmp_path / "killed", name)
    wait_for_step(tmp_path / "killed/runs/own", 6, killed)
    killed.kill()
    killed.wait()
    resumed = start(tmp_path / "killed", name, "--resume")
    out, _ = resumed.communicate(timeout=250)
    assert resumed.returncode == 0, out
    assert bits(tmp_path / "killed/runs/own") == rows


@pytest.mark.parametrize("name", nightly.only(LOOPS, "its own form"))
def test_ctrl_c_saves(tmp_path, name):
    child = start(tmp_path, name)
    wait_for_step(tmp_path / "runs/own", 3, child)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=250)
    assert child.returncode == -signal.SIGINT, out
    last = bits(tmp_path / "runs/own")[-1]["step"]
    assert f"saved after step {last}; go on with: " in out
    assert (tmp_path / f"runs/own/checkpoints/step_{last:08d}/manifest.json").exists()
