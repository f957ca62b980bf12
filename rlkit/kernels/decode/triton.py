# mypy: allow-untyped-defs
"""Triton kernels of a decoding step. Memory-bound: each reads its inputs once.

Attention is split over the places of a slot, so that few rows fill a device too; a second kernel merges the parts. The
split depends on shapes only, never on lengths, and parts are merged in a fixed order: runs are bit-identical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit._util.extras import MissingExtra
from rlkit.kernels._triton import NEEDED

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingExtra(NEEDED) from None

PROGRAMS = 1056  # of the attention at least, if there are places enough: 8 for each multiprocessor of an H100
SPLIT_PLACES, MAX_SPLITS = 256, 32  # the fewest places of a part, and the most parts
ATTEND = {"TILE": 64, "num_warps": 4, "num_stages": 2}
MERGE = {"num_warps": 2}
ROTATE = {"num_warps": 1}
NORM = {"num_warps": 8}
SILU = {"BLOCK": 1024, "num_warps": 4}
SUMS = {"BLOCKS": 16, "num_warps": 4}
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


def append_rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slots: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """See `rlkit.kernels.decode.append_rotated`."""
    rows, (_, kv_heads, _, dim) = len(qkv), keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty(rows, heads * dim, dtype=keys.dtype, device=keys.device)
    q_norm, k_norm = (None, None) if norms is None else norms
    with torch.cuda.device_of(qkv):
        rotate_kernel[(rows, heads + 2 * kv_heads)](
            *(qkv, cos, sin, positions, slots, q_norm, k_norm, q, keys, values),
            *(keys.stride(0), keys.stride(1), eps),
            HEADS=heads,
            KV=kv_heads,
            HALF=dim // 2,
            HAS_NORM=norms is not None,
            HAS_SLOTS=slots is not None,
            **ROTATE,
        )
    return q


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, slots: Tensor | None) -> Tensor:
    """See `rlkit.kernels.decode.attend_slots`."""
    rows, (_, kv_heads, capacity, dim) = len(q), keys.shape
    heads, splits = q.shape[1] // dim, num_splits(rows * kv_heads, capacity)
    out = torch.empty_like(q)
    parts = q.new_empty(splits, rows * heads, dim, dtype=torch.float32) if splits > 1 else out
    stats = q.new_empty(2, splits, rows * heads, dtype=torch.float32)
    group = heads // kv_heads
    with torch.cuda.device_of(q):
        attend_kernel[(rows, kv_heads, splits)](
            *(q, keys, values, positions, slots, parts, stats),
            *(dim**-0.5, keys.stride(0), keys.stride(1), rows * heads),
            KV=kv_heads,
            GROUP=group,
            PADDED=max(16, triton.next_power_of_2(group)),
            D=dim,
            SPLITS=splits,
            HAS_SLOTS=slots is not None,
            EXACT=q.dtype == torch.float32,
            **ATTEND,
        )
        if splits > 1:
            merge_kernel[(rows * heads,)](parts, stats, out, rows * heads, D=dim, SPLITS=splits, **MERGE)
    return out


def num_splits(programs: int, capacity: int) -> int:
    """Into how many parts the places of a slot are split: a power of two."""
    wanted = min(triton.cdiv(PROGRAMS, programs), triton.cdiv(capacity, SPLIT_PLACES), MAX_SPLITS)
    return triton.next_power_of_2(max(1, wanted))


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
    """See `rlkit.kernels.decode.add_rms_norm`."""
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=dtype, device=x.device)
    with torch.cuda.device_of(x):
        norm_kernel[(rows,)](
            x, y, weight, out, eps, DIM=dim, BLOCK=triton.next_power_of_2(dim), HAS_SUM=y is not None, **NORM
        )
    return out


def silu_mul(x: Tensor) -> Tensor:
    """See `rlkit.kernels.decode.silu_mul`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        silu_kernel[(rows, triton.cdiv(width, SILU["BLOCK"]))](x, out, width, **SILU)
    return out


@triton.jit
def rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    slot_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """One head of one row: normed and rotated into the queries or the cache, or copied into the values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(positions_ptr + row)
    i = tl.arange(0, HALF)
    source = qkv_ptr + (row * (HEADS + 2 * KV) + head) * (2 * HALF)
    x, y = tl.load(source + i).to(tl.float32), tl.load(source + HALF + i).to(tl.float32)
    if head < HEADS + KV:
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
            norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            x = x * scale * tl.load(norm_ptr + i).to(tl.float32)
            y = y * scale * tl.load(norm_ptr + HALF + i).to(tl.float32)
        c, s = tl.load(cos_ptr + place * HALF + i), tl.load(sin_ptr + place * HALF + i)
        x, y = x * c - y * s, y * c + x * s
    slot = tl.load(slots_ptr + row) if HAS_SLOTS else row
    cached = slot * slot_stride + place * (2 * HALF)
    if head < HEADS:
        target = q_ptr + (row * HEADS + head) * (2 * HALF)
    elif head < HEADS + KV:
        target = keys_ptr + cached + (head - HEADS) * head_stride
    else:
        target = values_ptr + cached + (head - HEADS - KV) * head_stride
    tl.store(target + i, x.to(q_ptr.dtype.element_ty))
    tl.store(target + HALF + i, y.to(q_ptr.dtype.element_ty))


@triton.jit
def attend_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    slots_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    slot_stride,
    head_stride,
    num_rows,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The queries of one key head over one part of the places of a slot: sum of weighted values, max, sum of weights.

    The parts are split evenly over the places that count. With one part the result itself is stored.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    size = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    first = split * size
    last = tl.minimum(first + size, length)
    g, d, n = tl.arange(0, PADDED), tl.arange(0, D), tl.arange(0, TILE)
    alive = g < GROUP
    index = (row * KV + head) * GROUP + g
    q = tl.load(q_ptr + index[:, None] * D + d[None, :], mask=alive[:, None], other=0.0)
    slot = tl.load(slots_ptr + row) if HAS_SLOTS else row
    cached = slot * slot_stride + head * head_stride
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    peak = tl.full([PADDED], LOWEST, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    out = tl.zeros([PADDED, D], tl.float32)
    for start in range(first, last, TILE):
        inside = start + n < last
        at = cached + (start + n)[:, None] * D + d[None, :]
        k = tl.load(keys_ptr + at, mask=inside[:, None], other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision=precision) * (scale * LOG2_E)
        z = tl.where(inside[None, :], z, LOWEST)
        top = tl.maximum(peak, tl.max(z, 1))
        p = tl.exp2(z - top[:, None])
        p = tl.where(inside[None, :], p, 0.0)
        shrink = tl.exp2(peak - top)
        v = tl.load(values_ptr + at, mask=inside[:, None], other=0.0)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=precision)
        total = total * shrink + tl.sum(p, 1)
        peak = top
    if SPLITS == 1:
        out = out / total[:, None]
        tl.store(parts_ptr + index[:, None] * D + d[None, :], out.to(parts_ptr.dtype.element_ty), mask=alive[:, None])
    else:
        index += split * num_rows.to(tl.int64)
        tl.store(parts_ptr + index[:, None] * D + d[None, :], out, mask=alive[:, None])
        tl.store(stats_ptr + index, peak, mask=alive)
        tl.store(stats_ptr + SPLITS * num_rows.to(tl.int64) + index, total, mask=alive)


@triton.jit
def merge_kernel(parts_ptr, stats_ptr, out_ptr, num_rows, D: tl.constexpr, SPLITS: tl.constexpr):
    """The result of one query head from its parts; an empty part weighs 0."""
    row, s, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, D)
    index = s * num_rows.to(tl.int64) + row
    peak = tl.load(stats_ptr + index)
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(stats_ptr + SPLITS * num_rows.to(tl.int64) + index), 0)
    parts = tl.load(parts_ptr + index[:, None] * D + d[None, :])
    out = tl.sum(parts * weight[:, None], 0) / total
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty))


@triton.jit
def norm_kernel(x_ptr, y_ptr, weight_ptr, out_ptr, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_SUM: tl.constexpr):
    """One row: x += y, and its RMS norm."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < DIM
    x = tl.load(x_ptr + row * DIM + i, mask=inside, other=0.0)
    if HAS_SUM:
        x += tl.load(y_ptr + row * DIM + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * DIM + i, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * DIM + i, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def silu_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """A block of columns of one row."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(x_ptr + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp2(-gate * LOG2_E)) * up
    tl.store(out_ptr + row * width + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def block_sums(p: Tensor, *, block: int) -> Tensor:
    """See `rlkit.kernels.decode.block_sums`."""
    return _sums(p, None, block)


def block_exp_sums(z: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """See `rlkit.kernels.decode.reference.block_exp_sums`."""
    peaks = z.new_empty(len(z), triton.cdiv(z.shape[1], block))
    return peaks, _sums(z, peaks, block)


def _sums(x: Tensor, peaks: Tensor | None, block: int) -> Tensor:
    rows, width = x.shape
    count = triton.cdiv(width, block)
    out = x.new_empty(rows, count, dtype=torch.float64)
    grid = (rows, triton.cdiv(count, SUMS["BLOCKS"]))
    with torch.cuda.device_of(x):
        sums_kernel[grid](x.contiguous(), peaks, out, width, count, SIZE=block, EXP=peaks is not None, **SUMS)
    return out


@triton.jit
def sums_kernel(x_ptr, peaks_ptr, out_ptr, width, count, SIZE: tl.constexpr, EXP: tl.constexpr, BLOCKS: tl.constexpr):
    """Some neighbouring blocks of one row: of x, or (EXP) the peaks of x and the sums of exp(x - peak). SIZE is a power
    of two."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = i[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + row * width + at, mask=at < width, other=-float("inf") if EXP else 0.0)
    if EXP:
        peak = tl.maximum(tl.max(x, 1), LOWEST)
        tl.store(peaks_ptr + row * count + i, peak, mask=i < count)
        x = tl.exp2((x - peak[:, None]) * LOG2_E)
    tl.store(out_ptr + row * count + i, tl.sum(x.to(tl.float64), 1), mask=i < count)
