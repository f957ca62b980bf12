"""The loop over fixed data: one optimizer step per batch, evaluation, run folder, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlkit.data.order import Parts, batches, resumed, to_save
from rlkit.data.streaming import Streamed
from rlkit.loops.checks import check_names, check_same_data
from rlkit.loops.evaluate import Clock, EvalSet, answer_of, evaluate_sets, is_due, over_sets
from rlkit.loops.out_of_memory import retry_smaller
from rlkit.metrics import Metrics, finalize, merge
from rlkit.model.flops import peak_tokens
from rlkit.model.forward import default_dtype
from rlkit.model.lora import dropping, seed_dropout
from rlkit.model.optim import learning_rate, make_optimizer, optimizer_step, set_lr
from rlkit.model.sharding import device_of, mesh_of
from rlkit.parallel.data import rank_microbatches, reduce_metrics
from rlkit.parallel.pipeline import pipelined
from rlkit.rollout.engines.local import LocalEngine
from rlkit.run import saving
from rlkit.run.samples import Samples
from rlkit.run.sync import run_sync
from rlkit.settings import Optim, SamplingParams, Schedule
from rlkit.types import Batch, Picture, Trajectory

X = TypeVar("X")
Backward = Callable[[list[int]], tuple[Metrics, int]]  # indices of a batch -> its metrics, its number of tokens
Losses = Callable[[Batch], tuple[Tensor, Metrics]]  # a micro-batch -> one loss per example in it, and metrics
Prepare = Callable[[Sequence[X]], tuple[Batch, Losses]]  # examples -> their batch, and the losses of a part of it
Sets = Sequence[X] | Mapping[str, Sequence[X]]  # held-out examples, or several named sets of them


def by_set(examples: Sets[X]) -> dict[str, Sequence[X]]:
    """Held-out examples by the name of their set, "" where they have none."""
    if isinstance(examples, Mapping):
        check_names(examples)
        return {**examples}
    return {"": examples} if len(examples) else {}


def every(*parts: Sets[X]) -> list[X]:
    """The examples of all parts; of streamed data (`rlkit.data.streaming`) the first ones, which are already read."""
    return [x for part in parts for some in by_set(part).values() for x in getattr(some, "head", some)]


def chosen(examples: Sequence[X], rows: Sequence[int]) -> list[X]:
    """The examples of a step. A row of streamed data may have several."""
    if isinstance(examples, Streamed):
        return [x for i in rows for x in examples.of_row(i)]
    return [examples[i] for i in rows]


def check_examples(name: str, examples: Sequence[Any], fields: tuple[str, ...], maker: str) -> None:
    """Refuse rows that are not tokenized, and none at all: an error with the function that makes the examples."""
    for i, x in enumerate(examples):
        if missing := [field for field in fields if not hasattr(x, field)]:
            fix = f"{name} = {maker}(rows, tokenizer=tokenizer, max_example_tokens=...)"
            raise TypeError(f"{name}[{i}] is a {type(x).__name__} without `{missing[0]}`: {fix}")
    if not len(examples) and not name.startswith("eval"):
        raise ValueError(f"{name} is empty: there is nothing to train on")


def check_fits(sizes: Iterable[int], *, max_tokens: int, kind: str) -> None:
    """ValueError before the first step where an example of `sizes` tokens does not fit a micro-batch."""
    longest = max(sizes, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"the longest {kind} has {longest} tokens, and max_tokens={max_tokens} is what a micro-batch holds: "
            "raise it, or drop long ones when they are read (max_example_tokens)"
        )


def response(
    prompt: list[int],
    ids: list[int],
    *,
    reward: float = 0.0,
    logp: Sequence[float] | None = None,
    images: Sequence[Picture] = (),
) -> Trajectory:
    """A response of the data as a trajectory, with every token trained on."""
    mask, numbers = [True] * len(ids), list(logp or [0.0] * len(ids))
    return Trajectory(prompt, ids, mask, numbers, [-1] * len(ids), reward, images=tuple(images))


@dataclass(frozen=True)
class Examples(Generic[X]):
    """The examples that train, `batch_size` in a step, and what is held out: examples, and prompts that are answered.

    With `parts` those that train are mixed by weights (`rlkit.data.order.mixed_index`).
    """

    train: Sequence[X]
    batch_size: int
    held_out: Sets[X] = ()
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)
    parts: Parts = ()


def train_examples(
    model: Any, tokenizer: Any, data: Examples[X], schedule: Schedule, optim: Optim, prepare: Prepare[X]
) -> Path:
    """`supervised` on the mean over a step's examples of one loss per example.

    `prepare(examples)` returns their batch, and a function from a micro-batch of it (on the host, with whole groups) to
    losses and metrics. Terms that couple examples are computed in `prepare`, once for the whole batch.
    """
    mesh = mesh_of(model)

    def passes(batch: Batch, losses: Losses, num: int, max_tokens: int) -> Metrics:
        metrics: Metrics = {}
        train = torch.is_grad_enabled()
        with dropping(model) if train else nullcontext(), pipelined(mesh) as backward:
            for micro, *_ in rank_microbatches((batch,), mesh=mesh, max_tokens=max_tokens, whole_groups=True):
                value, new = losses(micro)
                if train:
                    backward(value.sum() / num)
                metrics = merge(metrics, new)
        return metrics

    def step(some: Sequence[X]) -> tuple[Metrics, int]:
        batch, losses = prepare(some)
        gradients = partial(passes, batch, losses, len(some))
        options: dict[str, Any] = {"model": model, "max_tokens": optim.max_tokens, "whole_groups": True}
        return retry_smaller(gradients, batch, **options), batch.num_tokens

    def evaluate(some: Sequence[X]) -> Metrics:
        with torch.no_grad():
            return reduce_metrics(step(some)[0], mesh=mesh)

    def backward(rows: list[int]) -> tuple[Metrics, int]:
        return step(chosen(data.train, rows))

    return supervised(model, tokenizer, data, schedule, optim, backward=backward, evaluate=evaluate)


def supervised(
    model: Any, tokenizer: Any, data: Examples[X], schedule: Schedule, optim: Optim, *, backward: Backward,
    evaluate: Callable[[Sequence[X]], Metrics],
) -> Path:  # fmt: skip
    """Train `model` in place on `schedule.steps` batches of examples; returns the folder of the exported model.

    With 0 steps it only evaluates, exports nothing and returns `schedule.output`.

    `backward(indices)` computes the loss of a batch's examples, micro-batch by micro-batch, and leaves the gradients on
    the parameters; its weights hold the denominators of the whole batch. `evaluate(examples)` returns metrics of
    held-out data, reduced over ranks, and runs at step 0, every `eval_steps` steps and after the last one: of named
    sets on each, logged as `eval/NAME/...`, with the means over the sets as `eval/...`.
    Each epoch visits every example once, in an order that depends on `schedule.seed`.
    """
    mesh, lr_at = mesh_of(model), learning_rate(optim, num_steps=schedule.steps)
    optimizer = make_optimizer(model, optim, lr=lr_at(0))
    saved = _begin(model, data, schedule, optimizer)
    start = saved.get("step", -1)
    first, sets = max(start, 0), by_set(data.held_out)
    peak = peak_tokens(model, dtype=optim.dtype or default_dtype(device_of(model)))

    def held_out(done: int, on_group: Callable[..., None]) -> dict[str, float]:
        if not is_due(done, schedule):
            return {}
        metrics, keys = dict[str, float](), list[str]()
        for name, some in sets.items():
            of_set = finalize(evaluate(some))
            metrics |= {f"eval/{name}/{key}" if name else f"eval/{key}": value for key, value in of_set.items()}
            keys = [*of_set]
        if data.eval_sets:
            metrics |= run_sync(_answered(model, tokenizer, data.eval_sets, seed=schedule.seed, on_group=on_group))
        return metrics | over_sets(metrics, sets, names=keys)

    with saving.open_training(schedule, start=start) as job:
        run, log = job.run, partial(saving.log, job, model=model, tokenizer=tokenizer)
        samples = Samples(run, tokenizer, engine=None)
        asked, num = {name: len(one.prompts) for name, one in data.eval_sets.items()}, len(data.train)
        run.note(rows=num, held_out=asked | {name: len(some) for name, some in sets.items()})
        if start < 0 and (evals := held_out(0, partial(samples.completed, step=0))):
            log(0, evals)
        size, parts = data.batch_size, data.parts
        leg, changes = resumed(saved.get("order"), parts, position=first * size, names=saved.get("files"))
        for text in changes:
            run.say(text)
        stream = batches(num, batch_size=size, seed=schedule.seed, start_step=first, parts=parts, leg=leg)
        for step, rows in zip(range(first, schedule.steps), stream):
            done, clock = step + 1, Clock(memory=schedule.profile_memory)
            metrics, num_tokens = backward(rows)
            set_lr(optimizer, lr_at(step))
            stepped = optimizer_step(optimizer, max_norm=optim.max_norm, model=model)
            line = finalize(merge(reduce_metrics(metrics, mesh=mesh), stepped)) | {"lr": lr_at(step)}
            clock.lap("train")
            line |= held_out(done, partial(samples.completed, step=done))
            clock.lap("eval")
            if line["skipped_step"]:
                run.say(f"step {done}: the gradient norm is {line['grad_norm']}, so the optimizer step was skipped")
            log(done, line | clock.times(num_tokens=num_tokens, peak=peak))
            order = {"order": to_save(parts, leg, position=done * size)}
            if saving.save_if_due(job, done, model=model, optimizer=optimizer, state=order):
                break
        return saving.finish(job, model, tokenizer)


def _begin(model: Any, data: Examples[X], schedule: Schedule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Check that all ranks have the same data, and return what a resumed run has saved."""
    check_same_data(len(data.train), data.parts)
    seed_dropout(model)  # before a resumed run has its random states
    return saving.restore(schedule.output, model=model, optimizer=optimizer) if schedule.resume else {}


async def _answered(
    model: Any, tokenizer: Any, sets: Mapping[str, EvalSet], *, seed: int, on_group: Callable[..., None]
) -> dict[str, float]:
    """`evaluate_sets` with the weights as they are."""
    async with LocalEngine(model, tokenizer=tokenizer) as engine:
        return await evaluate_sets(
            sets, generate=engine.generate, params=SamplingParams(), score=None, seed=seed, engine=engine,
            on_group=on_group, answer=partial(answer_of, tokenizer=tokenizer),
        )  # fmt: skip
