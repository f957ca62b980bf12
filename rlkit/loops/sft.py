"""Supervised fine-tuning on packed examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from rlkit.data.order import Parts
from rlkit.loops.evaluate import EvalSet
from rlkit.loops.out_of_memory import retry_smaller
from rlkit.loops.supervised import Examples, Sets, check_examples, check_fits, chosen, every, response, supervised
from rlkit.loops.updates import per_token
from rlkit.metrics import Metrics, mean, merge
from rlkit.model.forward import compute_log_probs, make_policy
from rlkit.model.lora import dropping
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.pipeline import pipelined
from rlkit.settings import Optim, Schedule
from rlkit.types import Batch


class Example(Protocol):
    """A tokenized conversation, with a mask of the tokens to train on."""

    @property
    def ids(self) -> list[int]:
        """Token ids, at least two."""
        ...

    @property
    def mask(self) -> list[bool]:
        """True at the tokens to train on."""
        ...


def pack_examples(examples: Sequence[Example]) -> Batch:
    """Pack examples: every token after the first is a target, and the mask selects those that train."""
    pictures = [getattr(e, "images", ()) for e in examples]
    made = [response(e.ids[:1], e.ids[1:], images=images) for e, images in zip(examples, pictures, strict=True)]
    return pack([[replace(t, mask=e.mask[1:])] for e, t in zip(examples, made, strict=True)])


def sft(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    schedule: Schedule,
    optim: Optim = Optim(lr=1e-5),
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    batch_size: int = 64,
    eval_examples: Sets[Example] = (),
    eval_sets: Mapping[str, EvalSet] = MappingProxyType({}),
    parts: Parts = (),
) -> Path:
    """Train `model` in place on the tokens of the examples where `mask` is True; returns the folder of the exported
    model.

    The loss is the mean negative log-likelihood over all trained tokens of an optimizer step, independent of the
    micro-batches, or the mean of `loss(logp)`, a number per token (`rlkit.losses.dft`). The NLL is what is logged. A
    model cut by `parallelize` is trained by all ranks together: each passes all the examples, and
    computes its share. `eval_examples` may be several named sets, {"easy": [...], "hard": [...]}. Answers to the
    prompts of `eval_sets` are sampled and scored at each evaluation (`rlkit.loops.evaluate.evaluate`; in one process).

    Errors: ValueError for an example longer than `optim.max_tokens`.
    """
    for name, some in (("examples", examples), ("eval_examples", eval_examples)):
        check_examples(name, every(some), ("ids", "mask"), "sft_examples")
    policy, max_tokens = make_policy(model, dtype=optim.dtype), optim.max_tokens
    mesh = policy.mesh
    check_fits((len(e.ids) - 1 for e in every(examples, eval_examples)), max_tokens=max_tokens, kind="example")

    def gradients(batch: Batch, max_tokens: int) -> Metrics:
        weights = per_token(batch)
        metrics: Metrics = {}
        with dropping(model), pipelined(mesh) as backward:
            for micro, *rest in rank_microbatches((batch, weights), mesh=mesh, max_tokens=max_tokens):
                out = policy(micro)
                micro, w = micro.to(model.device), rest[0].to(model.device, non_blocking=True)
                backward(-(w * out.logp).sum() if loss is None else (w * loss(out.logp)).sum())
                logp, entropy = out.logp.detach(), out.entropy.detach()
                new = {"loss": mean(-logp, mask=micro.mask), "entropy": mean(entropy, mask=micro.mask)}
                metrics = merge(metrics, new)
        return metrics

    def step(rows: list[int]) -> tuple[Metrics, int]:
        batch = pack_examples(chosen(examples, rows))
        metrics = retry_smaller(partial(gradients, batch), batch, model=model, max_tokens=max_tokens)
        return metrics, batch.num_tokens

    def evaluate(some: Sequence[Example]) -> Metrics:
        held_out = pack_examples(some)
        logp = compute_log_probs(policy, held_out, max_tokens=max_tokens, mesh=mesh)
        return {"loss": mean(-logp, mask=held_out.mask)}

    data = Examples(examples, batch_size, eval_examples, eval_sets, parts)
    return supervised(model, tokenizer, data, schedule, optim, backward=step, evaluate=evaluate)
