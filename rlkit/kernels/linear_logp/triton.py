# mypy: allow-untyped-defs
"""Triton backend for CUDA: library products into blocks that stay in the cache, one Triton pass over each block.

The library (cuBLAS) writes fp32 logits of 16-bit inputs; the row kernels read each block once, from the L2 cache if it
fits. The forward's blocks have one fixed shape per hidden size, the last rows padded with zeros, so that the library
selects the same kernel for every row: a row's log-probability does not depend on the number or content of other rows.
The backward iterates over blocks of columns: the gradient of the logits of *all* rows, then one product for the
weight's gradient (final when written, rounded once) and one that is added to the fp32 gradient of the hidden states.
Rows of logits and of their gradient begin at multiples of 16 elements, whatever the vocabulary (see `padded`).

The row kernels also serve `logits_logp`. They compute z = softcap * tanh((x + bias) / softcap) / temperature in fp32
from x, a model's logits or the output of a library product. A program handles whole rows (statistics) or blocks of rows
and columns (gradient) in a fixed order without atomics, so a row's bits do not depend on other rows. Rows are on the
first axis of the grid (the other axes are limited to 65,535).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit._util.extras import MissingExtra
from rlkit.kernels._triton import NEEDED
from rlkit.kernels.linear_logp.chunked import Grads, Head, Rows, blocks, full_sums, padded, product_dtype, product_into
from rlkit.kernels.linear_logp.reference import no_partials

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingExtra(NEEDED) from None

HEIGHT, WIDTH = 1024, 8192  # of a block of logits in the forward: 32 MB in fp32, for an L2 cache of 50 MB
BLOCK_BYTES, MIN_HEIGHT = 64 << 20, 256  # of a block of logits in the backward
NARROW, MAX_GROWTH = 4096, 4  # below this hidden size both blocks are larger: see `growth`
GRADIENT_BYTES = 512 << 20  # of the logits' gradient: all rows, and at least MIN_WIDTH columns
GRADIENT_SHARE = 128  # at most this part of the device's memory: below 64 GB of it, less than GRADIENT_BYTES
MIN_WIDTH, MAX_WIDTH = 4096, 16_384  # multiples of 16
LOWEST = tl.constexpr(-1e30)  # `reference.LOWEST`
LOG2_E = tl.constexpr(1.4426950408889634)
PER_LANE = tl.constexpr(16)  # columns of a block that share their statistics: as many as a thread reads
ROWS = 1  # per program; more only in the interpreter, where a program costs milliseconds
# maxnreg: 4 blocks per multiprocessor, and without a limit the assembler delays the loads of the next block of columns.
STATS = {"BLOCK": 2048, "num_warps": 4, "maxnreg": 64}
GRADIENT = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": False}


def partials(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Statistics of every row over the head's shard of the vocabulary, stacked: `[4, T]`, fp32."""
    (num_rows, dim), vocab = hidden.shape, head.weight.shape[0]
    out = no_partials(num_rows, dtype=torch.float32, device=hidden.device)
    if num_rows == 0 or vocab == 0:
        return out
    dtype = product_dtype(hidden, head.weight)
    width = min(WIDTH * growth(dim), vocab)
    z = hidden.new_empty(HEIGHT, padded(width), dtype=torch.float32)
    with torch.cuda.device_of(hidden), full_sums():
        for top, end in blocks(num_rows, HEIGHT):
            h = pad(hidden[top:end].to(dtype), (0, 0, 0, HEIGHT - (end - top)))
            for first, last in blocks(vocab, width):
                x = z[:, : last - first]
                product_into(x, h, head.weight[first:last].to(dtype).t())
                update_stats(out[:, top:end], x[: end - top], targets[top:end], head, first=first)
    return out


def backward(hidden: Tensor, head: Head, rows: Rows, *, need: list[bool]) -> Grads:
    """Gradients where `need` is True."""
    weight, dtype = head.weight, product_dtype(hidden, head.weight)
    h, (vocab, dim), num_rows = hidden.to(dtype), weight.shape, hidden.shape[0]
    d_weight = (torch.empty_like(weight) if num_rows else torch.zeros_like(weight)) if need[1] else None
    d_hidden = h.new_zeros(num_rows, dim, dtype=torch.float32) if need[0] else None
    d_bias = h.new_zeros(vocab, dtype=torch.float32) if need[2] else None
    if num_rows == 0 or vocab == 0:
        return Grads(None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias)
    terms, unscale = pack_terms(rows, dtype, head.temperature)
    width = gradient_width(h, vocab)
    buffer = h.new_empty(num_rows, padded(width))
    height = max(MIN_HEIGHT, BLOCK_BYTES * growth(dim) // (4 * width))
    z = h.new_empty(height, padded(width), dtype=torch.float32)
    sums = Grads(d_hidden, d_weight, d_bias)
    with torch.cuda.device_of(hidden), full_sums():
        for first, last in blocks(vocab, width):
            w, d = weight[first:last].to(dtype), buffer[:, : last - first]
            for top, end in blocks(num_rows, height):
                x = z[: end - top, : last - first]
                product_into(x, h[top:end], w.t())
                part = rows.targets[top:end], terms[:, top:end]
                write_gradient(d[top:end], x, *part, head, first=first, padded_rows=True)
            add_products(sums, d, h, w, first=first, factor=unscale)
    return Grads(None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias)


def growth(dim: int) -> int:
    """Factor on the size of a block of logits: 2 at a hidden size of 2048, 4 at 1024.

    There a device needs less time for a small block than the host needs to launch its product and its pass. On an H200
    at 1024, a backward takes 0.85 of the time of blocks half as large, a forward 0.95.
    """
    return max(1, min(MAX_GROWTH, NARROW // max(1, dim)))


def gradient_width(h: Tensor, vocab: int) -> int:
    """Columns of the logits' gradient in memory at a time, for all rows of `h` and in its dtype."""
    size = GRADIENT_BYTES
    if h.is_cuda:
        size = min(size, torch.cuda.get_device_properties(h.device).total_memory // GRADIENT_SHARE)
    return min(vocab, max(MIN_WIDTH, min(MAX_WIDTH, size // (h.element_size() * h.shape[0]) // 256 * 256)))


def add_products(sums: Grads, d: Tensor, h: Tensor, w: Tensor, *, first: int, factor: float) -> None:
    """Add to `sums` the gradients that follow from `d`, that of the logits from column `first` on, times `factor`.

    These rows of the weight's gradient are written.
    """
    entries = slice(first, first + d.shape[1])
    if sums.hidden is not None:
        product_into(sums.hidden, d, w, add=True, factor=factor)
    if sums.weight is not None:
        product_into(sums.weight[entries], d.t(), h, factor=factor)
    if sums.bias is not None:
        sums.bias[entries].add_(d.sum(0, dtype=torch.float32), alpha=factor)


def pack_terms(rows: Rows, dtype: torch.dtype, temperature: float) -> tuple[Tensor, float]:
    """The `terms` of `write_gradient` for a gradient in `dtype`, and the factor to apply after the products.

    The range of fp16 is 6e-8 to 65504. A power of two scales the largest possible entry to about 2^14, so that entries
    which underflow are 4e11 times smaller. This costs a device sync. The other dtypes have the range of fp32; their
    factor is 1.
    """
    scale, factor = rows.scale / temperature, 1.0
    if dtype == torch.float16 and scale.numel():
        size = torch.ones_like(scale) if rows.base is None else rows.base.abs()
        size = size if rows.slope is None else size + rows.slope.abs()
        largest = (scale.abs() * torch.maximum(size, rows.at_target.abs())).max().item()
        factor = 2.0 ** min(120, 14 - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
    terms = [scale * factor, rows.offset, rows.at_target, rows.base, rows.slope]
    return torch.stack([x for x in terms if x is not None]), 1 / factor


def update_stats(
    stats: Tensor, x: Tensor, targets: Tensor, head: Head, *, first: int = 0, mask: Tensor | None = None
) -> None:
    """Merge the columns `x` `[R, C]`, raw logits of the head's entries from `first` on, into the statistics `[4, R]`.

    Rows where `mask` is False are not read.
    """
    num_rows, num_columns = x.shape
    bias = None if head.bias is None else head.bias[first : first + num_columns]
    mask = None if mask is None else mask.contiguous()
    aligned = x.data_ptr() % 16 == x.stride(0) % 16 == 0
    stats_kernel[(triton.cdiv(num_rows, ROWS),)](
        *(x, bias, targets.contiguous(), mask, stats),
        *(num_rows, num_columns, x.stride(0), stats.stride(0), head.start + first),
        *((head.softcap or 1.0) / head.temperature, float(head.softcap or 1.0)),
        HAS_BIAS=bias is not None,
        HAS_MASK=mask is not None,
        HAS_SOFTCAP=head.softcap is not None,
        ROWS=ROWS,
        VECTOR=16 // x.itemsize if aligned else 1,
        **STATS,
    )


def write_gradient(
    out: Tensor,
    x: Tensor,
    targets: Tensor,
    terms: Tensor,
    head: Head,
    *,
    first: int = 0,
    alive: Tensor | None = None,
    padded_rows: bool = False,
) -> None:
    """out <- gradient of the columns `x` `[R, C]` from the `terms` of their rows; `out` may be `x`.

    `terms` `[3, R]` or `[5, R]` holds scale, offset, at_target(, base, slope) of `chunked.Rows`. Where `alive` is False
    the gradient is 0 and nothing is read. `padded_rows`: the rows
    of `x` and `out` go on to a multiple of 16 columns, which may be read, and are set to 0.
    """
    num_rows, num_columns = out.shape
    bias = None if head.bias is None else head.bias[first : first + num_columns]
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, GRADIENT["BLOCK"]))
    gradient_kernel[grid](
        *(x, bias, targets.contiguous(), alive, terms, out),
        *(num_rows, num_columns, x.stride(0), out.stride(0), terms.stride(0), head.start + first),
        *((head.softcap or 1.0) / head.temperature, float(head.softcap or 1.0)),
        HAS_BIAS=bias is not None,
        HAS_ALIVE=alive is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_ENTROPY=terms.shape[0] == 5,
        VECTOR=16 if padded_rows else 1,
        ROWS=ROWS,
        **GRADIENT,
    )


@triton.jit
def tanh(x):
    """tanh by exponentials, or by its series near 0, where the exponentials cancel (relative error 2e-7)."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    t = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1 - t) / (1 + t)
    return tl.where(square < 0.04, series, tl.where(x < 0, -size, size))


@triton.jit
def capped(x, bias_ptr, column, mask, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """x + bias in fp32; with a softcap tanh((x + bias) / softcap), where `scale` has the softcap as a factor."""
    x = x.to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=mask)
    if HAS_SOFTCAP:
        x = tanh(x / softcap)
    return x


@triton.jit
def to_logits(x, scale):
    """Scale, and clamp to at least -1e30; NaN stays NaN.

    The clamp also keeps compilers from fusing the product with the subtraction of a maximum, where z - max must be 0.
    """
    z = x * scale
    return tl.where(z < LOWEST, LOWEST, z)


@triton.jit
def merge_block(z, inside, peak, total, dot, VECTOR: tl.constexpr):
    """Merge logits `[R, BLOCK]` into the statistics `[R, BLOCK / PER_LANE]` of their lanes.

    A lane has `VECTOR` adjacent columns, several times: those of one thread, so that no thread waits for another.
    """
    LANES: tl.constexpr = z.shape[1] // PER_LANE
    z = tl.reshape(z, [z.shape[0], PER_LANE // VECTOR, LANES, VECTOR])
    if inside is not None:
        inside = tl.reshape(inside, [1, PER_LANE // VECTOR, LANES, VECTOR])
        z = tl.where(inside, z, LOWEST)
    top = tl.maximum(peak, tl.max(tl.max(z, 3), 1))
    u = z - top[:, None, :, None]
    e = tl.exp2(u * LOG2_E)
    if inside is not None:
        e = tl.where(inside, e, 0.0)
    shift = peak - top
    shrink = tl.exp2(shift * LOG2_E)
    dot = (dot + total * shift) * shrink + tl.sum(tl.sum(e * u, 3), 1)
    return top, total * shrink + tl.sum(tl.sum(e, 3), 1), dot


@triton.jit
def merge_rows(stats_ptrs, stride, alive, peak, total, dot):
    """`reference.combine` with max, sum and dot of the rows that are stored."""
    old_peak = tl.load(stats_ptrs, mask=alive, other=LOWEST)
    old_total = tl.load(stats_ptrs + stride, mask=alive, other=0.0)
    old_dot = tl.load(stats_ptrs + 2 * stride, mask=alive, other=0.0)
    top = tl.maximum(peak, old_peak)
    shift, old_shift = peak - top, old_peak - top
    shrink, old_shrink = tl.exp2(shift * LOG2_E), tl.exp2(old_shift * LOG2_E)
    dot = (dot + total * shift) * shrink + (old_dot + old_total * old_shift) * old_shrink
    tl.store(stats_ptrs, top, mask=alive)
    tl.store(stats_ptrs + stride, total * shrink + old_total * old_shrink, mask=alive)
    tl.store(stats_ptrs + 2 * stride, dot, mask=alive)


@triton.jit(do_not_specialize=["num_rows", "first"])
def stats_kernel(
    x_ptr,
    bias_ptr,
    targets_ptr,
    mask_ptr,
    stats_ptr,
    num_rows,
    num_columns,
    x_stride,
    stats_stride,
    first,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge these columns into max, sum, dot and target of their rows (see `Partials`)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = row < num_rows
    if HAS_MASK:
        alive = alive & (tl.load(mask_ptr + row, mask=alive, other=0) != 0)
    end = tl.where(tl.max(alive.to(tl.int32), 0) > 0, num_columns, 0)
    whole = end // BLOCK * BLOCK
    start = x_ptr + tl.minimum(row, num_rows - 1) * x_stride
    column = tl.arange(0, BLOCK)[None, :]
    peak = tl.full([ROWS, BLOCK // PER_LANE], LOWEST, tl.float32)
    total = tl.zeros_like(peak)
    dot = tl.zeros_like(peak)
    ahead = tl.load(start[:, None] + column, mask=whole > 0)
    for left in range(0, whole, BLOCK):
        x = capped(ahead, bias_ptr, left + column, None, softcap, HAS_BIAS, HAS_SOFTCAP)
        ahead = tl.load(start[:, None] + (left + BLOCK + column), mask=left + BLOCK < whole)
        peak, total, dot = merge_block(to_logits(x, scale), None, peak, total, dot, VECTOR)
    if whole < end:
        column += whole
        inside = column < end
        x = tl.load(start[:, None] + column, mask=inside)
        x = capped(x, bias_ptr, column, inside, softcap, HAS_BIAS, HAS_SOFTCAP)
        peak, total, dot = merge_block(to_logits(x, scale), inside, peak, total, dot, VECTOR)
    top = tl.max(peak, 1)
    shift = peak - top[:, None]
    dot = tl.sum((dot + total * shift) * tl.exp2(shift * LOG2_E), 1)
    total = tl.sum(total * tl.exp2(shift * LOG2_E), 1)
    merge_rows(stats_ptr + row, stats_stride, alive, top, total, dot)
    local = tl.load(targets_ptr + row, mask=alive, other=-1).to(tl.int32) - first
    here = alive & (local >= 0) & (local < num_columns)
    x = capped(tl.load(start + local, mask=here), bias_ptr, local, here, softcap, HAS_BIAS, HAS_SOFTCAP)
    tl.store(stats_ptr + 3 * stats_stride + row, to_logits(x, scale), mask=here)


@triton.jit(do_not_specialize=["num_rows", "first"])
def gradient_kernel(
    x_ptr,
    bias_ptr,
    targets_ptr,
    alive_ptr,
    terms_ptr,
    out_ptr,
    num_rows,
    num_columns,
    x_stride,
    out_stride,
    terms_stride,
    first,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_ALIVE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """factor * e^u (base + slope u), u = z - offset, and factor * at_target at the target: see `chunked`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = row < num_rows
    alive = valid
    if HAS_ALIVE:
        alive = alive & (tl.load(alive_ptr + row, mask=valid, other=0) != 0)
    within = (column < num_columns)[None, :]
    inside = alive[:, None] & within
    whole = (column // VECTOR * VECTOR < num_columns)[None, :]  # the same throughout a vector: one memory access
    x = tl.load(x_ptr + (row * x_stride)[:, None] + column[None, :], mask=alive[:, None] & whole)
    x = capped(x, bias_ptr, column[None, :], within, softcap, HAS_BIAS, HAS_SOFTCAP)
    factor = tl.load(terms_ptr + row, mask=alive, other=0.0)
    offset = tl.load(terms_ptr + terms_stride + row, mask=alive, other=0.0)
    at_target = tl.load(terms_ptr + 2 * terms_stride + row, mask=alive, other=0.0)
    u = to_logits(x, scale) - offset[:, None]
    d = tl.exp2(u * LOG2_E)
    if HAS_ENTROPY:
        base = tl.load(terms_ptr + 3 * terms_stride + row, mask=alive, other=0.0)
        slope = tl.load(terms_ptr + 4 * terms_stride + row, mask=alive, other=0.0)
        d *= base[:, None] + slope[:, None] * u
    local = tl.load(targets_ptr + row, mask=alive, other=-1).to(tl.int32) - first
    d = tl.where(local[:, None] == column[None, :], at_target[:, None], d)
    if HAS_SOFTCAP:  # x is tanh; d softcap * tanh(y / softcap) / dy = 1 - tanh^2
        d *= 1 - x * x
    d = tl.where(inside, d * factor[:, None], 0.0)
    here = valid[:, None] & whole
    tl.store(out_ptr + (row * out_stride)[:, None] + column[None, :], d.to(out_ptr.dtype.element_ty), mask=here)
