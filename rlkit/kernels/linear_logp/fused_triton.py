"""What `fused_loss` does with a chunk of rows on CUDA: library products of whole chunks, and one Triton pass each way.

A chunk is some thousand rows, so that the fp32 sum of the weight's gradient is read and written only a few times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.chunked import Head, Rows
from rlkit.kernels.linear_logp.products import full_sums, product_dtype, product_into
from rlkit.kernels.linear_logp.row_kernels import pack_terms, update_stats, write_gradient
from rlkit.kernels.linear_logp.stats import Partials, no_partials
from rlkit.kernels.linear_logp.triton import lift, scaling

CHUNK_BYTES = 4 << 30  # fp32 logits and their 16-bit gradient: 4096 rows of 152k entries
ROWS_STEP = 1024


def chunk_rows(device: torch.device, vocab: int) -> int:  # noqa: ARG001
    """Rows whose logits are kept at a time."""
    return max(1, CHUNK_BYTES // (6 * vocab * ROWS_STEP)) * ROWS_STEP


def workspace(num_rows: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the logits of a chunk."""
    return torch.empty(num_rows, weight.shape[0], dtype=dtype, device=weight.device)


def forward(h: Tensor, targets: Tensor, head: Head, buffer: Tensor) -> tuple[Tensor, Partials]:
    """The chunk's raw logits in `buffer`, and the statistics of its rows."""
    h = h.to(product_dtype(h, head.weight))
    z = buffer[: h.shape[0]]
    stats = no_partials(h.shape[0], dtype=torch.float32, device=h.device)
    with torch.cuda.device_of(h), full_sums():
        product_into(z, h, head.weight.to(h.dtype).t())
        update_stats(stats, z, targets, scaling(head, 0, z.shape[1]))
    return z, Partials(*stats)


def backward(
    h: Tensor,
    head: Head,
    rows: Rows,
    z: Tensor,
    alive: Tensor | None,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """Adds the gradients of the chunk's `alive` rows (None: all) to `d_weight` and `d_bias`, and writes `d_hidden`."""
    h = h.to(product_dtype(h, head.weight))
    if alive is not None:
        h, rows = h[alive], rows.take(alive)
    if h.shape[0] == 0:
        return
    scale, unscale = lift(rows, h.dtype, head.temperature)
    terms = pack_terms(scale, rows.offset, rows.at_target, rows.base, rows.slope)
    in_place = z.dtype == h.dtype and alive is None
    d = z if in_place else h.new_empty(h.shape[0], z.shape[1])
    with torch.cuda.device_of(h), full_sums():
        write_gradient(d, z, rows.targets, terms, scaling(head, 0, z.shape[1]), rows=alive)
        if d_hidden is not None:
            out = d_hidden if alive is None else torch.empty_like(h, dtype=d_hidden.dtype)
            product_into(out, d, head.weight.to(h.dtype), factor=unscale)
            if alive is not None:
                d_hidden.index_copy_(0, alive, out)
        if d_weight is not None:
            product_into(d_weight, d.t(), h, add=True, factor=unscale)
        if d_bias is not None:
            d_bias.add_(d.sum(0, dtype=torch.float32), alpha=unscale)
