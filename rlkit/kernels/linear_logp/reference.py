"""The definition of `linear_logp` in plain torch, which every implementation must equal; in fp64 it is the truth."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlkit.kernels.linear_logp.stats import LOWEST
from rlkit.types import LogProbs

CHUNK_ELEMENTS = 1 << 24


def linear_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
) -> LogProbs:
    """Log-softmax of the logits by chunks of rows, each computed again in the backward: memory is one chunk."""
    double = torch.float64 in (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    dtype = torch.float64 if double else torch.float32
    rows = torch.arange(hidden.shape[0], device=hidden.device) if mask is None else mask.nonzero().squeeze(1)
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    logp, entropy = hidden.new_zeros(2, hidden.shape[0], dtype=dtype).unbind()
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // max(1, weight.shape[0]))):
        out = checkpoint(
            _rows, hidden[chunk].to(dtype), w, b, targets[chunk].long(), temperature, softcap, use_reentrant=False
        )
        logp, entropy = logp.index_copy(0, chunk, out[0]), entropy.index_copy(0, chunk, out[1])
    return LogProbs(logp, entropy)


def _rows(
    h: Tensor, w: Tensor, b: Tensor | None, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    z = linear(h, w, b)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax((z / temperature).clamp(min=LOWEST), dim=-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)
