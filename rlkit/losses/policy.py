"""Policy-gradient surrogates, one loss per token.

Every function is `f(log_ratio, advantages, *, ..., mask=None) -> token_loss`, elementwise in any shape, with
`log_ratio = logp - old_logp` and r = exp(log_ratio). Its gradient is `-c * A * dlogp`; each docstring states the
coefficient c, which is 1 on-policy. Masked positions have loss 0 and gradient 0, even if they hold NaN.

Above log_ratio 20 the ratio is capped at e^20 and has no gradient. Losses written with `log_ratio` where the paper has
`logp` differ from it by a constant and have the same gradient.

The clipped surrogates come first, then those that multiply REINFORCE by a function of the ratio without PPO's minimum,
then those with a sequence-level ratio: `f(log_ratio, advantages, *, mask, cu_seqlens, ...) -> [T]`. These also return
one loss per token, so they are aggregated by the same weights. If all tokens of a sequence have the same advantage, the
gradient of the *summed* token losses is `-c * A * dlogp` for each token.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import MAX_LOG_RATIO, bounded_exp, carry_nan, check_log_probs, check_same_shape
from rlkit.losses._inputs import check_at_least, check_cap, check_distances, check_positive, prepared
from rlkit.losses.ratios import seq_log_ratio, seq_log_ratio_sum
from rlkit.segments import broadcast_to_tokens, seq_count, seq_lens
from rlkit.types import Mask, Tokens

__all__ = [
    "aspo",
    "cispo",
    "dft",
    "dppo",
    "dppo_kl",
    "dro",
    "dual_clip",
    "gmpo",
    "gspo",
    "importance_sampling",
    "kimi15",
    "luspo",
    "ppo_clip",
    "reinforce",
    "sapo",
    "topr",
    "unbounded_positive",
    "vespo",
]


def ppo_clip(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    mask: Mask = None,
) -> Tokens:
    """Proximal policy optimisation: the pessimistic minimum of the surrogate and its clipped form.

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Coefficient: c = r, and 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low.
    It clips only where a step would move r further from 1; r is unbounded for A < 0 (`dual_clip` bounds it). The clip
    distances may be tensors: one number for the whole batch (`bapo_clip_range`) or one per token. A warning for numbers
    that look like bounds, such as 0.8 and 1.2.
    Limits: clip_low = clip_high = inf is `importance_sampling`; clip_low = clip_high = 0 keeps only steps at r = 1 and
    those that move r back towards 1.
    Differs: verl `vanilla` always adds the dual clip.
    Reference: arXiv:1707.06347, equation 7; asymmetric: arXiv:2503.14476.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    check_distances(clip_low, clip_high)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    ratio = bounded_exp(log_ratio)
    return torch.maximum(-advantages * ratio, -advantages * _clipped(ratio, clip_low, clip_high))


def dual_clip(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    clip_c: float,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    mask: Mask = None,
) -> Tokens:
    """PPO with a second clip: where A < 0 the loss stops growing at ratio `clip_c` > 1.

        loss = ppo_clip where A >= 0, min(ppo_clip, -A clip_c) where A < 0

    Coefficient: that of `ppo_clip`, and 0 also where A < 0 and r > clip_c.
    The usual clip_c is 3. For clip_c > 1 + clip_high this is also INTELLECT-2's two-sided clip (arXiv:2505.07291),
    max(-A min(r, clip_c), -A clip(r, ..)).
    Limits: clip_c = inf is `ppo_clip`.
    Reference: arXiv:1912.09729.
    """
    if clip_c is None or not clip_c > 1:
        raise ValueError(f"clip_c must be above 1, the on-policy ratio, got {clip_c}")
    loss = ppo_clip(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    (advantages,) = prepared(mask, advantages=advantages)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip_c), loss)


def aspo(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_weight: float = float("inf"),
    mask: Mask = None,
) -> Tokens:
    """Asymmetric importance sampling: where A > 0 the ratio is inverted, so tokens of low ratio get larger steps.

        loss = -A sg(min(1 / r, max_weight)) log_ratio     where A > 0 and r <= 1 + clip_high, 0 where r is above
        loss = ppo_clip                                    where A <= 0

    Coefficient: min(1 / r, max_weight) for A > 0, 0 above the clip; that of `ppo_clip` for A < 0.
    The paper's soft dual clip of 1 / r is `max_weight` (no value given there). Without the stop-gradient, 1 / r would
    push tokens with A > 0 *down*.
    Limits: on-policy it is `reinforce`.
    Reference: arXiv:2510.06062.
    """
    check_cap(max_weight)
    negative = ppo_clip(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    fixed = log_ratio.detach()
    weight = bounded_exp(-fixed).clamp(max=max_weight) * (bounded_exp(fixed) <= 1 + clip_high)
    return torch.where(advantages > 0, -advantages * weight * log_ratio, negative)


def unbounded_positive(
    log_ratio: Tokens, advantages: Tokens, *, clip_low: float = 0.2, clip_c: float = 3.0, mask: Mask = None
) -> Tokens:
    """UP: plain REINFORCE where A > 0, the dual-clipped surrogate where A <= 0.

        loss = -A log_ratio where A > 0, dual_clip where A <= 0

    Coefficient: 1 for A > 0 (no clip); that of `dual_clip` for A < 0.
    Reference: arXiv:2607.06987, equation 15.
    """
    negative = dual_clip(log_ratio, advantages, clip_c=clip_c, clip_low=clip_low, clip_high=clip_low, mask=mask)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return torch.where(advantages > 0, -advantages * log_ratio, negative)


def _clipped(ratio: Tensor, clip_low: float | Tensor, clip_high: float | Tensor) -> Tensor:
    for name, x in (("clip_low", clip_low), ("clip_high", clip_high)):
        if isinstance(x, Tensor) and x.numel() != 1:
            check_same_shape(log_ratio=ratio, **{name: x})
    if isinstance(clip_low, Tensor) or isinstance(clip_high, Tensor):
        low, high = (torch.as_tensor(x, dtype=ratio.dtype, device=ratio.device) for x in (1 - clip_low, 1 + clip_high))
        return ratio.clamp(low, high)
    return ratio.clamp(1 - clip_low, 1 + clip_high)


def reinforce(log_ratio: Tokens, advantages: Tokens, *, mask: Mask = None) -> Tokens:
    """The plain policy gradient.

        loss = -A log_ratio

    Coefficient: c = 1 everywhere; no clip, no importance weight. `logp` in place of `log_ratio` has the same gradient.
    Reference: Williams 1992, doi:10.1007/BF00992696.
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return -advantages * log_ratio


def dft(logp: Tokens, *, mask: Mask = None) -> Tokens:
    """Dynamic fine-tuning: the negative log-likelihood of an expert's token, weighted by its probability.

        loss = -sg(p) logp        p = e^logp

    Coefficient: c = p at A = 1, so the gradient is that of -p: tokens that the model finds unlikely count little, where
    the NLL gives each the same. The loss is at most 1/e, and a model that gives a token no probability never learns it.
    Differs: from TRL `loss_type="dft"`, nothing.
    Reference: arXiv:2508.05629, equation 9.
    """
    (logp,) = prepared(mask, logp=logp)
    return -logp.detach().exp() * logp


def importance_sampling(log_ratio: Tokens, advantages: Tokens, *, mask: Mask = None) -> Tokens:
    """The importance-weighted policy gradient, unclipped.

        loss = -A r

    Coefficient: c = r, unbounded up to e^20.
    Limits: on-policy it is `reinforce`.
    Reference: https://tinker-docs.thinkingmachines.ai/losses
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return -advantages * bounded_exp(log_ratio)


def cispo(
    log_ratio: Tokens, advantages: Tokens, *, max_weight: float = 5.0, min_weight: float = 0.0, mask: Mask = None
) -> Tokens:
    """Clip the importance weight, not the update: every token keeps a bounded gradient.

        loss = -sg(clip(r, min_weight, max_weight)) A log_ratio

    Coefficient: c = clip(r, min_weight, max_weight), for either sign of A.
    Both bounds are absolute ratios. The lower one is off by default, as in MiniMax-M1 and ScaleRL; 5 is ScaleRL's cap.
    Limits: max_weight = inf has the gradient of `importance_sampling`; max_weight = min_weight = 1 is `reinforce`.
    Differs: verl, slime, SkyRL, ROLL and NeMo-RL take distances from 1 and also clip below.
    Reference: arXiv:2506.13585, equation 4; arXiv:2510.13786.
    """
    check_at_least(0, min_weight=min_weight)
    check_at_least(min_weight, max_weight=max_weight)
    check_cap(max_weight)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return _weighted(bounded_exp(log_ratio).clamp(min_weight, max_weight), log_ratio, advantages)


def topr(log_ratio: Tokens, advantages: Tokens, *, mask: Mask = None) -> Tokens:
    """Tapered off-policy REINFORCE: full gradient where A > 0, tapered by the ratio where A <= 0.

        loss = -A log_ratio where A > 0, -sg(min(r, 1)) A log_ratio where A <= 0

    Coefficient: c = 1 for A > 0, min(r, 1) for A < 0.
    The paper uses the sequence's ratio: pass `token_gradient(seq_log_ratio_sum(...), log_ratio)`.
    Differs: ROLL `topr` uses the token's ratio and splits by the sign of the reward, not of A.
    Reference: arXiv:2503.14286, equation 8.
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    weight = torch.where(advantages > 0, 1.0, bounded_exp(log_ratio).clamp(max=1))
    return _weighted(weight, log_ratio, advantages)


def sapo(
    log_ratio: Tokens, advantages: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05, mask: Mask = None
) -> Tokens:
    """Soft adaptive policy optimisation: a sigmoid gate in place of the hard clip.

        loss = -A (4 / tau) sigmoid(tau (r - 1))          tau = tau_pos where A > 0, tau_neg where A <= 0

    Coefficient: c = 4 p (1 - p) r with p = sigmoid(tau (r - 1)), for either sign of A. c is 1 at r = 1; for tau = 1 it
    peaks at 1.6 near r = 2 and then falls to 0, faster for a larger tau. No hard clip.
    Limits: at r = 1 the gate is 2 / tau and its slope 1.
    Reference: arXiv:2511.20347.
    """
    check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    excess = bounded_exp(log_ratio) - 1
    gate = torch.where(advantages > 0, _soft_gate(excess, tau_pos), _soft_gate(excess, tau_neg))
    return -advantages * gate


def dppo(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    old_logp: Tokens,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    max_weight: float = 20.0,
    mask: Mask = None,
) -> Tokens:
    """Divergence PPO, binary total variation: the trust region bounds the change in probability, not the ratio.

        loss = -sg(min(r, max_weight) keep) A log_ratio
        keep = pi - pi_old <= delta_high where A > 0, pi - pi_old >= -delta_low where A <= 0

    Coefficient: c = min(r, max_weight), and 0 outside the trust region in the direction of the step.
    A rare token's probability may change by a large factor, a common one's may not. `old_logp` is log pi_old.
    Differs: SkyRL `dppo` and prime-rl have no `max_weight`.
    Reference: arXiv:2602.04879, equation 13; verl `compute_policy_loss_dppo_tv`.
    """
    check_at_least(0, delta_low=delta_low, delta_high=delta_high)
    check_cap(max_weight)
    log_ratio, advantages, old_logp = prepared(mask, log_ratio=log_ratio, advantages=advantages, old_logp=old_logp)
    check_log_probs(old_logp=old_logp)
    change = (old_logp + log_ratio.detach()).exp() - old_logp.exp()
    keep = carry_nan(torch.where(advantages > 0, change <= delta_high, change >= -delta_low).to(change.dtype), old_logp)
    return _weighted(bounded_exp(log_ratio).clamp(max=max_weight) * keep, log_ratio, advantages)


def dppo_kl(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    old_logp: Tokens,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    max_weight: float = 20.0,
    mask: Mask = None,
) -> Tokens:
    """Divergence PPO, binary KL: `dppo` with the KL of "this token or another" as the distance.

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))          p = pi, q = pi_old of the sampled token
        drop where D > delta_high and p > q (A > 0), or D > delta_low and p < q (A <= 0)

    Coefficient: c = min(r, max_weight), and 0 where dropped.
    Differs: verl `dppo_kl` and SkyRL `binary_kl` add 1e-8 to 1 - p and 1 - q; here both are clamped to at least 1e-8.
    Reference: arXiv:2602.04879, equation 14; verl `compute_policy_loss_dppo_kl`.
    """
    check_at_least(0, delta_low=delta_low, delta_high=delta_high)
    check_cap(max_weight)
    log_ratio, advantages, old_logp = prepared(mask, log_ratio=log_ratio, advantages=advantages, old_logp=old_logp)
    check_log_probs(old_logp=old_logp)
    fixed = log_ratio.detach()
    p, q = (old_logp + fixed).exp(), old_logp.exp()
    divergence = -q * fixed + (1 - q) * ((1 - q).clamp(min=1e-8).log() - (1 - p).clamp(min=1e-8).log())
    up, down = (divergence > delta_high) & (fixed > 0), (divergence > delta_low) & (fixed < 0)
    keep = carry_nan((~torch.where(advantages > 0, up, down)).to(p.dtype), old_logp)
    return _weighted(bounded_exp(log_ratio).clamp(max=max_weight) * keep, log_ratio, advantages)


def dro(log_ratio: Tokens, advantages: Tokens, *, beta: float, mask: Mask = None) -> Tokens:
    """Direct reward optimisation, per token: the policy gradient plus a quadratic penalty on the log-ratio.

        loss = -A log_ratio + beta / 2 log_ratio^2

    Gradient: -(A - beta log_ratio) dlogp, not a multiple of A. On-policy it is that of `reinforce`; elsewhere c is not
    defined, and the penalty also acts where A = 0. No clip; suited to off-policy data.
    The square of the sequence's log-ratio is `kimi15`.
    Reference: arXiv:2405.19107; https://tinker-docs.thinkingmachines.ai/losses
    """
    check_at_least(0, beta=beta)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return -advantages * log_ratio + 0.5 * beta * log_ratio.square()


def _weighted(weight: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -weight.detach() * advantages * log_ratio


def _soft_gate(excess: Tensor, tau: float) -> Tensor:
    return torch.sigmoid(tau * excess) * (4 / tau)


def gspo(
    log_ratio: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"] | None,
    cu_seqlens: Int[Tensor, "N1"],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Tensor, "T"]:
    """PPO's clip on the sequence's ratio s, the geometric mean of its token ratios.

        loss = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))          s = exp(seq_log_ratio)

    Coefficient: c = s, and 0 for the whole sequence where `ppo_clip` would clip. Aggregate with `seq_mean`. GSPO-token
    is `ppo_clip` of `token_gradient(seq_log_ratio(...), log_ratio)`.
    Limits: for sequences of one token it is `ppo_clip`.
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
    """GSPO times the sequence's length, which removes its bias towards short answers.

        loss = gspo * (trainable tokens of the sequence)

    Coefficient: c = length * s, so not 1 on-policy. With `seq_mean` weights the length cancels, and each token's
    gradient has weight 1 / num_seqs. `gspo` with `seq_mean_token_sum` has the same gradient.
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
    """Geometric-mean policy optimisation: clip each token's log-ratio, then take the geometric mean over the sequence.

        x_t  = min(log_ratio, clip(log_ratio, -clip_low, clip_high)) where A > 0, max(..) where A <= 0
        loss = -A exp(mean of x over the sequence)

    Coefficient: c = exp(mean x), and 0 for a token whose log-ratio is clipped. Aggregate with `seq_mean`.
    The clip distances are in *log* space: 0.4 means ratios in [0.67, 1.49]. A is constant over a sequence.
    Limits: where no token is clipped it is `gspo` without its clip.
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

    with (k, lambda) = (k_pos, lambda_pos) where A >= 0, (k_neg, lambda_neg) where A < 0.
    Coefficient: c = phi(W): 1 at W = 1, falling to 0 on both sides of its peak at W = k / lambda. No clip.
    Pass logp - rollout_logp as `log_ratio`; then no rollout correction is needed.
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
    """Kimi k1.5's mirror descent: the policy gradient plus a quadratic penalty on the sequence's log-ratio S.

        loss_t = (-A + tau / 2 S) log_ratio_t          summed over a sequence: -A S + tau / 2 S^2

    Gradient of the sum: -(A - tau S) dlogp. On-policy it is that of `reinforce`; elsewhere it is not a multiple of A,
    and c is not defined. Aggregate with `seq_mean_token_sum`. A is the reward minus the group's mean.
    Limits: for sequences of one token it is `dro` with beta = tau.
    Differs: ROLL `kimi15` (tau 0.1) squares each token's log-ratio, which is `dro`.
    Reference: arXiv:2501.12599, equation 3.
    """
    check_at_least(0, tau=tau)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    total = seq_log_ratio_sum(log_ratio, mask=mask, cu_seqlens=cu_seqlens)
    return (0.5 * tau * total - advantages) * log_ratio
