"""Surrogates that weigh REINFORCE by a function of the ratio, without PPO's minimum.

Same contract as `rlkit.losses.surrogates`: `f(log_ratio, advantages, *, ..., mask=None) -> token_loss`, gradient
`-c * A * dlogp` with c = 1 on-policy, masked places 0 in value and gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import bounded_exp, carry_nan
from rlkit.losses._inputs import check_at_least, check_positive, prepared
from rlkit.losses.corrections import icepop


def reinforce(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """The policy gradient itself.

        loss = -A log_ratio

    Coefficient: c = 1 everywhere; no clip, no importance weight. `log_ratio` may as well be `logp`.
    Differs: nothing (ROLL `vanilla`; verl `bypass_mode` with `loss_type=reinforce`; NeMo-RL `disable_ppo_ratio`).
    Reference: Williams 1992, doi:10.1007/BF00992696.
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return -advantages * log_ratio


def gpg(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Group policy gradient: `reinforce` under the name of its paper, which also fixes how A is made.

        loss = -A log_ratio

    Coefficient: c = 1. The paper's factor for groups that teach nothing is in `rlkit.advantages.gpg`.
    Differs: nothing (verl `gpg`).
    Reference: arXiv:2504.02546; verl `compute_policy_loss_gpg`.
    """
    return reinforce(log_ratio, advantages, mask=mask)


def importance_sampling(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """The importance-weighted policy gradient, unclipped.

        loss = -A r

    Coefficient: c = r, unbounded up to e^20.
    Limits: on-policy `reinforce`.
    Differs: nothing (Tinker and SkyRL `importance_sampling`).
    Reference: https://tinker-docs.thinkingmachines.ai/losses
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return -advantages * bounded_exp(log_ratio)


def cispo(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    max_weight: float = 5.0,
    min_weight: float = 0.0,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Clip the importance weight, not the update: every token keeps a bounded gradient.

        loss = -sg(clip(r, min_weight, max_weight)) A log_ratio

    Coefficient: c = clip(r, min_weight, max_weight), whatever the sign of A; never 0.
    Both bounds are absolute ratios. The lower one is off, as MiniMax-M1 and ScaleRL run it; 5 is ScaleRL's cap.
    Limits: max_weight = inf has the gradient of `importance_sampling`; max_weight = min_weight = 1 is `reinforce`.
    Differs: TRL `epsilon_high` is an absolute bound too, 0.2 if unset; verl, slime, SkyRL, ROLL and NeMo-RL take
    distances from 1 and clip below as well.
    Reference: arXiv:2506.13585, equation 4; arXiv:2510.13786.
    """
    check_at_least(0, min_weight=min_weight)
    check_at_least(min_weight, max_weight=max_weight)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return _weighted(bounded_exp(log_ratio).clamp(min_weight, max_weight), log_ratio, advantages)


def double_sided_is(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Importance weighting with a hard gate on both sides, whatever the sign of A (GLM-5).

        loss = -sg(r 1[1 - clip_low <= r <= 1 + clip_high]) A log_ratio

    Coefficient: c = r inside the interval, 0 outside. `icepop` as a surrogate: meant for log_ratio = logp -
    rollout_logp.
    Differs: SkyRL `rollout_is` leaves the two end points out.
    Reference: SkyRL `rollout_is_policy_loss`.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    weight = icepop(log_ratio, low=1 - clip_low, high=1 + clip_high, mask=mask)
    return weight * reinforce(log_ratio, advantages, mask=mask)


def topr(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Tapered off-policy REINFORCE: imitate what was good, let go of what was bad once it has become unlikely.

        loss = -A log_ratio where A > 0, -sg(min(r, 1)) A log_ratio where A <= 0

    Coefficient: c = 1 for A > 0, min(r, 1) for A < 0.
    The paper's ratio is the whole sequence's: give it `token_gradient(seq_log_ratio_sum(...), log_ratio)`.
    Differs: ROLL `topr` uses the token's ratio and splits by the sign of the score, not of A.
    Reference: arXiv:2503.14286, equation 8.
    """
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    weight = torch.where(advantages > 0, 1.0, bounded_exp(log_ratio).clamp(max=1))
    return _weighted(weight, log_ratio, advantages)


def sapo(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Soft adaptive policy optimisation: a sigmoid gate in place of the hard clip.

        loss = -A (4 / tau) sigmoid(tau (r - 1))          tau = tau_pos where A > 0, tau_neg where A <= 0

    Coefficient: c = 4 p (1 - p) r with p = sigmoid(tau (r - 1)), whatever the sign of A: 1 at r = 1, at tau 1 at most
    1.6 near r = 2, then towards 0, sooner for a larger tau. No hard clip.
    Limits: at r = 1 the gate is 2 / tau and its slope 1.
    Differs: nothing (TRL, verl and SkyRL `sapo`, AReaL `use_sapo_loss`).
    Reference: arXiv:2511.20347.
    """
    check_positive(tau_pos=tau_pos, tau_neg=tau_neg)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    excess = bounded_exp(log_ratio) - 1
    gate = torch.where(advantages > 0, _soft_gate(excess, tau_pos), _soft_gate(excess, tau_neg))
    return -advantages * gate


def dppo(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    old_logp: Float[Tensor, "*shape"],
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    max_weight: float = 20.0,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Divergence PPO, binary total variation: the trust region is a distance of probabilities, not a ratio.

        loss = -sg(min(r, max_weight) keep) A log_ratio
        keep = pi - pi_old <= delta_high where A > 0, pi - pi_old >= -delta_low where A <= 0

    Coefficient: c = min(r, max_weight), and 0 outside the trust region in the direction of the step.
    A rare token may move by a large factor, a common one may not. `old_logp` is log pi_old, log_ratio = logp -
    old_logp.
    Differs: SkyRL `dppo` and prime-rl have no `max_weight`; prime-rl `kl_tau` (1e-3) adds that much log_ratio^2.
    Reference: arXiv:2602.04879, equation 13; verl `compute_policy_loss_dppo_tv`.
    """
    check_at_least(0, delta_low=delta_low, delta_high=delta_high)
    check_positive(max_weight=max_weight)
    log_ratio, advantages, old_logp = prepared(mask, log_ratio=log_ratio, advantages=advantages, old_logp=old_logp)
    moved = (old_logp + log_ratio.detach()).exp() - old_logp.exp()
    keep = carry_nan(torch.where(advantages > 0, moved <= delta_high, moved >= -delta_low).to(moved.dtype), old_logp)
    return _weighted(bounded_exp(log_ratio).clamp(max=max_weight) * keep, log_ratio, advantages)


def dppo_kl(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    old_logp: Float[Tensor, "*shape"],
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    max_weight: float = 20.0,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Divergence PPO, binary KL: as `dppo`, with the KL of "this token or another" as the distance.

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))          p = pi, q = pi_old of the sampled token
        drop where D > delta_high and p > q (A > 0), or D > delta_low and p < q (A <= 0)

    Coefficient: c = min(r, max_weight), and 0 where dropped.
    Differs: verl `dppo_kl` and SkyRL `binary_kl` add 1e-8 to 1 - p and 1 - q; here both are held at 1e-8 from below.
    Reference: arXiv:2602.04879, equation 14; verl `compute_policy_loss_dppo_kl`.
    """
    check_at_least(0, delta_low=delta_low, delta_high=delta_high)
    check_positive(max_weight=max_weight)
    log_ratio, advantages, old_logp = prepared(mask, log_ratio=log_ratio, advantages=advantages, old_logp=old_logp)
    fixed = log_ratio.detach()
    p, q = (old_logp + fixed).exp(), old_logp.exp()
    divergence = -q * fixed + (1 - q) * ((1 - q).clamp(min=1e-8).log() - (1 - p).clamp(min=1e-8).log())
    up, down = (divergence > delta_high) & (fixed > 0), (divergence > delta_low) & (fixed < 0)
    keep = carry_nan((~torch.where(advantages > 0, up, down)).to(p.dtype), old_logp)
    return _weighted(bounded_exp(log_ratio).clamp(max=max_weight) * keep, log_ratio, advantages)


def dro(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    beta: float,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Direct reward optimisation, per token: the policy gradient plus a quadratic pull back to the old policy.

        loss = -A log_ratio + beta / 2 log_ratio^2

    Gradient: -(A - beta log_ratio) dlogp: not a multiple of A. On-policy it is that of `reinforce`; c is not defined
    elsewhere, and where A = 0 the pull remains. No clip; off-policy data is welcome.
    Differs: the whole sequence's square is `kimi15`. Tinker names it `dro` too, and reads it as distributionally
    robust.
    Reference: arXiv:2405.19107; https://tinker-docs.thinkingmachines.ai/losses
    """
    check_at_least(0, beta=beta)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return -advantages * log_ratio + 0.5 * beta * log_ratio.square()


def nll(logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None) -> Float[Tensor, "*shape"]:
    """Negative log-likelihood of each target: supervised learning.

        loss = -logp

    The positive-example loss of VAPO is this on the tokens of correct samples; ECHO is 0.1 times this on the tokens
    that the environment wrote (their log-probs come from a forward whose mask includes them).
    Differs: nothing (NeMo-RL `positive_example_nll_weight`; prime-rl `echo`, with a token count of its own).
    Reference: arXiv:2504.05118, equation 10.
    """
    (logp,) = prepared(mask, logp=logp)
    return -logp


def _weighted(weight: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return -weight.detach() * advantages * log_ratio


def _soft_gate(excess: Tensor, tau: float) -> Tensor:
    return torch.sigmoid(tau * excess) * (4 / tau)
