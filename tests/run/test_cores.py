"""Runs on a busy machine: their threads, what they say, and what a resumed run keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlkit._util.platform import num_cores
from rlkit.run import cores

ROOT = Path(__file__).parents[2]
FREE = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "GOMP_"))}
pytestmark = pytest.mark.skipif(num_cores() < 2 or sys.platform != "linux", reason="needs /proc and two cores")


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Loops in sessions of their own, which Linux schedules as it does other users' jobs."""
    code = "while True: pass"
    running = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in running:
            loop.kill()
            loop.wait()


def test_busy_cores_are_those_that_other_processes_use():
    since = cores.Usage(clock=10.0, everyone=100.0, process=3.0)
    assert cores.busy_cores(since, cores.Usage(12.0, 105.0, 4.0)) == 2.0
    assert cores.busy_cores(since, cores.Usage(12.0, 101.5, 4.0)) == 0.25
    assert cores.busy_cores(since, cores.Usage(12.0, 100.9, 4.0)) == 0.0  # clocks of different resolution
    assert cores.busy_cores(since, since) == 0.0


def test_usage_counts_this_process_and_others():
    before = cores.usage()
    with busy(num_cores()):
        while cores.usage().everyone < before.everyone + 0.5:
            pass
    after = cores.usage()
    assert 0 < after.process - before.process < after.everyone - before.everyone


def grpo(task: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    files = ["--model", task / "model", "--data", task / "rows.jsonl", "--reward", f"{task / 'reward.py'}:score"]
    sizes = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "2"]
    command = [sys.executable, "-m", "rlkit.scripts", "grpo", *files, "--output", output, *sizes, *flags]
    return subprocess.run(command, env=FREE | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, check=True)


@pytest.mark.slow
def test_a_run_beside_busy_cores_takes_one_thread_and_says_so_and_a_resumed_run_keeps_its_number(task, tmp_path):
    with busy(num_cores()):
        first = grpo(task, tmp_path / "run", "--steps", "1")
    assert "\n1 thread: other processes use" in f"\n{first.stdout}"
    path = tmp_path / "run" / "args.json"
    kept = json.loads(path.read_text())
    assert kept["threads"] == 1
    path.write_text(json.dumps(kept | {"threads": 2}))
    with busy(num_cores()):
        resumed = grpo(task, tmp_path / "run", "--steps", "2", "--resume")
    assert "thread" not in resumed.stdout
    assert json.loads(path.read_text())["threads"] == 2


@pytest.mark.slow
def test_only_threads_that_wait_for_each_other_beside_other_processes_are_reported():
    code = """
import time, torch
from rlkit._util.platform import num_cores
from rlkit.run import cores
cores._WINDOW_S = 1.0
def during(work):
    watch, end = cores.Waiting(), time.monotonic() + 1.5
    while time.monotonic() < end:
        work()
    lines = [watch.report(), watch.report()]
    return [line[:26] for line in lines]
x = torch.randn(1 << 20)
torch.set_num_threads(num_cores())
print(during(lambda: x.exp()))
print(during(lambda: time.sleep(0.1)))  # e.g. for a judge behind HTTP
torch.set_num_threads(1)
print(during(lambda: x.exp()))
"""
    with busy(2 * num_cores()):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=FREE | {"PYTHONPATH": str(ROOT)},
            text=True,
            capture_output=True,
            check=True,
        )
    assert done.stdout.splitlines() == ["['slow: other processes use ', '']", "['', '']", "['', '']"], done.stdout
