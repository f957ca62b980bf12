"""The operator behind `linear_scan`: segments folded into the coefficients, the gradient as the scan backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.kernels.linear_scan import blocked, reference

SCANS = {"blocked": blocked.scan, "reference": reference.scan}


@torch.library.custom_op("rlkit::linear_scan", mutates_args=())
def scan_op(a: Tensor, b: Tensor, cu_seqlens: Tensor, x_end: Tensor, impl: str) -> Tensor:
    """x_t = a_t x_{t+1} + b_t inside each segment, whose last token reads x_end."""
    if a.numel() == 0:
        return torch.empty_like(b)
    edges, some = _last_tokens(cu_seqlens, a.numel())
    carried = torch.where(some & (a[edges] != 0), a[edges] * x_end, 0.0)
    return SCANS[impl](a.index_fill(0, edges, 0.0), b.index_add(0, edges, carried))


@scan_op.register_fake
def _(a: Tensor, b: Tensor, cu_seqlens: Tensor, x_end: Tensor, impl: str) -> Tensor:  # noqa: ARG001
    return torch.empty_like(b)


@torch.library.custom_op("rlkit::linear_scan_backward", mutates_args=())
def backward_op(
    g: Tensor, a: Tensor, x: Tensor, cu_seqlens: Tensor, x_end: Tensor, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b and x_end: d_b_t = g_t + a_{t-1} d_b_{t-1}, d_a_t = d_b_t x_{t+1}."""
    if a.numel() == 0:
        return torch.empty_like(a), torch.empty_like(a), torch.zeros_like(x_end)
    edges, some = _last_tokens(cu_seqlens, a.numel())
    inner = a.index_fill(0, edges, 0.0)  # its last entry is 0, so rolling it by one starts the scan from nothing
    d_b = SCANS[impl](inner.roll(1).flip(0), g.flip(0)).flip(0)
    following = x.roll(-1).index_fill_(0, edges, 0.0).index_add_(0, edges, torch.where(some, x_end, 0.0))
    unread = (a == 0) & following.isnan()
    d_end = torch.where(some, a[edges] * d_b[edges], 0.0)
    return torch.where(unread, 0.0, d_b * following), d_b, d_end


@backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, a, _, _, x_end, _ = args
    return torch.empty_like(a), torch.empty_like(a), torch.empty_like(x_end)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, cu_seqlens, x_end, ctx.impl = inputs
    ctx.save_for_backward(a, output, cu_seqlens, x_end)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    d_a, d_b, d_end = backward_op(g, *ctx.saved_tensors, ctx.impl)
    wanted = ctx.needs_input_grad
    return d_a if wanted[0] else None, d_b, None, d_end if wanted[3] else None, None


scan_op.register_autograd(_backward, setup_context=_setup)


def _last_tokens(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Each segment's last token, and whether it has one; an empty segment points at the last token of all."""
    some = cu_seqlens.diff() > 0
    return torch.where(some, cu_seqlens[1:] - 1, num_tokens - 1).long(), some
