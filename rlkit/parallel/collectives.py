"""Differentiable collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, concatenated in rank order. Not differentiable."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    _gather(out, x, group=group)
    return out


class Shared(torch.autograd.Function):
    """Identity on a replicated tensor of which each rank uses a part: the backward sums the gradients over ranks."""

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
    """All-gather; every rank computes the same from the result, so the backward takes the rank's own slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first = dist.get_rank(ctx.group) * ctx.rows
        return grad[first : first + ctx.rows], None


class GatheredSum(Gathered):
    """All-gather; each rank computes a part of the result from it, so the backward is a reduce-scatter."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(ctx.rows, *grad.shape[1:])
        _reduce_scatter(out, grad.contiguous(), group=ctx.group)
        return out, None


class Exchanged(torch.autograd.Function):
    """All-to-all: sends `there[r]` rows to rank r and receives `here[r]` rows from it; the backward is the reverse."""

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
