"""Preference training: DPO and other pair losses on packed pairs, and KTO on single responses with a label."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlkit import losses
from rlkit.data.examples import Labelled, Pair
from rlkit.data.order import Parts
from rlkit.loops.evaluate import EvalSet
from rlkit.loops.supervised import (
    Examples,
    Losses,
    Sets,
    by_set,
    check_examples,
    check_fits,
    every,
    response,
    train_examples,
)
from rlkit.metrics import Metrics, mean
from rlkit.model.forward import compute_log_probs, make_policy, reference_policy, with_ref_logp
from rlkit.packing import pack, select, with_streams
from rlkit.segments import mean_per_seq, seq_lens, sum_per_seq
from rlkit.settings import Optim, Schedule
from rlkit.types import Batch, Trajectory

_AT_ONCE = 256  # pairs packed into one batch for scoring


def dpo(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    schedule: Schedule,
    optim: Optim = Optim(),
    *,
    reference: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = partial(losses.dpo, beta=0.1),
    reduce: Callable[..., Tensor] = sum_per_seq,
    sft_coef: float = 0.0,
    batch_size: int = 64,
    eval_pairs: Sets[Pair] = (),
    eval_sets: Mapping[str, EvalSet] = MappingProxyType({}),
    parts: Parts = (),
) -> Path:
    """Train `model` in place on pairs of responses; returns the folder of the exported model.

    The loss is the mean over a step's pairs of `loss(chosen, rejected)`, any pair loss of `rlkit.losses`. The number of
    a response is `reduce` over its tokens of logp - ref_logp, or of logp without a `reference`:

        dpo(..., reference=model_0)                                                          DPO, beta 0.1
        dpo(..., reference=model_0, loss=partial(losses.ipo, beta=0.1), reduce=mean_per_seq)     IPO as in TRL
        dpo(..., loss=partial(losses.simpo, beta=2.0, gamma=1.0), reduce=mean_per_seq)           SimPO
        dpo(..., loss=partial(losses.orpo, beta=0.1), reduce=mean_per_seq, sft_coef=1.0)         ORPO

    plus `sft_coef` times the chosen response's mean NLL per token. Where pairs have a `margin`, the loss is
    `loss(chosen, rejected, margin=...)`, with a number per pair. The reference's log-probs are computed with each
    batch, or once for all pairs by `with_reference`. `aot`, which couples the pairs of a batch, couples those of a
    micro-batch.

    Answers to the prompts of `eval_sets` are sampled and scored at each evaluation, as in `rlkit.loops.sft.sft`.

    Logged: `accuracy` (share of pairs whose chosen number is larger), `margin`, `chosen` and `rejected` (mean numbers),
    and the mean log-probs per token `logp/chosen`, `logp/rejected`: where `logp/chosen` falls, consider `sft_coef`.

    Errors: ValueError where only some pairs have a `ref_logp`, or all have one and there is a `reference` too; and for
    a pair longer than `optim.max_tokens`.
    """
    check_pairs(pairs=pairs, eval_pairs=eval_pairs)
    policy = make_policy(model, dtype=optim.dtype)
    ref_policy = reference_policy(policy, reference)

    scored = {pair.ref_logp is not None for pair in every(pairs, eval_pairs)}
    if True in scored and (False in scored or reference is not None):
        raise ValueError(
            "either all pairs have reference log-probs (`with_reference`) and `reference` is None, or none has"
        )

    offset = {pair.margin is not None for pair in every(pairs, eval_pairs)}
    if len(offset) > 1:
        raise ValueError("either all pairs have a `margin`, or none has")

    def packed(groups: list[list[Trajectory]]) -> Batch:
        batch = pack(groups)
        if True in scored:
            return with_streams(batch, ref_logp=batch.rollout_logp)
        return with_ref_logp(ref_policy, batch, max_tokens=optim.max_tokens, mesh=policy.mesh)

    def pair_losses(micro: Batch) -> tuple[Tensor, Metrics]:
        out, micro = policy(micro), micro.to(model.device)  # on the host its segments are read without waiting
        sums = {"mask": micro.mask, "cu_seqlens": micro.cu_seqlens}
        number = reduce(out.logp if micro.ref_logp is None else out.logp - micro.ref_logp, **sums)
        logp = mean_per_seq(out.logp, **sums)
        more = {"margin": micro.rewards[0::2]} if True in offset else {}
        value = loss(number[0::2], number[1::2], **more) - sft_coef * logp[0::2]
        logged = {"logp/chosen": mean(logp[0::2]), "logp/rejected": mean(logp[1::2])}
        return value, {"loss": mean(value), **pair_metrics(number), **logged}

    data = Examples(pairs, batch_size, eval_pairs, eval_sets, parts)
    return train_pairs(model, tokenizer, data, schedule, optim, pack=packed, pair_losses=pair_losses)


def check_pairs(**sets: Sets[Pair]) -> None:
    """Refuse rows that are not tokenized pairs, and no pairs at all."""
    for name, pairs in sets.items():
        check_examples(name, every(pairs), ("prompt", "chosen", "rejected"), "preference_pairs")


def with_reference(pairs: Sequence[Pair], model: Any, optim: Optim = Optim()) -> list[Pair]:
    """The pairs with the current log-probs of `model` on their responses: `dpo` then needs no reference in memory.

        pairs = with_reference(pairs, model)                # before training the model is its own reference
        dpo(model, tokenizer, pairs, ...)                   # every epoch uses these numbers, also on a resumed run

    Cost: one forward over the pairs and 4 bytes per token on every rank. No step runs a reference, which saves work
    from the second epoch on. The numbers equal those of `dpo(reference=...)` up to the rounding of other micro-batches,
    which decides the `accuracy` of a model that still equals its reference.
    Differs: TRL's `precompute_ref_log_probs` keeps sums, in a cache file.
    """
    policy, out = make_policy(model, dtype=optim.dtype), []
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        batch = pack(pair_trajectories(some))
        logp = compute_log_probs(policy, batch, max_tokens=optim.max_tokens, mesh=policy.mesh)
        rows = [array("f", row.tolist()) for row in logp.split(seq_lens(batch.cu_seqlens).tolist())]
        out += [replace(p, ref_logp=both) for p, both in zip(some, zip(rows[0::2], rows[1::2]), strict=True)]
    return out


def train_pairs(
    model: Any, tokenizer: Any, data: Examples[Pair], schedule: Schedule, optim: Optim, *,
    pack: Callable[[list[list[Trajectory]]], Batch], pair_losses: Losses, extra: int = 0,
) -> Path:  # fmt: skip
    """`train_examples` on pairs: `pair_losses(micro)` returns one loss per pair, and metrics. `extra`: the tokens that
    `pack` adds to a pair."""
    sizes = (len(p.prompt) + len(p.chosen) + len(p.rejected) - 1 + extra for p in every(data.train, data.held_out))
    check_fits(sizes, max_tokens=optim.max_tokens, kind="pair")

    def prepare(pairs: Sequence[Pair]) -> tuple[Batch, Losses]:
        return pack(pair_trajectories(pairs)), pair_losses

    return train_examples(model, tokenizer, data, schedule, optim, prepare)


def pair_metrics(numbers: Tensor) -> Metrics:
    """Accuracy, margin and means of `numbers` (log-ratios or rewards), of which each pair has two, chosen first."""
    chosen, rejected = numbers[0::2], numbers[1::2]
    return {
        "accuracy": mean((chosen > rejected).float()),
        "margin": mean(chosen - rejected),
        "chosen": mean(chosen),
        "rejected": mean(rejected),
    }


def pair_trajectories(pairs: Sequence[Pair]) -> list[list[Trajectory]]:
    """One group per pair, chosen before rejected, so that its prompt is stored and forwarded once."""
    return [
        [
            response(p.prompt, ids, reward=p.margin or 0.0, logp=logp, images=p.images)
            for ids, logp in zip((p.chosen, p.rejected), p.ref_logp or (None, None))
        ]
        for p in pairs
    ]


def kto(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Labelled],
    schedule: Schedule,
    optim: Optim = Optim(),
    *,
    reference: Any,
    loss: Callable[..., Tensor] = partial(losses.kto_unpaired, beta=0.1),
    reference_point: Callable[[Tensor], Tensor] | None = losses.kto_reference_point,
    batch_size: int = 64,
    eval_examples: Sets[Labelled] = (),
    parts: Parts = (),
) -> Path:
    """Train `model` in place on labelled responses; returns the folder of the exported model.

    The loss is the mean over a step's examples i = 1 .. B of `loss(log_ratio_i, desirable_i, kl=kl)`, where

        log_ratio_i = log policy(y_i | x_i) - log reference(y_i | x_i)       sums over the tokens of the response y_i
        kl          = reference_point of all log_ratio'_i, those of the mismatched y_{i-1} | x_i   (y_0 is y_B)

    so with the defaults `kl` is max(0, mean log_ratio'). It is computed once per step over all examples, before they
    are split, and without gradient, so it does not depend on micro-batches or ranks. It costs a forward of policy and
    reference over the mismatched responses. `reference_point=None` skips it, with kl = 0:

        kto(..., reference=model_0)                                                          KTO, beta 0.1
        kto(..., reference=model_0, loss=partial(losses.kto_unpaired, beta=0.1, undesirable_weight=2.0))
        kto(..., reference=model_0, reference_point=None)                                    APO-zero, unpaired

    Logged: `kl`; `accuracy`, the share of desirable responses above it and others below; the mean log-ratios `chosen`
    of the desirable responses and `rejected` of the others, and their mean log-probs per token `logp/chosen`,
    `logp/rejected`.

    Errors: ValueError where a batch has one example only, so that none is mismatched, and where the longest prompt with
    the longest response exceeds `max_tokens`.

    Differs: TRL's `KTOTrainer` computes `kl` within each micro-batch, so its loss depends on the micro-batch's size; it
    mismatches responses once, in the order of the file, and therefore does not shuffle it.
    Reference: arXiv:2402.01306; TRL kto_trainer.py.
    """
    for name, some in (("examples", examples), ("eval_examples", eval_examples)):
        check_examples(name, every(some), ("prompt", "response", "desirable"), "labelled_examples")
    paired = reference_point is not None
    _check(examples, eval_examples, batch_size=batch_size, max_tokens=optim.max_tokens, paired=paired)
    policy = make_policy(model, dtype=optim.dtype)
    scoring: dict[str, Any] = {"max_tokens": optim.max_tokens, "mesh": policy.mesh}
    ref_policy = reference_policy(policy, reference)

    def prepare(some: Sequence[Labelled]) -> tuple[Batch, Losses]:
        # the reward is the label
        matched = [response(e.prompt, e.response, reward=float(e.desirable), images=e.images) for e in some]
        if reference_point is None:
            batch = with_ref_logp(ref_policy, pack([[t] for t in matched]), **scoring)
            return batch, partial(response_losses, kl=torch.zeros(()))
        others = zip([some[-1], *some], some)
        mismatched = [response(e.prompt, before.response, images=e.images) for before, e in others]
        both = pack([*zip(matched, mismatched, strict=True)])  # forwards a prompt once for its two responses
        both = with_ref_logp(ref_policy, both, **scoring)
        batch, crossed = (select(both, range(i, both.num_seqs, 2)) for i in (0, 1))
        logp = compute_log_probs(policy, crossed, **scoring)
        kl = reference_point(sum_per_seq(logp - crossed.ref_logp, cu_seqlens=crossed.cu_seqlens))
        return batch, partial(response_losses, kl=kl)

    def response_losses(micro: Batch, *, kl: Tensor) -> tuple[Tensor, Metrics]:
        out, micro = policy(micro), micro.to(model.device)  # on the host its segments are read without waiting
        log_ratio = sum_per_seq(out.logp - micro.ref_logp, mask=micro.mask, cu_seqlens=micro.cu_seqlens)
        desirable = micro.rewards > 0
        value = loss(log_ratio, desirable, kl=kl)
        metrics: Metrics = {"loss": mean(value), "kl": mean(kl), "accuracy": mean((log_ratio > kl) == desirable)}
        logp = mean_per_seq(out.logp, mask=micro.mask, cu_seqlens=micro.cu_seqlens)
        for name, which in (("chosen", desirable), ("rejected", ~desirable)):
            metrics |= {name: mean(log_ratio, mask=which), f"logp/{name}": mean(logp, mask=which)}
        return value, metrics

    data = Examples(examples, batch_size, eval_examples, parts=parts)
    return train_examples(model, tokenizer, data, schedule, optim, prepare)


def _check(
    examples: Sequence[Labelled], eval_examples: Sets[Labelled], *, batch_size: int, max_tokens: int, paired: bool
) -> None:
    """Refuse sizes that do not fit: `paired` gives any prompt of a batch the response of another example."""
    sizes = [(len(e.prompt), len(e.response)) for e in every(examples, eval_examples)]
    if paired and sizes:
        sizes = [(max(a for a, _ in sizes), max(b for _, b in sizes))]
    check_fits((a + b - 1 for a, b in sizes), max_tokens=max_tokens, kind="prompt with a response that it meets")
    held_out = min(map(len, by_set(eval_examples).values()), default=2)
    if paired and min(batch_size, len(examples), held_out) < 2:
        raise ValueError(
            f"`batch_size` {batch_size}, {len(examples)} examples and {held_out} to evaluate: KTO's reference point "
            "pairs prompts with others' responses, which takes two; `loss` apo_zero (reference_point=None) does not"
        )
