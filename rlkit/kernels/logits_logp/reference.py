"""Reference of `logits_logp` in plain torch; tests compare with it in fp64."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import masked, upcast
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
    z = masked(upcast(logits), None if mask is None else mask.unsqueeze(-1))
    return LogProbs(*(masked(x, mask) for x in from_logits(z, masked(targets.long(), mask), temperature, softcap)))
