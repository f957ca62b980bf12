"""Surrogates that need a statistic of the whole batch, and the functions that compute it.

Compute the statistic (a cutoff, a clip range, a selection of tokens) once per optimizer step, from detached values of
the whole batch, before the batch is split, and pass it to the loss. The losses are elementwise; where the docstring
gives a coefficient c, the gradient is `-c * A * dlogp`, as in `rlkit.losses.policy`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._util.tensors import bounded_exp, carry_nan, check_log_probs, check_no_nan, check_same_shape, cumsum, masked
from rlkit.losses._inputs import check_alone, check_at_least, check_between, check_one_number, check_positive, prepared
from rlkit.losses.policy import importance_sampling, ppo_clip
from rlkit.types import Mask, Tokens

__all__ = [
    "ClipRange",
    "bapo_clip_range",
    "clip_cov",
    "kl_cov",
    "m2_cutoff",
    "m2po",
    "select_between",
    "select_top",
    "token_covariance",
]


class ClipRange(NamedTuple):
    """Clip distances from 1 for `ppo_clip(x, A, **clip_range._asdict())`."""

    clip_low: Float[Tensor, ""]
    clip_high: Float[Tensor, ""]


def m2_cutoff(log_ratio: Tokens, advantages: Tokens, *, max_m2: float = 0.04, mask: Mask = None) -> Float[Tensor, ""]:
    """The largest squared log-ratio to keep, so that the mean of the kept ones is at most `max_m2`.

    Only trust-region tokens count (A > 0 and r > 1, or A < 0 and r < 1); PPO does not clip the others either. Equal
    values are kept or dropped together. inf keeps all, 0 none.
    Reference: arXiv:2510.01161, algorithm 1.
    """
    check_at_least(0, max_m2=max_m2)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio.detach(), advantages=advantages.detach())
    m2 = torch.where(_moves_further(log_ratio, advantages), log_ratio.square(), torch.inf)
    m2 = m2.flatten().double().sort().values
    ahead = torch.cat([m2[1:], m2.new_full((min(1, m2.numel()),), torch.inf)])
    mean = cumsum(m2, 0) / torch.arange(1, m2.numel() + 1, device=m2.device)
    fits = (mean <= max_m2) & (ahead > m2)
    cutoff = torch.cat([torch.where(fits, m2, 0), m2.new_zeros(1)]).amax()
    all_fit = torch.where(m2.isfinite(), m2 <= cutoff, True).all()
    cutoff = carry_nan(torch.where(all_fit, torch.inf, cutoff), log_ratio.sum(), advantages.sum())
    return cutoff.to(log_ratio.dtype)


def m2po(log_ratio: Tokens, advantages: Tokens, *, cutoff: Float[Tensor, ""] | float, mask: Mask = None) -> Tokens:
    """Second-moment trust policy optimisation: drop the few tokens that dominate the variance, clip nothing else.

        loss = -A r, and 0 on trust-region tokens with log_ratio^2 > cutoff          cutoff = m2_cutoff(...)

    Coefficient: c = r, and 0 where dropped (only in the direction in which PPO clips). `log_ratio` is relative to the
    policy that sampled, however stale. Aggregate with `token_mean`: dropped tokens stay in the denominator.
    Limits: cutoff = inf is `importance_sampling`.
    Differs: the authors' code turns the cutoff into a clip range of at least [0.7, 1.5].
    Reference: arXiv:2510.01161, equation 5.
    """
    check_one_number(cutoff=cutoff)
    check_at_least(0, cutoff=cutoff)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    fixed = log_ratio.detach()
    dropped = _moves_further(fixed, advantages) & (fixed.square() > cutoff)
    loss = importance_sampling(log_ratio, advantages, mask=~dropped)
    return masked(carry_nan(loss, torch.as_tensor(cutoff, device=loss.device)), mask)


def bapo_clip_range(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    old_logp: Tokens,
    target: float = 0.4,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step_low: float = 0.02,
    step_high: float = 0.05,
    mask: Mask = None,
) -> ClipRange:
    """BAPO's adaptive clip: the first range of a fixed schedule in which positive tokens reach a `target` share.

        share(c_low, c_high) = P / (P + N)      P = sum over A > 0 of pi_old |A| min(r, c_high)
                                                N = sum over A < 0 of pi_old |A| max(r, c_low)

    The schedule increases c_high from high[0] to high[1] by `step_high`, then c_low from low[0] to low[1] by
    `step_low`. If no range reaches the target, the last one is used. The loss is `ppo_clip` with this range.
    A larger c_low increases N, so by this equation the second part of the schedule never helps; if entered, it runs to
    its end.
    Differs: the authors' code raises c_low first, omits pi_old and compares P / N.
    Reference: arXiv:2510.18927, equation 8 and algorithm 1.
    """
    check_between(0, 1, target=target)
    check_positive(step_low=step_low, step_high=step_high)
    if not (0 <= low[0] <= low[1] <= 1 <= high[0] <= high[1]):
        bounds = f"0 <= low[0] <= low[1] <= 1 <= high[0] <= high[1], got low={low}, high={high}"
        raise ValueError(f"low and high are the first and the last bound of the ratio, {bounds}")
    log_ratio, advantages, old_logp = prepared(
        mask, log_ratio=log_ratio.detach(), advantages=advantages.detach(), old_logp=old_logp.detach()
    )
    check_log_probs(old_logp=old_logp)
    ratio, scale = bounded_exp(log_ratio).double(), (old_logp.exp() * advantages.abs()).double()
    good, bad = scale * (advantages > 0), scale * (advantages < 0)
    lows, highs = _steps(*low, step_low), _steps(*high, step_high)
    positive = torch.stack([(good * ratio.clamp(max=c)).sum() for c in highs])
    negative = torch.stack([(bad * ratio.clamp(min=c)).sum() for c in lows])
    schedule = [(low[0], c) for c in highs] + [(c, highs[-1]) for c in lows[1:]]
    gain = torch.cat([positive, positive[-1:].expand(len(lows) - 1)])
    loss = torch.cat([negative[:1].expand(len(highs)), negative[1:]])
    reached = gain >= target * (gain + loss)
    reached[-1] = True
    chosen = ratio.new_tensor(schedule).index_select(0, reached.int().argmax().view(1))
    chosen = carry_nan(chosen, (gain + loss).sum()).to(log_ratio.dtype)
    return ClipRange(1 - chosen[0, 0], chosen[0, 1] - 1)


def token_covariance(
    logp: Tokens,
    advantages: Tokens,
    *,
    mask: Mask = None,
    mean_logp: Float[Tensor, ""] | None = None,
    mean_advantage: Float[Tensor, ""] | None = None,
) -> Tokens:
    """Each token's term of the covariance between log-probability and advantage, which drives entropy collapse.

        cov_t = (A_t - mean A) (logp_t - mean logp)          means over the whole batch's trainable tokens; detached

    A mean defaults to that of the given tokens.
    Reference: arXiv:2505.22617, equation 10.
    """
    logp, advantages = prepared(mask, logp=logp.detach(), advantages=advantages.detach())
    count = (torch.ones_like(logp, dtype=torch.bool) if mask is None else mask).sum().clamp(min=1)
    if mean_logp is None:
        check_alone("mean_logp")
        mean_logp = logp.sum() / count
    if mean_advantage is None:
        check_alone("mean_advantage")
        mean_advantage = advantages.sum() / count
    check_one_number(mean_logp=mean_logp, mean_advantage=mean_advantage)
    (cov,) = prepared(mask, cov=(advantages - mean_advantage) * (logp - mean_logp))
    return cov


def select_top(
    cov: Tokens, *, fraction: float = 2e-4, mask: Mask = None, generator: torch.Generator | None = None
) -> Bool[Tensor, "*shape"]:
    """KL-Cov's selection: the `fraction` of trainable tokens with the largest covariance, at least one.

    Exactly max(1, floor(fraction * trainable tokens)) tokens are selected, also if all covariances are 0. Ties are
    broken at random, by `generator`.
    Errors: ValueError for NaN at a trainable token (on the CPU).
    Differs: SkyRL's default fraction is 0.2; 2e-4 is the paper's and verl's.
    """
    check_between(0, 1, fraction=fraction)
    (cov,) = prepared(mask, cov=cov.detach())
    check_no_nan(mask, cov=cov)
    allowed = torch.ones_like(cov, dtype=torch.bool) if mask is None else mask
    return _smallest(-cov, _noise(cov, generator), allowed=allowed, fraction=fraction, count=allowed.sum())


def select_between(
    cov: Tokens,
    *,
    low: float = 1.0,
    high: float = 5.0,
    fraction: float = 2e-4,
    mask: Mask = None,
    generator: torch.Generator | None = None,
) -> Bool[Tensor, "*shape"]:
    """Clip-Cov's selection: random tokens among those with covariance in (low, high).

    The number is `fraction` of all trainable tokens, at least one if any qualifies. `generator` seeds the choice.
    Errors: ValueError for NaN at a trainable token (on the CPU).
    Differs: verl excludes tokens that PPO already clips: pass `mask & ~clipped` for that.
    """
    check_between(0, 1, fraction=fraction)
    if not low < high:
        raise ValueError(f"low must be below high, got low {low}, high {high}")
    (cov,) = prepared(mask, cov=cov.detach())
    check_no_nan(mask, cov=cov)
    trainable = torch.ones_like(cov, dtype=torch.bool) if mask is None else mask
    allowed = trainable & (cov > low) & (cov < high)
    same = torch.zeros_like(cov)
    return _smallest(same, _noise(cov, generator), allowed=allowed, fraction=fraction, count=trainable.sum())


def clip_cov(
    log_ratio: Tokens,
    advantages: Tokens,
    *,
    selected: Bool[Tensor, "*shape"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Mask = None,
) -> Tokens:
    """Clip-Cov: PPO without the gradient of a few tokens that reduce entropy the most.

        loss = ppo_clip, and 0 on `selected` tokens          selected = select_between(token_covariance(...))

    Coefficient: that of `ppo_clip`, and 0 on selected tokens, on-policy too.
    Differs: verl and SkyRL `clip_cov` select per micro-batch.
    Reference: arXiv:2505.22617; verl `compute_policy_loss_clip_cov`.
    """
    _check_selected(selected, log_ratio)
    loss = ppo_clip(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    return torch.where(selected & ~loss.isnan(), 0, loss)


def kl_cov(
    log_ratio: Tokens, advantages: Tokens, *, selected: Bool[Tensor, "*shape"], kl_coef: float = 1.0, mask: Mask = None
) -> Tokens:
    """KL-Cov: the unclipped surrogate, plus a penalty on the log-ratio of those few tokens.

        loss = -A r + kl_coef |log_ratio| 1[selected]          selected = select_top(token_covariance(...))

    Gradient: -r A dlogp, plus kl_coef sign(log_ratio) dlogp on selected tokens (0 on-policy), where it is not a
    multiple of A.
    Differs: verl and SkyRL `kl_cov` select per micro-batch.
    Reference: arXiv:2505.22617; verl `compute_policy_loss_kl_cov`.
    """
    check_at_least(0, kl_coef=kl_coef)
    _check_selected(selected, log_ratio)
    loss = importance_sampling(log_ratio, advantages, mask=mask)
    (log_ratio,) = prepared(mask, log_ratio=log_ratio)
    return loss + kl_coef * torch.where(selected, log_ratio.abs(), 0)


def _check_selected(selected: Tensor, log_ratio: Tensor) -> None:
    if selected.dtype != torch.bool:
        raise TypeError(f"selected must be bool (see select_between, select_top), got {selected.dtype}")
    check_same_shape(log_ratio=log_ratio, selected=selected)


def _moves_further(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Tokens on which a step moves the ratio further from 1."""
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))


def _steps(start: float, end: float, step: float) -> list[float]:
    count = int((end - start) / step + 1e-9)
    return [start + i * step for i in range(count + 1)]


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    where = like.device if generator is None else generator.device
    return torch.rand(like.shape, generator=generator, device=where, dtype=torch.float64).to(like.device)


def _smallest(keys: Tensor, ties: Tensor, *, allowed: Tensor, fraction: float, count: Tensor) -> Tensor:
    """True at the `max(1, fraction * count)` allowed entries with the smallest keys; `ties` breaks ties."""
    order = ties.flatten().argsort()
    order = order[torch.where(allowed, keys, torch.inf).flatten()[order].argsort(stable=True)]
    rank = torch.empty_like(order).index_copy(0, order, torch.arange(order.numel(), device=order.device))
    return allowed & (rank < (count * fraction).long().clamp(min=1)).view(allowed.shape)
