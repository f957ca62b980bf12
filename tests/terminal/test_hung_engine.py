"""An engine that hangs (SIGSTOP): said on the screen, ended by one Ctrl-C or SIGTERM, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from screen import ROOT, Terminal, assert_clean

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc, /dev/shm")
SAID = r"^the engine \(process (\d+)\) has not answered for 3\d s: it hangs, or one"


def command(task, output, *flags):
    fixed = "--steps 9000 --prompts-per-step 2 --group-size 2 --max-new-tokens 8 --save-steps 9000 --eval-steps 0"
    line = [sys.executable, "-m", "rlkit.scripts.grpo", "--model", task / "model", "--data", task / "rows.jsonl"]
    line += ["--reward", f"{task / 'reward.py'}:score", "--output", output, "--device", "cpu", *fixed.split(), *flags]
    return [*map(str, line)]


def child_of(pid, what):
    """The process that this one started for the engine ("spawn_main") or to track its shared memory."""
    (found,) = [p for p in psutil.Process(pid).children(recursive=True) if what in " ".join(p.cmdline())]
    return found


def shared():
    return {p.name for p in Path("/dev/shm").iterdir() if p.name.startswith("psm_")}


def gone(process, seconds=60):
    end = time.monotonic() + seconds
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_hung_engine_is_said_and_one_request_ends_the_run(task, tmp_path, number):
    before = shared()
    terminal = Terminal(command(task, tmp_path / "run", "--overlap"))
    terminal.wait_for(r"^     2 ")
    engine = child_of(terminal.process.pid, "spawn_main")
    engine.suspend()
    stopped = time.monotonic()
    terminal.wait_for(SAID, 100)
    assert time.monotonic() - stopped < 60  # on a busy machine
    assert re.search(SAID, terminal.text, re.M)[1] == str(engine.pid)
    engine.resume()
    terminal.wait_for(r"^the engine \(process \d+\) answers again$")
    last = max(int(n) for n in re.findall(r"^ +(\d+) ", terminal.text, re.M))
    terminal.wait_for(rf"^ +{last + 3} ")  # the run goes on

    engine.suspend()
    time.sleep(3)
    if number == signal.SIGINT:
        terminal.press("\x03")
    else:
        os.kill(terminal.process.pid, number)
    code = terminal.wait()
    assert code == (-signal.SIGINT if number == signal.SIGINT else 128 + signal.SIGTERM), terminal.text
    assert re.search(r"^stopping without the engine, which has not answered for 3\d s$", terminal.text, re.M)
    saved = int(re.search(r"^saved after step (\d+); go on with:", terminal.text, re.M)[1])
    assert (tmp_path / f"run/checkpoints/step_{saved:08d}/manifest.json").exists()
    assert_clean(terminal)
    assert gone(engine)
    assert shared() <= before


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_run_whose_engine_hangs(task, tmp_path):
    """Trainer and resource tracker are killed at once, as the kernel does when memory is short."""
    before = shared()
    with subprocess.Popen(
        command(task, tmp_path / "run", "--overlap"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as run:  # fmt: skip
        for line in run.stdout:
            if re.match("     2 ", line):
                break
        engine, tracker = (child_of(run.pid, what) for what in ("spawn_main", "resource_tracker"))
        engine.suspend()
        tracker.kill()
        run.kill()
    assert gone(engine)
    assert gone(tracker)
    assert shared() <= before


@pytest.mark.slow
def test_sigterm_to_all_processes_of_a_run_saves(task, tmp_path):
    """As a scheduler sends it: the engine's process leaves the end to the trainer."""
    terminal = Terminal(command(task, tmp_path / "run", "--overlap"))
    terminal.wait_for(r"^     2 ")
    engine = child_of(terminal.process.pid, "spawn_main")
    engine.terminate()
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.wait() == 128 + signal.SIGTERM, terminal.text
    assert "saved after step" in terminal.text
    assert gone(engine)
