"""The run folder of a training loop: open it, save checkpoints, resume, export the model."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from rlkit._util.ranks import Stopped, await_all, on_all_ranks, on_rank0, world_size
from rlkit._util.text import Explained
from rlkit.model.checkpoint import BackgroundSaver, folder_name, load_latest
from rlkit.model.lora import adapters, save_adapter
from rlkit.model.optim import broken_weights
from rlkit.model.weights import export_hf
from rlkit.parallel.data import any_rank
from rlkit.rollout.engines import EngineError, silence
from rlkit.rollout.saved import SavedStream
from rlkit.rollout.shared import SharedStream
from rlkit.run import on_save
from rlkit.run.console import TRAINING, say, with_command
from rlkit.run.folder import Run, check_folder, hold, open_run, read_args, read_metrics
from rlkit.run.history import process_gib
from rlkit.run.profile import Profile
from rlkit.run.report.card import write_card
from rlkit.run.report.meanings import sign_of
from rlkit.run.report.page import report
from rlkit.run.report.plot import draw
from rlkit.run.signals import Stop, resume_command, stop_on_interrupt
from rlkit.run.tracking import tracking
from rlkit.settings import Schedule

X = TypeVar("X")


@dataclass(frozen=True)
class Job:
    """A training run in progress: its folder, the stop request of this process, and the saver of `checkpoints/`.

    `start`: the number of steps that it had taken when it was resumed; -1: a new one.
    """

    run: Run
    stop: Stop
    saver: BackgroundSaver
    schedule: Schedule
    start: int
    commands: list[on_save.Command] = field(default_factory=list)


async def unless_hung(waiting: Awaitable[X], *, engine: Any, stop: Stop, run: Run) -> X | None:
    """Await what needs the engine; after a stop request give up and return None, if the engine is silent for 30 s.

    Without a stop request a silent engine is waited for: it may be slow. `silent_s` is an optional member of an engine.
    Errors: EngineError in place of None if there are several ranks, which wait for each other.
    """
    task = asyncio.ensure_future(waiting)
    try:
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            silent_s = getattr(engine, "silent_s", 0.0)
            if stop.requested and silent_s >= silence.HUNG_AFTER_S:
                said = f"stopping without the engine, which has not answered for {silent_s:.0f} s"
                if world_size() > 1:
                    raise EngineError(said)
                run.say(said)
                return None
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


@contextmanager
def open_training(schedule: Schedule, *, start: int) -> Iterator[Job]:
    """Open the run folder (see `open_run`) for a run that has taken `start` steps (-1: a new one).

    After a stop request on any rank, leaving the block raises `Stopped`, a KeyboardInterrupt, so that the code after an
    interrupted run (the next stage, the next cell of a notebook) does not start.
    """
    folder, steps = schedule.output, schedule.steps
    started = False
    try:
        with (
            stop_on_interrupt() as stop,  # before the bar: who sees it may press Ctrl-C
            open_run(folder, steps=steps, start=start, resume=schedule.resume, print_steps=schedule.print_steps) as run,
            BackgroundSaver(run.checkpoints, keep=schedule.keep) as saver,
        ):
            if start >= steps > 0:
                cause = f"the newest checkpoint is of step {start}, and steps is {steps}"
                run.say(f"nothing to train: {cause}; args.json stays as it was")
            started = True
            with tracking(run, schedule), _profiled(run, schedule, start=max(start, 0)):
                job = Job(run, stop, saver, schedule, start)
                yield job
                report_commands(job, wait=True)
    except Exception as error:
        if started:  # `rlkit.scripts.cli.on_ranks` shows the traceback of an error that has this note
            error.add_note(f"{TRAINING}; the run folder is {folder}")
        raise
    await_all()  # rank 0 has waited for the user's commands and for uploads
    if any_rank(stop.requested):
        raise Stopped(stop.number)


@contextmanager
def _profiled(run: Run, schedule: Schedule, *, start: int) -> Iterator[None]:
    """Profile the steps of `schedule.profile_steps`, up to the last one that the run takes."""
    if schedule.profile_steps and run.active:
        run.profile = Profile(run.folder / "profile", *schedule.profile_steps, start=start)
    try:
        yield
    finally:
        if run.profile is not None and (written := run.profile.close()):
            run.say(written)


def log(job: Job, step: int, line: dict[str, float], *, model: Any, tokenizer: Any) -> None:
    """Log the metrics of a step (`Run.log`); after an evaluation also `keep_best`."""
    job.run.log(step, line)
    if any(name.startswith("eval/") for name in line):
        keep_best(job, step, model=model, tokenizer=tokenizer)


def save_if_due(
    job: Job,
    step: int,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    reference: Any = None,
    stream: SharedStream | SavedStream | None = None,
) -> bool:
    """Save every `schedule.save_steps` steps (0: never), after the last step, and after a stop request.

    Returns whether to stop. The run waits for a copy of the tensors, and for the disk only at its last save. The log is
    synced before the checkpoint that refers to it. The stream's state is saved with `state`, and its journal is
    truncated once the checkpoint is on the disk (at once if there are no checkpoints to resume from). On a full disk
    the previous checkpoint is kept, the error is reported and training continues, unless this is the last checkpoint of
    the run. A stop is reported with the command that resumes the run. Errors: see `check_finite`.
    """
    run, saver, schedule = job.run, job.saver, job.schedule
    if step <= max(job.start, 0):  # no step was taken
        return job.stop.requested
    stopping = any_rank(job.stop.requested)
    every, must = schedule.save_steps, stopping or step == schedule.steps
    due = must or (every > 0 and step % every == 0)
    if due or saver.idle:
        with _reported(run, fatal=False):
            saver.wait()
    report_commands(job)
    then: Callable[[], object] | None = None
    if stream is not None:
        state = {**state, "stream": stream.state}
        then = partial(stream.saved, state["stream"])
    if must:
        run.note(process_gib=process_gib())
        run.start_plot()
    if due:
        check_finite(model, when=f"after step {step} ")
        run.status("saving a checkpoint")
        with _reported(run, fatal=must):
            on_all_ranks(run.sync)
            both, args = _with_reference(model, reference), read_args(run.folder)
            state |= {name: args[name] for name in ("script", "run") if args.get(name)}
            saver.save(
                step=step, model=both, optimizer=optimizer, state=state, then=partial(_saved, job, step, then),
                spared=_best_steps(job, step), copy=not must,
            )  # fmt: skip
            if must:
                saver.wait()
    elif not every and then is not None:
        then()
    if stopping:
        said = with_command(f"saved after step {step}; go on with", resume_command("--resume"), sys.stdout)
        run.say(said, whole=True)
    return stopping


def _saved(job: Job, step: int, then: Callable[[], object] | None) -> None:
    """A checkpoint is on the disk: truncate the journal, and start the user's command on the first rank."""
    if then is not None:
        then()
    if job.schedule.on_save and job.run.active:
        folder, log = job.run.checkpoints / folder_name(step), job.run.folder / "on_save.log"
        job.commands.extend(on_save.start(job.schedule.on_save, folder, log=log, say=job.run.say))


def report_commands(job: Job, *, wait: bool = False) -> None:
    """Report the commands of `on_save` that have failed; with `wait` once all have ended."""
    if wait and job.commands:
        job.run.status("waiting for on_save")
    on_save.report(job.commands, log=job.run.folder / "on_save.log", say=job.run.say, wait=wait)


def check_finite(model: Any, *, when: str = "") -> None:
    """Explained where weights that train have become NaN or infinite: what was saved before stays."""
    if broken := broken_weights(model):
        fix = "try a lower learning rate, or --dtype fp32"
        fault = f"{when}weights are NaN or infinite: {broken}"
        raise Explained(f"{fault}; they are not saved, and earlier checkpoints and exports stay: {fix}")


@contextmanager
def _reported(run: Run, *, fatal: bool, event: str = "no checkpoint") -> Iterator[None]:
    """Report an OSError of the block, or raise it if `fatal`."""
    try:
        yield
    except OSError as error:
        if fatal:
            raise
        run.say(f"{event}, training goes on: {error}")


def restore(folder: Path, *, model: Any, optimizer: torch.optim.Optimizer, reference: Any = None) -> dict[str, Any]:
    """Load the newest complete checkpoint of the run and return its state with "step"; {} before the first save.

    A damaged checkpoint is skipped for the one before it, and reported on stdout with the reason. The folder is locked
    from here on (see `hold`).

    Errors: the errors of `keep_args`; FileNotFoundError also if every checkpoint is damaged; ValueError for a
    checkpoint in another format, or of a run of another script.
    """
    check_folder(folder, resume=True)
    on_rank0(lambda: hold(folder))
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    state, skipped = load_latest(folder / "checkpoints", model=_with_reference(model, reference), optimizer=optimizer)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group |= {} if decay is None else {"weight_decay": decay}  # of this run, as the learning rate
    args, run = read_args(folder), state.pop("run", None)
    wrote, here = state.pop("script", None), args.get("script")
    if None not in (wrote, here) and wrote != here:
        fix = "start from its exported model/, or resume the run that it belongs to"
        raise ValueError(f"{folder}: its checkpoint of step {state['step']} is of a run of {wrote}, not {here}: {fix}")
    lines = [f"skipped a checkpoint: {reason}" for reason in skipped]
    if None not in (run, args.get("run")) and run != args["run"]:
        lines.append(f"the checkpoint of step {state['step']} was written by another run, and is now part of this one")
    if state:
        data = args.get("data", [])
        state["files"] = " ".join(
            spec.rpartition("=")[0] or spec for spec in ([data] if isinstance(data, str) else data)
        )
    if not state:
        lines.append(f"{folder} has no checkpoint yet: starting from step 0 again")
    elif skipped:
        lines.append(f"going on from the checkpoint of step {state['step']}")
    on_rank0(lambda: say("\n".join(lines)) if lines else None)
    return state


def _with_reference(model: Any, reference: Any) -> Any:
    """The modules of a checkpoint: the model, and the reference if it moves."""
    return model if reference is None else torch.nn.ModuleDict({"policy": model, "reference": reference})


def keep_best(job: Job, step: int, *, model: Any, tokenizer: Any) -> None:
    """Write the model to `best/` in the run folder, as `export` does, if no evaluation had a better
    `schedule.keep_best`.

    The highest is best, and of a loss the lowest; the model before the first step is not written. A full disk is
    reported. Errors: Explained for a metric that the evaluation has not.
    """
    run, metric = job.run, job.schedule.keep_best
    if metric is None or not any(on_all_ranks(lambda: run.active and _is_best(run.folder, step, metric))):
        return
    run.status("saving the best model")
    with _reported(run, fatal=False, event="no best model"):
        folder = export_hf(model, tokenizer, run.folder / "best", dtype=dtype_of(job.schedule))
        _write_card(run, folder, step=step)


def _is_best(folder: Path, step: int, metric: str) -> bool:
    rows = [row for row in read_metrics(folder) if any(name.startswith("eval/") for name in row)]
    last = rows[-1] if rows else {}
    if last.get("step") != step:
        return False
    values = _values(folder, metric, step=step)
    if not values:
        there = ", ".join(name for name in last if name.startswith("eval/") and not name.endswith("_se"))
        raise Explained(f"`keep_best` {metric} is not measured: the evaluation has {there}")
    now = values.pop(step, -math.inf)  # missing where every reward failed
    return step > 0 and now > max((x for x in values.values() if not math.isnan(x)), default=-math.inf)


def _values(folder: Path, metric: str, *, step: int) -> dict[int, float]:
    """The metric of each evaluation up to a step, so that the highest is best: of a loss its negative."""
    sign, rows = sign_of(metric), read_metrics(folder)
    return {row["step"]: sign * row[metric] for row in rows if row["step"] <= step and metric in row}


def _best_steps(job: Job, step: int) -> tuple[int, ...]:
    """The steps of the `keep_best_checkpoints` best checkpoints, of those that are there and that of `step`."""
    num, metric = job.schedule.keep_best_checkpoints, job.schedule.keep_best
    if not num or metric is None or not job.run.active:
        return ()
    values = _values(job.run.folder, metric, step=step)
    there = [s for s in values if s == step or (job.run.checkpoints / folder_name(s)).exists()]
    return tuple(sorted(there, key=lambda s: (values[s], s))[-num:])


def _write_card(run: Run, folder: Path, *, step: int | None = None) -> None:
    """The model card, on the first rank; what goes wrong is reported, and the model is there."""
    if not run.active:
        return
    try:
        write_card(run.folder, folder, step=step)
    except Exception as error:
        run.say(f"no model card: {type(error).__name__}: {error}".splitlines()[0])


def dtype_of(schedule: Schedule) -> torch.dtype | None:
    """The dtype of `schedule.dtype_export`; None: that of the model's files."""
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    return named[schedule.dtype_export]


def finish(job: Job, model: Any, tokenizer: Any, *, others: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Draw the curves, export the model and the `others` by their names, and write the report of the run.

    Returns the folder of the exported model. After 0 steps nothing is exported, and it returns the run folder.
    """
    run = job.run
    draw(run)
    exported = run.folder
    if max(job.start, job.schedule.steps) > 0:
        for name, other in others.items():
            export_hf(other, tokenizer, run.folder / name, dtype=dtype_of(job.schedule))
        exported = export(run, model, tokenizer, schedule=job.schedule)
    metric = job.schedule.keep_best
    if metric and run.active and not (run.folder / "best").exists():
        for first in [row[metric] for row in read_metrics(run.folder) if metric in row][:1]:
            run.say(f"keep_best {metric}: no evaluation was better than the first ({first:.4g}), so best/ has no model")
    report(run)
    return exported


def export(run: Run, model: Any, tokenizer: Any, *, schedule: Schedule) -> Path:
    """Write the model, with its card, to `model/` in the run folder, for transformers' `from_pretrained`.

    LoRA adapters are merged into its weights, and also written to `adapter/`, with the tokenizer, for
    `peft.AutoPeftModelForCausalLM.from_pretrained`. Errors: see `check_finite`.
    """
    check_finite(model)
    run.status("saving the model")
    if adapters(model) and not hasattr(model, "score"):  # of a reward model peft's file would lack the head
        save_adapter(model, run.folder / "adapter", tokenizer=tokenizer)
    folder = export_hf(model, tokenizer, run.folder / "model", dtype=dtype_of(schedule))
    _write_card(run, folder)
    return folder
