"""Clipped policy-gradient surrogates, one loss per token.

Every function is `f(log_ratio, advantages, *, ..., mask=None) -> token_loss`, elementwise in any shape, with
`log_ratio = logp - old_logp` and r = exp(log_ratio). Its gradient is `-c * A * dlogp`; the coefficient c is 1 on-policy
and stands in each docstring. Masked places give loss 0 and gradient 0, whatever they hold (NaN included).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import bounded_exp
from rlkit.losses._inputs import check_at_least, prepared


def ppo_clip(
    log_ratio: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Proximal policy optimisation: the pessimistic minimum of the surrogate and its clipped form.

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    Coefficient: c = r, and 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low.
    Clips only where a step would move r further from 1; r is unbounded for A < 0 (`dual_clip` bounds it).
    Limits: clip_low = clip_high = inf is `-A r`. Above log_ratio 20 the ratio is held at e^20 and c is 0.
    Differs: `clip_high` 0.28 is DAPO's clip-higher; verl adds the dual clip always, TRL (`epsilon`, `epsilon_high`),
    OpenRLHF (`eps_clip_low_high`) and slime (`--eps-clip`, `--eps-clip-high`) as here.
    Reference: arXiv:1707.06347, equation 7; asymmetric: arXiv:2503.14476.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    log_ratio, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages)
    ratio = bounded_exp(log_ratio)
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
