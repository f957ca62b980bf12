"""A sweep over a command that writes its metrics in no time: it finds the best value, ends bad runs, and goes on."""

from __future__ import annotations

import sys

import optuna
import pytest

from rlkit.scripts.cli import run
from rlkit.scripts.sweep import Args, main

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
if args.bad == "hangs" and args.kind == "b":  # until somebody ends it
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
    assert f"best so far: trial {best.number}, {best.value:.4g}" in capsys.readouterr().out.splitlines()[-1]


def test_a_worse_run_is_ended_early(tmp_path, capsys):
    sweep(tmp_path, "--range", "x", "3", "3", "--choice", "kind", "a", "--startup-trials", "1")
    assert "(ended early)" not in capsys.readouterr().out
    flags = ["--range", "x", "3", "3", "--startup-trials", "1"]
    sweep(tmp_path, *flags, train=["--kind", "b", "--bad", "hangs"], trials=1)
    assert "(ended early)" in capsys.readouterr().out
    assert [t.state.name for t in trials_of(tmp_path)] == ["COMPLETE", "COMPLETE", "PRUNED"]


def test_an_impossible_sweep_is_an_error(tmp_path, capsys):
    for flags, train, message in [
        ([], [], "nothing to search over"),
        (SPACE, ["--bad", "fails"], "the command failed with exit code 1"),
        ([*SPACE, "--metric", "reward"], [], "has 'reward': is it one of ['score', 'step', 'x']"),
    ]:
        with pytest.raises((SystemExit, RuntimeError)) as ended:
            sweep(tmp_path, *flags, train=train)
        assert str(ended.value) != "0"
        assert message in capsys.readouterr().err + str(ended.value)
    assert {t.state.name for t in trials_of(tmp_path)} == {"FAIL"}
