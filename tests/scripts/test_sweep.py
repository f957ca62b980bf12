"""A sweep over a command that writes its metrics in no time: it finds the best value, ends bad runs, and goes on."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import optuna
import pytest
import screens
import warm

from rlkit.scripts.cli import run
from rlkit.scripts.tools.sweep import Args, main, open_study

TRAIN = """
import argparse, json, pathlib, time
p = argparse.ArgumentParser()
p.add_argument("--x", type=float), p.add_argument("--kind"), p.add_argument("--output"), p.add_argument("--bad")
args = p.parse_args()
pathlib.Path(args.output).mkdir()
with open(args.output + "/metrics.jsonl", "w") as file:
    for step in range(1, 5):
        score = step - (args.x - 3) ** 2 - 5 * (args.kind == "b")
        print(json.dumps({"step": step, "score": score, "x": args.x}), file=file, flush=True)
if args.bad == "hangs" and (args.kind == "b" or args.x > 5):  # until somebody ends it
    time.sleep(600)
assert args.bad != "fails"
"""


def sweep(folder, *flags, train=(), trials=2):
    """In this process; the runs are processes."""
    (folder / "train.py").write_text(TRAIN)
    given = ["--output", str(folder / "out"), "--metric", "score", "--trials", str(trials), *flags]
    command = [sys.executable, str(folder / "train.py"), *train]
    return run(main, Args, None, argv=[*given, "--", *command])


def trials_of(folder):
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / 'out/study.db'}").trials


SPACE = ["--range", "x", "0", "10", "--choice", "kind", "a,b"]


@pytest.mark.slow
def test_the_best_values_are_found_and_a_second_call_continues(tmp_path, capsys):
    sweep(tmp_path, *SPACE, "--startup-trials", "20", trials=3)
    sweep(tmp_path, *SPACE, "--startup-trials", "4", trials=2)  # the first one at random, too
    trials = trials_of(tmp_path)
    assert len({t.params["x"] for t in trials}) == 5
    finished = [t for t in trials if t.state == optuna.trial.TrialState.COMPLETE]
    for t in finished:
        assert t.value == 4 - (t.params["x"] - 3) ** 2 - 5 * (t.params["kind"] == "b")
        assert (tmp_path / f"out/trial_{t.number:04d}/metrics.jsonl").exists()
    best = max(finished, key=lambda t: t.value)
    out = capsys.readouterr().out
    assert f"best so far: trial {best.number}, {best.value:.4g}" in out
    command = shlex.join([sys.executable, str(tmp_path / "train.py")])
    given = " ".join(f"--{name} {value}" for name, value in best.params.items())
    assert f"best: {command} {given}" in out.splitlines()[-2:]


@pytest.mark.slow
def test_two_processes_divide_a_grid_and_a_third_finds_nothing_left(tmp_path, capfd):
    """Each combination once, whoever takes it; the table has all, the best first, and a picture the importances."""
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--output", "out", "--metric", "score", "--sampler", "grid", "--choice", "x", "1,2,3", "kind", "a,b"]
    command = [sys.executable, "-m", "rlkit.scripts.tools.sweep", *flags, "--", sys.executable, "train.py"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    both = [warm.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    capfd.readouterr()
    warm.run(command, cwd=tmp_path, env=env, check=True)
    trials = trials_of(tmp_path)
    assert sorted((t.params["x"], t.params["kind"]) for t in trials) == sorted(product("123", "ab"))
    assert {t.state.name for t in trials} <= {"COMPLETE", "PRUNED"}
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    done = sorted((t for t in trials if t.state.name == "COMPLETE"), key=lambda t: -t.value)
    assert lines[0] == ["score", "trial", "x", "kind"]
    assert [line[0] for line in lines[1 : 1 + len(done)]] == [f"{t.value:.4g}" for t in done]
    assert lines[-2][-4:] == ["--x", "3", "--kind", "a"]
    if len(done) >= 4:
        assert lines[-1][0] == "importance:"
        assert (tmp_path / "out/importances.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_failed_combination_is_run_again(tmp_path):
    space = ["--sampler", "grid", "--choice", "x", "1,2", "bad", "no,fails", "--startup-trials", "20"]
    sweep(tmp_path, *space, trials=9)
    assert sorted(t.state.name for t in trials_of(tmp_path)) == ["COMPLETE"] * 2 + ["FAIL"] * 2
    sweep(tmp_path, *space, trials=9)
    assert sorted(t.params["bad"] for t in trials_of(tmp_path)) == ["fails"] * 4 + ["no"] * 2


def test_a_trial_whose_sweep_was_killed_has_failed(tmp_path, capsys):
    """Nobody else would tell its end; a sweep that lives keeps its own."""
    grid = ["--sampler", "grid", "--choice", "x", "1,2", "--startup-trials", "20"]
    (tmp_path / "out").mkdir()
    study = open_study(optuna, Args(("train",), tmp_path / "out", metric="score", choice={"x": "1,2"}), "score", False)
    study.enqueue_trial({"x": "1"})
    study.ask().suggest_categorical("x", ["1", "2"])
    with (tmp_path / "out/sweeps.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        sweep(tmp_path, *grid, trials=9)
    assert [t.state.name for t in trials_of(tmp_path)] == ["RUNNING", "COMPLETE"]
    sweep(tmp_path, *grid, trials=9)
    assert "trial 0: its sweep was killed, so it counts as failed" in capsys.readouterr().out
    assert [(t.state.name, t.params["x"]) for t in trials_of(tmp_path)][::2] == [("FAIL", "1"), ("COMPLETE", "1")]


@pytest.mark.slow
def test_random_values_are_those_of_the_seed(tmp_path):
    drawn = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        sweep(tmp_path / name, "--sampler", "random", "--range", "x", "0", "10", "--seed", seed, train=["--kind", "a"])
        drawn.append([t.params["x"] for t in trials_of(tmp_path / name)])
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_a_study_of_something_else_is_refused(tmp_path, capsys):
    """Trials of another command, or of other flags, would be compared with those of this one."""
    sweep(tmp_path, "--range", "x", "0", "10", trials=1, train=["--kind", "a"])
    same, other = [sys.executable, str(tmp_path / "train.py"), "--kind", "a"], ["--metric", "score", "--range", "x"]
    for flags, command, message in [
        (["--metric", "x", "--range", "x", "0", "1"], same, "has a study of the metric score, and this"),
        ([*other, "0", "1"], ["other"], f"has a study of the command {sys.executable}, and"),
        ([*other, "0", "1"], [*same[:-1], "b"], "--kind a, and this one is of "),
        ([*other, "0", "1", "--choice", "bad", "no"], same, "has a study of the flags x, and this one is of bad, x"),
        (["--metric", "score", "--choice", "x", "0,1"], same, "has a study over other values, give another"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            run(main, Args, None, argv=["--output", str(tmp_path / "out"), *flags, "--", *command])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_worse_run_is_ended_early(tmp_path, capsys):
    train = ["--kind", "a", "--bad", "hangs"]
    sweep(tmp_path, "--range", "x", "3", "3", "--startup-trials", "1", train=train)
    assert "(ended early)" not in capsys.readouterr().out
    sweep(tmp_path, "--range", "x", "5.5", "5.5", "--startup-trials", "1", train=train, trials=1)
    assert "(ended early)" in capsys.readouterr().out
    assert [t.state.name for t in trials_of(tmp_path)] == ["COMPLETE", "COMPLETE", "PRUNED"]


@pytest.mark.slow
def test_an_impossible_sweep_is_an_error(tmp_path, capsys):
    for flags, train, message in [
        ([], [], "nothing to search over"),
        ([*SPACE, "--metric", "reward"], [], "--metric reward: no line of "),
        ([*SPACE, "--metric", "scores"], [], "/metrics.jsonl has it; perhaps score"),
        ([*SPACE, "--metric", "loss"], [], "/metrics.jsonl has it; it has score, x"),
        ([*SPACE], ["--x", "3"], "--x of the command is searched by the sweep: drop it there"),
        (["--log-range", "x", "3", "1"], [], "--log-range x must be from low to high and above 0, got 3.0 1.0"),
        (["--log-range", "x", "0", "1"], [], "--log-range x must be from low to high and above 0, got 0.0 1.0"),
        (["--range", "x", "3", "1"], [], "--range x must be from low to high, got 3.0 1.0"),
        (["--range", "x", "0", "1", "--sampler", "grid"], [], "--sampler grid has no values of x: give values, as in"),
    ]:
        with pytest.raises((SystemExit, RuntimeError)) as ended:
            sweep(tmp_path, *flags, train=train)
        assert str(ended.value) != "0"
        assert message in capsys.readouterr().err + str(ended.value)
    assert {t.state.name for t in trials_of(tmp_path)} == {"FAIL"}


STEPS = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
folder.mkdir()
asked = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: asked.append(1))
print("training", flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(1)  # the step, and the save
print("saved" if len(asked) == 1 else "aborted", flush=True)
"""


@pytest.mark.slow
def test_one_ctrl_c_ends_the_trial_and_the_sweep_once(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    flags = ["--output", str(tmp_path / "out"), "--metric", "x", "--range", "x", "0", "1"]
    sweep = [sys.executable, "-m", "rlkit.scripts.tools.sweep", *flags]
    command = [*sweep, "--", sys.executable, str(tmp_path / "steps.py")]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        os.execv(command[0], command)
    shown = b""
    with suppress(OSError):  # nobody has the terminal any more
        while data := os.read(terminal, 4096):
            shown += data
            if data.strip().endswith(b"training"):
                os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT
    text = shown.decode()
    assert "saved" in text, text
    assert "trial 0 was stopped; the sweep goes on with:" in text
    assert not {"aborted", "KeyboardInterrupt", "Traceback"} & {*text.replace(":", " ").split()}, text


@pytest.mark.slow
def test_sigterm_ends_the_trial_with_the_sweep(tmp_path):
    """A scheduler sends it to the sweep alone: the run would go on without it, on the same GPU."""
    (tmp_path / "steps.py").write_text(STEPS)
    flags = ["--output", str(tmp_path / "out"), "--metric", "x", "--range", "x", "0", "1"]
    command = [sys.executable, "-m", "rlkit.scripts.tools.sweep", *flags, "--", sys.executable, tmp_path / "steps.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == "training\n":
                process.terminate()
                break
        rest = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "saved" in rest, rest
    assert "trial 0 was stopped; the sweep goes on with:" in rest


@pytest.mark.slow
def test_two_sweeps_that_start_at_once_draw_other_values(tmp_path):
    args = Args(("train",), tmp_path, metric="score", range={"x": (0.0, 10.0)})
    studies = [open_study(optuna, args, "score", False) for _ in range(2)]
    drawn = [study.ask().suggest_float("x", 0, 10) for study in studies]
    assert drawn[0] != drawn[1]


@pytest.mark.slow
def test_trials_that_fail_are_named_and_the_sweep_goes_on_unless_the_first_three_do(tmp_path, capfd):
    space = ["--range", "x", "0", "10", "--choice", "bad", "no,fails", "--startup-trials", "20"]
    sweep(tmp_path, *space, trials=6)
    states = [t.state.name for t in trials_of(tmp_path)]
    assert {*states} == {"COMPLETE", "FAIL"}
    out, err = capfd.readouterr()
    assert "rlkit" not in err, "the trials' own errors only"
    for number, state in enumerate(states):
        said = f"trial {number}: failed, and the sweep goes on: exit code 1 of "
        assert (said in out) == (state == "FAIL")
    (tmp_path / "b").mkdir()
    with pytest.raises(SystemExit, match="1"):
        sweep(tmp_path / "b", *SPACE, train=["--bad", "fails"], trials=9)
    out, err = capfd.readouterr()
    assert err.splitlines()[-1].startswith("error: the first 3 trials failed, so the sweep stops: exit code 1 of ")
    assert len(trials_of(tmp_path / "b")) == 3


WRONG = [
    (
        "--log-range learning_rate 1e-6 1e-4",
        "sft --model m --data d",
        "rlkit sft has no flag --learning_rate: it is --lr",
    ),
    (
        "--log-range lr 1e-6 1e-4",
        "sft --model m --data d",
        "--metric eval/loss is measured on held-out data: give rlkit sf",
    ),
    (
        "--log-range lr 1e-6 1e-4",
        "dpo --model m --data d",
        "--metric eval/accuracy is measured on held-out data: give rlkit",
    ),
    (
        "--range steps 1 4",
        "sft --model m --data d --eval-data d",
        "rlkit sft: --steps must be a whole number, got '1.0'",
    ),
    (
        "--choice dtype fp16,bf16",
        "kto --model m --data d",
        "rlkit kto: --dtype must be one of fp32, bf16 or None, got 'fp",
    ),
    ("--choice lr 1", "sft --data d", "rlkit sft: missing --model"),
    (
        "--choice loss gspo,grpo",
        "grpo --model m --data d --reward r.py:f --eval-data d",
        "rlkit grpo: --loss must be one of ppo_clip, dual_clip, gspo, gmpo, cispo, sapo or FILE.py:FUNCTION, got grpo",
    ),
    (
        "--choice loss ppo_clip,sapo --range clip-low 0.1 0.3",
        "grpo --model m --data d --reward r.py:f --eval-data d",
        "rlkit grpo: --clip-low is for --loss ppo_clip, dual_clip, gspo or gmpo, not",
    ),
    (
        "--range label-smoothing 0.1 2",
        "dpo --model m --data d --eval-data d",
        "rlkit dpo: --label-smoothing must be at least 0 and below 0.5, got 2.0",
    ),
    (
        "--choice lr 1",
        "sft --model m --data d --eval-data d --output x",
        "--output of the command is set by the sweep: dr",
    ),
]


@pytest.mark.parametrize(("space", "command", "message"), WRONG)
def test_what_no_trial_could_run_with_is_refused_before_the_first(tmp_path, space, command, message):
    argv = [*space.split(), "--output", str(tmp_path / "out"), "--", "rlkit", *command.split()]
    assert screens.refused(lambda: run(main, Args, None, argv=argv)).startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_default_metric_is_one_that_the_command_writes(tmp_path, task, capfd):
    argv = ["--output", str(tmp_path), "--trials", "1", "--log-range", "lr", "1e-5", "1e-3", "--"]
    data = str(tmp_path / "rows.jsonl")
    Path(data).write_text('{"prompt": "1+1=", "response": "2"}\n' * 4)
    command = [
        sys.executable,
        "-m",
        "rlkit.scripts.sft",
        "--model",
        str(task / "model"),
        "--data",
        data,
        "--eval-data",
        data,
    ]
    run(main, Args, None, argv=[*argv, *command, "--steps", "1", "--batch-size", "4", "--warmup-steps", "0"])
    assert "trial 0: eval/loss " in capfd.readouterr().out
