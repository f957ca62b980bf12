"""Surrogates whose ratio belongs to a whole sequence.

`f(log_ratio, advantages, *, mask, cu_seqlens, ...) -> token_loss [T]`: every token carries a loss, so they are
aggregated by the same weights as all others. Where all tokens of a sequence share one advantage, the gradient of the
*summed* token losses is `-c * A * dlogp` for each token, with the coefficient given below.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import MAX_LOG_RATIO, bounded_exp
from rlkit.losses._inputs import check_at_least, check_positive, prepared
from rlkit.losses.ratios import seq_log_ratio, seq_log_ratio_sum
from rlkit.losses.surrogates import ppo_clip
from rlkit.segments import broadcast_to_tokens, seq_count, seq_lens


def gspo(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Tensor, "T"]:
    """PPO's clip on the sequence's ratio, the geometric mean s of its tokens'.

        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))          s = exp(seq_log_ratio)

    Coefficient: c = s, and 0 for the whole sequence where `ppo_clip` would be clipped. Aggregate with `seq_mean`.
    Limits: sequences of one token are `ppo_clip`.
    Differs: nothing; `gspo_token_log_ratio` inside `ppo_clip` is GSPO-token.
    Reference: arXiv:2507.18071, equation 5.
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    ratio = seq_log_ratio(log_ratio, mask=mask, cu_seqlens=cu_seqlens)
    return ppo_clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)


def luspo(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Tensor, "T"]:
    """GSPO times the sequence's length, which takes its preference for short answers away.

        loss = gspo * (trainable tokens of the sequence)

    Coefficient: c = length * s, so not 1 on-policy: with `seq_mean` weights the length cancels, and each token's
    gradient weighs 1 / num_seqs. The same gradient comes from `gspo` with `seq_mean_token_sum`.
    Differs: nothing (TRL `luspo`).
    Reference: arXiv:2602.05261.
    """
    loss = gspo(log_ratio, advantages, mask=mask, cu_seqlens=cu_seqlens, clip_low=clip_low, clip_high=clip_high)
    lens = seq_lens(cu_seqlens) if mask is None else seq_count(mask, cu_seqlens=cu_seqlens)
    return loss * broadcast_to_tokens(lens.to(loss.dtype), cu_seqlens=cu_seqlens, num_tokens=loss.shape[0])


def gmpo(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Float[Tensor, "T"]:
    """Geometric-mean policy optimisation: clip each token's log-ratio, then take the sequence's geometric mean.

        x_t  = min(log_ratio, clip(log_ratio, -clip_low, clip_high)) where A > 0, max(..) where A <= 0
        loss = -A exp(mean of x over the sequence)

    Coefficient: c = exp(mean x), and 0 for a token whose own log-ratio is clipped. Aggregate with `seq_mean`.
    The clip distances are in *log* space: 0.4 means ratios in [0.67, 1.49]. A is one number per sequence.
    Limits: no clip active: `gspo` without its clip.
    Differs: verl `geo_mean` takes the mean of A over the sequence.
    Reference: arXiv:2507.20673.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return -advantages * bounded_exp(seq_log_ratio(clipped, mask=mask, cu_seqlens=cu_seqlens))


def vespo(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Float[Tensor, "T"]:
    """Variational sequence-level soft policy optimisation: a gamma-shaped weight of the sequence's exact ratio W.

        loss = -sg(phi(W)) A log_ratio          phi(W) = W^k exp(lambda (1 - W)),  W = exp(seq_log_ratio_sum)

    with k, lambda = k_pos, lambda_pos where A >= 0, k_neg, lambda_neg where A < 0.
    Coefficient: c = phi(W), 1 at W = 1 and towards 0 on both sides; its peak is at W = k / lambda. No clip.
    `log_ratio` is best logp - rollout_logp, so that no further correction multiplies it.
    Differs: TRL `vespo` clamps each token's log-ratio to +-20 and log W to [-18.4, 20].
    Reference: arXiv:2602.10693; TRL `get_gamma_weights`.
    """
    check_positive(k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    log_w = seq_log_ratio_sum(log_ratio.detach(), mask=mask, cu_seqlens=cu_seqlens).clamp(max=MAX_LOG_RATIO)
    below_one = 1 - log_w.exp()
    positive, negative = k_pos * log_w + lambda_pos * below_one, k_neg * log_w + lambda_neg * below_one
    return -torch.where(advantages >= 0, positive, negative).exp() * advantages * log_ratio


def kimi15(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    tau: float = 0.1,
) -> Float[Tensor, "T"]:
    """Kimi k1.5's mirror descent: the policy gradient plus a quadratic pull on the whole sequence's log-ratio S.

        loss_t = (-A + tau / 2 S) log_ratio_t          summed over a sequence: -A S + tau / 2 S^2

    Gradient of the sum: -(A - tau S) dlogp: that of `reinforce` on-policy, and no multiple of A elsewhere; c is not
    defined. Aggregate with `seq_mean_token_sum`. A is r minus the group's mean.
    Limits: sequences of one token are `dro` with beta = tau.
    Differs: ROLL `kimi15` (tau 0.1) squares each token's log-ratio, which is `dro`.
    Reference: arXiv:2501.12599, equation 3.
    """
    check_at_least(0, tau=tau)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    total = seq_log_ratio_sum(log_ratio, mask=mask, cu_seqlens=cu_seqlens)
    return (0.5 * tau * total - advantages) * log_ratio
