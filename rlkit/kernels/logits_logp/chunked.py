"""Statistics and gradients of given logits, a few rows at a time, in fp32 buffers that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.chunked import Head, Rows, blocks, compute_dtype, tile_bytes, tile_gradient
from rlkit.kernels.linear_logp.stats import LOWEST, no_partials, tile_partials


def partials(logits: Tensor, targets: Tensor, head: Head, rows: Tensor | None) -> Tensor:
    """Statistics `[4, T]` of the given rows (None: all); the others get those of an empty part."""
    out = no_partials(logits.shape[0], dtype=compute_dtype(logits), device=logits.device)
    for z, scratch, block in _tiles(logits, head, rows):
        out[:, block] = torch.stack(tile_partials(z, targets[block], first=head.start, scratch=scratch))
    return out


def backward(logits: Tensor, head: Head, terms: Rows, rows: Tensor | None, *, out: Tensor) -> None:
    """Writes the gradient of the given rows (None: all) into `out`, which may be `logits` itself, and 0 elsewhere."""
    if rows is not None:
        absent = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device).index_fill_(0, rows, False)
        out[absent] = 0.0
    spare = None
    for z, scratch, block in _tiles(logits, head, rows):
        part = terms.take(block)
        u = z.sub_(part.offset.unsqueeze(1))
        spare = torch.empty_like(u) if spare is None else spare
        d = tile_gradient(u, part, head, first=0, out=scratch, spare=spare[: u.shape[0]])
        out[block] = d.mul_((part.scale / head.temperature).unsqueeze(1)).to(out.dtype)


def _tiles(logits: Tensor, head: Head, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, slice | Tensor]]:
    """By blocks of rows: softcap * tanh(logits / softcap) / temperature in a buffer, a spare one, and which rows."""
    num_rows, vocab = logits.shape[0] if rows is None else rows.numel(), logits.shape[1]
    if vocab == 0:
        return
    dtype = compute_dtype(logits)
    height = max(1, min(num_rows, tile_bytes(logits.device) // (dtype.itemsize * vocab)))
    buffers = logits.new_empty(2, height, vocab, dtype=dtype)
    for top, end in blocks(num_rows, height):
        block = slice(top, end) if rows is None else rows[top:end]
        z = buffers[0, : end - top].copy_(logits[block])
        if head.softcap is not None:
            z.div_(head.softcap).tanh_().mul_(head.softcap / head.temperature)
        elif head.temperature != 1:
            z.div_(head.temperature)
        yield z.clamp_(min=LOWEST), buffers[1, : end - top], block
