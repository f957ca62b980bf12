"""Supervised fine-tuning on packed examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlkit.data.load import batches
from rlkit.loops import verbs
from rlkit.loops.run import open_run, resume_command, stop_on_interrupt
from rlkit.losses import token_mean
from rlkit.metrics import Metrics, finalize, mean, merge
from rlkit.packing import pack
from rlkit.parallel.data import any_rank, rank_microbatches, reduce_metrics
from rlkit.parallel.model import forward, mesh_of, score
from rlkit.parallel.optim import adamw, optimizer_step, set_lr
from rlkit.types import Batch, Trajectory


class Example(Protocol):
    """A tokenized conversation: ids, and which of them are trained on."""

    @property
    def ids(self) -> list[int]:
        """Token ids, at least two."""
        ...

    @property
    def mask(self) -> list[bool]:
        """True at the tokens to learn."""
        ...


def pack_examples(examples: Sequence[Example]) -> Batch:
    """Examples as a batch: every token after the first is a target, the mask says which ones count."""
    return pack(
        [
            [Trajectory(e.ids[:1], e.ids[1:], e.mask[1:], [0.0] * (len(e.ids) - 1), [-1] * (len(e.ids) - 1))]
            for e in examples
        ]
    )


def sft(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    folder: Path,
    steps: int,
    lr_at: Callable[[int], float],
    batch_size: int = 64,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
    max_tokens: int = 16384,
    dtype: str = "fp32",
    eval_examples: Sequence[Example] = (),
    eval_steps: int = 0,
    save_steps: int = 0,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
) -> Path:
    """Train `model` in place on the masked-in tokens of the examples; returns the folder of the exported model.

    A model cut by `parallelize` is trained by all ranks together: each has all the examples, and computes its share.

    The loss is the mean negative log-likelihood over all trained tokens of an optimizer step, whatever the
    micro-batches.
    """
    mesh = mesh_of(model)
    policy = partial(forward, model, dtype=dtype)
    optimizer = adamw(model, lr=lr_at(0), weight_decay=weight_decay)
    state = verbs.restore(folder, model=model, optimizer=optimizer, reference=None) if resume else {}
    start = state.get("step", -1)
    save = partial(verbs.save, model=model, optimizer=optimizer, reference=None, keep=keep)
    with open_run(folder, steps=steps, start=start, resume=resume) as run, stop_on_interrupt() as stop:
        order = batches(len(examples), batch_size=batch_size, seed=seed, start_step=max(start, 0))
        for step, rows in zip(range(max(start, 0), steps), order):
            clock = verbs.Clock()
            batch = pack_examples([examples[i] for i in rows])
            weights = token_mean(batch.mask, num_tokens=verbs.global_count(batch.mask))
            metrics: Metrics = {}
            for micro, *rest in rank_microbatches((batch, weights), mesh=mesh, max_tokens=max_tokens):
                micro, w = micro.to(model.device), rest[0].to(model.device)
                out = policy(micro)
                loss = -(w * out.logp).sum()
                loss.backward()
                new = {"loss": mean(-out.logp, mask=micro.mask), "entropy": mean(out.entropy, mask=micro.mask)}
                metrics = merge(metrics, new)
            set_lr(optimizer, lr_at(step))
            metrics = merge(reduce_metrics(metrics, mesh=mesh), optimizer_step(optimizer, max_norm=max_norm))

            done = step + 1
            line = finalize(metrics) | {"lr": lr_at(step)}
            if eval_examples and eval_steps and (done % eval_steps == 0 or done == steps):
                held_out = pack_examples(eval_examples)
                logp = score(policy, held_out, max_tokens=max_tokens, mesh=mesh)
                line |= finalize({"eval/loss": mean(-logp, mask=held_out.mask)})
            run.log(done, line | clock.times(num_tokens=batch.num_tokens))
            stopping = any_rank(stop.requested)
            if stopping or done == steps or (save_steps and done % save_steps == 0):
                save(run, done, state={}, must=stopping or done == steps)
            if stopping:
                run.say(f"saved after step {done}; go on with: {resume_command('--resume')}")
                break
        run.plot()
        return verbs.export(run, model, tokenizer)
