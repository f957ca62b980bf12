"""Clipped policy-gradient surrogates, one loss per token.

Every function is `f(log_ratio, advantages, *, ..., mask=None) -> token_loss`, elementwise in any shape, with
`log_ratio = logp - old_logp` and r = exp(log_ratio). Its gradient is `-c * A * dlogp`; the coefficient c is 1 on-policy
and stands in each docstring. Masked places give loss 0 and gradient 0, whatever they hold (NaN included).

Above log_ratio 20 every ratio is held at e^20 and passes no gradient. Losses written with `log_ratio` where the paper
has `logp` differ from it by a constant and have the same gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import bounded_exp, check_float, check_same_shape
from rlkit.losses._inputs import check_at_least, check_positive, prepared
from rlkit.losses.corrections import tis


def ppo_clip(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Proximal policy optimisation: the pessimistic minimum of the surrogate and its clipped form.

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Coefficient: c = r, and 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low.
    Clips only where a step would move r further from 1; r is unbounded for A < 0 (`dual_clip` bounds it). The clip
    distances may be tensors: one number of the whole batch (`bapo_clip_range`) or one per token.
    Limits: clip_low = clip_high = inf is `importance_sampling`; clip_low = clip_high = 0 keeps only steps back towards
    1.
    Differs: verl `vanilla` always adds the dual clip; verl and OpenRLHF bound log_ratio on both sides at 20.
    Reference: arXiv:1707.06347, equation 7; asymmetric: arXiv:2503.14476.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    ratio = bounded_exp(log_ratio)
    return torch.maximum(-advantages * ratio, -advantages * _clipped(ratio, clip_low, clip_high))


def dual_clip(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_c: float,
    clip_low: float | Tensor = 0.2,
    clip_high: float | Tensor = 0.2,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """PPO with a second clip: where A < 0 the loss stops growing at ratio `clip_c` > 1.

        loss = ppo_clip where A >= 0, min(ppo_clip, -A clip_c) where A < 0

    Coefficient: that of `ppo_clip`, and 0 also where A < 0 and r > clip_c.
    Limits: clip_c = inf is `ppo_clip`. The usual value is 3.
    Differs: always on in verl `vanilla` (`clip_ratio_c` 3); ROLL `dual_clip_loss` fixes clip_c = 1 + 2 * clip.
    Reference: arXiv:1912.09729.
    """
    if not clip_c > 1:
        raise ValueError(f"clip_c must be above 1, the on-policy ratio, got {clip_c}")
    loss = ppo_clip(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    (advantages,) = prepared(mask, advantages=advantages)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * clip_c), loss)


def two_sided_clip(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    delta: float = 4.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """INTELLECT-2's two-sided clip: the unclipped ratio is capped at `delta` > 1 + clip_high.

        loss = max(-A min(r, delta), -A clip(r, 1 - clip_low, 1 + clip_high))

    Coefficient: that of `ppo_clip`, and 0 also where A < 0 and r > delta. For these delta it is `dual_clip` with
    clip_c = delta, to the last bit: two papers, one function.
    Differs: TRL `delta` accepts a delta below 1 + clip_high, which clips A > 0 at delta.
    Reference: arXiv:2505.07291.
    """
    if not delta > 1 + clip_high:
        raise ValueError(f"delta must be above 1 + clip_high = {1 + clip_high}, got {delta}")
    return dual_clip(log_ratio, advantages, clip_c=delta, clip_low=clip_low, clip_high=clip_high, mask=mask)


def aspo(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_weight: float = float("inf"),
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Asymmetric importance sampling: where A > 0 the ratio is turned over, so that tokens fallen behind catch up.

        loss = -A sg(min(1 / r, max_weight)) log_ratio     where A > 0 and r <= 1 + clip_high, 0 where r is above
        loss = ppo_clip                                    where A <= 0

    Coefficient: min(1 / r, max_weight) for A > 0, 0 above the clip; that of `ppo_clip` for A < 0.
    Limits: on-policy it is `reinforce`. The paper's soft dual clip of 1 / r is `max_weight`; it names no number for it.
    A plain 1 / r, without stop-gradient, would push good tokens *down*.
    Reference: arXiv:2510.06062.
    """
    check_positive(max_weight=max_weight)
    negative = ppo_clip(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    fixed = log_ratio.detach()
    weight = bounded_exp(-fixed).clamp(max=max_weight) * (bounded_exp(fixed) <= 1 + clip_high)
    return torch.where(advantages > 0, -advantages * weight * log_ratio, negative)


def unbounded_positive(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float = 0.2,
    clip_c: float = 3.0,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """UP: plain REINFORCE where A > 0, the dual-clipped surrogate where A <= 0.

        loss = -A log_ratio where A > 0, dual_clip where A <= 0

    Coefficient: 1 for A > 0, with no clip at all; that of `dual_clip` for A < 0.
    Reference: arXiv:2607.06987, equation 15.
    """
    negative = dual_clip(log_ratio, advantages, clip_c=clip_c, clip_low=clip_low, clip_high=clip_low, mask=mask)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    return torch.where(advantages > 0, -advantages * log_ratio, negative)


def decoupled_ppo(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    behavior_log_ratio: Float[Tensor, "*shape"],
    max_weight: float = float("inf"),
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """PPO with three policies: clip against a recent (proximal) one, correct for the one that sampled.

        loss = sg(min(pi_prox / pi_behavior, max_weight)) * ppo_clip(log pi - log pi_prox, A)

    `log_ratio` is logp - proximal_logp, `behavior_log_ratio` is proximal_logp - rollout_logp.
    Coefficient: the behaviour weight times that of `ppo_clip`; 1 where all three agree.
    Limits: behavior_log_ratio = 0 is `ppo_clip`. It is `tis(...) * ppo_clip(...)`, no more; with `icepop` or another
    correction in its place write that product.
    Differs: AReaL `use_decoupled_loss` masks or clamps the weight by `rejection_sampling`.
    Reference: arXiv:2110.00641; arXiv:2505.24298.
    """
    check_float(behavior_log_ratio=behavior_log_ratio)
    check_same_shape(log_ratio=log_ratio, behavior_log_ratio=behavior_log_ratio)
    loss = ppo_clip(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    return tis(behavior_log_ratio, max_weight=max_weight, mask=mask) * loss


def _clipped(ratio: Tensor, clip_low: float | Tensor, clip_high: float | Tensor) -> Tensor:
    if isinstance(clip_low, Tensor) or isinstance(clip_high, Tensor):
        low, high = (torch.as_tensor(x, dtype=ratio.dtype, device=ratio.device) for x in (1 - clip_low, 1 + clip_high))
        return ratio.clamp(low, high)
    return ratio.clamp(1 - clip_low, 1 + clip_high)
