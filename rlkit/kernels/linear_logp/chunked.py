"""Tiled forward and backward in plain torch: the fast path on CPUs, and the one for any vocabulary size elsewhere.

Both passes walk over tiles of at most `ROW_BLOCK` x `VOCAB_BLOCK` logits, vocabulary outermost, in preallocated buffers. The forward
keeps the four statistics of `Partials` per row; the backward computes the logits again. With u = z - max, and upstream gradients
g_l of logp and g_h of the entropy,

    dz_j = g_l [j = target] - e^(u_j) / sum * (g_l + g_h (entropy - log sum) + g_h u_j)

The factor 1 / sum does not depend on j: it scales rows of `hidden` once instead of every logit. The gradient at the target is
written from expm1(logp), which keeps its digits when the target's probability is near 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.stats import Partials, combine, local_targets, no_partials, tile_partials

ROW_BLOCK = 1024
VOCAB_BLOCK = 1024
KEEP_BYTES = 16 << 20


class Head(NamedTuple):
    """A vocabulary projection (or one shard of it, whose first row is entry `start`) and what turns its output into logits."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    start: int = 0


class Rows(NamedTuple):
    """What the backward reads per row, all `[T]`: saved values and upstream gradients (`g_entropy` None: zero everywhere)."""

    targets: Tensor
    max: Tensor
    sum: Tensor
    logp: Tensor
    entropy: Tensor
    g_logp: Tensor
    g_entropy: Tensor | None

    def take(self, rows: slice) -> Rows:
        """The same for a block of rows."""
        return Rows(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Grads(NamedTuple):
    """Gradients: `hidden` and `weight` in their dtypes, `bias` in the compute dtype; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any given tensor is fp64, otherwise fp32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def keeps_logits(num_rows: int, vocab: int, dtype: torch.dtype) -> bool:
    """Whether all shifted logits together are small enough to be kept for the backward."""
    return num_rows * vocab * dtype.itemsize <= KEEP_BYTES


def partials(hidden: Tensor, targets: Tensor, head: Head, *, kept: Tensor | None = None) -> Tensor:
    """Statistics of every row over the head's part of the vocabulary, stacked `[4, T]`. `kept [T, V]` receives z - max."""
    dtype = compute_dtype(hidden, head.weight, head.bias)
    h = hidden.to(dtype)
    num_rows, vocab = h.shape[0], head.weight.shape[0]
    if kept is not None and vocab:
        logits_into(kept, h, *_columns(head, 0, vocab, dtype), head)
        return torch.stack(tile_partials(kept, targets, start=head.start, scratch=torch.empty_like(kept)))
    out = no_partials(num_rows, dtype=dtype, device=h.device)
    buffers = _buffers(2, h, vocab)
    for first, last in blocks(vocab, VOCAB_BLOCK):
        w, bias = _columns(head, first, last, dtype)
        for top, end in blocks(num_rows, ROW_BLOCK):
            z, scratch = _views(buffers, end - top, last - first)
            logits_into(z, h[top:end], w, bias, head)
            tile = tile_partials(z, targets[top:end], start=head.start + first, scratch=scratch)
            out[:, top:end] = torch.stack(combine(Partials(*out[:, top:end]), tile))
    return out


def backward(
    hidden: Tensor, head: Head, rows: Rows, *, need: tuple[bool, bool, bool], kept: Tensor | None = None
) -> Grads:
    """Gradients of `hidden`, `weight` and `bias` as far as `need` asks for them; `kept` as the forward wrote it."""
    weight, dtype = head.weight, compute_dtype(hidden, head.weight, head.bias)
    h = hidden.to(dtype)
    scale = (row_scale(rows) / head.temperature).unsqueeze(1)
    scaled = h * scale if need[1] else h
    d_hidden = torch.zeros_like(h) if need[0] else None
    d_weight = torch.empty_like(weight) if need[1] else None
    d_bias = torch.zeros(weight.shape[0], dtype=dtype, device=h.device) if need[2] else None
    buffers = _buffers(3, h, weight.shape[0])
    for first, last in blocks(weight.shape[0], VOCAB_BLOCK):
        w, bias = _columns(head, first, last, dtype)
        d_w = None if d_weight is None else d_weight[first:last] if d_weight.dtype == dtype else torch.empty_like(w)
        for top, end in blocks(h.shape[0], ROW_BLOCK):
            tile, scratch, slope = _views(buffers, end - top, last - first)
            block = rows.take(slice(top, end))
            if kept is None:
                logits_into(tile, h[top:end], w, bias, head)
                tile.sub_(block.max.unsqueeze(1))
            else:
                tile = kept[top:end, first:last]
            d = tile_gradient(tile, block, head, start=head.start + first, out=scratch, slope=slope)
            if d_hidden is not None:
                d_hidden[top:end].addmm_(d, w)
            if d_w is not None:
                d_w.addmm_(d.t(), scaled[top:end], beta=int(top > 0))
            if d_bias is not None:
                d_bias[first:last].addmv_(d.t(), scale[top:end, 0])
        if d_weight is not None and d_w is not None and d_w.dtype != d_weight.dtype:
            d_weight[first:last] = d_w
    if d_weight is not None and h.shape[0] == 0:
        d_weight.zero_()
    if d_hidden is not None:
        d_hidden = d_hidden.mul_(scale).to(hidden.dtype)
    return Grads(d_hidden, d_weight, d_bias)


def logits_into(out: Tensor, h: Tensor, w: Tensor, bias: Tensor | None, head: Head) -> None:
    """out <- softcap * tanh((h w^T + bias) / softcap) / temperature."""
    scale = 1 / (head.softcap or head.temperature)
    if bias is None:
        out.addmm_(h, w.t(), beta=0, alpha=scale)
    else:
        torch.addmm(bias, h, w.t(), beta=scale, alpha=scale, out=out)
    if head.softcap is not None:
        out.tanh_().mul_(head.softcap / head.temperature)


def row_scale(rows: Rows) -> Tensor:
    """The factor of a whole row that `tile_gradient` leaves out."""
    return (-1 if rows.g_entropy is not None else -rows.g_logp) / rows.sum


def tile_gradient(u: Tensor, rows: Rows, head: Head, *, start: int, out: Tensor, slope: Tensor) -> Tensor:
    """Gradient of one tile of logits divided by `row_scale`, from u = z - max. May overwrite `out` and `slope`, never `u`."""
    index, inside = local_targets(rows.targets, start=start, size=u.shape[1])
    torch.exp(u, out=out)
    if rows.g_entropy is None:
        at_target = rows.sum * rows.logp.expm1()
    else:
        g_h, log_sum = rows.g_entropy, rows.sum.log()
        base = rows.g_logp + g_h * (rows.entropy - log_sum)
        torch.addcmul(base.unsqueeze(1), u, g_h.unsqueeze(1), out=slope)
        out.mul_(slope)
        at_target = rows.sum * (g_h * rows.logp.exp() * (rows.logp + rows.entropy) + rows.g_logp * rows.logp.expm1())
    out.scatter_(1, index, torch.where(inside.unsqueeze(1), at_target.unsqueeze(1), out.gather(1, index)))
    if head.softcap is not None:  # d softcap * tanh(x / softcap) / dx = 1 - (z temperature / softcap)^2
        torch.add(u, rows.max.unsqueeze(1), out=slope).mul_(head.temperature / head.softcap)
        out.addcmul_(out, slope.square_(), value=-1)
    return out


def blocks(size: int, block: int) -> Iterator[tuple[int, int]]:
    """Consecutive [first, last) ranges of at most `block`."""
    return ((first, min(first + block, size)) for first in range(0, size, block))


def _columns(head: Head, first: int, last: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    bias = None if head.bias is None else head.bias[first:last].to(dtype)
    return head.weight[first:last].to(dtype), bias


def _buffers(count: int, h: Tensor, vocab: int) -> Tensor:
    return h.new_empty(count, min(h.shape[0], ROW_BLOCK) * min(vocab, VOCAB_BLOCK))


def _views(buffers: Tensor, num_rows: int, width: int) -> Tensor:
    return buffers[:, : num_rows * width].view(buffers.shape[0], num_rows, width)
