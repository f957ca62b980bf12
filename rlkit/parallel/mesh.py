"""Device meshes: the grid of pipeline, replica, shard, context and tensor parallel ranks.

`tp` is innermost, so that its traffic, the largest, stays inside a node:

    rank = (((pp_rank * replicate + replicate_rank) * shard + shard_rank) * cp + cp_rank) * tp + tp_rank

Parameters are split over (replicate, shard * cp, tp): context parallel ranks hold different tokens of the same
sequences, so for the parameters they are additional data parallel ranks. Data is split over (dp = replicate * shard,
cp, tp): all ranks with the same `dp` coordinate work on the same sequences.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlkit._util.ranks import launched, local_rank, name_interface, timeout_of
from rlkit.settings import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh", "Parallel", "grid", "make_mesh", "resolve", "start"]


class Mesh:
    """The sizes of the grid, and this rank's coordinates and process groups. Made by `make_mesh`.

    `attention` is `rlkit.model.flops.attention_share` of the model that was cut over it, which weighs its batches.
    """

    attention = 0.0

    def __init__(self, sizes: Parallel, parameters: DeviceMesh, data: DeviceMesh) -> None:
        self.sizes = sizes
        self.parameters = parameters
        self.data = data
        self.device = torch.empty(0, device=parameters.device_type).device  # with the index of the GPU
        self.dp = sizes.replicate * sizes.shard
        self.dp_rank: int = data.get_local_rank("dp")
        self.cp_rank: int = data.get_local_rank("cp")
        self.tp_rank: int = data.get_local_rank("tp")
        self.pp_rank: int = data.get_local_rank("pp")

    def weighing(self, attention: float) -> Mesh:
        """The same mesh with another `attention`; itself where no ranks share the data."""
        if self.dp == 1:
            return self
        mesh = copy(self)
        mesh.attention = attention
        return mesh

    def group(self, name: str) -> dist.ProcessGroup:
        """The ranks that differ from this one only in their `dp`, `cp`, `tp` or `pp` coordinate."""
        return self.data.get_group(name)

    def backward_group(self) -> dist.ProcessGroup:
        """A second group of the ranks of `group("pp")`, for sends to the previous stage. All ranks must call it."""
        return _group(tuple(line[::-1] for line in self._stages()), dist.group.WORLD)

    def ends_group(self) -> dist.ProcessGroup | None:
        """The first and the last rank of `group("pp")`; None on the ranks between. All ranks must call it."""
        return _group(tuple((line[0], line[-1]) for line in self._stages()), dist.group.WORLD)

    def _stages(self) -> list[tuple[int, ...]]:
        return list(map(tuple, self.data.mesh.movedim(0, -1).reshape(-1, self.sizes.pp).tolist()))

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh of `fully_shard`: (shard * cp), or (replicate, shard * cp) with more than one replica."""
        return self.parameters["replicate", "shard"] if self.sizes.replicate > 1 else self.parameters["shard"]

    @property
    def tensor(self) -> DeviceMesh:
        """The mesh of `parallelize_module`."""
        return self.parameters["tp"]


def start(*, device: str = "cpu", timeout_s: float = 1800.0) -> None:
    """Initialise the process group from `torchrun`'s environment, or with this process only. Idempotent.

    A collective that waits longer than `timeout_s` for another rank raises (gloo) or ends the process (NCCL). CUDA
    ranks use the GPU of their LOCAL_RANK (a single process that of `device`), and have gloo besides NCCL for tensors on
    the CPU.
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(local_gpu(device, num_gpus=torch.cuda.device_count()))
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    if launched():
        name_interface()
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def local_gpu(device: str, *, num_gpus: int) -> int:
    """The index of this process's GPU: its LOCAL_RANK under torchrun, else that of `device` ("cuda:1"; 0 by default).

    Errors: ValueError where this machine has more ranks than GPUs.
    """
    rank = local_rank()
    index = (torch.device(device).index or 0) if rank is None else rank
    if index >= num_gpus:
        fault = f"rank {index} of this machine has no GPU of its own, there are {num_gpus}"
        raise ValueError(f"{fault}: start --nproc-per-node {num_gpus}, or train on the CPU with --device cpu")
    return index


def make_mesh(sizes: Parallel, *, device: str = "cpu") -> Mesh:
    """The mesh of `sizes` over all ranks of the process group (see `start`). All ranks must call it.

    Errors: ValueError if the product of the sizes is not the number of ranks; it names sizes that fit.
    """
    sizes = resolve(sizes, world_size=dist.get_world_size())
    inner = (sizes.replicate, sizes.shard * sizes.cp, sizes.tp)
    parameters = grid(("pp", "replicate", "shard", "tp"), (sizes.pp, *inner), device=device)
    data = (sizes.pp, sizes.replicate * sizes.shard, sizes.cp, sizes.tp)
    return Mesh(sizes, parameters, grid(("pp", "dp", "cp", "tp"), data, device=device))


def grid(names: tuple[str, ...], shape: tuple[int, ...], *, device: str) -> DeviceMesh:
    """All ranks as a device mesh whose groups have the timeout of `start`. All ranks must call it.

    Differs from torch's `init_device_mesh`: groups of the same ranks are shared, within and between grids. A group
    holds threads (gloo) or device memory (NCCL) for the life of the process, and most sizes of a grid are 1.
    """
    return _grid(names, shape, torch.device(device).type, dist.group.WORLD)


@cache
def _grid(names: tuple[str, ...], shape: tuple[int, ...], kind: str, world: Any) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(world.size()).view(shape)
    lines = [ranks.movedim(i, -1).reshape(-1, size) for i, size in enumerate(shape)]
    groups = [_group(tuple(map(tuple, line.tolist())), world) for line in lines]
    return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)


@cache
def _group(parts: tuple[tuple[int, ...], ...], world: Any) -> Any:
    """This rank's group among `parts`, a partition of ranks; the same ranks in another order are another group."""
    if parts == (tuple(range(world.size())),):
        return world
    return dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout=timeout_of(world))[0]


def resolve(sizes: Parallel, *, world_size: int) -> Parallel:
    """The sizes with `shard` filled in, checked against the number of ranks."""
    named = {k: getattr(sizes, k) for k in ("pp", "replicate", "shard", "cp", "tp", "ep")}
    fixed = math.prod(v for k, v in named.items() if k not in ("shard", "ep"))
    shard = sizes.shard or max(1, world_size // fixed)
    if fixed * shard != world_size:
        product = " * ".join(f"{k} {v}" for k, v in named.items() if v > 1 and k != "ep") or "1"
        fix = f"use shard={world_size // fixed}" if world_size % fixed == 0 else _fitting(sizes, fixed, world_size)
        raise ValueError(f"{product} = {fixed * shard} ranks, but there are {world_size}; {fix}")
    if (shard * sizes.cp * sizes.tp) % sizes.ep:
        raise ValueError(f"ep={sizes.ep} must divide shard * cp * tp = {shard} * {sizes.cp} * {sizes.tp}")
    return replace(sizes, shard=shard)


def _fitting(sizes: Parallel, fixed: int, world_size: int) -> str:
    """For each size, the nearest value that divides the world size with `shard` free and the others fixed."""
    fixes = []
    for name in ("tp", "cp", "replicate", "pp"):
        size: int = getattr(sizes, name)
        if fits := [n for n in range(1, world_size + 1) if world_size % (fixed // size * n) == 0]:
            fixes.append(f"{name}={min(fits, key=lambda n: abs(n - size))}")
    return f"with shard=0 any one of these changes fits: {'; '.join(fixes) or 'change the number of ranks'}"
