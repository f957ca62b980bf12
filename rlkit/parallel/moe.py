"""Expert parallelism: the experts of a MoE layer are split over ranks, and tokens are sent to their experts' ranks.

Applied by `parallelize` with `Parallel(ep=...)` or `tp`. For the experts, all shard * cp * tp ranks are data parallel:
tensor parallel ranks, which hold the same tokens, process a share each and gather the results. The `ep` ranks are a
subset of them. Fused expert weights [experts, ...] are split over `ep` by experts, and over the remaining ranks by
their second dimension: optimizer states are as small as without `ep`, and checkpoints reshard. The router is replicated
on every rank. Experts are not split over `tp`, which would mean small products and twice the traffic (parallel folding,
arXiv:2504.14960).

There is no auxiliary load-balancing loss, because it would work against the reward; the model's `router_aux_loss_coef`
is ignored. Differs: TRL adds it with its coefficient; verl's Qwen3-MoE and slime's scripts omit it.

The experts that the sampling engine chose are replayed where it reports them (`rlkit.model.routing`). Elsewhere the
trainer uses its own router; the effect shows in `mismatch/k3`, and TIS or IcePop (`rlkit.losses`) bound it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlkit._util.files import weight_files
from rlkit.parallel.collectives import Exchanged
from rlkit.parallel.mesh import Mesh, grid

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The parts of each fused weight, concatenated along the dimension after the experts'.
PARTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


def split_experts(model: Any, mesh: Mesh, **fsdp: Any) -> None:
    """Shard the fused experts of every MoE layer over the mesh, in place. `fsdp`: options of `fully_shard`.

    Errors: ValueError if `ep` does not divide the number of experts, or the model has none.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    sizes, num_experts = mesh.sizes, getattr(model.config, "num_experts", 0)
    if not num_experts or num_experts % sizes.ep:
        raise ValueError(f"ep={sizes.ep} must divide the experts of the model, which has {num_experts}")
    shape = (sizes.pp, sizes.replicate, sizes.shard * sizes.cp * sizes.tp // sizes.ep, sizes.ep)
    experts_mesh = grid(("pp", "replicate", "rest", "ep"), shape, device=mesh.device.type)
    rest = experts_mesh["replicate", "rest"] if sizes.replicate > 1 else experts_mesh["rest"]
    for experts in [m for m in model.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]:
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            shard = distribute_tensor(whole.detach(), experts_mesh["ep"], [Shard(0)])
            setattr(experts, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
        forward = partial(expert_parallel, experts, group=experts_mesh.get_group("ep"))
        experts.forward = partial(_split_over_tp, forward, mesh.tensor) if sizes.tp > 1 else forward
        fully_shard(experts, mesh=rest, shard_placement_fn=lambda _: Shard(1), **fsdp)


def _split_over_tp(forward: Callable[..., Tensor], tensor: DeviceMesh, hidden: Tensor, *routing: Tensor) -> Tensor:
    """`forward` on this tensor parallel rank's share of the replicated tokens; the results are gathered."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    split = lambda x: DTensor.from_local(x, tensor, [Replicate()]).redistribute(placements=[Shard(0)])  # noqa: E731
    out = forward(*(split(x).to_local() for x in (hidden, *routing)))
    shape: Any = {"shape": hidden.shape, "stride": hidden.stride()}
    return DTensor.from_local(out, tensor, [Shard(0)], **shape).redistribute(placements=[Replicate()]).to_local()


def expert_parallel(
    experts: Any,
    hidden: Float[Tensor, "T D"],
    chosen: Int[Tensor, "T K"],
    weights: Float[Tensor, "T K"],
    *,
    group: dist.ProcessGroup,
) -> Float[Tensor, "T D"]:
    """sum_k weights[t, k] expert_{chosen[t, k]}(hidden[t]), computed on the experts' ranks. Deterministic."""
    ep, (tokens, k) = dist.get_world_size(group), chosen.shape
    order = chosen.flatten().argsort(stable=True)
    sent = chosen.flatten().bincount(minlength=experts.num_experts).view(ep, -1)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    there, here = torch.stack((sent, got)).sum(2).tolist()
    rows = Exchanged.apply(hidden[:, None].expand(-1, k, -1).flatten(0, 1)[order], there, here, group)
    ids = torch.arange(got.shape[1], device=hidden.device).repeat(ep)
    by_expert = ids.repeat_interleave(got.flatten(), output_size=rows.shape[0]).argsort(stable=True)
    rows = _grouped(experts, rows[by_expert], got.sum(0))
    rows = Exchanged.apply(rows[by_expert.argsort()], here, there, group)
    return (rows[order.argsort()].view(tokens, k, -1) * weights[..., None]).sum(1).to(hidden.dtype)


def _grouped(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """This rank's experts on `rows`, which are sorted by expert."""
    up, down = experts.gate_up_proj.to_local(), experts.down_proj.to_local()
    if rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows):
        offs = counts.cumsum(0).to(torch.int32)
        gate, value = F.grouped_mm(rows, up.transpose(1, 2), offs=offs).chunk(2, -1)
        return F.grouped_mm(experts.act_fn(gate) * value, down.transpose(1, 2), offs=offs)
    out = []
    for x, w_up, w_down in zip(rows.split(counts.tolist()), up, down):  # also without rows: all weights get a gradient
        gate, value = F.linear(x, w_up).chunk(2, -1)
        out.append(F.linear(experts.act_fn(gate) * value, w_down))
    return torch.cat(out)


@torch.no_grad()
def read_experts(weights: Mapping[str, Any], folder: Path) -> list[str]:
    """Fill the fused experts of a sharded model's `weights` from `folder`, whose files hold each expert separately.

    Returns their names. Errors: ValueError naming a weight that the files lack.
    """
    from safetensors import safe_open
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    fused = {name: parts for name in weights for end, parts in PARTS.items() if name.endswith(end)}
    stored: dict[str, Any] = {}
    for path in weight_files(folder) if fused else ():
        file = safe_open(path, framework="pt")
        stored |= dict.fromkeys(file.keys(), file)
    for name, parts in fused.items():
        param = weights[name]
        _, (first, *rest) = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        for i, target in enumerate(param.to_local()):
            wanted = [f"{name.rsplit('.', 1)[0]}.{first + i}.{part}.weight" for part in parts]
            if missing := [x for x in wanted if x not in stored]:
                raise ValueError(f"{folder} does not hold this model: {missing[0]} is missing")
            _copy_rows(target, [stored[x].get_slice(x) for x in wanted], rest)
    return list(fused)


def _copy_rows(target: Tensor, parts: list[Any], offset: list[int]) -> None:
    """Fill `target`, the block at `offset` of the vertically concatenated parts."""
    (row, column), (height, width) = offset, target.shape
    start = 0
    for part in parts:
        size = part.get_shape()[0]
        a, b = max(row, start), min(row + height, start + size)
        if a < b:
            target[a - row : b - row] = part[a - start : b - start, column : column + width].to(target)
        start += size
