"""Search for the best values of a command's flags with Optuna: every trial is a run in its own folder.

    rlkit sweep --trials 20 --log-range lr 1e-6 1e-4 --choice group-size 4,8 \\
        -- rlkit grpo --model M --data D --reward R --eval-data E

After `--` comes the command with the flags that all trials share: any command, torchrun too, that takes `--output`
and writes `metrics.jsonl` there. A trial worse than the median of earlier ones at the same step ends early.
A sweep that is started again continues, and several at once with one --output share the study: each trains trials of
its own. It ends with a table, the best command, and importances.png: how much of the metric each flag explains.
`optuna-dashboard sqlite:///OUTPUT/study.db` shows it. Needs the extra `sweep`.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import tyro

from rlkit._util.extras import optional
from rlkit.compat.flags import answer
from rlkit.run.console import say, with_command
from rlkit.run.folder import new_metrics
from rlkit.run.report.meanings import sign_of
from rlkit.run.signals import handled_by, resume_command
from rlkit.scripts.cli import fail, parsed, run, with_config
from rlkit.scripts.flags import list_flags, wrong_words
from rlkit.settings import ASCENDING, Count, Range, Seed, check, refuse_if

DEFAULTS = {  # the metric of each script
    "grpo": "eval/sampled", "ppo": "eval/sampled", "dpo": "eval/accuracy", "kto": "eval/accuracy",
    "reward_model": "eval/accuracy", "sft": "eval/loss",
}  # fmt: skip

_ABOVE_0 = Range("from low to high and above 0", lambda x: 0 < x[0] <= x[1])
_SHOWN = 10  # trials of the table
_FEWEST = 4  # trials whose importances mean something


@dataclass(frozen=True)
class Args:
    """Flags."""

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """the command to tune, after `--`"""
    output: Path = Path("runs/sweep")
    """folder of the study and of the trials' runs"""
    trials: Count = 20
    """runs that this call starts"""
    metric: str | None = None
    """key of `metrics.jsonl` whose last value is maximized (of a loss: minimized). None: eval/sampled (grpo, ppo),
    eval/accuracy (dpo, kto, reward_model), or eval/loss, minimized (sft)"""
    minimize: bool = False
    """minimize the metric instead"""
    range: dict[str, Annotated[tuple[float, float], ASCENDING]] = field(default_factory=dict, hash=False)
    """flags and their lowest and highest value: `--range clip-high 0.2 0.4 temperature 0.7 1.2`"""
    log_range: dict[str, Annotated[tuple[float, float], _ABOVE_0]] = field(default_factory=dict, hash=False)
    """the same on a logarithmic scale: `--log-range lr 1e-6 1e-4`"""
    choice: dict[str, str] = field(default_factory=dict, hash=False)
    """flags and the values to choose from: `--choice group-size 4,8,16`"""
    sampler: Literal["tpe", "gp", "random", "grid"] = "tpe"
    """how values are chosen: tpe (tree-structured Parzen estimator, as hyperopt), gp (Gaussian process, as
    scikit-optimize and bayesian-optimization; needs scipy), random, or grid (each combination of --choice once,
    --trials of them a call)"""
    startup_trials: Count = 5
    """runs that are drawn at random at first (tpe, gp), and that have to finish before others are ended early"""
    seed: Seed = 0
    """random seed of the search"""

    def __post_init__(self) -> None:
        check(self, may_be_empty=("command",))
        searched = self.range or self.log_range or self.choice
        refuse_if(not searched, "nothing to search over: give `range`, `log_range` or `choice`")
        fix = "give it after --, as in: rlkit sweep --log-range lr 1e-6 1e-4 -- rlkit grpo ..."
        refuse_if(not self.command, f"no command: {fix}")
        for name in self.choice:
            fix = "several values are separated by commas, as in group-size 4,8"
            refuse_if(not name[:1].isalpha(), f"`choice` {name} is no flag: {fix}")
        ranges, fix = ", ".join([*self.range, *self.log_range]), "give values, as in --choice lr 1e-6,1e-5"
        refuse_if(self.sampler == "grid" and ranges, f"`sampler` grid has no values of {ranges}: {fix}")
        refuse_if(self.sampler == "gp" and not find_spec("scipy"), "`sampler` gp needs scipy: pip install scipy")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while a trial trains."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # `rlkit.scripts.cli.on_ranks` ends by it, and prints nothing


def main(args: Args) -> Any:
    """The finished study."""
    optuna = optional("optuna", "sweep", "sweeps need")
    metric, minimize = check_command(args)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "sweeps.lock").open("w") as held:  # by each sweep of the folder, until it ends in any way
        with alone(args.output):
            study = open_study(optuna, args, metric, minimize)
            end_killed(study, held)
            if args.sampler == "grid":
                enqueue_grid(study, {name: values.split(",") for name, values in args.choice.items()})
        run_trials(args, optuna, study, metric)
    for line in [*table(study, metric), *best_command(study, args.command), *importances(optuna, study, args.output)]:
        say(line)
    return study


def run_trials(args: Args, optuna: Any, study: Any, metric: str) -> None:
    """Ask the study for values and train with them, `args.trials` times or until the grid is empty."""
    states, ended = optuna.trial.TrialState, []
    for _ in range(args.trials):
        if args.sampler == "grid" and not any(trial.state == states.WAITING for trial in study.trials):
            break
        with alone(args.output):  # SQLite gives a waiting trial to two processes that ask at once
            trial = study.ask()
        folder, state, value, failure = args.output / f"trial_{trial.number:04d}", states.FAIL, None, None
        try:
            flags = suggested(trial, args)
            text = "  ".join(f"{name} {v:.3g}" if isinstance(v, float) else f"{name} {v}" for name, v in flags.items())
            say(f"trial {trial.number}: {text}")
            command = [*args.command, *words_of(flags), "--output", str(folder)]
            value, pruned = run_trial(command, folder, metric, trial)
            state = states.PRUNED if pruned else states.FAIL if math.isnan(value) else states.COMPLETE
        except RuntimeError as error:
            failure = error
        except Interrupted:
            on = f"trial {trial.number} was stopped; the sweep goes on with"
            say(with_command(on, resume_command(), sys.stdout), whole=True)
            raise
        finally:
            ended.append(state)
            study.tell(trial, value if state == states.COMPLETE else None, state=state)
        if failure is not None:
            if ended == [states.FAIL] * min(3, args.trials):
                number = "the only trial" if len(ended) == 1 else f"the first {len(ended)} trials"
                fail(f"{number} failed, so the sweep stops: {failure}", code=1)
            say(f"trial {trial.number}: failed, and the sweep goes on: {failure}")
            continue
        best = f"; best so far: trial {study.best_trial.number}, {study.best_value:.4g}" if complete(study) else ""
        say(f"trial {trial.number}: {metric} {value:.4g}{' (ended early)' if pruned else ''}{best}")


def suggested(trial: Any, args: Args) -> dict[str, Any]:
    """The values of a trial; ValueError for a flag that the study has searched in another way."""
    try:
        flags = {name: trial.suggest_float(name, *ends) for name, ends in args.range.items()}
        flags |= {name: trial.suggest_float(name, *ends, log=True) for name, ends in args.log_range.items()}
        return flags | {name: trial.suggest_categorical(name, x.split(",")) for name, x in args.choice.items()}
    except ValueError as error:
        fault = "has a study over other values, give another folder"
        raise ValueError(f"`output` {args.output} {fault}: {error}") from None


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """The flags and their values as a command line has them."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def complete(study: Any) -> list[Any]:
    """The trials that ran to their end."""
    return [trial for trial in study.trials if trial.state.name == "COMPLETE"]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process of those that share a study at a time."""
    with (folder / "study.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_study(optuna: Any, args: Args, metric: str, minimize: bool) -> Any:
    """The study in the folder, new or to be continued; ValueError for one of another command or metric."""
    study = optuna.create_study(
        storage=f"sqlite:///{args.output / 'study.db'}",
        study_name="sweep",
        load_if_exists=True,
        direction="minimize" if minimize else "maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=args.startup_trials),
    )
    measured = any(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)
    searched = ", ".join(sorted({*args.range, *args.log_range, *args.choice}))
    facts = {"metric": metric, "words": shlex.join(args.command), "searched": searched}
    for name, now in {"command": script_of(args.command) or args.command[0], **facts}.items():
        before = study.user_attrs.get(name, now)
        if before != now and measured:
            kind = {"words": "command", "searched": "flags"}.get(name, name)
            fault = f"has a study of the {kind} {before}, and this one is of {now}: give another folder"
            raise ValueError(f"`output` {args.output} {fault}")
        study.set_user_attr(name, now)
    starts = study.user_attrs.get("starts", 0)
    study.set_user_attr("starts", starts + 1)
    seed = args.seed + len(study.trials) + starts  # or a call, later or at the same time, would draw the same values
    kinds, startup = optuna.samplers, {"n_startup_trials": args.startup_trials}
    study.sampler = {
        "tpe": lambda: kinds.TPESampler(seed=seed, constant_liar=True, **startup),  # trials of other processes run
        "gp": lambda: kinds.GPSampler(seed=seed, **startup),
        "random": lambda: kinds.RandomSampler(seed=seed),
        "grid": lambda: kinds.RandomSampler(seed=seed),  # of `enqueue_grid` all values are given
    }[args.sampler]()
    return study


def end_killed(study: Any, held: IO[str]) -> None:
    """Count the trials as failed whose sweep was killed, if no other sweep of this folder lives; hold the lock then."""
    with suppress(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for trial in study.trials:
            if trial.state.name == "RUNNING":
                study.tell(trial.number, state=type(trial.state).FAIL)
                say(f"trial {trial.number}: its sweep was killed, so it counts as failed")
    fcntl.flock(held, fcntl.LOCK_SH)


def enqueue_grid(study: Any, choices: Mapping[str, Sequence[str]]) -> None:
    """Let each combination wait that no trial has, or only failed ones; all processes take from these."""
    tried = [t.system_attrs.get("fixed_params", t.params) for t in study.trials if t.state.name != "FAIL"]
    for values in itertools.product(*choices.values()):
        if (params := dict(zip(choices, values, strict=True))) not in tried:
            study.enqueue_trial(params)


def table(study: Any, metric: str) -> list[str]:
    """Lines of the best trials: metric, number and flags."""
    done = sorted(complete(study), key=lambda trial: trial.value, reverse=study.direction.name == "MAXIMIZE")
    names = [*dict.fromkeys(name for trial in done for name in trial.params)]
    rows = [[metric, "trial", *names]]
    for trial in done[:_SHOWN]:
        values = [trial.params.get(name, "-") for name in names]
        cells = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in values]
        rows.append([f"{trial.value:.4g}", str(trial.number), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{x:>{width}}" for x, width in zip(row, widths, strict=True)) for row in rows]
    return [*lines, f"... and {len(done) - _SHOWN} more"] if len(done) > _SHOWN else lines if done else []


def best_command(study: Any, command: Sequence[str]) -> list[str]:
    """The command of the best trial, to copy."""
    if not complete(study):
        return []
    return [with_command("best", shlex.join([*command, *words_of(study.best_trial.params)]), sys.stdout)]


def importances(optuna: Any, study: Any, folder: Path) -> list[str]:
    """A line with the share of the metric's variation among good trials that each flag explains, drawn in a picture.

    Reference: PED-ANOVA, arXiv:2304.10255. Nothing for fewer than `_FEWEST` trials, or where all have one value.
    """
    done = complete(study)
    if len(done) < _FEWEST or len({trial.value for trial in done}) < 2 or not find_spec("matplotlib"):
        return []
    with warnings.catch_warnings(action="ignore"):  # the evaluator is experimental
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    from matplotlib.figure import Figure

    names = [*shares][::-1]
    figure = Figure(figsize=(6, 1 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [shares[name] for name in names], color="#0072b2")
    axes.set(xlim=(0, 1), xlabel="share of the importance", title=f"{study.user_attrs['metric']}, {len(done)} trials")
    path = folder / "importances.png"
    figure.savefig(path, dpi=150)
    return [f"importance: {', '.join(f'{name} {x:.2f}' for name, x in shares.items())} ({path})"]


def check_command(args: Args) -> tuple[str, bool]:
    """The metric, and whether it is minimized; ValueError for what the command could not run with, or never writes.

    Of a command of rlkit, the searched flags, their values and the evaluation are checked; others are not known.
    """
    words = list(args.command)
    ends = {name: [str(x) for x in pair] for name, pair in {**args.range, **args.log_range}.items()}
    searched = ends | {name: values.split(",") for name, values in args.choice.items()}
    typed = {word[2:].partition("=")[0].replace("_", "-"): word for word in words[::-1] if word[:2] == "--"}
    for name in searched:
        if word := typed.get(name.replace("_", "-")):
            raise ValueError(f"{word} of the command is searched by the sweep: drop it there")
    script = script_of(words)
    if script is None:
        if args.metric is None:
            raise ValueError("`metric` has no default for this command: give a key of its metrics.jsonl")
        return args.metric, args.minimize
    at = next(i for i, word in enumerate(words) if word in (script, f"rlkit.scripts.{script}"))
    kind = importlib.import_module(f"rlkit.scripts.{script}").Args
    names = {flag.name for flag in list_flags(kind)}
    for name in (name for name in searched if name.replace("-", "_") not in names):
        better = answer(name.replace("-", "_"), names)
        raise ValueError(f"rlkit {script} has no flag --{name}" + (f": it {better}" if better else ""))
    try:
        first = words_of({name: values[0] for name, values in searched.items()})
        of_command = with_config([*words[at + 1 :], *first], kind).words
        for name, value in ((name, value) for name, values in searched.items() for value in values):
            argv = [*of_command, f"--{name}", value]
            if faults := wrong_words(argv, kind):
                raise ValueError("{} {}".format(*faults.popitem()))
            parsed(argv, kind)
    except ValueError as error:
        raise ValueError(f"rlkit {script}: {error}") from None
    metric = args.metric or DEFAULTS[script]
    evaluated = any(word.partition("=")[0] in ("--eval-data", "--eval_data") for word in of_command)
    if metric.startswith("eval/") and not evaluated:
        raise ValueError(f"`metric` {metric} is measured on held-out data: give rlkit {script} --eval-data")
    if "output" in typed:
        fix = f"drop it; trials are in {args.output}/trial_0000 ..."
        raise ValueError(f"--output of the command is set by the sweep: {fix}")
    return metric, args.minimize or sign_of(metric) < 0


def script_of(words: Sequence[str]) -> str | None:
    """The script of rlkit that the words of a command run."""
    if not any(word.endswith("rlkit") or word.startswith("rlkit.") for word in words[:8]):
        return None
    return next((name for name in DEFAULTS for word in words[:8] if word in (name, f"rlkit.scripts.{name}")), None)


def run_trial(command: list[str], folder: Path, metric: str, trial: Any) -> tuple[float, bool]:
    """The metric's last value, and whether the run was ended early because others were better."""
    seen: dict[int, float] = {}
    rows, at = list[dict[str, Any]](), 0
    with handled_by(_interrupt), subprocess.Popen(command) as process:
        try:
            while True:
                ended = process.poll() is not None
                new, at = new_metrics(folder, at)
                rows += new
                for row in new:
                    if metric in row and row["step"] not in seen:
                        seen[row["step"]] = row[metric]
                        trial.report(row[metric], row["step"])
                if ended:
                    break
                if seen and trial.should_prune():
                    return list(seen.values())[-1], True
                time.sleep(0.2)
        except Interrupted as stopped:
            _wait_for_stop(process, stopped.number)
            raise
        finally:
            process.terminate()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode} of {shlex.join(command)}")
    if not seen:
        keys = sorted({key for row in rows for key in row if key != "step" and not key.startswith("time/")})
        near = get_close_matches(metric, keys, n=3, cutoff=0.5)
        there = f"perhaps {' or '.join(near)}" if near else f"it has {', '.join(keys)}"
        raise ValueError(f"`metric` {metric}: no line of {folder / 'metrics.jsonl'} has it; {there}")
    return list(seen.values())[-1], False


def _interrupt(number: int, _frame: Any) -> None:
    """Handle Ctrl-C, and SIGTERM, which by default would leave the trial's run behind."""
    raise Interrupted(number)


def _wait_for_stop(process: subprocess.Popen[bytes], number: int) -> None:
    """After signal `number`, wait until the run, which gets it too, has ended: it saves after its step.

    A further one ends the run without saving. A terminal's Ctrl-C reaches the run without our help.
    """
    of_terminal = False
    with suppress(OSError), open("/dev/tty") as terminal:
        of_terminal = os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    while process.poll() is None:
        if number != signal.SIGINT or not of_terminal:
            process.send_signal(number)
        try:
            process.wait()
        except Interrupted as again:
            number = again.number


if __name__ == "__main__":
    run(main, Args, __doc__)
