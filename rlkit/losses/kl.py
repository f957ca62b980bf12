"""Estimators of KL(pi || pi_ref) from sampled tokens, in nats.

With d = logp - ref_logp of the sampled tokens. As a *value*, k1 and k3 are unbiased for on-policy samples and k2 is
biased. As a *loss*, the expected gradient counts instead:

    | loss | E[gradient], on-policy, per state |
    |------|-----------------------------------|
    | k1   | 0                                 |
    | k2   | grad KL(pi || ref)                |
    | k3   | grad KL(ref || pi)                |

Per state: the KL of whole sequences also depends on which states the policy visits. For that, put the KL into the
reward (`kl_in_reward`).

`unbiased_kl` multiplies by the ratio: value and gradient are then both unbiased for KL(pi || ref), also off-policy. The
`*_straight_through` forms have the value of one estimator and the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit._util.tensors import (
    MAX_LOG_RATIO,
    bounded_exp,
    check_float,
    check_logits,
    check_mask,
    check_same_shape,
    masked,
    upcast,
)
from rlkit.losses._inputs import check_at_least, check_one_number, prepared
from rlkit.losses.ratios import token_gradient
from rlkit.types import Mask, Tokens

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


def k1(logp: Tokens, ref_logp: Tokens, *, mask: Mask = None) -> Tokens:
    """The log-ratio: unbiased, may be negative, highest variance.

        k1 = d = logp - ref_logp

    As a loss its expected gradient is 0, so it only adds noise. Use it in the reward.
    Reference: http://joschu.net/blog/kl-approx.html
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    return logp - ref_logp


def k2(logp: Tokens, ref_logp: Tokens, *, mask: Mask = None) -> Tokens:
    """Half the squared log-ratio: non-negative, biased as a value, correct as a loss.

        k2 = d^2 / 2

    Expected on-policy gradient: grad KL(pi || ref).
    Reference: http://joschu.net/blog/kl-approx.html
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Tokens, ref_logp: Tokens, *, mask: Mask = None) -> Tokens:
    """Unbiased and non-negative: k1 with the control variate `exp(-d) - 1`, whose mean is 0.

        k3 = exp(-d) - 1 + d

    Expected on-policy gradient as a loss: that of the *other* direction, KL(ref || pi).
    Limits: d -> 0 gives d^2 / 2. Below d = -20 the exponential is capped at e^20, in the value and in the slope (which
    keeps its sign); the linear term is not clamped.
    Differs: verl clamps d to +-20 and the result to +-10; TRL clamps nothing.
    Reference: http://joschu.net/blog/kl-approx.html, arXiv:2402.03300 equation 4.
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    d = logp - ref_logp
    excess = (-d.detach() - MAX_LOG_RATIO).clamp(min=0)
    return torch.expm1(-d - excess) + d


def abs_kl(logp: Tokens, ref_logp: Tokens, *, mask: Mask = None) -> Tokens:
    """The absolute log-ratio: a penalty, not an estimate of the KL.

        |d|

    Its mean is above the KL; its gradient has magnitude 1 wherever d is not 0.
    Reference: verl `kl_penalty_forward`, trainer/ppo/core_algos.py.
    """
    logp, ref_logp = prepared(mask, logp=logp, ref_logp=ref_logp)
    return (logp - ref_logp).abs()


def kl_in_reward(
    rewards: Tokens,
    logp: Tokens,
    ref_logp: Tokens,
    *,
    kl_coef: float | Float[Tensor, ""],
    mask: Mask,
    estimator: Callable[..., Tensor] = k1,
) -> Tokens:
    """Token rewards minus a KL penalty: the policy gradient then includes the effect on later states.

        r_t' = r_t - kl_coef * kl_t                    detached; 0 where the mask is False

    With k1, the policy gradient of the return is exactly that of the KL between whole sequences; with k2 and k3 it is
    biased, since the gradient through the estimate is missing. `estimator` is any `f(logp, ref_logp)`, which gets 0 for
    both where the mask is False.
    Differs: masked tokens (tool output) contribute 0 (they leaked in slime issue 1372 and miles issue 1383).
    Reference: arXiv:2203.02155, equation 2.
    """
    check_one_number(kl_coef=kl_coef)
    check_at_least(0, kl_coef=kl_coef)
    rewards, logp, ref_logp = prepared(mask, rewards=rewards, logp=logp, ref_logp=ref_logp)
    return (rewards - kl_coef * estimator(logp, ref_logp)).detach()


def k1_straight_through(logp: Tokens, ref_logp: Tokens, *, mask: Mask = None) -> Tokens:
    """The value of `k1` with the gradient of `k2`.

        k2 - sg(k2) + sg(k1)

    The value is unbiased; expected on-policy gradient: grad KL(pi || ref).
    Reference: verl `kl_penalty`, trainer/ppo/core_algos.py.
    """
    return token_gradient(k1(logp, ref_logp, mask=mask), k2(logp, ref_logp, mask=mask))


def k3_straight_through(logp: Tokens, ref_logp: Tokens, *, mask: Mask = None) -> Tokens:
    """The value of `k3` with the gradient of `k2`.

        k2 - sg(k2) + sg(k3)

    The value is unbiased and non-negative; expected on-policy gradient: grad KL(pi || ref).
    Reference: verl `kl_penalty`, trainer/ppo/core_algos.py.
    """
    return token_gradient(k3(logp, ref_logp, mask=mask), k2(logp, ref_logp, mask=mask))


def unbiased_kl(
    logp: Tokens, ref_logp: Tokens, old_logp: Tokens, *, mask: Mask = None, estimator: Callable[..., Tensor] = k3
) -> Tokens:
    """Ratio-corrected KL estimator: unbiased in value *and* gradient, on-policy and off-policy.

        r * estimator(logp, ref_logp)          r = exp(logp - old_logp), with its gradient

    For samples of pi_old: E[value] = KL(pi || ref) and E[gradient] = grad KL(pi || ref), per state, with `k1` or `k3`.
    `old_logp` is of the policy that sampled; on-policy pass `logp.detach()`.
    Differs: NeMo-RL `use_on_policy_kl_approximation` uses the rollout's log-probs, and clamps to +-10.
    Reference: DeepSeek-V3.2, arXiv:2512.02556; TRL#4967.
    """
    logp, ref_logp, old_logp = prepared(mask, logp=logp, ref_logp=ref_logp, old_logp=old_logp)
    return bounded_exp(logp - old_logp) * estimator(logp, ref_logp)


def kl_from_logits(
    logits: Float[Tensor, "*shape V"], ref_logits: Float[Tensor, "*shape V"], *, mask: Mask = None
) -> Tokens:
    """Exact KL divergence at each position, in nats, from the full distributions.

        KL(pi || ref) = sum_v pi_v (log pi_v - log ref_v)

    Logits are temperature-scaled by the caller. A logit of -inf in `logits` contributes 0, and so does a probability
    that underflows; -inf in `ref_logits` only gives inf. Swap the arguments for KL(ref || pi). Memory: several copies
    of [*shape, V]; call it on slices of the positions.
    """
    check_float(logits=logits, ref_logits=ref_logits)
    check_logits(logits=logits, ref_logits=ref_logits)
    check_same_shape(logits=logits, ref_logits=ref_logits)
    check_mask(mask, positions=logits[..., 0])
    rows = None if mask is None else mask.unsqueeze(-1)
    logp, ref_logp = (masked(upcast(x), rows).log_softmax(-1) for x in (logits, ref_logits))
    possible = logp.exp() > 0
    gap = torch.where(possible, logp, 0) - torch.where(possible, ref_logp, 0)
    return (logp.exp() * gap).sum(-1)
