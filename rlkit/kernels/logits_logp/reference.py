"""Reference of `logits_logp` in plain torch; tests compare with it in fp64."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import upcast
from rlkit.kernels.linear_logp.reference import from_logits
from rlkit.types import LogProbs


def logits_logp(
    logits: Float[Tensor, "T V"],
    targets: Int[Tensor, "T"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
) -> LogProbs:
    """Log-softmax of the logits in fp32 (fp64 for fp64) at the targets, and the entropy."""
    rows = torch.arange(logits.shape[0], device=logits.device) if mask is None else mask.nonzero().squeeze(1)
    z = upcast(logits[rows])
    zeros = z.new_zeros(logits.shape[0])
    return LogProbs(*(zeros.index_copy(0, rows, x) for x in from_logits(z, targets[rows].long(), temperature, softcap)))
