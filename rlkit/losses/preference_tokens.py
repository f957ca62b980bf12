"""From tokens to what the preference losses take, where it is more than a sum: LD-DPO's log-ratio, WPO's weight."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_cu_seqlens, check_float, check_mask, check_same_shape, masked, upcast
from rlkit.losses._pairs import check_between
from rlkit.segments import broadcast_to_tokens, cumulative, seq_mean, seq_sum


def ld_log_ratio(
    log_ratio: Float[Tensor, "T"],
    *,
    shared_lens: Int[Tensor, "N"],
    ld_alpha: float,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
) -> Float[Tensor, "N"]:
    """Length-desensitised log-ratio of each response: tokens beyond the pair's shared length count `ld_alpha`.

        sum_{i <= shared_len} log_ratio_i + ld_alpha sum_{i > shared_len} log_ratio_i          i counts action tokens

    `shared_lens[n]` is the shorter of the pair's two lengths in action tokens (`segments.seq_count` of both, then
    `torch.minimum`), given for chosen and rejected sequences alike. The result goes into `dpo` or any loss of the
    margin.
    Limits: ld_alpha = 1 is `segments.seq_sum`; ld_alpha = 0 cuts both responses to the shared length.
    Differs: nothing (TRL `ld_alpha`); by linearity policy and reference need not be treated apart.
    Reference: arXiv:2409.06411; TRL dpo_trainer.py.
    """
    check_float(log_ratio=log_ratio)
    check_mask(mask, log_ratio=log_ratio)
    check_cu_seqlens(cu_seqlens, log_ratio=log_ratio)
    check_between(0, 1, ld_alpha=ld_alpha)
    if shared_lens.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(f"shared_lens must have shape [{cu_seqlens.numel() - 1}], got {list(shared_lens.shape)}")
    count = cumulative(mask.long())
    last_shared = count[cu_seqlens[:-1]] + shared_lens
    tail = count[1:] > broadcast_to_tokens(last_shared, cu_seqlens=cu_seqlens, num_tokens=log_ratio.shape[0])
    x = masked(upcast(log_ratio), mask)
    return seq_sum(torch.where(tail, ld_alpha * x, x), cu_seqlens=cu_seqlens)


def wpo_weights(
    logp: Float[Tensor, "T"],
    log_collision: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
) -> Float[Tensor, "N"]:
    """Weighted preference optimisation: how much a response looks as if the policy had sampled it. Detached.

        w = exp(mean_t (logp_t - log sum_v p_t(v)^2))          mean over action tokens

    `log_collision` is log sum_v p(v)^2 of each token's distribution, `logsumexp(2 log_probs)`; the expected
    probability of a sample normalises the token's, so on-policy text has weights near 1 whatever the entropy.
    A pair's weight is the product of its two: `w[chosen] * w[rejected] * dpo(...)`. A response without tokens has 1.
    Differs: nothing (TRL `use_weighting`).
    Reference: arXiv:2406.11827, equation 2; TRL dpo_trainer.py.
    """
    check_float(logp=logp, log_collision=log_collision)
    check_same_shape(logp=logp, log_collision=log_collision)
    check_mask(mask, logp=logp)
    aligned = masked(upcast(logp), mask) - masked(upcast(log_collision), mask)
    return seq_mean(aligned.detach(), cu_seqlens=cu_seqlens, mask=mask).exp()
