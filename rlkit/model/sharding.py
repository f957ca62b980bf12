"""A model over a mesh of ranks: `ShardedModel` holds it with its mesh and dtype, and computes inside its forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit._util.ranks import reshard
from rlkit.model.working_copy import WorkingCopy
from rlkit.parallel.mesh import Mesh


class ShardedModel(nn.Module):
    """A transformers model that `parallelize` cut over `mesh`, and what belongs to it.

    It has the modules, parameters and names of the model, and its other attributes (`config`, `base_model`, ...). FSDP2
    gathers and frees the root's parameters (norm, head) around `forward`, so `inside` runs its work as the forward. A
    `WorkingCopy` stands in for the parameters meanwhile.

    Attributes:
        mesh: the ranks that hold it.
        compute_dtype: of the forward and backward. The parameters are fp32.
        copies: the first and the last pipeline stage, where both hold a copy of a tied weight; else None.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        copies: dist.ProcessGroup | None = None,
        working: WorkingCopy | None = None,
    ) -> None:
        super().__init__()
        shared = {"_modules": model._modules, "_parameters": model._parameters, "_buffers": model._buffers}
        self.training = model.training
        vars(self).update(shared, _model=model, mesh=mesh, compute_dtype=dtype, copies=copies, _working=working)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_model"], name)

    def forward(self, *args: Any, work: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The model's own forward, or `work(self, *args)`."""
        working = vars(self)["_working"]
        with nullcontext() if working is None else working.in_place():
            return vars(self)["_model"].forward(*args, **options) if work is None else work(self, *args)


def inside(model: Any, work: Callable[..., Any], *args: Any) -> Any:
    """`work(model, *args)` in place of the model's forward: the root's parameters (norm, head) are gathered meanwhile.

    Gradients flow through the tensors that `work` returns. On a plain model it is just the call.
    """
    if not isinstance(model, ShardedModel):
        return work(model, *args)
    out = model(*args, work=work)
    if not torch.is_grad_enabled():
        reshard(model)  # without a backward nothing else does
    return out


def mesh_of(model: Any) -> Mesh | None:
    """The mesh over which `parallelize` cut the model; None for a plain model."""
    return model.mesh if isinstance(model, ShardedModel) else None


def is_cut(model: Any) -> bool:
    """Whether other ranks hold parts of the model."""
    mesh = mesh_of(model)
    return mesh is not None and mesh.parameters.size() > 1


def device_of(model: Any) -> torch.device:
    """The device that computes: the mesh's for a cut model, whose offloaded parameters are on the CPU."""
    return model.mesh.device if isinstance(model, ShardedModel) else model.device


def is_offloaded(model: Any) -> bool:
    """Whether the parameters are on the CPU and the GPU computes."""
    return device_of(model).type != model.device.type


def dtype_of(model: Any) -> torch.dtype:
    """The dtype of the forward outside autocast: what `parallelize` was given, or that of the parameters."""
    return model.compute_dtype if isinstance(model, ShardedModel) else model.dtype


def own_part(x: Any) -> Tensor:
    """This rank's part of a weight, a gradient or a state; a plain tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def whole_of(x: Any) -> Tensor:
    """All of a weight, a gradient or a state, a collective where it is sharded; a plain tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def sync_gradients(model: Any, on: bool) -> None:
    """Turn the sum of gradients over ranks on (the default) or off for the next backward passes.

    While it is off, each rank accumulates whole gradients, which the next backward with it on sums. Off for all but the
    last micro-batch of a step saves communication, for the memory of a whole gradient per rank.
    """
    if hasattr(model, "set_requires_gradient_sync"):  # on one rank there is nothing to sum
        model.set_requires_gradient_sync(on)
