"""Custom operators of `linear_scan`: a = 0 at segment bounds; the gradient is a scan in the other direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.kernels.linear_scan import blocked, reference

SCANS = {"blocked": blocked.scan, "reference": reference.scan, "doubled": blocked.doubled}
IMPLS = ("blocked", "reference", "triton")


def scan(a: Tensor, b: Tensor, cu_seqlens: Tensor, x_end: Tensor | None, reverse: bool, impl: str) -> Tensor:
    """x_t = a_t x' + b_t inside each segment, starting from x_end; only "triton" supports reverse=False."""
    if a.numel() == 0:
        return torch.empty_like(b)
    if x_end is None and impl == "triton":
        return _by_triton(a, b, cu_seqlens, reverse=reverse)[0]
    edges, some = _entries(cu_seqlens, a.numel(), reverse)
    if x_end is not None:
        read = some & ((a[edges] != 0) | x_end.isfinite())
        b = b.index_add(0, edges, a[edges] * torch.where(read, x_end, 0.0))
    if impl == "triton":
        return _by_triton(a, b, cu_seqlens, reverse=reverse)[0]
    return SCANS[impl](a.index_fill(0, edges, 0.0), b)


scan_op = torch.library.custom_op("rlkit::linear_scan", scan, mutates_args=())


@scan_op.register_fake
def _(a: Tensor, b: Tensor, *_: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(b)


@torch.library.custom_op("rlkit::linear_scan_backward", mutates_args=())
def backward_op(
    g: Tensor, a: Tensor, x: Tensor, cu_seqlens: Tensor, x_end: Tensor | None, reverse: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b and x_end (`[0]` without one): d_b_t = g_t + a_{t-1} d_b_{t-1}, d_a_t = d_b_t x_{t+1}."""
    if a.numel() == 0:
        return torch.empty_like(a), torch.empty_like(a), g.new_zeros(0) if x_end is None else torch.zeros_like(x_end)
    edges, some = _entries(cu_seqlens, a.numel(), reverse)
    if impl == "triton":
        d_b, d_a = _by_triton(a, g, cu_seqlens, reverse=not reverse, of=x)
    else:
        inner = a.index_fill(0, edges, 0.0)  # the last entry is 0, so rolling by one starts the scan from 0
        d_b = SCANS[impl](inner.roll(1).flip(0), g.flip(0)).flip(0)
        following = x.roll(-1).index_fill_(0, edges, 0.0)
        d_a = torch.where((a == 0) & following.isnan(), 0.0, d_b * following)
    if x_end is None:
        return d_a, d_b, g.new_zeros(0)
    read = some & ((a[edges] != 0) | ~x_end.isnan())
    d_a.index_add_(0, edges, torch.where(read, d_b[edges] * x_end, 0.0))
    return d_a, d_b, torch.where(some, a[edges] * d_b[edges], 0.0)


@backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    g, a, _, _, x_end, _, _ = args
    return torch.empty_like(a), torch.empty_like(a), g.new_empty(0 if x_end is None else x_end.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, cu_seqlens, x_end, ctx.reverse, ctx.impl = inputs
    ctx.save_for_backward(a, output, cu_seqlens, x_end)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    d_a, d_b, d_end = backward_op(g, *ctx.saved_tensors, ctx.reverse, ctx.impl)
    wanted = ctx.needs_input_grad
    return d_a if wanted[0] else None, d_b, None, d_end if wanted[3] else None, None, None


scan_op.register_autograd(_backward, setup_context=_setup)


def _entries(cu_seqlens: Tensor, num_tokens: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """The first scanned token of each segment (for empty ones the last token), and whether the segment is nonempty."""
    some = cu_seqlens.diff() > 0
    entry = cu_seqlens[1:] - 1 if reverse else cu_seqlens[:-1]
    return torch.where(some, entry, num_tokens - 1).long(), some


def _by_triton(*tensors: Tensor, reverse: bool, of: Tensor | None = None) -> Any:
    from rlkit.kernels.linear_scan import triton

    return triton.scan(*tensors, reverse=reverse, of=of)
