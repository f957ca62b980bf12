"""Sequence-level log-ratios as `[T]` streams, accepted by any surrogate or correction in place of token log-ratios."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import check_cu_seqlens, check_float, check_mask
from rlkit.losses._inputs import prepared
from rlkit.segments import broadcast_to_tokens, mean_per_seq, sum_per_seq

__all__ = ["seq_log_ratio", "seq_log_ratio_sum", "token_gradient"]


def seq_log_ratio(
    log_ratio: Float[Tensor, "T"], *, mask: Bool[Tensor, "T"] | None, cu_seqlens: Int[Tensor, "N1"]
) -> Float[Tensor, "T"]:
    """Mean log-ratio over each sequence's trainable tokens, broadcast to its tokens.

        s_t = sum_u m_u x_u / sum_u m_u          over the tokens u of t's sequence; 0 where it has none

    exp(s) is the geometric mean of the token ratios: GSPO's length-normalised sequence ratio. The gradient flows to
    every trainable token of the sequence.
    Example: log_ratio [1, 3, 5] with cu_seqlens [0, 2, 3] gives [2, 2, 5].
    Reference: arXiv:2507.18071, equation 7.
    """
    check_float(log_ratio=log_ratio)
    check_mask(mask, log_ratio=log_ratio)
    check_cu_seqlens(cu_seqlens, log_ratio=log_ratio)
    mean = mean_per_seq(log_ratio, cu_seqlens=cu_seqlens, mask=mask)
    return broadcast_to_tokens(mean, cu_seqlens=cu_seqlens, num_tokens=log_ratio.shape[0])


def seq_log_ratio_sum(
    log_ratio: Float[Tensor, "T"], *, mask: Bool[Tensor, "T"] | None, cu_seqlens: Int[Tensor, "N1"]
) -> Float[Tensor, "T"]:
    """Sum of log-ratios over each sequence's trainable tokens, broadcast to its tokens.

        S_t = sum_u m_u x_u                      over the tokens u of t's sequence

    exp(S) is the product of the token ratios: the sequence's exact importance weight, unbiased, with a variance that
    grows with length.
    Reference: verl trainer/ppo/rollout_corr_helper.py.
    """
    check_float(log_ratio=log_ratio)
    check_mask(mask, log_ratio=log_ratio)
    check_cu_seqlens(cu_seqlens, log_ratio=log_ratio)
    total = sum_per_seq(log_ratio, cu_seqlens=cu_seqlens, mask=mask)
    return broadcast_to_tokens(total, cu_seqlens=cu_seqlens, num_tokens=log_ratio.shape[0])


def token_gradient(value: Float[Tensor, "*shape"], log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The value of one log-ratio with the gradient of another.

        sg(value) + log_ratio - sg(log_ratio)

    Combines a sequence-level ratio with each token's own gradient. Sequence-level TOPR:
    `topr(token_gradient(seq_log_ratio_sum(x, mask=mask, cu_seqlens=cu), x), advantages, mask=mask)`;
    GSPO-token (arXiv:2507.18071, equations 14 and 15) is the same with `seq_log_ratio` and `ppo_clip`.
    """
    value, log_ratio = prepared(None, value=value, log_ratio=log_ratio)
    return value.detach() + (log_ratio - log_ratio.detach())
