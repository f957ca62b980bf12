"""What `fused_loss` does with a chunk of rows in plain torch: its logits stay, as tiles, for their gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.kernels.linear_logp import chunked
from rlkit.kernels.linear_logp.chunked import Head, Rows, blocks, columns, logits_into, tile_gradient
from rlkit.kernels.linear_logp.stats import Partials, combine, no_partials, tile_partials

CPU_CHUNK_BYTES = 32 << 20
CHUNK_BYTES = 256 << 20
CPU_MIN_ROWS = 256  # fewer, and the sum into the weight's gradient, read and written once per chunk, shows
MIN_ROWS = 2048


class Tile(NamedTuple):
    """Logits of the vocabulary entries [first, last), less their row-wise maximum `peak`."""

    first: int
    last: int
    u: Tensor
    peak: Tensor


def chunk_rows(device: torch.device, vocab: int) -> int:
    """Rows whose logits are kept at a time."""
    if device.type == "cpu":
        return max(CPU_MIN_ROWS, CPU_CHUNK_BYTES // (vocab * 4))
    return max(MIN_ROWS, CHUNK_BYTES // (vocab * 4))


def workspace(num_rows: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the logits of a chunk."""
    return torch.empty(num_rows * weight.shape[0], dtype=dtype, device=weight.device)


def forward(h: Tensor, targets: Tensor, head: Head, buffer: Tensor) -> tuple[list[Tile], Partials]:
    """The chunk's logits as tiles in `buffer`, each less its own maximum, and the statistics of its rows."""
    h, num_rows, vocab = h.to(buffer.dtype), h.shape[0], head.weight.shape[0]
    stats, tiles = Partials(*no_partials(num_rows, dtype=h.dtype, device=h.device)), []
    width = _width(h, vocab)
    scratch = h.new_empty(num_rows * width)
    for first, last in blocks(vocab, width):
        z = buffer[num_rows * first : num_rows * last].view(num_rows, last - first)
        logits_into(z, h, *columns(head, first, last, h.dtype), head)
        part = tile_partials(z, targets, first=first, scratch=scratch[: z.numel()].view_as(z))
        tiles.append(Tile(first, last, z, part.max))
        stats = combine(stats, part)
    return tiles, stats


def backward(
    h: Tensor,
    head: Head,
    rows: Rows,
    tiles: list[Tile],
    alive: Tensor | None,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """Adds the gradients of the chunk's `alive` rows (None: all) to `d_weight` and `d_bias`, and writes `d_hidden`."""
    h = h.to(rows.scale.dtype)
    if alive is not None:
        h, rows = h[alive], rows.take(alive)
    scale = (rows.scale / head.temperature).unsqueeze(1)
    scaled = h * scale
    sums = torch.zeros_like(h)
    buffers = h.new_empty(2, h.shape[0] * _width(h, head.weight.shape[0]))
    for first, last, u, peak in tiles:
        if alive is not None:
            u, peak = u[alive], peak[alive]
        out, spare = (x[: u.numel()].view_as(u) for x in buffers)
        u.add_((peak - rows.offset).unsqueeze(1))
        d = tile_gradient(u, rows, head, first=first, out=out, spare=spare)
        if d_hidden is not None:
            sums.addmm_(d, columns(head, first, last, h.dtype)[0])
        if d_weight is not None:
            d_weight[first:last].addmm_(d.t(), scaled)
        if d_bias is not None:
            d_bias[first:last].addmv_(d.t(), scale.squeeze(1))
    if d_hidden is not None:
        sums = sums.mul_(scale).to(d_hidden.dtype)
        d_hidden.copy_(sums) if alive is None else d_hidden.index_copy_(0, alive, sums)


def _width(h: Tensor, vocab: int) -> int:
    return min(vocab, max(1, chunked.tile_bytes(h.device) // (2 * h.element_size() * max(1, h.shape[0]))))
