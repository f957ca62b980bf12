"""Collectives with gradients: what a rank gets of the others' rows, and what it owes them in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the names from torch 2.13 on
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, one rank after the other. Without a gradient."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    _gather(out, x, group=group)
    return out


class Shared(torch.autograd.Function):
    """The same tensor on every rank, read by each for a part of the result: the gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Gathered(torch.autograd.Function):
    """All ranks' rows; every rank computes the same from them, so a rank's gradient is its own slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first = dist.get_rank(ctx.group) * ctx.rows
        return grad[first : first + ctx.rows], None


class GatheredSum(Gathered):
    """All ranks' rows; every rank uses them for a part of the result, so the gradient is a sum over ranks."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(ctx.rows, *grad.shape[1:])
        _reduce_scatter(out, grad.contiguous(), group=ctx.group)
        return out, None


class Exchanged(torch.autograd.Function):
    """The first `there[0]` rows to rank 0, the next to rank 1; `here[r]` came from rank r. The gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = there, here, group
        out = x.new_empty(sum(here), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), here, there, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        there, here, group = ctx.splits
        return Exchanged.apply(grad, here, there, group), None, None, None
