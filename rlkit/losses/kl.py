"""Estimators of KL(pi || pi_ref) from sampled tokens, in nats.

Each takes the log-probs of the sampled tokens, d = logp - ref_logp. As a *value* k1 and k3 are unbiased for on-policy
samples and k2 is not; as a *loss* what counts is the expected gradient, which is another matter:

    | loss | E[gradient], on-policy, per state |
    |------|-----------------------------------|
    | k1   | 0                                 |
    | k2   | grad KL(pi || ref)                |
    | k3   | grad KL(ref || pi)                |

Per state: the KL of whole sequences also depends on which states are visited; for that the KL belongs into the reward
(`kl_in_reward`).

`unbiased_kl` corrects by the ratio: value and gradient are then both those of KL(pi || ref), also off-policy. The
`*_straight_through` forms have one estimator's value and k2's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import MAX_LOG_RATIO, bounded_exp, check_float, check_mask, check_same_shape, masked, upcast
from rlkit.losses._inputs import prepared
from rlkit.losses.ratios import token_gradient

__all__ = [
    "abs_kl",
    "k1",
    "k1_straight_through",
    "k2",
    "k3",
    "k3_straight_through",
    "kl_from_logits",
    "kl_in_reward",
    "unbiased_kl",
]


def k1(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """The log-ratio itself: unbiased, of either sign, with the largest variance.

        k1 = d = logp - ref_logp

    As a loss its expected gradient is 0: it pulls towards nothing and only adds noise. Use it in the reward.
    Differs: nothing (verl, OpenRLHF and slime `k1`).
    Reference: http://joschu.net/blog/kl-approx.html
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    return logp - ref_logp


def k2(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """Half the squared log-ratio: never negative, biased as a value, right as a loss.

        k2 = d^2 / 2

    Expected on-policy gradient: grad KL(pi || ref).
    Differs: nothing (verl, OpenRLHF and slime `k2`).
    Reference: http://joschu.net/blog/kl-approx.html
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    return 0.5 * (logp - ref_logp).square()


def k3(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """Unbiased and never negative: k1 with the control variate `exp(-d) - 1`, whose mean is 0.

        k3 = exp(-d) - 1 + d

    Expected on-policy gradient as a loss: that of the *other* direction, KL(ref || pi).
    Limits: d -> 0 gives d^2 / 2. Below d = -20 the exponential is held at e^20, in the value and in the slope (which
    keeps its sign); the linear term is not clamped.
    Differs: verl clamps d to +-20 and the result to +-10, OpenRLHF and NeMo-RL likewise; TRL nothing.
    Reference: http://joschu.net/blog/kl-approx.html, arXiv:2402.03300 equation 4.
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    d = logp - ref_logp
    excess = (-d.detach() - MAX_LOG_RATIO).clamp(min=0)
    return torch.expm1(-d - excess) + d


def abs_kl(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """The absolute log-ratio: a penalty in its own right, not an estimate of the KL.

        |d|

    Its mean lies above the KL; its gradient has size 1 wherever d is not 0.
    Differs: nothing (verl and SkyRL `abs`).
    Reference: verl `kl_penalty_forward`, trainer/ppo/core_algos.py.
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    return (logp - ref_logp).abs()


def kl_in_reward(
    rewards: Float[Tensor, "*shape"],
    logp: Float[Tensor, "*shape"],
    ref_logp: Float[Tensor, "*shape"],
    *,
    kl_coef: float | Float[Tensor, ""],
    mask: Bool[Tensor, "*shape"] | None,
    estimator: Callable[..., Tensor] = k1,
) -> Float[Tensor, "*shape"]:
    """Token rewards minus a KL penalty: the policy gradient then also sees that later states change.

        r_t' = r_t - kl_coef * kl_t                    detached; 0 where the mask is False

    With k1 the return's gradient is that of the KL between whole sequences, exactly.
    `estimator` is any `f(logp, ref_logp, *, mask)` of this module; for values of either sign keep k1.
    Differs: masked tokens (tool output) add nothing here (they leaked in slime issue 1372, miles issue 1383).
    Reference: arXiv:2203.02155, equation 2.
    """
    rewards, logp, ref_logp = prepared(mask, rewards=rewards, logp=logp, ref_logp=ref_logp)
    return (rewards - kl_coef * estimator(logp, ref_logp, mask=mask)).detach()


def k1_straight_through(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """The value of `k1` with the gradient of `k2`.

        k2 - sg(k2) + sg(k1)

    As a value unbiased; expected on-policy gradient: grad KL(pi || ref).
    Differs: nothing (verl `k1+`; OpenRLHF `unbiased_gradient`, with a ratio of at most 10).
    Reference: verl `kl_penalty`, trainer/ppo/core_algos.py.
    """
    return token_gradient(k1(logp, ref_logp, mask=mask), k2(logp, ref_logp, mask=mask))


def k3_straight_through(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """The value of `k3` with the gradient of `k2`.

        k2 - sg(k2) + sg(k3)

    As a value unbiased and never negative; expected on-policy gradient: grad KL(pi || ref).
    Differs: nothing (verl `k3+`; OpenRLHF `unbiased_gradient`, with a ratio of at most 10).
    Reference: verl `kl_penalty`, trainer/ppo/core_algos.py.
    """
    return token_gradient(k3(logp, ref_logp, mask=mask), k2(logp, ref_logp, mask=mask))


def unbiased_kl(
    logp: Float[Tensor, "*shape"],
    ref_logp: Float[Tensor, "*shape"],
    old_logp: Float[Tensor, "*shape"],
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
    estimator: Callable[..., Tensor] = k3,
) -> Float[Tensor, "*shape"]:
    """The ratio-corrected estimator: unbiased in value *and* gradient, on-policy and off-policy.

        r * estimator(logp, ref_logp)          r = exp(logp - old_logp), with its gradient

    For samples of pi_old: E[value] = KL(pi || ref) and E[gradient] = grad KL(pi || ref), per state, with `k1` or `k3`.
    `old_logp` is the policy that sampled; on-policy give `logp.detach()`.
    Differs: NeMo-RL `use_on_policy_kl_approximation` is this over the rollout's log-probs, clamped to +-10.
    Reference: DeepSeek-V3.2, arXiv:2512.02556; TRL#4967.
    """
    kl = estimator(logp, ref_logp, mask=mask)
    logp, old_logp = prepared(mask, logp=logp, old_logp=old_logp)
    return bounded_exp(logp - old_logp) * kl


def kl_from_logits(
    logits: Float[Tensor, "*shape V"],
    ref_logits: Float[Tensor, "*shape V"],
    *,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """The exact KL divergence at each position, in nats, from both distributions in full.

        KL(pi || ref) = sum_v pi_v (log pi_v - log ref_v)

    Give temperature-scaled logits. A logit of -inf in `logits` contributes 0; one only in `ref_logits` makes the KL
    inf. Swap the arguments for KL(ref || pi). Memory: several copies of [*shape, V]; call it on slices of the
    positions.
    """
    check_float(logits=logits, ref_logits=ref_logits)
    check_same_shape(logits=logits, ref_logits=ref_logits)
    check_mask(mask, positions=logits[..., 0])
    rows = None if mask is None else mask.unsqueeze(-1)
    logp, ref_logp = (masked(upcast(x), rows).log_softmax(-1) for x in (logits, ref_logits))
    possible = logp > -torch.inf
    gap = torch.where(possible, logp, 0) - torch.where(possible, ref_logp, 0)
    return (logp.exp() * gap).sum(-1)
