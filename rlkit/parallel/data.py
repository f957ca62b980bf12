"""Data parallelism of a training loop: micro-batches per rank, and reductions over ranks.

Every rank holds the whole batch of a step, packed from the same trajectories, so weights, advantages and counts need no
communication. Only the forward and backward are split over the data parallel ranks. With `mesh` None every function
here runs in a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Bool
from torch import Tensor

from rlkit import packing
from rlkit._util.ranks import world_size
from rlkit.metrics import Metrics, all_reduce, stacked
from rlkit.parallel.mesh import Mesh
from rlkit.types import Batch

X = TypeVar("X")


def rank_microbatches(
    streams: tuple[Batch, *tuple[Tensor, ...]],
    *,
    mesh: Mesh | None,
    max_tokens: int,
    isolate: Bool[Tensor, "N"] | None = None,
    whole_groups: bool = False,
) -> Iterator[tuple[Batch, *tuple[Tensor, ...]]]:
    """`packing.microbatches` of this data parallel rank: the same number on every rank, together the whole batch.

    Ranks without work get empty batches, because all ranks must take part in the forward of a sharded model.
    """
    rank, ranks, attention = (0, 1, 0.0) if mesh is None else (mesh.dp_rank, mesh.dp, mesh.attention)
    options: dict[str, Any] = {"isolate": isolate, "whole_groups": whole_groups, "attention": attention}
    return packing.microbatches(streams, max_tokens=max_tokens, rank=rank, ranks=ranks, **options)


def summed(x: Tensor, *, mesh: Mesh | None) -> Tensor:
    """The sum of `x` over the data parallel ranks: a `[T]` stream that is nonzero where a rank computed it."""
    if mesh is not None and mesh.dp > 1:
        x = x.clone()
        dist.all_reduce(x, group=mesh.group("dp"))
    return of_last_stage(x, mesh=mesh)


def reduce_metrics(metrics: Metrics, *, mesh: Mesh | None) -> Metrics:
    """The metrics of the whole batch. Means and extremes that are equal on all ranks are unchanged."""
    if mesh is not None and mesh.dp > 1:
        metrics = all_reduce(metrics, group=mesh.group("dp"))
    if mesh is None or mesh.sizes.pp == 1 or not metrics:
        return metrics
    parts = of_last_stage(stacked([x for m in metrics.values() for x in m]), mesh=mesh)
    return {k: type(m)._make(x) for (k, m), x in zip(metrics.items(), parts.split([len(m) for m in metrics.values()]))}


def of_last_stage(x: Tensor, *, mesh: Mesh | None) -> Tensor:
    """`x` of the last pipeline stage, which has the log-probs, on all stages."""
    if mesh is None or mesh.sizes.pp == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(x, group=mesh.group("pp"), group_src=mesh.sizes.pp - 1)
    return x


def each_stage(x: X, *, mesh: Mesh | None) -> list[X]:
    """`x` of every pipeline stage, in stage order, e.g. a property of the stage's parameters."""
    if mesh is None or mesh.sizes.pp == 1:
        return [x]
    out: list[Any] = [None] * mesh.sizes.pp
    dist.all_gather_object(out, x, group=mesh.group("pp"))
    return out


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank: for decisions that all ranks must take together (stop, need a gradient)."""
    return any_ranks([flag])[0]


def any_ranks(flags: Sequence[bool]) -> list[bool]:
    """`any_rank` of each flag, in one collective. Call it before the micro-batches, or pipeline stages deadlock."""
    if world_size() == 1:
        return list(flags)
    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    x = torch.tensor(flags, dtype=torch.float32, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.bool().tolist()
