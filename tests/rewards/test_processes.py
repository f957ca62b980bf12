"""Rewards that start processes, in real runs: the result, the end, Ctrl-C, and no process that stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = """
import multiprocessing as mp
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent

def measure(text):
    return float(len(text))

def forked(completions, rows):
    with mp.Pool(2) as pool:
        return pool.map(measure, completions)

def spawned(completions, rows):
    with mp.get_context("spawn").Pool(2) as pool:
        return pool.map(measure, completions)

def executor(completions, rows):
    with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool:
        return list(pool.map(measure, completions))

def slow_measure(text):
    (HERE / f"worker-{os.getpid()}").touch()
    time.sleep(1.5)
    return measure(text)

def slowly(completions, rows):
    with mp.Pool(2) as pool:
        return pool.map(slow_measure, completions)

pool = None

def kept(completions, rows):
    global pool
    pool = pool or mp.get_context("fork").Pool(2)
    runs = [*HERE.glob("run-*kept/*")]
    return pool.map(slow_measure if runs else measure, completions)
"""


@pytest.fixture(scope="module")
def folder(make_task):
    folder = make_task(reward=SOURCE, rows=[{"prompt": f"{i}?"} for i in range(8)])
    (folder / "sub").mkdir()
    (folder / "sub/copy.py").write_text(SOURCE)  # the name of a module of the standard library
    return folder


def start(folder, reward, *flags):
    sizes = ("--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--device", "cpu")
    command = [sys.executable, "-m", "rlkit.scripts.grpo", "--model", "model", "--data", "rows.jsonl", *sizes]
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += ["--output", f"run-{reward[0][-6:]}", "--reward", *reward, *flags]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | given,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def _lives(group):
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def ended(run, *, timeout_s=60):
    """The exit code and what was printed; fails for a run that hangs, or that leaves a process."""
    try:
        printed, _ = run.communicate(timeout=timeout_s)
        deadline = time.monotonic() + 5
        while (left := _lives(run.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, "a process of the run stays"
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    return run.returncode, printed


@pytest.mark.slow
def test_pools_and_executors_give_the_same_rewards(folder):
    rewards = ["reward.py:forked", "reward.py:spawned", "reward.py:executor"]
    code, printed = ended(start(folder, rewards, "--steps", "3", "--reward-timeout", "30"))
    assert code == 0, printed
    assert "stopping" not in printed
    assert "Traceback" not in printed
    lines = (folder / f"run-{rewards[0][-6:]}" / "metrics.jsonl").read_text()
    steps = [metrics for line in lines.splitlines() if "reward/forked" in (metrics := json.loads(line))]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["reward/forked"] == metrics["reward/spawned"] == metrics["reward/executor"] > 0


def interrupted(run, folder):
    """Ctrl-C while a worker of a run works: the exit code and what was printed."""
    deadline = time.monotonic() + 40
    while not [*folder.glob("worker-*")] and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # as the terminal does
    result = ended(run)
    for mark in folder.glob("worker-*"):
        mark.unlink()
    return result


def test_ctrl_c_in_the_trial_ends_the_command_and_its_pool(folder):
    code, printed = interrupted(start(folder, ["reward.py:slowly"]), folder)
    assert printed == "KeyboardInterrupt\n"
    assert code == -signal.SIGINT


@pytest.mark.parametrize(("reward", "flags"), [("slowly", ["--no-trial"]), ("kept", [])])
@pytest.mark.slow
def test_ctrl_c_while_a_pool_works_ends_the_step_and_saves(folder, reward, flags):
    """Also with a pool that the trial has started, before the run."""
    code, printed = interrupted(start(folder, [f"reward.py:{reward}"], "--steps", "50", *flags), folder)
    assert "saved after step 1" in printed, printed
    assert printed.count("stopping after this step") == 1
    assert "Traceback" not in printed
    assert code == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "expected"), [((), 2), (("--no-trial",), 1)], ids=["trial", "run"])
def test_a_file_that_spawned_processes_cannot_import_is_named_as_the_reason(folder, flags, expected):
    code, printed = ended(start(folder, ["sub/copy.py:spawned"], "--steps", "1", "--reward-timeout", "3", *flags))
    assert code == expected, printed
    fix = "rename copy.py: another module is named 'copy', so processes with spawn cannot import the function"
    assert fix in printed
