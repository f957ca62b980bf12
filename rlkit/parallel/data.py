"""The data side of a loop on many ranks: who computes what, and how the ranks agree.

Every rank holds the whole batch of a step, packed alike from the same trajectories. So weights, advantages and counts
are computed without talking to anybody; only the forward and backward are split, over the data parallel ranks.
Everything here works without ranks (`mesh` None) and is then the plain function.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from jaxtyping import Bool
from torch import Tensor

from rlkit import packing
from rlkit.metrics import Metrics, all_reduce
from rlkit.parallel._ranks import world_size
from rlkit.parallel.mesh import Mesh
from rlkit.types import Batch


def rank_microbatches(
    streams: tuple[Batch, *tuple[Tensor, ...]],
    *,
    mesh: Mesh | None,
    max_tokens: int,
    apart: Bool[Tensor, "N"] | None = None,
) -> Iterator[tuple[Batch, *tuple[Tensor, ...]]]:
    """`packing.microbatches` of this data parallel rank: as many on every rank, together the whole batch.

    Ranks that have nothing left get empty batches: sharded models are forwarded by all ranks or by none.
    """
    rank, ranks = (0, 1) if mesh is None else (mesh.dp_rank, mesh.dp)
    return packing.microbatches(streams, max_tokens=max_tokens, apart=apart, rank=rank, ranks=ranks)


def summed(x: Tensor, *, mesh: Mesh | None) -> Tensor:
    """The sum of `x` over the data parallel ranks: a `[T]` stream of which each filled in the places it computed."""
    if mesh is None or mesh.dp == 1:
        return x
    x = x.clone()
    dist.all_reduce(x, group=mesh.group("dp"))
    return x


def reduce_metrics(metrics: Metrics, *, mesh: Mesh | None) -> Metrics:
    """The metrics of the whole batch. What every rank computed alike (a mean, an extreme) stays what it is."""
    if mesh is None or mesh.dp == 1:
        return metrics
    return all_reduce(metrics, group=mesh.group("dp"))


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank: for decisions after which all must do the same (stop, need a gradient)."""
    if world_size() == 1:
        return flag
    x = torch.tensor(float(flag), device=_device())
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return bool(x)


def _device() -> torch.device:
    return torch.device("cpu") if "gloo" in dist.get_backend_config() else torch.device("cuda")
