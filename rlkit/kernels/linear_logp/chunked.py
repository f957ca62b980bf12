"""Backend in plain torch, in tiles of logits: the fast path on CPUs; runs on any device.

A backend has two functions, here and in `triton`: `partials` and `backward` iterate over tiles of logits and keep
none. `forward_kept` and `backward_kept` keep the probabilities of a problem whose logits take a few MB in total. The
outer loop is over the vocabulary; buffers are preallocated. With u = z - max and upstream gradients g_l of logp and g_h
of the entropy,

    dz_j = g_l [j = target] - e^(u_j) / sum * (g_l + g_h (entropy - log sum) + g_h u_j)

1 / sum does not depend on j, so it scales rows of `hidden` once instead of every logit. The gradient at the target is
computed from expm1(logp), which is accurate where the target's probability is near 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit._util.tensors import cumsum
from rlkit.kernels.linear_logp.reference import LOWEST, Partials, combine, compute_dtype, no_partials

LOG2_E = 1 / math.log(2)
CPU_TILE_BYTES = 4 << 20  # fits the shared cache together with the other buffers; 1 to 8 MB took the same time
TILE_BYTES = 256 << 20
TILE_ROWS = 1024
KEEP_BYTES = 16 << 20
COLUMNS = 8192  # columns of the logits whose weight rows `logits` converts at a time
FIRST_CANDIDATES = 128  # most nuclei are smaller; the other rows are searched again with 8 times as many


class Head(NamedTuple):
    """A vocabulary projection and the scaling of its logits. `start`: vocabulary entry of the weight's first row."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    start: int = 0


class Rows(NamedTuple):
    """Per-row terms of the gradient of the logits: d_j = scale * e^(u_j) (base + slope u_j), u = z - offset.

    At the target it is scale * at_target. `base` and `slope` None mean 1 and 0 (no gradient from the entropy).
    """

    targets: Tensor
    offset: Tensor
    scale: Tensor
    at_target: Tensor
    base: Tensor | None
    slope: Tensor | None

    def take(self, rows: slice | Tensor) -> Rows:
        """The terms of the given rows."""
        return Rows(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class KeptRows(NamedTuple):
    """Per-row inputs `[T]` of `backward_kept`. `g_entropy` None is zero."""

    targets: Tensor
    logp: Tensor
    entropy: Tensor
    lse: Tensor
    g_logp: Tensor
    g_entropy: Tensor | None


class Grads(NamedTuple):
    """Gradients: `hidden` and `weight` in their dtypes, `bias` in the compute dtype; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


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


def partials(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Statistics of every row over the head's shard of the vocabulary, stacked: `[4, T]`."""
    dtype = compute_dtype(hidden, head.weight, head.bias)
    h, vocab = hidden.to(dtype), head.weight.shape[0]
    out = no_partials(h.shape[0], dtype=dtype, device=h.device)
    height, width = _tile_shape(h, vocab)
    buffers = h.new_empty(2, height * width)
    for first, last in blocks(vocab, width):
        w, bias = _columns(head, first, last, dtype)
        for top, end in blocks(h.shape[0], height):
            z, scratch = _tiles(buffers, end - top, last - first)
            logits_into(z, h[top:end], w, bias, head)
            tile = tile_partials(z, targets[top:end], first=head.start + first, scratch=scratch)
            out[:, top:end] = torch.stack(combine(Partials(*out[:, top:end]), tile))
    return out


def backward(hidden: Tensor, head: Head, rows: Rows, *, need: list[bool]) -> Grads:
    """Gradients where `need` is True."""
    weight, dtype = head.weight, compute_dtype(hidden, head.weight, head.bias)
    h, vocab = hidden.to(dtype), head.weight.shape[0]
    scale = (rows.scale / head.temperature).unsqueeze(1)
    d_hidden = torch.zeros_like(h) if need[0] else None
    d_weight = torch.zeros_like(weight) if need[1] else None
    d_bias = torch.zeros(vocab, dtype=dtype, device=h.device) if need[2] else None
    scaled = h * scale if need[1] else h
    height, width = _tile_shape(h, vocab)
    buffers = h.new_empty(3, height * width)
    for first, last in blocks(vocab, width):
        w, bias = _columns(head, first, last, dtype)
        d_w = None
        if d_weight is not None:
            d_w = d_weight[first:last]
            d_w = d_w if d_w.dtype == dtype else torch.zeros_like(d_w, dtype=dtype)
        for top, end in blocks(h.shape[0], height):
            u, out, spare = _tiles(buffers, end - top, last - first)
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


def can_keep(num_rows: int, vocab: int, dtype: torch.dtype) -> bool:
    """Whether the log-probabilities and probabilities are small enough to keep for the backward."""
    return 2 * num_rows * vocab * dtype.itemsize <= KEEP_BYTES


def forward_kept(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, logsumexp (0 without a softcap, where it is not needed), and log_p and p, stacked: `[2, T, V]`.

    Keeping log_p and p saves one of the four matrix products, an exponential, and most of the overhead.
    """
    dtype = compute_dtype(hidden, head.weight, head.bias)
    h, w, index = hidden.to(dtype), head.weight.to(dtype), targets.unsqueeze(1)
    probs = h.new_empty(2, h.shape[0], w.shape[0])
    log_p, z = probs
    logits_into(z, h, w, head.bias, head)
    torch.log_softmax(z, 1, out=log_p)
    logp = log_p.gather(1, index).squeeze(1)
    lse = torch.zeros_like(logp) if head.softcap is None else z.gather(1, index).squeeze(1) - logp
    entropy = torch.linalg.vecdot(exp_into(log_p, out=z), log_p, out=torch.empty_like(logp)).neg_()
    return logp, entropy, lse, probs


def backward_kept(hidden: Tensor, head: Head, probs: Tensor, rows: KeptRows, *, need: list[bool]) -> Grads:
    """`backward` from the outputs of `forward_kept`: dz_j = g_l [j = target] - p_j (g_l + g_h (entropy + log_p_j))."""
    targets, logp, entropy, lse, g_logp, g_entropy = rows
    scale = (g_logp / -head.temperature).unsqueeze(1)
    log_p, p = probs
    if g_entropy is None:
        d = p * scale
        at_target = logp.expm1().unsqueeze(1).mul_(scale)
    else:
        slope = (g_entropy / -head.temperature).unsqueeze(1)
        d = (log_p * slope).add_(torch.addcmul(scale, slope, entropy.unsqueeze(1))).mul_(p)
        logp, entropy = logp.unsqueeze(1), entropy.unsqueeze(1)
        at_target = scale * logp.expm1() + slope * logp.exp() * (logp + entropy)
    d.scatter_(1, targets.unsqueeze(1), at_target)
    if head.softcap is not None:  # d softcap * tanh(x / softcap) / dx = 1 - (z temperature / softcap)^2
        d.addcmul_(d, (log_p + lse.unsqueeze(1)).mul_(head.temperature / head.softcap).square_(), value=-1)
    d_weight = _product(d.t(), hidden).to(head.weight.dtype) if need[1] else None
    d_hidden = _product(d, head.weight).to(hidden.dtype) if need[0] else None
    return Grads(d_hidden, d_weight, d.sum(0) if need[2] else None)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product a b in the dtype of `a`, also under autocast, which does not apply to products with an `out`."""
    return torch.mm(a, b.to(a.dtype), out=a.new_empty(a.shape[0], b.shape[1]))


def logits_into(out: Tensor, h: Tensor, w: Tensor, bias: Tensor | None, head: Head) -> None:
    """out <- softcap * tanh((h w^T + bias) / softcap) / temperature."""
    scale = 1 / (head.softcap or head.temperature)
    if bias is None:
        out.addmm_(h, w.t(), beta=0, alpha=scale)
    else:
        torch.addmm(bias, h, w.t(), beta=scale, alpha=scale, out=out)
    if head.softcap is not None:
        out.tanh_().mul_(head.softcap / head.temperature)


def logits(h: Tensor, head: Head, dtype: torch.dtype) -> Tensor:
    """Logits `[R, V]` of a few rows, without an fp32 copy of the whole weight."""
    out = torch.empty(h.shape[0], head.weight.shape[0], dtype=dtype, device=h.device)
    if h.is_cuda and dtype == torch.float32:
        logits_by_library(out, h, head)
    else:
        h = h.to(dtype)
        for first, last in blocks(out.shape[1], COLUMNS):
            logits_into(out[:, first:last], h, *_columns(head, first, last, dtype), head)
    return out


def logits_by_library(out: Tensor, h: Tensor, head: Head) -> None:
    """`logits_into` for all columns, as one product of 16-bit inputs with an fp32 result."""
    dtype = product_dtype(h, head.weight)
    with full_sums():
        product_into(out, h.to(dtype), head.weight.to(dtype).t())
    if head.bias is not None:
        out.add_(head.bias)
    if head.softcap is not None:
        out.div_(head.softcap).tanh_().mul_(head.softcap)
    out.div_(head.temperature)


def kept_mass(p: Tensor, top_p: float, top_k: int, min_p: float = 0.0) -> Tensor:
    """Kept mass of each row, fp64: the sum of the largest p, at most `top_k` of them, until it reaches `top_p`, and of
    those that are at least `min_p` times the largest."""
    size = top_k if top_p == 1 and min_p == 0 else min(FIRST_CANDIDATES, top_k)
    mass, todo = p.new_zeros(p.shape[0], dtype=torch.float64), torch.arange(p.shape[0], device=p.device)
    while todo.numel():
        largest = (p if todo.numel() == p.shape[0] else p[todo]).topk(size, dim=1).values.double()
        total = cumsum(largest, 1)
        before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], dim=1)
        likely = ~(largest < min_p * largest[:, :1])  # NaN stays
        mass[todo] = torch.where(((before < top_p) | (top_p == 1)) & likely, largest, 0).sum(1)
        todo = todo[(total[:, -1] < top_p) & likely[:, -1]] if size < top_k else todo[:0]
        size = min(8 * size, top_k)
    return mass


def tile_partials(z: Tensor, targets: Tensor, *, first: int, scratch: Tensor) -> Partials:
    """Statistics of a tile of logits whose first column is vocabulary entry `first`. Overwrites `z` with z - max."""
    index, inside = _local_targets(targets, first=first, width=z.shape[1])
    peak = z.amax(1)
    target = torch.where(inside, z.gather(1, index), LOWEST).squeeze(1)
    exp_into(z.sub_(peak.unsqueeze(1)), out=scratch)
    total = scratch.sum(1)
    return Partials(peak, total, scratch.mul_(z).sum(1), target)


def tile_gradient(u: Tensor, rows: Rows, head: Head, *, first: int, out: Tensor, spare: Tensor) -> Tensor:
    """Gradient of a tile of logits divided by `rows.scale`, from u = z - offset, into `out`. Overwrites `spare`."""
    exp_into(u, out=out)
    if rows.base is not None and rows.slope is not None:
        out.mul_(torch.addcmul(rows.base.unsqueeze(1), u, rows.slope.unsqueeze(1), out=spare))
    index, inside = _local_targets(rows.targets, first=head.start + first, width=u.shape[1])
    out.scatter_(1, index, torch.where(inside, rows.at_target.unsqueeze(1), out.gather(1, index)))
    if head.softcap is not None:  # d softcap * tanh(x / softcap) / dx = 1 - (z temperature / softcap)^2
        torch.add(u, rows.offset.unsqueeze(1), out=spare).mul_(head.temperature / head.softcap)
        out.addcmul_(out, spare.square_(), value=-1)
    return out


def exp_into(u: Tensor, *, out: Tensor) -> Tensor:
    """out <- e^u for u <= 0, as 2^(u log2 e): twice as fast as exp on CPUs. The error e^u |u| eps is below eps / 2."""
    return torch.mul(u, LOG2_E, out=out).exp2_()


def _local_targets(targets: Tensor, *, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Target ids relative to the `width` columns from `first` (0 if outside), and whether inside: both `[T, 1]`."""
    local = targets.unsqueeze(1) - first
    inside = (local >= 0) & (local < width)
    return torch.where(inside, local, 0), inside


def _columns(head: Head, first: int, last: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows [first, last) of the weight and the bias, in the compute dtype."""
    return head.weight[first:last].to(dtype), None if head.bias is None else head.bias[first:last].to(dtype)


def tile_bytes(device: torch.device) -> int:
    """Bytes of a tile of logits on this device."""
    return CPU_TILE_BYTES if device.type == "cpu" else TILE_BYTES


def _tile_shape(h: Tensor, vocab: int) -> tuple[int, int]:
    """Rows and columns of a tile, within the device's budget."""
    budget = tile_bytes(h.device) // h.element_size()
    width = max(1, min(vocab, budget // max(1, min(h.shape[0], TILE_ROWS))))
    return max(1, min(h.shape[0], budget // width)), width


def _tiles(buffers: Tensor, num_rows: int, width: int) -> Tensor:
    """Contiguous `[num_rows, width]` views of flat buffers."""
    return buffers[:, : num_rows * width].view(buffers.shape[0], num_rows, width)


def blocks(size: int, block: int) -> Iterator[tuple[int, int]]:
    """Consecutive [first, last) ranges of at most `block`."""
    return ((first, min(first + block, size)) for first in range(0, size, block))


def padded(size: int) -> int:
    """`size` rounded up to 16: elements from one row of logits to the next.

    Rows that begin at multiples of 32 bytes let the library use its fastest kernels, and row kernels load vectors.
    """
    return -(-size // 16) * 16


def product_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, factor: float = 1.0) -> None:
    """out <- factor a b (+ out) by the library, accumulated in fp32 (fp64 for fp64) and rounded once to `out`.

    `out` is not read without `add`. 16-bit `a` and `b` may have an fp32 `out`.
    """
    beta = 1 if add else 0
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=factor, out=out)
    elif a.dtype.itemsize > out.dtype.itemsize:
        product = torch.mm(a, b, out=a.new_empty(out.shape)).mul_(factor)  # with `out`, autocast does not apply
        out.copy_(out + product if add else product)
    elif a.is_cuda and not add and factor == 1:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=factor, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, alpha=factor, out=out)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The common dtype, or fp32 if they differ."""
    return hidden.dtype if hidden.dtype == weight.dtype else torch.float32


@contextmanager
def full_sums() -> Iterator[None]:
    """Accumulate split-K products of 16-bit matrices in fp32 instead of 16 bits (torch's default).

    Each of torch's two settings is a pair: 16-bit sums, and split-K itself. Assigning a bool to it would allow split-K,
    so the caller's choice is assigned with it. Without split-K, cuBLAS (unlike cuBLASLt) makes torch raise.
    """
    flags = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")]
    before = [(getattr(flags, name), getattr(flags, f"{name}_split_k")) for name in names]
    try:
        for name, (_, split_k) in zip(names, before, strict=True):
            setattr(flags, name, (False, split_k))
        yield
    finally:
        for name, pair in zip(names, before, strict=True):
            setattr(flags, name, pair)
