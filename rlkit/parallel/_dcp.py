"""The tensors of a checkpoint: what a model and its optimizer hold, under names that do not depend on the layout.

`model/NAME` is a weight or buffer and `optimizer/KEY/NAME` the optimizer's KEY (exp_avg, step, ...) of parameter NAME.
DTensors stay DTensors: each rank writes and reads its own shards, and torch.distributed.checkpoint reshards. A pipeline
stage has its own names only, of which a tied weight's may be another's too; lists of names that are stored or compared
are those of all stages.
Its import costs a second where transformers is not loaded yet, so it waits until a checkpoint is due.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlkit.parallel._ranks import distributed
from rlkit.parallel.data import each_stage

T = TypeVar("T")

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # added by torch.compile and by activation checkpointing


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live weights and persistent buffers, tied ones once; writing into them writes into the model."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    unique = {_clean_name(name) for name, _ in model.named_parameters()}
    tied = {_clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    weights: dict[str, Any] = get_model_state_dict(model)
    return {f"model/{name}": x for name, x in weights.items() if name not in tied}


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The live optimizer state. A parameter that was never updated has none, and gets none by being saved."""
    names = _names(model, optimizer)
    items = ((names[p], key, x) for p, entry in optimizer.state.items() for key, x in entry.items())
    return {f"optimizer/{key}/{name}": x for name, key, x in items if isinstance(x, Tensor)}


def optimizer_options(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer holds beside tensors: options per group, and any number it keeps per parameter."""
    names = _names(model, optimizer)
    groups = [{**g, "params": own} for g, own in zip(optimizer.param_groups, _groups(model, optimizer), strict=True)]
    scalars = {
        names[p]: {key: x for key, x in entry.items() if not isinstance(x, Tensor)}
        for p, entry in optimizer.state.items()
    }
    stages = of_stages(model, plain(scalars, "optimizer.state"))
    merged = {name: entry for stage in stages for name, entry in stage.items()}
    return {"groups": plain(groups, "optimizer.param_groups"), "scalars": merged}


def empty_optimizer_tensors(path: Path, model: nn.Module, optimizer: Optimizer, options: Any) -> dict[str, Tensor]:
    """Room for the state stored in `path`, sharded like the parameters. No optimizer step is needed to make it."""
    names, groups = _names(model, optimizer), _groups(model, optimizer)
    if options is None or [*map(sorted, groups)] != [sorted(group["params"]) for group in options["groups"]]:
        raise ValueError(
            f"{path} was written with another optimizer: its parameters or parameter groups differ from the given one's"
        )
    owners = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    room = {}
    for full, stored in _stored(path).items():
        if full.startswith("optimizer/"):
            _, key, name = full.split("/", 2)
            if name in owners:
                room[full] = _room(key, stored, *owners[name])
    return room


def _room(key: str, stored: Any, param: Tensor, group: dict[str, Any]) -> Tensor:
    dtype = stored.properties.dtype
    if key == "step":  # torch's own rule: on the CPU, unless a fused or captured kernel reads it
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(stored.size, dtype=dtype, device=param.device if on_device else "cpu")
    if stored.size == param.shape:
        return torch.empty_like(param.detach(), dtype=dtype)
    return torch.empty(stored.size, dtype=dtype, device=param.device)


def install_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer, options: Any) -> None:
    """Make `tensors` and `options` the optimizer's state. (`load_state_dict` would cast to the type of the weights.)"""
    params = {name: p for p, name in _names(model, optimizer).items()}
    optimizer.state.clear()
    for name, entry in options["scalars"].items():
        if name in params:
            optimizer.state[params[name]].update(entry)
    for full, x in tensors.items():
        if full.startswith("optimizer/"):
            _, key, name = full.split("/", 2)
            optimizer.state[params[name]][key] = x
    for group, stored in zip(optimizer.param_groups, options["groups"], strict=True):
        group.update({key: x for key, x in stored.items() if key != "params"})


def copied(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, in CPU memory (pinned, where they come from a GPU). `buffers` are used again."""
    from torch.distributed.tensor import DTensor

    out: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, x in tensors.items():
        local = x.to_local().detach() if isinstance(x, DTensor) else x.detach()
        old = buffers.get(name)
        if old is None or (old.shape, old.dtype) != (local.shape, local.dtype):
            buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        copy = buffers[name].copy_(local, non_blocking=True)
        devices |= {local.device} if local.is_cuda else set()
        out[name] = DTensor(copy, x._spec, requires_grad=False) if isinstance(x, DTensor) else copy
    for device in devices:
        torch.cuda.synchronize(device)
    return out


def write_tensors(tensors: dict[str, Tensor], folder: Path, *, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's share of `tensors` and sync it; RuntimeError on every rank if one of them failed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    _quiet()
    try:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not distributed())
    except CheckpointException as error:  # a BaseException, which an `except Exception` in a loop would miss
        causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items())
        raise RuntimeError(f"writing the tensors failed: {causes}") from error


def read_tensors(tensors: dict[str, Tensor], path: Path, model: nn.Module) -> None:
    """Fill `tensors` of `model` in place; ValueError, before anything is written, where names or shapes differ."""
    import torch.distributed.checkpoint as dcp

    stored = _stored(path)
    stages = of_stages(model, {name: x.shape for name, x in tensors.items()})
    here = {name: shape for shapes in stages for name, shape in shapes.items()}
    wrong = [f"{name} is missing there" for name in here if name not in stored]
    wrong += [f"{name} is missing here" for name in stored if name.startswith("model/") and name not in here]
    wrong += [
        f"{name} is {list(stored[name].size)} there, {list(shape)} here"
        for name, shape in here.items()
        if name in stored and stored[name].size != shape
    ]
    if wrong:
        raise ValueError(f"{path} holds another model: {'; '.join(wrong[:4])} ({len(wrong)} differences in all)")
    _quiet()
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=not distributed())


def plain(value: Any, where: str) -> Any:
    """`value` rebuilt from types that `torch.load(weights_only=True)` reads; TypeError names what cannot be."""
    if isinstance(value, Tensor) and hasattr(value, "placements"):
        raise TypeError(f"{where} is sharded: give the model it belongs to as part of `model`, an nn.ModuleDict")
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | bytes):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {plain(k, f"a key of {where}"): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, strings, tensors, "
        "and lists, tuples or dicts of them, for example str(path) or dataclasses.asdict(config)"
    )


def of_stages(model: nn.Module, value: T) -> list[T]:
    """`value` of every pipeline stage of the model, or of the one inside it."""
    mesh = next((m.rlkit_mesh for m in model.modules() if hasattr(m, "rlkit_mesh")), None)
    return each_stage(value, mesh=mesh)  # type: ignore[arg-type]


def _quiet() -> None:
    """One process alone is what is meant. (Not `catch_warnings`: it is no thing for threads.)"""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _stored(path: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {p: _clean_name(name) for name, p in model.named_parameters()}
    missing = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if missing:
        raise ValueError(
            f"the optimizer holds {len(missing)} parameters that are not in the model, the first of shape "
            f"{list(missing[0].shape)}; give all trained modules as one nn.ModuleDict"
        )
    return names


def _groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names in each group of the optimizer, of all pipeline stages."""
    names = _names(model, optimizer)
    stages = of_stages(model, [[names[p] for p in group["params"]] for group in optimizer.param_groups])
    return [list(dict.fromkeys(name for part in parts for name in part)) for parts in zip(*stages, strict=True)]


def _clean_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
