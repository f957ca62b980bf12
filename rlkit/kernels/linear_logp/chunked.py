"""Tiled forward and backward in plain torch: the fast path on CPUs, and the one for any vocabulary size elsewhere.

Both passes walk over tiles of logits, vocabulary outermost, in preallocated buffers. The forward keeps the statistics
of `Partials` per row; the backward computes the logits again. With u = z - max, and upstream gradients g_l of logp and
g_h of the entropy,

    dz_j = g_l [j = target] - e^(u_j) / sum * (g_l + g_h (entropy - log sum) + g_h u_j)

1 / sum does not depend on j: it scales rows of `hidden` once instead of every logit. The gradient at the target is
written from expm1(logp), which keeps its digits where the target's probability is near 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.stats import Partials, combine, exp_into, local_targets, no_partials, tile_partials

CPU_TILE_BYTES = 4 << 20  # with its neighbours inside the shared cache; 1 to 8 MB took the same time
TILE_BYTES = 256 << 20
TILE_ROWS = 1024


class Head(NamedTuple):
    """A vocabulary projection, and what turns its output into logits.

    `start` is the vocabulary entry of the weight's first row, where the weight is one shard of several.
    """

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    start: int = 0


class Rows(NamedTuple):
    """What the gradient of a row of logits depends on: d_j = scale * e^(u_j) (base + slope u_j), u = z - offset.

    At the target it is scale * at_target. `base` and `slope` None are 1 and 0: no gradient comes through the entropy.
    """

    targets: Tensor
    offset: Tensor
    scale: Tensor
    at_target: Tensor
    base: Tensor | None
    slope: Tensor | None

    def take(self, rows: slice | Tensor) -> Rows:
        """The same for some of the rows."""
        return Rows(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Grads(NamedTuple):
    """Gradients: `hidden` and `weight` in their dtypes, `bias` in the compute dtype; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any given tensor is fp64, otherwise fp32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def partials(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Statistics of every row over the head's part of the vocabulary, stacked: `[4, T]`."""
    dtype = compute_dtype(hidden, head.weight, head.bias)
    h, vocab = hidden.to(dtype), head.weight.shape[0]
    out = no_partials(h.shape[0], dtype=dtype, device=h.device)
    height, width = tile_shape(h, vocab)
    buffers = h.new_empty(2, height * width)
    for first, last in blocks(vocab, width):
        w, bias = columns(head, first, last, dtype)
        for top, end in blocks(h.shape[0], height):
            z, scratch = tiles(buffers, end - top, last - first)
            logits_into(z, h[top:end], w, bias, head)
            tile = tile_partials(z, targets[top:end], first=head.start + first, scratch=scratch)
            out[:, top:end] = torch.stack(combine(Partials(*out[:, top:end]), tile))
    return out


def row_terms(
    targets: Tensor,
    offset: Tensor,
    total: Tensor,
    logp: Tensor,
    entropy: Tensor,
    g_logp: Tensor,
    g_entropy: Tensor | None,
) -> Rows:
    """`Rows` from the saved statistics and the upstream gradients (`g_entropy` None: zero everywhere)."""
    if g_entropy is None:
        return Rows(targets, offset, -g_logp / total, total * logp.expm1(), None, None)
    base = g_logp + g_entropy * (entropy - total.log())
    at_target = total * (g_entropy * logp.exp() * (logp + entropy) + g_logp * logp.expm1())
    return Rows(targets, offset, -1 / total, at_target, base, g_entropy)


def backward(hidden: Tensor, head: Head, rows: Rows, *, need: list[bool], d_weight: Tensor | None = None) -> Grads:
    """Gradients as far as `need` asks for them; a given `d_weight` is added to, in its own dtype."""
    weight, dtype = head.weight, compute_dtype(hidden, head.weight, head.bias)
    h, vocab = hidden.to(dtype), head.weight.shape[0]
    scale = (rows.scale / head.temperature).unsqueeze(1)
    d_hidden = torch.zeros_like(h) if need[0] else None
    d_weight = torch.zeros_like(weight) if need[1] and d_weight is None else d_weight
    d_bias = torch.zeros(vocab, dtype=dtype, device=h.device) if need[2] else None
    scaled = h * scale if need[1] else h
    height, width = tile_shape(h, vocab)
    buffers = h.new_empty(3, height * width)
    for first, last in blocks(vocab, width):
        w, bias = columns(head, first, last, dtype)
        d_w = None if d_weight is None or not need[1] else accumulator(d_weight[first:last], dtype)
        for top, end in blocks(h.shape[0], height):
            u, out, spare = tiles(buffers, end - top, last - first)
            part = rows.take(slice(top, end))
            logits_into(u, h[top:end], w, bias, head)
            u.sub_(part.offset.unsqueeze(1))
            d = tile_gradient(u, part, head, first=first, out=out, spare=spare)
            if d_hidden is not None:
                d_hidden[top:end].addmm_(d, w)
            if d_w is not None:
                d_w.addmm_(d.t(), scaled[top:end])
            if d_bias is not None:
                d_bias[first:last].addmv_(d.t(), scale[top:end, 0])
        if d_weight is not None and d_w is not None and d_w.dtype != weight.dtype:
            d_weight[first:last] += d_w
    return Grads(None if d_hidden is None else d_hidden.mul_(scale).to(hidden.dtype), d_weight, d_bias)


def logits_into(out: Tensor, h: Tensor, w: Tensor, bias: Tensor | None, head: Head) -> None:
    """out <- softcap * tanh((h w^T + bias) / softcap) / temperature."""
    scale = 1 / (head.softcap or head.temperature)
    if bias is None:
        out.addmm_(h, w.t(), beta=0, alpha=scale)
    else:
        torch.addmm(bias, h, w.t(), beta=scale, alpha=scale, out=out)
    if head.softcap is not None:
        out.tanh_().mul_(head.softcap / head.temperature)


def tile_gradient(u: Tensor, rows: Rows, head: Head, *, first: int, out: Tensor, spare: Tensor) -> Tensor:
    """Gradient of a tile of logits divided by `rows.scale`, from u = z - offset, in `out`. `spare` is overwritten."""
    exp_into(u, out=out)
    if rows.base is not None and rows.slope is not None:
        out.mul_(torch.addcmul(rows.base.unsqueeze(1), u, rows.slope.unsqueeze(1), out=spare))
    index, inside = local_targets(rows.targets, first=head.start + first, width=u.shape[1])
    out.scatter_(1, index, torch.where(inside, rows.at_target.unsqueeze(1), out.gather(1, index)))
    if head.softcap is not None:  # d softcap * tanh(x / softcap) / dx = 1 - (z temperature / softcap)^2
        torch.add(u, rows.offset.unsqueeze(1), out=spare).mul_(head.temperature / head.softcap)
        out.addcmul_(out, spare.square_(), value=-1)
    return out


def columns(head: Head, first: int, last: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Some rows of the weight and the bias, in the compute dtype."""
    return head.weight[first:last].to(dtype), None if head.bias is None else head.bias[first:last].to(dtype)


def accumulator(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Where to sum what is added to `x`: `x` itself if precise enough, or else a new tensor."""
    return x if x.dtype == dtype else torch.zeros_like(x, dtype=dtype)


def tile_bytes(device: torch.device) -> int:
    """The size of a tile of logits on this device."""
    return CPU_TILE_BYTES if device.type == "cpu" else TILE_BYTES


def tile_shape(h: Tensor, vocab: int) -> tuple[int, int]:
    """Rows and columns of a tile: at most the device's budget, and neither side needlessly short."""
    budget = tile_bytes(h.device) // h.element_size()
    width = max(1, min(vocab, budget // max(1, min(h.shape[0], TILE_ROWS))))
    return max(1, min(h.shape[0], budget // width)), width


def tiles(buffers: Tensor, num_rows: int, width: int) -> Tensor:
    """Contiguous `[num_rows, width]` views of flat buffers."""
    return buffers[:, : num_rows * width].view(buffers.shape[0], num_rows, width)


def blocks(size: int, block: int) -> Iterator[tuple[int, int]]:
    """Consecutive [first, last) ranges of at most `block`."""
    return ((first, min(first + block, size)) for first in range(0, size, block))
