"""What to watch while training: typed metrics that add exactly over micro-batches and ranks."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import bounded_exp
from rlkit.losses._inputs import check_at_least, prepared
from rlkit.losses.kl import k3
from rlkit.metrics import Metrics, largest, mean, smallest


def ratio_stats(
    log_ratio: Float[Tensor, "*shape"],
    *,
    mask: Bool[Tensor, "*shape"] | None,
    clip_low: float,
    clip_high: float,
    advantages: Float[Tensor, "*shape"] | None = None,
) -> Metrics:
    """How far the policy has moved, and how much of the batch the clip silences.

    With r = exp(log_ratio), over the masked-in tokens:

        ratio ratio_max ratio_min    mean, largest and smallest r
        ratio_is_one                 share of tokens with log_ratio == 0 (all of them when old = logp.detach())
        clip_low                     share with r < 1 - clip_low and A < 0: the clip takes their gradient away
        clip_high                    share with r > 1 + clip_high and A > 0
        kl_old_k1 kl_old_k3          mean of -log_ratio and of r - 1 - log_ratio: two estimates of KL(old || pi)
        abs_log_ratio_max            largest |log_ratio|

    Without `advantages` the clip shares count every ratio outside the interval, on its side.
    Differs: verl `pg_clipfrac` and TRL `clip_ratio/*` count only active clips, as here; OpenRLHF and slime count
    one share.
    """
    check_at_least(0, clip_low=clip_low, clip_high=clip_high)
    (log_ratio,) = prepared(mask, log_ratio=log_ratio.detach())
    ratio = bounded_exp(log_ratio)
    below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
    if advantages is not None:
        _, advantages = prepared(mask, log_ratio=log_ratio, advantages=advantages.detach())
        below, above = below & (advantages < 0), above & (advantages > 0)
    return {
        "ratio": mean(ratio, mask=mask),
        "ratio_max": largest(ratio, mask=mask),
        "ratio_min": smallest(ratio, mask=mask),
        "ratio_is_one": mean(log_ratio == 0, mask=mask),
        "clip_low": mean(below, mask=mask),
        "clip_high": mean(above, mask=mask),
        "kl_old_k1": mean(-log_ratio, mask=mask),
        "kl_old_k3": mean(k3(-log_ratio, log_ratio * 0), mask=mask),
        "abs_log_ratio_max": largest(log_ratio.abs(), mask=mask),
    }
