"""Direct preference optimization and its relatives, on packed pairs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkit import losses
from rlkit.data.examples import Pair
from rlkit.loops.supervised import check_fits, response, train_examples
from rlkit.loops.verbs import reference_policy
from rlkit.metrics import Metrics, mean
from rlkit.model.forward import forward, mesh_of, score, with_ref_logp
from rlkit.packing import pack, with_streams
from rlkit.segments import seq_lens, seq_mean, seq_sum
from rlkit.types import Batch, Trajectory

_AT_ONCE = 256  # pairs that are packed together to be scored


def dpo(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    folder: Path,
    steps: int,
    lr_at: Callable[[int], float],
    reference: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = partial(losses.dpo, beta=0.1),
    reduce: Callable[..., Tensor] = seq_sum,
    sft_coef: float = 0.0,
    batch_size: int = 64,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
    max_tokens: int = 16384,
    dtype: str = "fp32",
    eval_pairs: Sequence[Pair] = (),
    eval_steps: int = 0,
    print_steps: int = 1,
    save_steps: int = 0,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
) -> Path:
    """Train `model` in place on pairs of responses; returns the folder of the exported model.

    The loss is the mean over a step's pairs of `loss(chosen, rejected)`, any loss of `rlkit.losses` on two numbers a
    pair, where the number of a response is `reduce` over its tokens of logp - ref_logp; without a `reference`, of logp:

        dpo(..., reference=model_0)                                                          DPO, beta 0.1
        dpo(..., reference=model_0, loss=partial(losses.ipo, beta=0.1), reduce=seq_mean)     IPO as in TRL
        dpo(..., loss=partial(losses.simpo, beta=2.0, gamma=1.0), reduce=seq_mean)           SimPO
        dpo(..., loss=partial(losses.orpo, beta=0.1), reduce=seq_mean, sft_coef=1.0)         ORPO

    plus `sft_coef` times the chosen response's mean NLL per token. The reference's log-probs are computed with each
    batch, without gradient; or once for all of them, by `with_reference`. `aot`, which couples the pairs of a
    batch, sees a micro-batch.

    Logged: `accuracy` (the chosen number is the larger one), `margin`, `chosen`, `rejected` (the numbers themselves),
    and the mean log-probs per token `logp/chosen`, `logp/rejected`: where `logp/chosen` falls, consider `sft_coef`.
    """
    mesh = mesh_of(model)
    policy = partial(forward, model, dtype=dtype)
    ref_policy = reference_policy(policy, model, reference)

    scored = {pair.ref_logp is not None for pair in (*pairs, *eval_pairs)}
    if True in scored and (False in scored or reference is not None):
        raise ValueError("pairs carry a reference's log-probs (`with_reference`): all of them, and without `reference`")

    def prepare(batch: Batch) -> Batch:
        if True in scored:
            return with_streams(batch, ref_logp=batch.rollout_logp)
        return with_ref_logp(ref_policy, batch, max_tokens=max_tokens, mesh=mesh)

    def pair_losses(micro: Batch) -> tuple[Tensor, Metrics]:
        out, micro = policy(micro), micro.to(model.device)  # on the host its segments are read without waiting
        sums = {"mask": micro.mask, "cu_seqlens": micro.cu_seqlens}
        number = reduce(out.logp if micro.ref_logp is None else out.logp - micro.ref_logp, **sums)
        logp = seq_mean(out.logp, **sums)
        value = loss(number[0::2], number[1::2]) - sft_coef * logp[0::2]
        logged = {"logp/chosen": mean(logp[0::2]), "logp/rejected": mean(logp[1::2])}
        return value, {"loss": mean(value), **pair_metrics(number), **logged}

    return train_pairs(
        model, tokenizer, pairs, pack=lambda groups: prepare(pack(groups)), pair_losses=pair_losses, folder=folder,
        steps=steps, lr_at=lr_at, batch_size=batch_size, weight_decay=weight_decay, max_norm=max_norm,
        max_tokens=max_tokens, eval_pairs=eval_pairs, eval_steps=eval_steps, print_steps=print_steps,
        save_steps=save_steps, keep=keep, seed=seed, resume=resume,
    )  # fmt: skip


def with_reference(pairs: Sequence[Pair], model: Any, *, max_tokens: int = 16384, dtype: str = "fp32") -> list[Pair]:
    """The pairs with the log-probs that `model` gives their responses now: `dpo` then needs no reference in memory.

        pairs = with_reference(pairs, model)                # before training the model is its own reference
        dpo(model, tokenizer, pairs, ...)                   # in every epoch, on a resumed run too: the same numbers

    One forward over the pairs, 4 bytes a token on every rank, and no forward of a reference in any step: less work from
    the second epoch on. The numbers are those of `dpo(reference=...)` up to the rounding of other micro-batches, which
    decides the `accuracy` of a model that still is its reference.
    Differs: TRL's `precompute_ref_log_probs` keeps sums, in a cache file.
    """
    policy, found = partial(forward, model, dtype=dtype), []
    for start in range(0, len(pairs), _AT_ONCE):
        some = pairs[start : start + _AT_ONCE]
        batch = pack(pair_trajectories(some))
        logp = score(policy, batch, max_tokens=max_tokens, mesh=mesh_of(model))
        rows = [array("f", row.tolist()) for row in logp.split(seq_lens(batch.cu_seqlens).tolist())]
        found += [replace(p, ref_logp=both) for p, both in zip(some, zip(rows[0::2], rows[1::2]), strict=True)]
    return found


def train_pairs(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    pack: Callable[[list[list[Trajectory]]], Batch],
    pair_losses: Callable[[Batch], tuple[Tensor, Metrics]],
    max_tokens: int,
    eval_pairs: Sequence[Pair],
    **options: Any,
) -> Path:
    """`train_examples` on pairs: `pair_losses(micro)` gives one loss a pair."""
    sizes = (len(p.prompt) + len(p.chosen) + len(p.rejected) - 1 for p in (*pairs, *eval_pairs))
    check_fits(sizes, max_tokens=max_tokens, what="pair")
    return train_examples(
        model,
        tokenizer,
        pairs,
        prepare=lambda some: (pack(pair_trajectories(some)), pair_losses),
        max_tokens=max_tokens,
        eval_examples=eval_pairs,
        **options,
    )


def pair_metrics(numbers: Tensor) -> Metrics:
    """How a pair's two numbers (log-ratios, rewards; chosen first) stand to each other."""
    chosen, rejected = numbers[0::2], numbers[1::2]
    return {
        "accuracy": mean((chosen > rejected).float()),
        "margin": mean(chosen - rejected),
        "chosen": mean(chosen),
        "rejected": mean(rejected),
    }


def pair_trajectories(pairs: Sequence[Pair]) -> list[list[Trajectory]]:
    """One group a pair, chosen before rejected: the prompt is stored, and forwarded, once for both."""
    return [
        [response(p.prompt, ids, logp=logp) for ids, logp in zip((p.chosen, p.rejected), p.ref_logp or (None, None))]
        for p in pairs
    ]
