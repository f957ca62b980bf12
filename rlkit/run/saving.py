"""A loop's run folder, what it saves there while it trains, and how it goes on from that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlkit.model.checkpoint import BackgroundSaver
from rlkit.parallel.data import any_rank
from rlkit.ranks import Stopped, first, together
from rlkit.rollout.shared import SharedStream
from rlkit.rollout.stream import GroupStream
from rlkit.run.console import TRAINING, say
from rlkit.run.folder import Run, check_folder, hold, open_run
from rlkit.run.signals import Stop, resume_command, stop_on_interrupt


@contextmanager
def open_training(
    folder: Path, *, steps: int, start: int, resume: bool, keep: int, print_steps: int = 1
) -> Iterator[tuple[Run, Stop, BackgroundSaver]]:
    """The run folder (see `open_run`), whether somebody asked to stop, and what saves into its `checkpoints/`.

    Where somebody asked, the end of the block raises `Stopped`, a KeyboardInterrupt: what follows a run that was
    interrupted (the next stage, the next cell of a notebook) does not start.
    """
    if steps < 0 or keep < 1 or print_steps < 1:
        raise ValueError(f"{steps=} must be at least 0, {keep=} and {print_steps=} at least 1")
    started = False
    try:
        with (
            open_run(folder, steps=steps, start=start, resume=resume, print_steps=print_steps) as run,
            stop_on_interrupt() as stop,
            BackgroundSaver(run.checkpoints, keep=keep) as saver,
        ):
            if start >= steps > 0:
                run.say(f"nothing to train: the newest checkpoint is of step {start}, and steps is {steps}")
            started = True
            yield run, stop, saver
    except Exception as error:
        if started:  # then its traceback is shown, see `main_on_ranks`
            error.add_note(f"{TRAINING}; the run folder is {folder}")
        raise
    if any_rank(stop.requested):
        raise Stopped(stop.number)


def save_if_due(
    run: Run,
    saver: BackgroundSaver,
    stop: Stop,
    step: int,
    *,
    steps: int,
    every: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    reference: Any = None,
    stream: GroupStream | SharedStream | None = None,
) -> bool:
    """Save after every so many steps (0: never), after the last one, and when somebody asked the run to stop.

    The run waits for a copy of the tensors, and for the disk only at its last save. The log is on the disk before the
    checkpoint that knows of it. The stream's own state is saved with `state`, and its journal cut once the checkpoint
    is whole; without checkpoints nothing could use it. A disk that is full does not end the run unless the checkpoint
    is its last: the older one stays, the error is said, and training goes on.

    Returns whether to stop; then how to go on has been said.
    """
    stopping = any_rank(stop.requested)
    must = stopping or step == steps
    due = must or (every > 0 and step % every == 0)
    if due or saver.idle:
        with _said(run, unless=False):
            saver.wait()
    then: Callable[[], object] | None = None
    if stream is not None:
        state = {**state, "stream": stream.state}
        then = partial(stream.saved, state["stream"])
    if due:
        with _said(run, unless=must):
            together(run.sync)
            both = _with_reference(model, reference)
            saver.save(step=step, model=both, optimizer=optimizer, state=state, then=then)
            if must:
                saver.wait()
    elif not every and then is not None:
        then()
    if stopping:
        run.say(f"saved after step {step}; go on with: {resume_command('--resume')}")
    return stopping


@contextmanager
def _said(run: Run, *, unless: bool) -> Iterator[None]:
    """Inside the block an error of the disk is only said, `unless` it has to end the run."""
    try:
        yield
    except OSError as error:
        if unless:
            raise
        run.say(f"no checkpoint, training goes on: {error}")


def restore(folder: Path, *, model: Any, optimizer: torch.optim.Optimizer, reference: Any = None) -> dict[str, Any]:
    """Load the newest whole checkpoint of the run and return its state, "step" among it; {} where there is none yet.

    A damaged checkpoint is skipped for the one before it, and named on stdout with what is wrong with it. The folder is
    held from here on.

    Errors: those of `keep_args`; FileNotFoundError also where every checkpoint is damaged.
    """
    from rlkit.model.checkpoint import load_latest

    check_folder(folder, resume=True)
    first(lambda: hold(folder))
    state, skipped = load_latest(folder / "checkpoints", model=_with_reference(model, reference), optimizer=optimizer)
    lines = [f"skipped a checkpoint: {reason}" for reason in skipped]
    if not state:
        lines.append(f"{folder} has no checkpoint yet: starting from step 0 again")
    elif skipped:
        lines.append(f"going on from the checkpoint of step {state['step']}")
    first(lambda: say("\n".join(lines)) if lines else None)
    return state


def _with_reference(model: Any, reference: Any) -> Any:
    """What a checkpoint holds: the model, and a reference that moves, whose shards are written like the model's."""
    return model if reference is None else torch.nn.ModuleDict({"policy": model, "reference": reference})


def export(run: Run, model: Any, tokenizer: Any) -> Path:
    """The model as it is now, in `model/` of the run folder, for `transformers.from_pretrained`.

    With LoRA its weights hold the adapter, which is in `adapter/` as well, with the tokenizer, for
    `peft.AutoPeftModelForCausalLM.from_pretrained`.
    """
    from rlkit.model.lora import adapters, save_adapter
    from rlkit.model.weights import export_hf

    if adapters(model):
        save_adapter(model, run.folder / "adapter", tokenizer=tokenizer)
    return export_hf(model, tokenizer, run.folder / "model")
