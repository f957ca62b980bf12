"""Alignment via optimal transport: compare sorted samples, not pairs.

These two couple the samples of a batch through their current values, so they are exceptions to the rule that a loss
adds up over any split: the loss of two micro-batches is not that of their union. Call them on the whole batch, or
accept that dominance is asked for within each micro-batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import masked
from rlkit.losses._inputs import check_positive, prepared
from rlkit.losses._pairs import check_between, smoothed_nll


def aot(
    chosen_log_ratio: Float[Tensor, "N"],
    rejected_log_ratio: Float[Tensor, "N"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: Bool[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """Make the distribution of chosen rewards dominate that of rejected ones (unpaired AOT), one loss per *rank*.

        loss_i = -(1 - e) log sigmoid(beta d_i) - e log sigmoid(-beta d_i)          d = sort(chosen) - sort(rejected)

    Entry i belongs to the i-th smallest chosen and the i-th smallest rejected log-ratio, not to pair i, so a loss must
    not be weighted per pair (TRL refuses WPO weights here too). With a mask the unmasked responses are ranked among
    themselves and fill the first entries; the rest is 0. The gradient goes through the sorted values, not the order.
    Limits: one pair is `dpo`; invariant under permuting either side.
    Differs: this is TRL's `aot_unpaired`; TRL's `aot` is `aot_paired` here.
    Reference: arXiv:2406.05882; TRL dpo_trainer.py.
    """
    chosen, rejected = prepared(mask, chosen_log_ratio=chosen_log_ratio, rejected_log_ratio=rejected_log_ratio)
    return _sorted_dpo(chosen, rejected, beta, label_smoothing, mask)


def aot_paired(
    logp_margin: Float[Tensor, "N"],
    ref_logp_margin: Float[Tensor, "N"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
    mask: Bool[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """Make the policy's margins dominate the reference model's (paired AOT), one loss per *rank*.

        loss_i = -(1 - e) log sigmoid(beta d_i) - e log sigmoid(-beta d_i)
        d = sort(logp_margin) - sort(ref_logp_margin)

    A margin is logp(chosen) - logp(rejected), summed over tokens. Ranks, mask and splits as in `aot`.
    Limits: one pair is `dpo`.
    Differs: this is TRL's `aot`.
    Reference: arXiv:2406.05882; TRL dpo_trainer.py.
    """
    margin, ref_margin = prepared(mask, logp_margin=logp_margin, ref_logp_margin=ref_logp_margin)
    return _sorted_dpo(margin, ref_margin, beta, label_smoothing, mask)


def _sorted_dpo(high: Tensor, low: Tensor, beta: float, label_smoothing: float, mask: Tensor | None) -> Tensor:
    """DPO's loss of the gaps between order statistics; masked entries sort to the end and give 0.

    NaN sorts last: filled in at masked places, a trainable NaN still stands before the end of those that are kept.
    """
    check_positive(beta=beta)
    check_between(0, 0.5, label_smoothing=label_smoothing)
    if high.ndim != 1:
        raise ValueError(f"AOT ranks one batch: inputs must have shape [N], got {list(high.shape)}")
    kept = None if mask is None else torch.arange(high.numel(), device=high.device) < mask.sum()
    high, low = (masked(masked(x, mask, float("nan")).sort().values, kept) for x in (high, low))
    return masked(smoothed_nll(beta * (high - low), label_smoothing), kept)
