"""Corrections for samples that another engine, or an older policy, drew.

Each takes `log_ratio = old_logp - rollout_logp` (training engine over sampling engine, at the weights that sampled) and
returns detached weights that multiply the *policy* term of the loss, never KL or entropy. Weights are 0 where the mask
is False. Multiply them into `token_mean(...)`: the denominator then stays the count before rejection.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._tensors import bounded_exp, masked
from rlkit.losses._inputs import check_positive, prepared


def tis(
    log_ratio: Float[Tensor, "*shape"], *, max_weight: float, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """Truncated importance sampling: the ratio, capped.

        w = min(exp(log_ratio), max_weight)            detached

    Limits: max_weight = inf is plain importance sampling (unbiased, heavy tails). The usual cap is 2.
    Differs: verl `rollout_is=token` with `rollout_is_threshold`, TRL `vllm_importance_sampling_mode=token_truncate`,
    OpenRLHF and slime (`--tis-clip`) alike; RL2 takes the *current* log-probs over the rollout's and scales the KL too.
    For the sequence and geometric levels give it `seq_log_ratio_sum` or `seq_log_ratio`.
    Reference: https://fengyao.notion.site/off-policy-rl, verl PR#2953.
    """
    check_positive(max_weight=max_weight)
    (log_ratio,) = prepared(mask, log_ratio=log_ratio.detach())
    return masked(bounded_exp(log_ratio).clamp(max=max_weight), mask)
