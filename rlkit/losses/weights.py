"""Aggregation as a weight vector: `loss = (weights * token_loss).sum()`.

Weights are computed over one optimizer step's batch (all ranks, all micro-batches) and then split along with it, so any
split adds up exactly. Where a process sees only its share of the batch, it passes the global count; the count of the
local mask is the default only in a process that is alone (with `torch.distributed` running on several ranks a missing
count raises, since a silent local one is wrong by the ratio of the two). A process alone that computes weights per
micro-batch, instead of once per step, must pass the count as well: no function can see that from its arguments.

Weights have torch's default dtype (fp32 at least), are 0 where the mask is False, and carry no gradient. A batch with
nothing to train on has weights 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_mask

Count = int | Int[Tensor, ""]


def token_mean(mask: Bool[Tensor, "*shape"], *, num_tokens: Count | None = None) -> Float[Tensor, "*shape"]:
    """Every trainable token of the batch counts the same.

        w_t = m_t / num_tokens

    `num_tokens`: trainable tokens of the whole optimizer step; see the module for when it may be left out.
    Differs: verl `token-mean`, DAPO, TRL `dapo`, OpenRLHF `token_level_loss`; TRL `bnpo` is this with the micro-batch's
    own count, which depends on how the batch is split.
    Reference: arXiv:2503.14476, section 3.3.
    """
    check_mask(mask, tokens=mask)
    return _over(_as_float(mask), mask.sum() if num_tokens is None else num_tokens, given=num_tokens, name="num_tokens")


def _over(weights: Tensor, count: Count, *, given: Count | None, name: str) -> Tensor:
    """`weights / count`, 0 for a count of 0."""
    if given is None and not torch.compiler.is_compiling() and _num_ranks() > 1:
        raise ValueError(
            f"{name} must be given when several ranks train: it counts the whole optimizer step's batch, and this rank "
            f"may hold only a part. If it holds all of it (replicated metadata), pass its own count."
        )
    if isinstance(count, int):
        if count < 0:
            raise ValueError(f"{name} must be at least 0, got {count}")
        return weights / max(count, 1)
    return weights / count.clamp(min=1)


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _as_float(mask: Tensor) -> Tensor:
    return mask.to(torch.promote_types(torch.get_default_dtype(), torch.float32))
