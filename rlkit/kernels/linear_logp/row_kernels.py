# mypy: allow-untyped-defs
"""Triton kernels over rows of logits: their softmax statistics, and their gradient. Memory-bound, and one read each.

Both turn what they read into logits on the way: z = softcap * tanh((x + bias) / softcap) / temperature, in fp32. They
serve `logits_logp`, where x are the model's logits, and `linear_logp`, where x is a block that a library product left
in fp32. A program handles whole rows (statistics) or pieces of rows (gradient), always in the same order: no atomics,
and a row's bits do not depend on the rows around it. Rows are on the first axis of the grid (the others end at 65,535).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkit._extras import MissingExtra
from rlkit.kernels._triton import NEEDED

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingExtra(NEEDED) from None

LOWEST = tl.constexpr(-1e30)  # as in `stats`
LOG2_E = tl.constexpr(1.4426950408889634)

ROWS = 1  # per program; more only in the interpreter, where a program costs milliseconds
# Products are not fused with the differences after them: u = z - max would not be 0 at the maximum, nor logp at V = 1.
# ptxas would stop at 64 registers on sm_100, and spill.
STATS = {"BLOCK": 4096, "STAGES": 2, "num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}
GRADIENT = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": False}


class Scaling(NamedTuple):
    """What turns the numbers that are read into logits; `first` is the vocabulary entry of their first column."""

    bias: Tensor | None
    temperature: float
    softcap: float | None
    first: int


def update_stats(stats: Tensor, x: Tensor, targets: Tensor, scaling: Scaling, *, mask: Tensor | None = None) -> None:
    """Merges the columns `x` `[R, C]` into the statistics `[4, R]`. Rows where `mask` is False are not read."""
    num_rows, num_columns = x.shape
    bias, temperature, softcap, first = scaling
    stats_kernel[(triton.cdiv(num_rows, ROWS),)](
        x,
        bias,
        targets.contiguous(),
        None if mask is None else mask.contiguous(),
        stats,
        num_rows,
        num_columns,
        x.stride(0),
        stats.stride(0),
        first,
        1 / temperature,
        float(softcap or 1.0),
        HAS_BIAS=bias is not None,
        HAS_MASK=mask is not None,
        HAS_SOFTCAP=softcap is not None,
        ROWS=ROWS,
        **STATS,
    )


def write_gradient(
    out: Tensor,
    x: Tensor,
    targets: Tensor,
    terms: Tensor,
    scaling: Scaling,
    *,
    alive: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """out <- gradient of the columns `x` `[R, C]` from the `terms` of their rows; `out` may be `x`.

    `terms` `[3, R]` or `[5, R]` holds scale, offset, at_target(, base, slope) of `chunked.Rows`. Where `alive` is False
    the gradient is 0 and nothing is read. `rows` `[R]`, where given, says which row of `x` each row of `out` is of.
    """
    num_rows, num_columns = out.shape
    bias, temperature, softcap, first = scaling
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, GRADIENT["BLOCK"]))
    gradient_kernel[grid](
        x,
        bias,
        targets.contiguous(),
        alive,
        rows,
        terms,
        out,
        num_rows,
        num_columns,
        x.stride(0),
        out.stride(0),
        terms.stride(0),
        first,
        1 / temperature,
        float(softcap or 1.0),
        HAS_BIAS=bias is not None,
        HAS_ALIVE=alive is not None,
        HAS_ROWS=rows is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_ENTROPY=terms.shape[0] == 5,
        ROWS=ROWS,
        **GRADIENT,
    )


@triton.jit
def tanh(x):
    """By exponentials; near 0, where those cancel, by its series (relative error 2e-7)."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    t = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1 - t) / (1 + t)
    return tl.where(square < 0.04, series, tl.where(x < 0, -size, size))


@triton.jit
def to_logits(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled and capped, at least -1e30; NaN stays."""
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    z = x * scale
    return tl.where(z < LOWEST, LOWEST, z)


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
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """max, sum, dot and target of a row so far (see `Partials`) become those with these columns too."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = row < num_rows
    if HAS_MASK:
        alive = alive & (tl.load(mask_ptr + row, mask=alive, other=0) != 0)
    start = row * x_stride
    peak = tl.load(stats_ptr + row, mask=alive, other=LOWEST)
    total = tl.load(stats_ptr + stats_stride + row, mask=alive, other=0.0)
    dot = tl.load(stats_ptr + 2 * stats_stride + row, mask=alive, other=0.0)
    end = tl.where(tl.max(alive.to(tl.int32), 0) > 0, num_columns, 0)
    for left in tl.range(0, end, BLOCK, num_stages=STAGES):
        column = left + tl.arange(0, BLOCK)
        inside = alive[:, None] & (column < num_columns)[None, :]
        x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)[None, :]
        z = to_logits(x, scale, softcap, HAS_SOFTCAP)
        top = tl.maximum(peak, tl.max(tl.where(inside, z, LOWEST), 1))
        u = z - top[:, None]
        e = tl.where(inside, tl.exp2(u * LOG2_E), 0.0)
        shift = peak - top
        shrink = tl.exp2(shift * LOG2_E)
        dot = (dot + total * shift) * shrink + tl.sum(e * u, 1)
        total = total * shrink + tl.sum(e, 1)
        peak = top
    local = tl.load(targets_ptr + row, mask=alive, other=-1).to(tl.int32) - first
    here = alive & (local >= 0) & (local < num_columns)
    x = tl.load(x_ptr + start + local, mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + local, mask=here, other=0.0)
    z = to_logits(x, scale, softcap, HAS_SOFTCAP)
    tl.store(stats_ptr + row, peak, mask=alive)
    tl.store(stats_ptr + stats_stride + row, total, mask=alive)
    tl.store(stats_ptr + 2 * stats_stride + row, dot, mask=alive)
    tl.store(stats_ptr + 3 * stats_stride + row, z, mask=here)


@triton.jit(do_not_specialize=["num_rows", "first"])
def gradient_kernel(
    x_ptr,
    bias_ptr,
    targets_ptr,
    alive_ptr,
    rows_ptr,
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
    HAS_ROWS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
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
    source = row
    if HAS_ROWS:
        source = tl.load(rows_ptr + row, mask=valid, other=0)
    inside = alive[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + (source * x_stride)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0)[None, :]
    z = to_logits(x, scale, softcap, HAS_SOFTCAP)
    factor = tl.load(terms_ptr + row, mask=alive, other=0.0)
    offset = tl.load(terms_ptr + terms_stride + row, mask=alive, other=0.0)
    at_target = tl.load(terms_ptr + 2 * terms_stride + row, mask=alive, other=0.0)
    u = z - offset[:, None]
    d = tl.exp2(u * LOG2_E)
    if HAS_ENTROPY:
        base = tl.load(terms_ptr + 3 * terms_stride + row, mask=alive, other=0.0)
        slope = tl.load(terms_ptr + 4 * terms_stride + row, mask=alive, other=0.0)
        d *= base[:, None] + slope[:, None] * u
    local = tl.load(targets_ptr + row, mask=alive, other=-1).to(tl.int32) - first
    d = tl.where(local[:, None] == column[None, :], at_target[:, None], d)
    if HAS_SOFTCAP:  # d softcap * tanh(x / softcap) / dx = 1 - tanh^2
        t = z / (scale * softcap)
        d *= 1 - t * t
    d = tl.where(inside, d * factor[:, None], 0.0)
    here = valid[:, None] & (column < num_columns)[None, :]
    tl.store(out_ptr + (row * out_stride)[:, None] + column[None, :], d.to(out_ptr.dtype.element_ty), mask=here)


def pack_terms(scale: Tensor, offset: Tensor, at_target: Tensor, base: Tensor | None, slope: Tensor | None) -> Tensor:
    """The `terms` of `write_gradient`."""
    given = [scale, offset, at_target] if base is None or slope is None else [scale, offset, at_target, base, slope]
    return torch.stack(given)
