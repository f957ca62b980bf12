"""Reference of `linear_logp` in plain torch, and the softmax statistics that split it over the vocabulary.

Every implementation must equal `linear_logp` here; tests compare with it in fp64. `Partials`, `combine` and `finish`
are the associative form used by tiles, kernels and vocabulary shards.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlkit._util.tensors import masked, transformed
from rlkit.types import LogProbs

CHUNK_ELEMENTS = 1 << 24
LOWEST = -1e30  # "no logit"; finite, so that the difference of two of them is 0 and not NaN


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
    """Log-softmax of the logits in chunks of rows, each recomputed in the backward; memory is one chunk.

    Under torch.func, which has no checkpoints, it is that of all chunks.
    """
    dtype = compute_dtype(hidden, weight, bias)
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    on = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.to(hidden.device)

    def rows_logp(h: Tensor, targets: Tensor, on: Tensor) -> tuple[Tensor, ...]:
        z = linear(masked(h.to(dtype), on.unsqueeze(-1)), w, b)
        return tuple(masked(x, on) for x in from_logits(z, masked(targets.long(), on), temperature, softcap))

    run = rows_logp if transformed() else partial(checkpoint, rows_logp, use_reentrant=False)
    size = max(1, CHUNK_ELEMENTS // max(1, weight.shape[0]))
    parts = [run(*chunk) for chunk in zip(hidden.split(size), targets.split(size), on.split(size))]
    return LogProbs(*map(torch.cat, zip(*parts)))


def from_logits(
    z: Float[Tensor, "T V"], targets: Int[Tensor, "T"], temperature: float, softcap: float | None
) -> LogProbs:
    """Log-softmax of softcap * tanh(z / softcap) / temperature at the targets, and the entropy."""
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax((z / temperature).clamp(min=LOWEST), dim=-1)
    return LogProbs(log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1))


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any tensor is fp64, otherwise fp32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


class Partials(NamedTuple):
    """Softmax statistics of the logits z over any part of the vocabulary, per row, fp32 (fp64 for fp64 inputs).

        max = max_j z_j                            dot = sum_j e^(z_j - max) (z_j - max)
        sum = sum_j e^(z_j - max)                  target = z_target

    `target` is -1e30 in a part without the row's target. An empty part and a masked row have (-1e30, 0, 0, -1e30), the
    identity of `combine`.
    """

    max: Float[Tensor, "T"]
    sum: Float[Tensor, "T"]
    dot: Float[Tensor, "T"]
    target: Float[Tensor, "T"]


def combine(a: Partials, b: Partials) -> Partials:
    """Statistics of the union of two disjoint parts of the vocabulary.

        max = max(a.max, b.max)       d_i = i.max - max       for i = a, b
        sum = sum_i e^(d_i) i.sum
        dot = sum_i e^(d_i) (i.dot + d_i i.sum)

    Associative and commutative, with the empty part as identity: it merges tiles, splits, and vocabulary shards of any
    sizes. Over ranks: all-gather `torch.stack(partials)`, `[4, T]`, then `functools.reduce(combine, ...)` in rank
    order, so that all ranks get bit-identical results.
    """
    peak = torch.maximum(a.max, b.max)
    shift_a, shift_b = a.max - peak, b.max - peak
    scale_a, scale_b = shift_a.exp(), shift_b.exp()
    sum_a, sum_b = a.sum * scale_a, b.sum * scale_b
    dot = (a.dot * scale_a + sum_a * shift_a) + (b.dot * scale_b + sum_b * shift_b)
    return Partials(peak, sum_a + sum_b, dot, torch.maximum(a.target, b.target))


def finish(partials: Partials) -> LogProbs:
    """Log-probability and entropy from the statistics of the whole vocabulary.

        logp = (target - max) - log sum            entropy = log sum - dot / sum

    The maximum is never added back, so a common offset of the logits loses no precision: with logits near +500 the
    error is 4e-6, against 3e-5 for subtracting a logsumexp of the same precision. Masked rows (no logit) give 0, rows
    with a NaN give NaN.
    """
    none = partials.sum == 0
    total = torch.where(none, 1.0, partials.sum)
    log_sum = total.log()
    return LogProbs(torch.where(none, 0.0, (partials.target - partials.max) - log_sum), log_sum - partials.dot / total)


def no_partials(num_rows: int, *, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "4 T"]:
    """The identity of `combine`, stacked."""
    out = torch.empty(4, num_rows, dtype=dtype, device=device)
    out[0], out[1], out[2], out[3] = LOWEST, 0.0, 0.0, LOWEST
    return out
