"""Training diagnostics: typed metrics that add exactly over micro-batches and ranks."""

from __future__ import annotations

from math import inf

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import bounded_exp, carry_nan, check_cu_seqlens
from rlkit.losses._inputs import check_at_least, prepared
from rlkit.losses.kl import k3
from rlkit.metrics import Metrics, largest, mean, smallest
from rlkit.segments import seq_count, sum_per_seq
from rlkit.types import Mask, Tokens

__all__ = ["kl_stats", "mismatch_stats", "policy_stats", "ratio_stats", "seq_kl_stats", "weight_stats"]


def ratio_stats(
    log_ratio: Tokens, *, mask: Mask, clip_low: float = inf, clip_high: float = inf, advantages: Tokens | None = None
) -> Metrics:
    """Importance-ratio and clipping statistics.

    With r = exp(log_ratio), over the unmasked tokens:

        ratio ratio_max ratio_min    mean, largest and smallest r
        ratio_is_one                 share of tokens with log_ratio == 0 (all of them when old = logp.detach())
        clip_low                     share with r < 1 - clip_low and A < 0: the clip zeroes their gradient
        clip_high                    share with r > 1 + clip_high and A > 0
        kl_old_k1 kl_old_k3          mean of -log_ratio and of r - 1 - log_ratio: two estimates of KL(old || pi)
        abs_log_ratio_max            largest |log_ratio|

    Without `advantages` the clip shares count all ratios beyond that bound.
    Differs: verl `pg_clipfrac` is one share for both sides.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    (log_ratio,) = prepared(mask, log_ratio=log_ratio.detach())
    ratio = bounded_exp(log_ratio)
    below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
    if advantages is not None:
        _, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages.detach())
        below = carry_nan((below & (advantages < 0)).double(), advantages)
        above = carry_nan((above & (advantages > 0)).double(), advantages)
    return {
        "ratio": mean(ratio, mask=mask),
        "ratio_max": largest(ratio, mask=mask),
        "ratio_min": smallest(ratio, mask=mask),
        "ratio_is_one": mean(log_ratio == 0, mask=mask),
        "clip_low": mean(below, mask=mask),
        "clip_high": mean(above, mask=mask),
        "kl_old_k1": mean(-log_ratio, mask=mask),
        "kl_old_k3": mean(k3(torch.zeros_like(log_ratio), log_ratio), mask=mask),
        "abs_log_ratio_max": largest(log_ratio.abs(), mask=mask),
    }


def mismatch_stats(old_logp: Tokens, rollout_logp: Tokens, *, mask: Mask) -> Metrics:
    """Mismatch between the training engine and the engine that sampled, at the same weights.

    With x = old_logp - rollout_logp and r = exp(x), over the unmasked tokens:

        mismatch_k1 mismatch_k3      mean of -x and of r - 1 - x: two estimates of KL(rollout || old)
        mismatch_abs mismatch_max    mean and largest |x|
        mismatch_prob                mean |pi_old - pi_rollout| of the sampled token
        mismatch_prob_max            its largest value
        mismatch_chi2                mean of r^2 - 1, with r^2 at most e^20: the chi-square divergence, which
                                     bounds the variance of weights
    """
    old_logp, rollout_logp = prepared(mask, old_logp=old_logp.detach(), rollout_logp=rollout_logp.detach())
    x = old_logp - rollout_logp
    prob = (old_logp.exp() - rollout_logp.exp()).abs()
    return {
        "mismatch_k1": mean(-x, mask=mask),
        "mismatch_k3": mean(k3(torch.zeros_like(x), x), mask=mask),
        "mismatch_abs": mean(x.abs(), mask=mask),
        "mismatch_max": largest(x.abs(), mask=mask),
        "mismatch_prob": mean(prob, mask=mask),
        "mismatch_prob_max": largest(prob, mask=mask),
        "mismatch_chi2": mean(bounded_exp(2 * x) - 1, mask=mask),
    }


def weight_stats(weights: Tokens, *, mask: Mask, max_weight: float = float("inf")) -> Metrics:
    """Statistics of rollout-correction weights, over the unmasked tokens.

    weight weight_max weight_min   mean, largest and smallest
    weight_rejected                share of tokens with weight 0
    weight_capped                  share at `max_weight`
    weight_square                  mean of w^2: weight^2 / weight_square is `effective_sample_size` per token
    """
    (weights,) = prepared(mask, weights=weights.detach())
    return {
        "weight": mean(weights, mask=mask),
        "weight_max": largest(weights, mask=mask),
        "weight_min": smallest(weights, mask=mask),
        "weight_square": mean(weights.square(), mask=mask),
        "weight_rejected": mean(weights == 0, mask=mask),
        "weight_capped": mean(weights >= max_weight, mask=mask),
    }


def kl_stats(logp: Tokens, ref_logp: Tokens, *, mask: Mask) -> Metrics:
    """Reference-KL statistics: mean `k1` and `k3` per token, and the largest |logp - ref_logp|."""
    logp, ref_logp = prepared(mask, logp=logp.detach(), ref_logp=ref_logp.detach())
    return {
        "kl_ref_k1": mean(logp - ref_logp, mask=mask),
        "kl_ref_k3": mean(k3(logp, ref_logp), mask=mask),
        "kl_ref_max": largest((logp - ref_logp).abs(), mask=mask),
    }


def seq_kl_stats(log_ratio: Float[Tensor, "T"], *, mask: Bool[Tensor, "T"], cu_seqlens: Int[Tensor, "N1"]) -> Metrics:
    """Mean, largest and smallest summed log-ratio over sequences with a trainable token."""
    check_cu_seqlens(cu_seqlens, log_ratio=log_ratio)
    total = sum_per_seq(log_ratio.detach(), cu_seqlens=cu_seqlens, mask=mask)
    some = seq_count(mask, cu_seqlens=cu_seqlens) > 0
    return {
        "seq_log_ratio": mean(total, mask=some),
        "seq_log_ratio_max": largest(total, mask=some),
        "seq_log_ratio_min": smallest(total, mask=some),
    }


def policy_stats(logp: Tokens, entropy: Tokens, advantages: Tokens, *, mask: Mask) -> Metrics:
    """Log-prob, entropy and advantage statistics of the sampled tokens.

    logp entropy                       means per token
    advantage advantage_abs            mean A and mean |A|
    advantage_zero advantage_positive  shares of tokens with A = 0 and with A > 0
    """
    logp, entropy, advantages = prepared(
        mask, logp=logp.detach(), entropy=entropy.detach(), advantages=advantages.detach()
    )
    return {
        "logp": mean(logp, mask=mask),
        "entropy": mean(entropy, mask=mask),
        "advantage": mean(advantages, mask=mask),
        "advantage_abs": mean(advantages.abs(), mask=mask),
        "advantage_zero": mean(advantages == 0, mask=mask),
        "advantage_positive": mean(advantages > 0, mask=mask),
    }
