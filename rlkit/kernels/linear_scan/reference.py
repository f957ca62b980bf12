"""The recurrence as a loop: the reference, the fast path for short streams on a CPU, and the path for |a| > 1."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def scan(a: Float[Tensor, "T"], b: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """x_t = a_t x_{t+1} + b_t from x_T = 0, in Python floats: fp64 for every dtype of the inputs.

    Where a_t = 0, x_t = b_t even if x_{t+1} is NaN or infinite.
    """
    x, out = 0.0, []
    for a_t, b_t in zip(reversed(a.tolist()), reversed(b.tolist()), strict=True):
        x = b_t if a_t == 0 else a_t * x + b_t
        out.append(x)
    return torch.tensor(out[::-1], dtype=b.dtype, device=b.device)
