# mypy: allow-untyped-defs
"""The recurrence in three Triton passes: each block from 0, the carries of the blocks, each block from its carry.

The kernels handle segment bounds: one byte per token marks the last token of a segment, so neither coefficients nor
values are copied. Work per token does not depend on the segments' lengths. No atomics; runs are bit-identical. Bytes
per token in fp32: 9 read in each of two passes, 4 written, 1 for the flag.
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

BLOCK = 2048
CARRIES = 1024
BOUNDS = 1024
NUM_WARPS = 4


def scan(
    a: Tensor, b: Tensor, cu_seqlens: Tensor, *, reverse: bool, of: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """x_t = a_t x' + b_t inside each segment, x' the value before it in the direction of the scan (0 at the edge).

    If `of` holds the values of a scan with coefficients `a` in the other direction, and `b` their upstream gradient,
    the result is the gradients of that scan's b and a: d_b_t = b_t + a' d_b', d_a_t = d_b_t of'.
    """
    a, b, num_tokens, num_seqs = a.contiguous(), b.contiguous(), a.numel(), cu_seqlens.numel() - 1
    num_blocks, flags = triton.cdiv(num_tokens, BLOCK), (reverse, of is not None)
    out, d_a = torch.empty_like(b), None if of is None else torch.empty_like(a)
    last = torch.zeros(num_tokens, dtype=torch.int8, device=a.device)
    ends, carry = b.new_empty(2, num_blocks), b.new_empty(num_blocks)
    with torch.cuda.device_of(a):
        mark_kernel[(triton.cdiv(num_seqs, BOUNDS),)](cu_seqlens.contiguous(), last, num_seqs, BOUNDS)
        reduce_kernel[(num_blocks,)](a, b, last, ends, num_tokens, num_blocks, *flags, BLOCK, num_warps=NUM_WARPS)
        carry_kernel[(1,)](ends, carry, num_blocks, reverse, CARRIES, num_warps=NUM_WARPS)
        apply_kernel[(num_blocks,)](
            a, b, last, carry, out, of, d_a, num_tokens, *flags, of is not None, BLOCK, num_warps=NUM_WARPS
        )
    return out, d_a


@triton.jit
def mark_kernel(cu_ptr, last_ptr, num_seqs, BOUNDS: tl.constexpr):
    """Write 1 at the last token of each nonempty segment."""
    i = tl.program_id(0) * BOUNDS + tl.arange(0, BOUNDS)
    start = tl.load(cu_ptr + i, mask=i < num_seqs, other=0)
    end = tl.load(cu_ptr + i + 1, mask=i < num_seqs, other=0)
    tl.store(last_ptr + end - 1, tl.full([BOUNDS], 1, tl.int8), mask=end > start)


@triton.jit
def compose(a1, b1, a2, b2):
    """x -> a1 x + b1, then a2 x + b2; a2 = 0 drops x, so NaN does not pass it."""
    cut = a2 == 0
    return tl.where(cut, a2, a1 * a2), tl.where(cut, b2, a2 * b1 + b2)


@triton.jit
def coefficients(a_ptr, b_ptr, last_ptr, at, num_tokens, REVERSE: tl.constexpr, SHIFTED: tl.constexpr):
    """a and b of the tokens `at`; a = 0 where the scan enters a segment, (1, 0) past the end of the stream."""
    valid = at < num_tokens
    before = at + 1 if REVERSE else at - 1
    if REVERSE:
        edge = tl.load(last_ptr + at, mask=valid, other=0) != 0
    else:
        edge = tl.load(last_ptr + before, mask=valid & (before >= 0), other=1) != 0
    if SHIFTED:
        a = tl.load(a_ptr + before, mask=valid & (before >= 0) & (before < num_tokens), other=1.0)
    else:
        a = tl.load(a_ptr + at, mask=valid, other=1.0)
    b = tl.load(b_ptr + at, mask=valid, other=0.0)
    return tl.where(edge & valid, 0.0, a), b


@triton.jit
def reduce_kernel(
    a_ptr,
    b_ptr,
    last_ptr,
    ends_ptr,
    num_tokens,
    num_blocks,
    REVERSE: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The map x -> a x + b of one block, applied to its incoming carry."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    a, b = coefficients(a_ptr, b_ptr, last_ptr, pid.to(tl.int64) * BLOCK + i, num_tokens, REVERSE, SHIFTED)
    a, b = tl.associative_scan((a, b), 0, compose, reverse=REVERSE)
    end = i == (0 if REVERSE else BLOCK - 1)
    tl.store(ends_ptr + pid, tl.sum(tl.where(end, a, 0.0), 0))
    tl.store(ends_ptr + num_blocks + pid, tl.sum(tl.where(end, b, 0.0), 0))


@triton.jit
def carry_kernel(ends_ptr, carry_ptr, num_blocks, REVERSE: tl.constexpr, CARRIES: tl.constexpr):
    """The carry into each block, by one program: a scan of `CARRIES` blocks at a time."""
    i = tl.arange(0, CARRIES)
    rounds = tl.cdiv(num_blocks, CARRIES)
    tl.store(carry_ptr + (num_blocks - 1 if REVERSE else 0), 0.0)
    x = tl.zeros([1], carry_ptr.dtype.element_ty)
    for r in range(rounds):
        at = (rounds - 1 - r if REVERSE else r) * CARRIES + i
        a = tl.load(ends_ptr + at, mask=at < num_blocks, other=1.0)
        b = tl.load(ends_ptr + num_blocks + at, mask=at < num_blocks, other=0.0)
        a, b = tl.associative_scan((a, b), 0, compose, reverse=REVERSE)
        out = tl.where(a == 0, b, a * x + b)
        after = at - 1 if REVERSE else at + 1
        tl.store(carry_ptr + after, out, mask=(at < num_blocks) & (after >= 0) & (after < num_blocks))
        x = tl.sum(tl.where(i == (0 if REVERSE else CARRIES - 1), out, 0.0), 0, keep_dims=True)


@triton.jit
def apply_kernel(
    a_ptr,
    b_ptr,
    last_ptr,
    carry_ptr,
    out_ptr,
    x_ptr,
    d_a_ptr,
    num_tokens,
    REVERSE: tl.constexpr,
    SHIFTED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scan of one block from its carry; for a gradient also d_a, from the values x of the opposite scan."""
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = at < num_tokens
    a, b = coefficients(a_ptr, b_ptr, last_ptr, at, num_tokens, REVERSE, SHIFTED)
    a, b = tl.associative_scan((a, b), 0, compose, reverse=REVERSE)
    out = tl.where(a == 0, b, a * tl.load(carry_ptr + pid) + b)
    tl.store(out_ptr + at, out, mask=valid)
    if GRADIENT:
        read = at - 1 if REVERSE else at + 1  # the token whose x enters x_t
        edge_at = read if REVERSE else at
        edge = tl.load(last_ptr + edge_at, mask=valid & (edge_at >= 0), other=1) != 0
        x = tl.load(x_ptr + read, mask=valid & ~edge, other=0.0)
        coefficient = tl.load(a_ptr + at, mask=valid, other=0.0)
        d_a = tl.where((coefficient == 0) & (x != x), 0.0, out * x)
        tl.store(d_a_ptr + at, d_a, mask=valid)
