"""Traces for off-policy data: V-trace, Retrace, Q(lambda), clipped importance sampling.

    ratio_t = exp(log_ratio_t)     log_ratio = logp of the learned policy minus logp of the behaviour policy

The exponent is capped at 20. Masked tokens, `gamma`, `lam`, `bootstrap` and dtypes are as in `rlkit.advantages.traces`.
A trace cap above 1 (`c_max`; `rho_max` in `clipped_is_returns`) makes the scan sequential: about 0.3 s for a million
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import bounded_exp, check_no_ratio, masked
from rlkit.advantages.traces import coefficient, end_values, following, next_action, prepared, scan

__all__ = ["VTrace", "clipped_is_returns", "q_lambda", "retrace", "vtrace"]


class VTrace(NamedTuple):
    """Advantages for the policy (they include the truncated ratio), targets for the critic."""

    advantages: Float[Tensor, "T"]
    targets: Float[Tensor, "T"]


def vtrace(
    rewards: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    log_ratio: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    lam: float | Float[Tensor, "T"] = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
    pg_rho_max: float | None = None,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> VTrace:
    """V-trace: off-policy value targets and policy advantages from truncated ratios (IMPALA).

        rho_t = min(rho_max, ratio_t)     c_t = lam_t min(c_max, ratio_t)
        delta_t = rho_t (r_t + gamma_t V' - V_t)
        x_t = delta_t + gamma_t c_t x'                               x' after the last action: 0
        targets_t = V_t + x_t
        advantages_t = min(pg_rho_max, ratio_t) (r_t + gamma_t targets' - V_t)

    The trace x is cut by its *own* token's c. `targets'` after the last action is `bootstrap`. `pg_rho_max` defaults to
    `rho_max`. The advantages include the ratio: use them with `reinforce`, not with a surrogate that has a ratio.

    Gradient: flows into `values` and `log_ratio`, unless under `torch.no_grad`.
    Limits:   at ratio 1 and caps >= 1 the targets are `td_lambda`, and at lam = 1 the advantages those of `gae`; with
              lam = 0 the targets are one truncated TD step; rho_max = 0 leaves the values unchanged; without
              truncation and at lam = 1 it is per-decision importance sampling.
    Errors:   ValueError for rho_max, c_max or pg_rho_max below 0, and for ratios as `log_ratio` (on the CPU). The
              paper's c_max <= rho_max is not checked.
    Differs:  from rlax at lam < 1: its advantages use lam targets' + (1 - lam) V' instead of targets'.
    Reference: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, section 4, remark 2
    """
    pg_rho_max = rho_max if pg_rho_max is None else pg_rho_max
    _check_caps(rho_max=rho_max, c_max=c_max, pg_rho_max=pg_rho_max)
    rewards, values, log_ratio = prepared(mask, cu_seqlens, rewards=rewards, values=values, log_ratio=log_ratio)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma, lam = coefficient(mask, rewards, gamma=gamma), coefficient(mask, rewards, lam=lam)
    ratio = _ratio(log_ratio, mask)
    next_values = next_action(values, mask=mask, cu_seqlens=cu_seqlens, end=end)
    delta = ratio.clamp(max=rho_max) * (rewards + gamma * next_values - values)
    zero = torch.zeros_like(end)
    c = lam * ratio.clamp(max=c_max)
    x = scan(gamma * c, delta, mask=mask, cu_seqlens=cu_seqlens, end=zero, a_max=c_max)
    next_targets = next_values + following(x, cu_seqlens=cu_seqlens, end=zero)
    advantages = ratio.clamp(max=pg_rho_max) * (rewards + gamma * next_targets - values)
    return VTrace(masked(advantages, mask), masked(values + x, mask))


def retrace(
    rewards: Float[Tensor, "T"],
    q_values: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    *,
    log_ratio: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    lam: float | Float[Tensor, "T"] = 1.0,
    c_max: float = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """Retrace(lambda): off-policy targets for action values.

        c_t = lam_t min(c_max, ratio_t)
        G_t = r_t + gamma_t (V' + c' (G' - Q'))          after the last action V' is bootstrap and c' is 0

    `q_values` are Q(s_t, a_t) of the sampled tokens, `values` V(s_t) = E_a Q(s_t, a) under the learned policy. The
    trace is cut by the *next* action's c; the target does not contain action t's own ratio. The advantage is G - V.

    Gradient: flows into all streams, unless under `torch.no_grad`.
    Limits:   lam = 0 gives r + gamma V'; ratio = 1, lam = 1, Q = V gives `discounted_returns`; a large ratio is
              capped, a ratio of 0 cuts the trace.
    Reference: Munos et al. 2016, https://arxiv.org/abs/1606.02647, section 3
    """
    _check_caps(c_max=c_max)
    (log_ratio,) = prepared(mask, cu_seqlens, log_ratio=log_ratio)
    c = coefficient(mask, log_ratio, lam=lam) * _ratio(log_ratio, mask).clamp(max=c_max)
    return _off_policy_q(rewards, q_values, values, c, mask, cu_seqlens, gamma, bootstrap, c_max)


def q_lambda(
    rewards: Float[Tensor, "T"],
    q_values: Float[Tensor, "T"],
    values: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    lam: float | Float[Tensor, "T"] = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """Q(lambda) with off-policy corrections: Retrace's target without a ratio in the trace.

        G_t = r_t + gamma_t (V' + lam' (G' - Q'))          after the last action V' is bootstrap and lam' is 0

    Converges if the two policies are close: lam < (1 - gamma) / (gamma d), d their largest L1 distance over states.

    Gradient: flows into all streams, unless under `torch.no_grad`.
    Limits:   lam = 0 gives r + gamma V'; Q = V gives `td_lambda` with a constant lam.
    Reference: Harutyunyan et al. 2016, https://arxiv.org/abs/1602.04951
    """
    (like,) = prepared(mask, cu_seqlens, rewards=rewards)
    c = coefficient(mask, like, lam=lam).expand_as(like)
    return _off_policy_q(rewards, q_values, values, c, mask, cu_seqlens, gamma, bootstrap, 1.0)


def clipped_is_returns(
    rewards: Float[Tensor, "T"],
    log_ratio: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    rho_max: float = 1.0,
    bootstrap: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """Returns by per-decision importance sampling, each ratio capped.

        G_t = min(rho_max, ratio_t) (r_t + gamma_t G')          G' after the last action: bootstrap

    Estimates V(s_t) under the learned policy; it includes the ratio of action t. For rho_max = inf it is unbiased, with
    a variance that grows exponentially with length; with a cap it is biased low (for rewards >= 0). To weight the loss
    of each token by one ratio instead, use `rlkit.losses.tis`.

    Gradient: flows into `log_ratio`, unless under `torch.no_grad`.
    Limits:   ratio = 1 is `discounted_returns`; equal to `vtrace` targets at V = 0, lam = 1 and both caps rho_max.
    Reference: Precup, Sutton & Singh 2000, Eligibility traces for off-policy policy evaluation, section 4; the cap
               as in https://arxiv.org/abs/1802.01561
    """
    _check_caps(rho_max=rho_max)
    rewards, log_ratio = prepared(mask, cu_seqlens, rewards=rewards, log_ratio=log_ratio)
    end = end_values(bootstrap, cu_seqlens, rewards)
    rho = _ratio(log_ratio, mask).clamp(max=rho_max)
    gamma = coefficient(mask, rewards, gamma=gamma)
    return masked(scan(rho * gamma, rho * rewards, mask=mask, cu_seqlens=cu_seqlens, end=end, a_max=rho_max), mask)


def _off_policy_q(
    rewards: Tensor,
    q_values: Tensor,
    values: Tensor,
    c: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float | Tensor,
    bootstrap: Tensor | None,
    c_max: float,
) -> Tensor:
    """G_t = r_t + gamma_t (V' + c' (G' - Q')), by the scan of y_t = c_t (G_t - Q_t) = c_t (delta_t + gamma_t y')."""
    rewards, q_values, values = prepared(mask, cu_seqlens, rewards=rewards, q_values=q_values, values=values)
    end = end_values(bootstrap, cu_seqlens, rewards)
    gamma = coefficient(mask, rewards, gamma=gamma)
    zero = torch.zeros_like(end)
    one_step = rewards + gamma * next_action(values, mask=mask, cu_seqlens=cu_seqlens, end=end)
    y = scan(c * gamma, c * (one_step - q_values), mask=mask, cu_seqlens=cu_seqlens, end=zero, a_max=c_max)
    return masked(one_step + gamma * following(y, cu_seqlens=cu_seqlens, end=zero), mask)


def _ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The ratio, its exponent capped; ValueError for a `log_ratio` that is one already."""
    check_no_ratio(log_ratio, mask)
    return bounded_exp(log_ratio)


def _check_caps(**caps: float) -> None:
    for name, cap in caps.items():
        if not cap >= 0:
            raise ValueError(f"{name} must be at least 0 (math.inf: no cap), got {cap}")
