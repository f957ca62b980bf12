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
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import MAX_LOG_RATIO
from rlkit.losses._inputs import prepared


def k1(
    logp: Float[Tensor, "*shape"], ref_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """The log-ratio itself: unbiased, of either sign, with the largest variance.

        k1 = d = logp - ref_logp

    As a loss its expected gradient is 0: it pulls towards nothing and only adds noise. Use it in the reward.
    Differs: nothing (verl `kl`, TRL has none, OpenRLHF `k1`, slime `k1`).
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
    Differs: nothing (verl `mse`, OpenRLHF and slime `k2`).
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
    Differs: verl `low_var_kl` clamps d to +-20 and the result to +-10; NeMo 20 and 10;
    OpenRLHF +-10; TRL and GRPO nothing.
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
    Differs: masked tokens (tool output) add nothing here, in slime#1372 and miles#1383 they leaked.
    Reference: arXiv:2203.02155, equation 2.
    """
    rewards, logp, ref_logp = prepared(mask, rewards=rewards, logp=logp, ref_logp=ref_logp)
    return (rewards - kl_coef * estimator(logp, ref_logp, mask=mask)).detach()
