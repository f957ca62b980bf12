"""Ctrl-C in the middle of a step, of a thread's work, and again; and the command to go on with."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import warm

from rlkit.run.folder import read_metrics
from rlkit.run.signals import resume_command, stop_on_interrupt

ROOT = Path(__file__).parents[2]


def python(script: str, *args: object) -> subprocess.Popen:
    """A child process running `script`, with pipes."""
    command = [sys.executable, "-c", script, *map(str, args)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return warm.Popen(command, **pipes, text=True, cwd=ROOT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_second_aborts(number, capfd):
    before = signal.getsignal(number)
    with stop_on_interrupt() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_caught():
    seen = []

    def work():
        with stop_on_interrupt() as stop:
            seen.append(stop.requested)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGINT) is before


LOOP = """
import asyncio, sys
from rlkit.run.folder import open_run
from rlkit.run.signals import resume_command, stop_on_interrupt
async def main():
    with open_run(sys.argv[1], steps=1000, active=True) as run, stop_on_interrupt() as stop:
        run.say("started")
        for step in range(1, 1001):
            await asyncio.sleep(float(sys.argv[2]))
            run.log(step, {"x": 1.0})
            if stop.requested:
                run.say("saved; resume with " + resume_command("--resume"), whole=True)
                return
asyncio.run(main())
"""


def test_interrupt_inside_asyncio_finishes_the_step(tmp_path):
    """asyncio.run has its own SIGINT handler, which would cancel the step."""
    child = python(LOOP, tmp_path / "run", 0.2)
    assert child.stdout.readline() == "started\n"
    child.stdout.readline(), child.stdout.readline()
    time.sleep(0.05)  # into the second step
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    steps = [r["step"] for r in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert 2 <= len(steps) < 1000
    assert "\nsaved; resume with " in out
    assert out.rstrip().endswith(f"{shlex.quote(str(tmp_path / 'run'))} 0.2 --resume")

    child = python(LOOP, tmp_path / "other", 30)
    assert child.stdout.readline() == "started\n"
    child.send_signal(signal.SIGINT)
    assert "stopping after this step" in (child.stderr.readline() + child.stderr.readline())
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode != 0


@pytest.mark.slow
def test_the_resume_command_is_the_typed_command_and_the_flag(tmp_path):
    script = tmp_path / "train me.py"
    script.write_text(
        "import sys, json; from rlkit.run.signals import resume_command\n"
        "print(resume_command('--resume')); print(json.dumps(sys.argv[1:]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = shlex.join([sys.executable, str(script), "--prompt", "it's $5"])
    for expected in (["--prompt", "it's $5"], ["--prompt", "it's $5", "--resume"], ["--prompt", "it's $5", "--resume"]):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
        command, argv = done.stdout.splitlines()
        assert json.loads(argv) == expected


def test_the_resume_command_of_a_rank_is_torchruns(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "-u", "-m", "rlkit.scripts.grpo", "--lr", "1e-5"])
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("LOCAL_WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    command = "torchrun --nproc-per-node 4 -m rlkit.scripts.grpo --lr 1e-5 --resume"
    assert resume_command("--resume") == command
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert resume_command("--resume") == "the same torchrun command on each node, with --resume"


def test_resume_command_of_this_process_has_its_own_arguments():
    assert resume_command() == shlex.join(sys.orig_argv)


THREAD = """
import asyncio, os
from functools import partial
from rlkit.run.signals import stop_on_interrupt
from rlkit.run.sync import run_in_thread
def work():
    os.read(0, 1)
    print("worked", flush=True)
async def main():
    with stop_on_interrupt():
        try:
            asyncio.get_running_loop().call_soon(partial(print, "begun", flush=True))  # once the loop waits for it
            await run_in_thread(work)
        finally:
            print("closed", flush=True)
asyncio.run(main())
"""


def test_the_second_ctrl_c_waits_for_a_threads_work_and_reports_it():
    child = python(THREAD)
    assert child.stdout.readline() == "begun\n"
    for words in ("then saving (Ctrl-C again: without saving)", "aborting, nothing more is saved (Ctrl-C again"):
        child.send_signal(signal.SIGINT)
        assert words in child.stderr.readline() + child.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.2)
    assert child.communicate("\n", timeout=120)[0] == "worked\nclosed\n"
    assert child.returncode == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_third_ctrl_c_waits_for_nothing(number):
    child = python(THREAD)
    assert child.stdout.readline() == "begun\n"
    for _ in range(2):
        child.send_signal(number)
        child.stderr.readline(), child.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.2)
    child.send_signal(number)
    assert child.wait(timeout=120) == -number
