"""A vocabulary that is split over ranks (tensor parallel): statistics per shard, gradients per shard, no collective."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.kernels._checks import check_head, check_targets
from rlkit.kernels.linear_logp import ops
from rlkit.kernels.linear_logp.stats import Partials
from rlkit.types import LogProbs


def partials(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    vocab_start: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> Partials:
    """Softmax statistics of one vocabulary shard, to be merged with those of the other shards by `combine`.

    `weight` and `bias` are the shard's rows, the first of which is vocabulary entry `vocab_start`; `targets` are ids of
    the whole vocabulary. Any split works: shards may differ in size or be empty. The result carries no gradient; the
    gradient comes in through `shard_logp`:

        mine = partials(hidden, shard, targets, vocab_start=start)
        everyone = [Partials(*x) for x in all_gather(torch.stack(mine))]
        out = shard_logp(hidden, shard, targets, combined=reduce(combine, everyone), vocab_start=start)

    Without gradients `finish(reduce(combine, everyone))` is enough. Rows where `mask` is False are not read. `impl` as
    in `linear_logp`, less its reference.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], None, mask)
    chosen, b = ops.check_impl(impl, hidden, weight, bias), None if bias is None else bias.detach()
    args = (hidden.detach(), weight.detach(), targets, b, mask, temperature, softcap, vocab_start, chosen)
    return Partials(*ops.partials_op(*args))


def shard_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    combined: Partials,
    vocab_start: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability and entropy over the whole vocabulary, differentiable in this shard of it.

    `combined` holds the statistics of all shards, merged; the values are `finish(combined)`, the same on every rank.
    The backward gives the complete gradient of this shard's `weight` and `bias`, and this shard's *summand* of the
    gradient of `hidden`: their sum over the shards is the gradient (the all-reduce that a column-parallel layer makes
    anyway). It holds when every rank sends back the same gradients of logp and entropy, that is, when all compute the
    same loss.

    Differs: from Megatron-style vocabulary-parallel cross entropy (verl, NeMo, slime): no logits are stored, the
    entropy has its gradient, and the collective is the caller's: one all-gather of `[4, T]`.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], None, mask)
    stats, chosen = torch.stack(combined).detach(), ops.check_impl(impl, hidden, weight, bias)
    args = (hidden, weight, targets, bias, mask, temperature, softcap, vocab_start, stats, chosen)
    return LogProbs(*ops.shard_op(*args))
