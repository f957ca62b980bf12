"""What a person sees: lines in fixed columns on a pipe, and a live bar below them on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.run import console
from rlkit.run.console import COLUMNS, RunDisplay, header, step_line, with_command, wrapped
from rlkit.run.folder import open_run, read_metrics

ROOT = Path(__file__).parents[2]
KEYS = sorted({key for column in COLUMNS for key in column.keys} | {"eval/sampled", "eval/greedy"})
FULL = {
    "loss": 0.25, "accuracy": 0.5, "reward/mean": 0.8125, "entropy": 1.5, "kl/ref": 0.0012, "length/mean": 7.03,
    "ratio/clip_low": 0.01, "ratio/clip_high": 0.02, "mismatch/abs_mean": 1.5e-7, "grad_norm": 0.33, "time/step": 0.31,
    "time/tokens_per_s": 6612.3, "eval/sampled": 0.9, "eval/greedy": 0.975,
}  # fmt: skip


OF_RL = [c for c in COLUMNS if c.title != "acc"]  # no run has all


def test_each_number_is_printed_under_its_title():
    titles, values = header().split("  eval: ")[0].split(), step_line(12, FULL).split()
    assert dict(zip(titles, values, strict=False)) == {
        "step": "12", "loss": "0.2500", "acc": "0.500", "reward": "0.812", "entropy": "1.500", "kl": "0.00120",
        "length": "7.0", "clip%": "3.00", "teacher": "-", "mismatch": "1.5e-07", "grad": "0.330", "s/step": "0.31",
        "tok/s": "6612",
    }  # fmt: skip
    assert values[-1] == "0.900/0.975"
    assert len(header(OF_RL)) <= 120
    assert step_line(1, {"loss": 0.5, "accuracy": 0.75, "eval/loss": 0.25, "eval/accuracy": 1.0}).endswith(
        "  0.250/1.000"
    )
    assert step_line(1, {"eval/loss": 0.25}).endswith("  0.250/-")
    assert step_line(1, {"loss": -4e-5}).split()[1] == "0.0000"
    assert step_line(1, {"loss": -6e-5}).split()[1] == "-0.0001"


@given(st.dictionaries(st.sampled_from(KEYS), st.floats() | st.floats(-1e3, 1e3)), st.integers(0, 999_999))
def test_columns_are_fixed_whatever_the_numbers(metrics, step):
    evals = metrics.pop("eval/sampled", None), metrics.pop("eval/greedy", None)
    line = step_line(step, metrics)
    ends = [m.end() for m in re.finditer(r"\S+", header().split("  eval: ")[0])]
    assert [m.end() for m in re.finditer(r"\S+", line)] == ends
    assert len(step_line(step, metrics, OF_RL)) <= 120
    if all(x is not None and abs(x) < 1000 for x in evals):
        found = metrics | {"eval/sampled": evals[0], "eval/greedy": evals[1]}
        assert len(step_line(step, found, OF_RL)) <= 120


@pytest.mark.parametrize(
    ("reward", "shown"),
    [(0.25, "0.250"), (5008.0, "5008.0"), (12345.68, "12345.7"), (-123456.4, "-123456"), (98765432.0, "9.9e+07")],
)
def test_a_large_reward_is_shown_with_the_digits_that_fit(reward, shown):
    assert step_line(1, {"reward/mean": reward}).split()[3] == shown


class Screen(io.StringIO):
    """A terminal of 40 columns."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        raise OSError


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    return Screen()


def test_a_line_goes_on_below_its_own_beginning(narrow):
    text = "one word after another, and then some more of them\n  name of it   what this is about, in several words"
    assert wrapped(text, narrow).split("\n") == [
        "one word after another, and then some",
        "more of them",
        "  name of it   what this is about, in",
        "               several words",
    ]
    assert wrapped("    indented, and longer than the terminal is", narrow).split("\n")[1].startswith("    t")
    assert wrapped(text, io.StringIO()) == text


def test_a_long_command_is_copied_as_it_is(narrow):
    command = "rlkit grpo --model tiny --data 'a file.jsonl' --reward rw.py:score --resume"
    said = with_command("go on with", command, narrow)
    first, *below = said.split("\n")
    assert (first, len(below) > 1, max(map(len, below)) <= 37) == ("go on with:", True, True)
    done = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + "\n".join(below)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == shlex.split(command)
    assert with_command("go on with", command, io.StringIO()) == f"go on with: {command}"
    assert with_command("on", "rlkit x", narrow) == "on: rlkit x"


def test_the_time_left_moves_during_an_evaluation(monkeypatch):
    """9 steps of 10 s: at 12 s into the tenth it is as if it ended now; the mean of all has the evaluation."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    eta = console._Eta(100, 0)
    assert eta.seconds() is None
    for step in range(1, 10):
        now[0] = 10.0 * step
        eta.step(step)
    assert eta.seconds() == 91 * 10
    now[0] = 94.0
    assert eta.seconds() == 91 * 10 - 4
    now[0] = 100.0
    assert eta.seconds() == 90 * 10
    now[0] = 300.0
    assert eta.seconds() == 90 * 30, "ten steps in 300 s"
    eta.step(100)
    assert eta.seconds() == 0


def test_columns_appear_with_their_metrics_and_the_header_returns(capsys):
    progress = RunDisplay(steps=99)
    progress.step(0, {"eval/sampled": 0.5})
    for step in range(1, 31):
        progress.step(step, {"reward/mean": 0.5, **({"grad_norm": 1.0} if step > 2 else {})})
    lines = capsys.readouterr().out.splitlines()
    headers = {i: line.split() for i, line in enumerate(lines) if line.startswith("  step")}
    tail = ["eval:", "sampled/greedy"]
    assert headers == {
        0: ["step", *tail],
        2: ["step", "reward", *tail],
        5: ["step", "reward", "grad", *tail],
        31: ["step", "reward", "grad", *tail],
    }
    assert lines[1].split() == ["0", "0.500/-"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_step_has_no_bar(capsys, monkeypatch, steps):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    RunDisplay(steps=steps).close()
    assert ("step 0/" in capsys.readouterr().out) == bool(steps)


SCRIPT = """
import sys, time
from rlkit.run.console import RunDisplay
pause = sys.stdin.readline if sys.argv[1:] else lambda: time.sleep(0.7)
progress = RunDisplay(steps=10, start=3)
for step in (4, 5):
    progress.status("rollout 43/64")
    pause()
    progress.step(step, {"reward/mean": step / 10, "time/tokens_per_s": 6000.0 + step})
progress.say("[bold] is not markup")
print("a bare print", flush=True)
pause()
print("rich" in sys.modules)
progress.close()
"""


def test_lines_leave_a_pipe_as_they_are_printed():
    """The script goes on only when we have read what it printed."""
    command = [sys.executable, "-c", SCRIPT, "wait"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    lines = []
    for count in (2, 3, 1):
        child.stdin.write("\n")
        child.stdin.flush()
        lines += [child.stdout.readline().rstrip("\n") for _ in range(count)]
    assert child.wait() == 0
    titles = f"  step{'reward':>8}{'tok/s':>9}"
    expected = [
        titles,
        "     4   0.400     6004",
        "     5   0.500     6005",
        "[bold] is not markup",
        "a bare print",
        "False",
    ]
    assert lines == expected


@pytest.mark.slow
def test_a_terminal_gets_a_bar_below_the_lines():
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "130", "LINES": "40"}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=side, stderr=side, cwd=ROOT, env=env)
    os.close(side)
    raw = b""
    while True:
        try:
            chunk = os.read(main, 4096)
        except OSError:
            break
        if not chunk:
            break
        raw += chunk
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode())
    for part in ("step 3/10", "5/10", "eta", "rollout 43/64", "[bold] is not markup", "True"):
        assert part in text
    for line in ("     4   0.400     6004", "     5   0.500     6005", "a bare print"):
        assert len(re.findall(rf"[\r\n]{re.escape(line)}\r?\n", text)) == 1, "a whole line, once"
    assert re.search(r"eta 0:0\d", text)


@given(st.integers(1, 12), st.integers(1, 40), st.sets(st.integers(0, 40)))
def test_every_nth_step_is_printed_and_those_with_an_evaluation_and_the_last(every, steps, evaluated):
    out = io.StringIO()
    with redirect_stdout(out):
        progress = RunDisplay(steps=steps, print_steps=every)
        for step in range(1, steps + 1):
            progress.step(step, {"reward/mean": 0.5} | ({"eval/greedy": 1.0} if step in evaluated else {}))
    lines = out.getvalue().splitlines()
    printed = [int(line.split()[0]) for line in lines if not line.startswith("  step")]
    assert printed == [s for s in range(1, steps + 1) if s in {*range(0, 99, every), *evaluated, steps}]
    assert lines[0].startswith("  step")


def test_a_run_logs_the_steps_that_it_does_not_print(tmp_path, capsys):
    with open_run(tmp_path, steps=5, print_steps=4, active=True) as run:
        for step in range(1, 6):
            run.log(step, {"reward/mean": 0.5})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "4", "5"]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
