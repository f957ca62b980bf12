"""Entropy in nats: from logits, and as a filter on tokens. The entropy bonus is `-coef * entropy`, a loss per token."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlkit._util.tensors import carry_nan, check_float, check_logits, check_mask, check_no_nan, masked, upcast
from rlkit.losses._inputs import check_alone, check_between, check_one_number, prepared
from rlkit.types import Mask, Tokens

__all__ = ["entropy_from_logits", "entropy_quantile", "top_entropy_mask"]


def entropy_from_logits(logits: Float[Tensor, "*shape V"], *, mask: Mask = None) -> Tokens:
    """Entropy of the distribution at each position.

        H = -sum_v p_v log p_v          p = softmax(logits), temperature-scaled by the caller

    A logit of -inf contributes 0. Memory: several copies of [*shape, V]; `rlkit.kernels` computes it without them.
    """
    check_float(logits=logits)
    check_logits(logits=logits)
    check_mask(mask, positions=logits[..., 0])
    logits = masked(upcast(logits), None if mask is None else mask.unsqueeze(-1))
    logp = logits.log_softmax(-1)
    return masked(-(logp.exp() * torch.where(logp > -torch.inf, logp, 0)).sum(-1), mask)


def entropy_quantile(entropy: Tokens, *, top: float, mask: Mask = None) -> Float[Tensor, ""]:
    """The entropy threshold that the `top` share of trainable tokens reaches, linearly interpolated; detached.

    top = 0.2 is the 0.8 quantile, top = 1 the minimum; -inf if no token is trainable. Compute it once over the whole
    batch.
    Reference: arXiv:2506.01939.
    """
    check_between(0, 1, top=top)
    (entropy,) = prepared(mask, entropy=entropy.detach())
    if entropy.numel() == 0:
        return entropy.new_full((), -torch.inf)
    count = torch.full((), entropy.numel(), device=entropy.device) if mask is None else mask.sum()
    ranked = masked(entropy, mask, torch.inf).flatten().sort().values
    rank = (1 - top) * (count - 1).clamp(min=0).double()
    below = rank.floor().long()
    above = torch.minimum(below + 1, (count - 1).clamp(min=0))
    ends = ranked.index_select(0, torch.stack([below, above])).double()
    value = torch.lerp(ends[0], ends[1], rank - below)
    return carry_nan(torch.where(count > 0, value, -torch.inf), masked(entropy, mask).mean()).to(entropy.dtype)


def top_entropy_mask(
    entropy: Tokens, *, threshold: Float[Tensor, ""] | float | None = None, top: float = 0.2, mask: Mask = None
) -> Bool[Tensor, "*shape"]:
    """The trainable tokens of highest entropy, to train on these "forking" tokens only.

        m_t and entropy_t >= threshold

    `threshold` is `entropy_quantile` of the whole batch; a single process may omit it. Multiply the policy term by the
    mask; as in TRL and the paper, all tokens stay in the denominator: give `token_mean` the original mask. Errors:
    ValueError for values that are all negative, as log-probs are.
    Reference: arXiv:2506.01939, equation 5; TRL `get_high_entropy_mask`.
    """
    if threshold is None:
        check_alone("threshold")
        threshold = entropy_quantile(entropy, top=top, mask=mask)
    check_one_number(threshold=threshold)
    (entropy,) = prepared(mask, entropy=entropy.detach())
    check_no_nan(mask, entropy=entropy)
    high = entropy >= threshold
    return high if mask is None else high & mask
