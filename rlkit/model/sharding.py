"""Over which ranks a model is sharded: its mesh, device and dtype, and how to compute inside its forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from rlkit.parallel.mesh import Mesh


class Sharding(NamedTuple):
    """The mesh over which `parallelize` sharded a model, and the dtype of its forward and backward."""

    mesh: Mesh
    dtype: torch.dtype


# an entry of a model ends with it; nothing is hung on a model of transformers
_shardings: WeakKeyDictionary[Any, Sharding] = WeakKeyDictionary()


def set_sharding(model: Any, sharding: Sharding) -> None:
    """Record how `parallelize` sharded the model."""
    _shardings[model] = sharding


def inside(model: Any, work: Callable[..., Any], *args: Any) -> Any:
    """`work(model, *args)` in place of the model's forward: the root's parameters (norm, head) are gathered meanwhile.

    Gradients flow through the tensors that `work` returns. On a plain model it is just the call.
    """
    if model not in _shardings:
        return work(model, *args)
    before = vars(model).get("forward")
    model.forward = partial(work, model)  # FSDP2 gathers and frees parameters around `forward` only
    try:
        out = model(*args)
    finally:
        del model.forward
        if before is not None:
            model.forward = before
    if not torch.is_grad_enabled():
        model.reshard()  # without a backward nothing else does
    return out


def mesh_of(model: Any) -> Mesh | None:
    """The mesh over which `parallelize` cut the model; None for a plain model."""
    return _shardings[model].mesh if model in _shardings else None


def device_of(model: Any) -> torch.device:
    """The device that computes: the mesh's for a cut model, whose offloaded parameters are on the CPU."""
    return model.device if model not in _shardings else _shardings[model].mesh.device


def dtype_of(model: Any) -> torch.dtype:
    """The dtype of the forward outside autocast: what `parallelize` was given, or that of the parameters."""
    return model.dtype if model not in _shardings else _shardings[model].dtype


def sync_gradients(model: Any, on: bool) -> None:
    """Turn the sum of gradients over ranks on (the default) or off for the next backward passes.

    While it is off, each rank accumulates whole gradients, which the next backward with it on sums. Off for all but the
    last micro-batch of a step saves communication, for the memory of a whole gradient per rank.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
