"""A run in a terminal, in a pipe, and where stdout is lost: one line a step, and a bar that goes away.

The child imports no torch, so each of these takes a second.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import screens
from screen import ROOT, Terminal, assert_clean, steps_on

from rlkit.run.folder import read_metrics

RUN = """
import os, sys
from rlkit.run.console import with_command
from rlkit.run.folder import open_run
from rlkit.run.signals import resume_command, stop_on_interrupt

GRPO = {"reward/mean": 0.25, "entropy": 1.5, "kl/ref": 0.0012, "length/mean": 7.03, "ratio/clip_low": 0.01,
        "mismatch/abs_mean": 1.5e-7, "grad_norm": 0.33, "time/step": 0.31, "time/tokens_per_s": 6612.3}
SFT = {"loss": 0.25, "grad_norm": 0.33, "time/step": 0.31, "time/tokens_per_s": 6612.3}
kind, folder, steps = sys.argv[1:4]
line = GRPO if kind == "grpo" else SFT
status = "train: 5 groups, reward 0.812, 6004 tok/s, 64 running, 320 queued"
wait = (lambda: os.read(int(os.environ["GO"]), 1)) if sys.argv[4:] else lambda: None
with open_run(folder, steps=int(steps), active=True) as run, stop_on_interrupt() as stop:
    run.log(0, {"eval/sampled": 0.5, "eval/greedy": 0.25} if kind == "grpo" else {"eval/loss": 0.5})
    for step in range(1, int(steps) + 1):
        run.status(status)
        wait()
        run.log(step, line)
        if stop.requested:
            run.say(with_command("saved; go on with", resume_command("--resume"), sys.stdout), whole=True)
            break
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "run.py"
    path.write_text(RUN)
    return path


@pytest.fixture
def short():
    """A folder with a short path: a word longer than a line would be broken."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def logged(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


@pytest.mark.slow_cases("grpo-120", "grpo-60", "sft-120", "sft-80")
@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_each_step_stays_on_one_line_and_the_bar_goes(tmp_path, script, kind, columns):
    terminal = Terminal([sys.executable, script, kind, tmp_path / "run", 30], columns=columns)
    assert terminal.wait() == 0
    assert steps_on(terminal.lines) == list(range(31))
    assert_clean(terminal)
    assert sum(line.startswith("  step ") for line in terminal.lines) >= 3, "at the start, with the metrics, after 25"
    titles = next(line for line in reversed(terminal.lines) if line.startswith("  step "))
    values = next(line for line in reversed(terminal.lines) if line.startswith("    30 "))
    assert len(values.split()) == len(titles.split("  eval: ")[0].split()), "every value is under its title"
    assert ("mismatch" in titles) == (kind == "grpo" and columns == 120)
    assert ("reward" in titles) == (kind == "grpo")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_bar_stays_readable_while_sampling(tmp_path, script, columns):
    terminal = Terminal([sys.executable, script, "grpo", tmp_path / "run", 200, "wait"], columns=columns)
    for step in range(3):
        terminal.wait_for(rf"^step {step}/200 ━.*━ 0:\d\d:\d\d eta \S+ train: 5 groups, reward 0\.812")
        (bar,) = (line for line in terminal.lines if " eta " in line)
        assert ("320 queued" in bar) == (columns == 120), "only the status is cut"
        assert "…" not in bar, "and between its parts"
        assert len(bar) <= columns - 3, "there is room for the ^C that the terminal writes there"
        terminal.go()
    terminal.wait_for(r"^     3 ")
    terminal.process.kill()
    terminal.wait()
    assert terminal.cursor_is_visible, "also of a process that was killed"


def test_ctrl_c_in_a_terminal_leaves_whole_lines(short, script):
    terminal = Terminal([sys.executable, script, "grpo", short / "run", 200, "wait"])
    terminal.wait_for(r" train: 5 groups")
    terminal.press("\x03")
    terminal.wait_for(r"^stopping after this step, then saving \(Ctrl-C again: without saving\)$")
    terminal.go()
    assert terminal.wait() == 0
    assert_clean(terminal)
    assert steps_on(terminal.lines) == [0, 1] == logged(short / "run")
    said = terminal.text.partition("saved; go on with:")[2]
    assert max(map(len, terminal.lines)) < 80, "broken between words"
    assert shlex.split(said.replace("\\\n", "")) == [
        sys.executable,
        str(script),
        "grpo",
        str(short / "run"),
        "200",
        "wait",
        "--resume",
    ]


STUCK = """
import asyncio, time
from rlkit.run.console import RunDisplay
from rlkit.run.signals import stop_on_interrupt
from rlkit.run.sync import run_in_thread
async def main():
    with stop_on_interrupt():
        asyncio.get_running_loop().call_soon(progress.say, "working")  # once the loop waits for the thread
        await run_in_thread(time.sleep, 600)
progress = RunDisplay(steps=9)
asyncio.run(main())
"""


def test_the_third_ctrl_c_leaves_a_usable_terminal():
    terminal = Terminal([sys.executable, "-c", STUCK])
    terminal.wait_for(r"^working(.|\n)* eta ")
    for said in (r"^stopping after this step", r"^aborting, nothing more is saved"):
        terminal.press("\x03")
        terminal.wait_for(said)
    terminal.press("\x03")
    assert terminal.wait() == -signal.SIGINT
    assert_clean(terminal)


def test_a_terminal_without_colour_or_without_any_codes(tmp_path, script):
    plain = Terminal([sys.executable, script, "grpo", tmp_path / "dumb", 3], TERM="dumb")
    assert plain.wait() == 0
    assert b"\x1b" not in plain.raw
    assert steps_on(plain.lines) == [0, 1, 2, 3]
    grey = Terminal([sys.executable, script, "grpo", tmp_path / "grey", 3], NO_COLOR="1")
    assert grey.wait() == 0
    assert not re.search(rb"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m", grey.raw), "no colour"
    assert steps_on(grey.lines) == [0, 1, 2, 3]
    assert_clean(grey)


FOREIGN = """
import logging, sys
from rlkit.run.console import RunDisplay
from rlkit.scripts import cli
from dataclasses import dataclass

@dataclass(frozen=True)
class Args:
    pass

def main(args):
    logging.getLogger("rlkit.data").warning("the row \u2192 has \u6570 tokens, " + "and many more words than fit " * 4)
    display = RunDisplay(steps=1)
    display.say("caf\u00e9 \u2192 \u6570")
    display.step(1, {"reward/mean": 0.5})
    display.close()
    sys.stdout.write("\u2192\\n")
    raise ValueError("no \u6570 here")

if sys.argv[1] == "display":  # of the Python API, without a command line
    display = RunDisplay(steps=1)
    display.say("caf\u00e9 \u2192 \u6570")
    display.close()
else:
    cli.run(main, Args, None, argv=[])
"""


@pytest.mark.slow_cases(
    "ascii terminal",
    "dumb",
    "latin-1 terminal",
    "narrow",
    "stderr in a file",
    "terminal",
    "wide",
    "ascii",
    "no colour",
    "pipe",
)
@pytest.mark.parametrize("where", screens.PLACES)
def test_text_that_the_encoding_lacks_is_escaped_and_warnings_fit(tmp_path, where):
    """A terminal that cuts a word fails in `screens.run`."""
    (tmp_path / "foreign.py").write_text(FOREIGN)
    encoding = screens.PLACES[where].environment.get("PYTHONIOENCODING", "utf-8")
    code, out, err = screens.run([sys.executable, tmp_path / "foreign.py", "all"], where, env={"PYTHONPATH": str(ROOT)})
    assert code == 2, out + err
    (message,) = screens.errors(out + err)
    if encoding != "utf-8":
        assert " \\u2192 \\u6570\n" in out
        assert where != "latin-1" or "café " in out
        assert message == "error: no \\u6570 here"
    assert "words than fit and many more words than fit" in " ".join((out + err).split())
    code, out, err = screens.run(
        [sys.executable, tmp_path / "foreign.py", "display"], where, env={"PYTHONPATH": str(ROOT)}
    )
    assert code == 0, out + err


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["{} | head -3", "{} | true", "{} >&-", "{} >&- 2>&-"])
def test_a_run_outlives_the_reader_of_its_output(tmp_path, script, shell):
    """200 lines: more than a pipe holds unread would not matter, since every line is flushed."""
    command = shlex.join([sys.executable, str(script), "grpo", str(tmp_path / "run"), "200"])
    line = shell.format(command) + "; echo ${PIPESTATUS[0]}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "0", done.stderr
    assert done.stderr == ""
    assert logged(tmp_path / "run") == list(range(201))


@pytest.mark.slow
def test_a_run_outlives_its_terminal(tmp_path, script):
    command = shlex.join([sys.executable, str(script), "grpo", str(tmp_path / "run"), "100", "wait"])
    terminal = Terminal(["bash", "-c", f"trap '' HUP; exec {command}"])
    terminal.wait_for(r"^step 0/100 ")
    terminal.hang_up()  # from then on every write fails
    assert terminal.process.wait(timeout=250) == 0
    assert logged(tmp_path / "run") == list(range(101))


@pytest.mark.slow
def test_ctrl_c_ends_tee_and_not_the_run(tmp_path, script):
    """The terminal sends it to both, and what the run prints then is read by nobody."""
    command = shlex.join([sys.executable, str(script), "grpo", str(tmp_path / "run"), "200", "wait"])
    tee = f"(trap : INT; tee {tmp_path / 'log'}; echo tee has ended > /dev/tty)"
    terminal = Terminal(["bash", "-c", f"trap : INT; {command} 2>&1 | {tee}; echo code ${{PIPESTATUS[0]}}"])
    terminal.wait_for(r"^     0 ")
    terminal.press("\x03")
    terminal.wait_for(r"tee has ended$")
    terminal.go()
    terminal.wait_for(r"code 0$")
    terminal.wait()
    assert logged(tmp_path / "run") == [0, 1]
