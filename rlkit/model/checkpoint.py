"""Atomic checkpoints that restore a run bit for bit.

A checkpoint is a folder `step_00000050` of

    __0_0.distcp ...  .metadata     weights and optimizer tensors, by torch.distributed.checkpoint: each rank writes its
                                    shards, and any layout can load them
    state.pt                        the caller's `state`, the optimizer's group options
    rank_00000.pt ...               random states, one file per rank
    manifest.json                   step, order of writing, size and CRC-32 of every other file; written last

Everything is written into `.tmp_step_00000050`, synced, and renamed. All ranks call each function together; without a
process group there is one rank. `BackgroundSaver` writes in a thread while the run trains. manifest.json and state.pt
carry the number of this format (`FORMAT`); a folder in another format is refused.

Names of tensors do not depend on the layout: `model/NAME` is a weight or buffer, `optimizer/KEY/NAME` the optimizer's
KEY (exp_avg, step, ...) of parameter NAME. The frozen weights under LoRA adapters are left out: a run that resumes has
read them from its model's folder. DTensors stay DTensors: each rank writes and reads its own shards, and
torch.distributed.checkpoint reshards. A pipeline stage has only its own names, and a tied weight is on two stages;
lists of names that are stored or compared cover all stages. torch.distributed.checkpoint takes a second to import
before transformers is loaded, so it is imported by the first checkpoint.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import rlkit
from rlkit._util import files as _files
from rlkit._util import untrusted
from rlkit._util.ranks import (
    distributed,
    local_world_size,
    on_all_ranks,
    on_rank0,
    on_this_device,
    rank,
    timeout_of,
    world_size,
)
from rlkit.model.lora import adapters
from rlkit.model.sharding import mesh_of, own_part, whole_of
from rlkit.model.weights import clean_name, model_tensors
from rlkit.parallel.data import each_stage

T = TypeVar("T")

FORMAT = 2  # of a checkpoint's files; raised by a change that older versions cannot read


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The live optimizer state. A parameter that was never updated has no state, and saving creates none."""
    names = _names(model, optimizer)
    items = ((names[p], key, x) for p, entry in optimizer.state.items() for key, x in entry.items())
    return {f"optimizer/{key}/{name}": x for name, key, x in items if isinstance(x, Tensor)}


def optimizer_options(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's options per group, and its per-parameter state that is not a tensor."""
    names = _names(model, optimizer)
    members = _groups(model, optimizer)
    groups = [{**group, "params": params} for group, params in zip(optimizer.param_groups, members, strict=True)]
    scalars = {
        names[p]: {key: x for key, x in entry.items() if not isinstance(x, Tensor)}
        for p, entry in optimizer.state.items()
    }
    stages = of_stages(model, plain(scalars, "optimizer.state"))
    merged = {name: entry for stage in stages for name, entry in stage.items()}
    return {"groups": plain(groups, "optimizer.param_groups"), "scalars": merged}


def empty_optimizer_tensors(path: Path, model: nn.Module, optimizer: Optimizer, options: Any) -> dict[str, Tensor]:
    """Empty tensors for the state stored in `path`, sharded like the parameters, made without an optimizer step."""
    names, groups = _names(model, optimizer), _groups(model, optimizer)
    _check_reference(path, model)
    if options is None or [*map(sorted, groups)] != [sorted(group["params"]) for group in options["groups"]]:
        raise ValueError(
            f"{path} was written with another optimizer: its parameters or parameter groups differ from the given "
            "optimizer's; resume with the model and flags of the run (--lora-rank, --lora-targets, --optimizer), or in "
            "Python load with optimizer=None for the weights only"
        )
    owners = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    room = {}
    for full, stored in _stored(path).items():
        if full.startswith("optimizer/"):
            _, key, name = full.split("/", 2)
            if name in owners:
                room[full] = _room(key, stored, *owners[name])
    return room


def _check_reference(path: Path, model: nn.Module) -> None:
    """ValueError if only one of the checkpoint and the model has the weights of a reference that moves."""
    moved = any(name.startswith("model/reference.") for name in _stored(path))
    names = [clean_name(name) for name, _ in model.named_parameters()]
    moves = any(name.startswith("reference.") for stage in of_stages(model, names) for name in stage)
    if moved != moves:
        moving = "a reference model that moves: give `kl_coef` and `ref_sync_steps` above 0"
        wrote = moving if moved else "no reference model that moves: give `ref_sync_steps` 0"
        raise ValueError(f"{path} was written with {wrote}, as before, or start a new run in another folder")


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The frozen weights under adapters. They never change: a checkpoint leaves them to the model's folder."""
    parts = model.items() if isinstance(model, nn.ModuleDict) else [("", model)]
    base: dict[str, Tensor] = {}
    for key, part in parts:
        frozen = [(name, p) for name, p in part.named_parameters() if not p.requires_grad and ".lora_" not in name]
        base |= {f"model/{key}{'.' * bool(key)}{clean_name(name)}": p for name, p in frozen if adapters(part)}
    return base


def sums_of(base: dict[str, Tensor], model: nn.Module) -> dict[str, float]:
    """The sum of each base weight, of all stages: enough to tell whether the model's folder holds other weights now."""
    sums = {name: p.detach().sum(dtype=torch.float64) for name, p in base.items()}
    here = {name: float(whole_of(x)) for name, x in sums.items()}
    return {name: x for stage in of_stages(model, here) for name, x in stage.items()}


def _check_base(path: Path, base: dict[str, Tensor], model: nn.Module, stored: dict[str, float]) -> None:
    """ValueError if the base weights are not those that the adapters of the checkpoint were trained on."""
    here = sums_of(base, model)
    other = [name for name, x in stored.items() if not math.isclose(x, here.get(name, x), rel_tol=1e-6, abs_tol=1e-4)]
    if other:
        first = other[0].removeprefix("model/")
        fault = f"{path}: its adapters were trained on other weights than the model has now ({first} and"
        raise ValueError(f"{fault} {len(other) - 1} others differ): give the model that the run started from")


def _room(key: str, stored: Any, param: Tensor, group: dict[str, Any]) -> Tensor:
    dtype = stored.properties.dtype
    if key == "step":  # as in torch: on the CPU, unless a fused or captured kernel reads it
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(stored.size, dtype=dtype, device=param.device if on_device else "cpu")
    if stored.size == param.shape:
        return torch.empty_like(param.detach(), dtype=dtype)
    return torch.empty(stored.size, dtype=dtype, device=param.device)


def install_optimizer(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer, options: Any) -> None:
    """Set the optimizer's state to `tensors` and `options`. (`load_state_dict` would cast to the weights' dtype.)"""
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
    """A copy of the tensors in CPU memory (pinned, if they are on a GPU), in `buffers`, which the next copy reuses."""
    from torch.distributed.tensor import DTensor

    out: dict[str, Tensor] = {}
    devices: set[torch.device] = set()
    for name, x in tensors.items():
        local = own_part(x).detach()
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
    """Write this rank's share of `tensors` and sync it; RuntimeError on every rank if any rank failed."""
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
    """Fill `tensors` of `model` in place; ValueError, before any tensor changes, where names or shapes differ."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from rlkit.model.plain_files import Reader

    stages = of_stages(model, {name: [*x.shape] for name, x in tensors.items()})
    here = {name: shape for shapes in stages for name, shape in shapes.items()}
    there = {name: [*x.size] for name, x in _stored(path).items() if name in here or name.startswith("model/")}
    shapes = {name: (there.get(name, "missing"), here.get(name, "missing")) for name in here | there}
    if unequal := [f"{name} is {a} there, {b} here" for name, (a, b) in shapes.items() if a != b]:
        raise ValueError(f"{path} holds another model: {'; '.join(unequal[:4])} ({len(unequal)} differences in total)")
    _quiet()
    try:
        dcp.load(tensors, storage_reader=Reader(path), no_dist=not distributed())
    except CheckpointException as error:  # a BaseException, as in `write_tensors`
        raise next(iter(error.failures.values()))[0] from None


def plain(value: Any, where: str) -> Any:
    """`value` in types that `torch.load(weights_only=True)` reads; TypeError names an entry of another type."""
    if isinstance(value, Tensor) and hasattr(value, "placements"):
        raise TypeError(f"{where} is sharded: give the model it belongs to as part of `model`, an nn.ModuleDict")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, Tensor | bool | bytes):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {plain(k, f"a key of {where}"): plain(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    fault = f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, strings, tensors"
    raise TypeError(f"{fault}, and lists, tuples or dicts of them, for example str(path) or dataclasses.asdict(config)")


def of_stages(model: nn.Module, value: T) -> list[T]:
    """`value` of every pipeline stage of the model, or of the first module inside it that was cut."""
    mesh = next(filter(None, map(mesh_of, model.modules())), None)
    return each_stage(value, mesh=mesh)


def _quiet() -> None:
    """Silence DCP's single-process warning; `catch_warnings` is not thread-safe."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _stored(path: Path) -> dict[str, Any]:
    from rlkit.model.plain_files import Reader

    return Reader(path).read_metadata().state_dict_metadata


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {p: clean_name(name) for name, p in model.named_parameters()}
    if missing := [p for group in optimizer.param_groups for p in group["params"] if p not in names]:
        fault = f"the optimizer holds {len(missing)} parameters that are not in the model, the first of shape"
        raise ValueError(f"{fault} {list(missing[0].shape)}; give all trained modules as one nn.ModuleDict")
    return names


def _groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The parameter names in each group of the optimizer, over all pipeline stages."""
    names = _names(model, optimizer)
    stages = of_stages(model, [[names[p] for p in group["params"]] for group in optimizer.param_groups])
    return [list(dict.fromkeys(name for part in parts for name in part)) for parts in zip(*stages, strict=True)]


_MANIFEST = "manifest.json"
_SAVE_FIX = "Earlier checkpoints are untouched. Free space there, keep fewer or save to another disk, then resume."


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint changed after it was written."""


def save_checkpoint(
    folder: Path | str, *, step: int, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_{step:08d}` and then delete all but the `keep` newest checkpoints of `folder`.

    `step` is the number of steps done. `state` is the rest that the loop needs to continue (data position, controllers,
    config): None, bool, int, float, str, bytes, tensors, and lists, tuples and dicts of them. A NamedTuple is restored
    as a plain tuple: `PidState(*state["kl"])`. The random states of torch, CUDA, Python and numpy are added. Model,
    optimizer and random states are only read, so saving does not change the run.

    Errors: OSError (ENOSPC, EDQUOT, EFBIG) with the path and the space needed and free, if the disk is full: the new
    checkpoint is removed, the earlier ones are kept. TypeError for a `state` entry that could not be read back.
    ValueError (on many ranks RuntimeError) if the nodes do not share the folder's disk.

    Differs: TRL, verl and OpenRLHF write into the final folder and find the newest by its name or a pointer file.
    torch's `get_optimizer_state_dict` takes an optimizer step with zero gradients if the state is still empty, so
    saving at step 0 would change the run; here an empty state is stored as empty. `BackgroundSaver` does the same in a
    thread.
    """
    return write_job(make_job(folder, step=step, model=model, optimizer=optimizer, state=state, keep=keep))


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The complete checkpoint of `folder` that was written last, or None.

    Complete: the manifest is readable, and every file it lists has the listed size; the folder's name does not matter.
    The last one written is not always that of the highest step: a run may resume from an older checkpoint.
    Errors: ValueError for a checkpoint in another format.
    """
    _check_formats(Path(folder))
    return next(reversed(_complete(Path(folder))), None)


def load_checkpoint(path: Path | str, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Load weights and optimizer state in place, set the random states, and return `state` with "step" added.

    Every file's checksum is verified first. The number of ranks and the layout may differ from those at saving; a rank
    that has no stored random states keeps its own. The optimizer's options (learning rate, betas) come from the
    checkpoint. `optimizer=None` loads only the weights and keeps the current random states.

    Errors: FileNotFoundError for an incomplete checkpoint; DamagedCheckpoint for a file that changed after it was
    written; ValueError for another format, or for a model or optimizer that does not fit, with the first tensors that
    differ.
    """
    from rlkit.model.plain_files import read_plain

    path = Path(path)
    manifest = _verified(path)
    side = read_plain(path / "state.pt")
    wanted = ["state", "optimizer"] if optimizer is not None else ["state"]
    if lacks := [key for key in wanted if not isinstance(side, dict) or not isinstance(side.get(key), dict)]:
        raise ValueError(f"{path / 'state.pt'} is damaged, or no file of a checkpoint: it has no `{lacks[0]}`")
    _check_format(path / "state.pt", side)
    base = base_weights(model)
    left_out = base.keys() - _stored(path).keys()
    _check_base(path, base, model, side.get("base", {}))
    tensors = {name: x for name, x in model_tensors(model).items() if name not in left_out}
    if optimizer is not None:
        tensors |= empty_optimizer_tensors(path, model, optimizer, side["optimizer"])
    read_tensors(tensors, path, model)
    if optimizer is not None:
        install_optimizer(tensors, model, optimizer, side["optimizer"])
        random_states = path / _rank_file()
        if random_states.exists():
            states = read_plain(random_states)
            with _files.no_code(random_states):
                _set_random_states(states)
    return {**side["state"], "step": manifest["step"]}


def load_latest(
    folder: Path | str, *, model: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, Any], list[str]]:
    """`load_checkpoint` of the newest intact checkpoint, and the reason for each one that was skipped.

    Without any checkpoint the state is {}. Nothing is loaded from a damaged checkpoint.
    Errors: FileNotFoundError if there are checkpoints but none is intact; the errors of `load_checkpoint`.
    """
    _check_formats(Path(folder))
    folder, complete = Path(folder), _complete(Path(folder))
    torn = {path for path in folder.glob("step_*") if path.is_dir()} - {*complete}
    skipped = [_fault(path, _manifest(path)) for path in sorted(torn)]
    for path in reversed(complete):
        try:
            return load_checkpoint(path, model=model, optimizer=optimizer), skipped
        except DamagedCheckpoint as error:
            skipped.append(str(error))
    if skipped:
        fix = "restore their files, or delete them to start from step 0 again"
        raise FileNotFoundError(errno.ENOENT, f"no checkpoint is whole: {'; '.join(skipped)}; {fix}", str(folder))
    return {}, []


class Job(NamedTuple):
    """A checkpoint to write, serialized except for its tensors. `size`: bytes of the tensors of all stages; `spared`:
    steps of older checkpoints that are kept."""

    folder: Path
    step: int
    keep: int
    tensors: dict[str, Tensor]
    size: int
    files: dict[str, bytes]
    spared: tuple[int, ...] = ()


def make_job(
    folder: Path | str, *, step: int, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any], keep: int
) -> Job:
    """The job of `save_checkpoint`, with the live tensors."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1 (the checkpoint just written), got {keep}")
    side = {"format": FORMAT, "rlkit": rlkit.__version__, "state": plain(state, "state"), "optimizer": None}
    base = base_weights(model)
    tensors = {name: x for name, x in model_tensors(model).items() if name not in base}
    if base:
        side["base"] = sums_of(base, model)
    if optimizer is not None:
        side["optimizer"] = optimizer_options(model, optimizer)
        tensors |= optimizer_tensors(model, optimizer)
    files = {_rank_file(): _serialized(_random_states())}
    if rank() == 0:
        files["state.pt"] = _serialized(side)
    record = 2048  # bytes per tensor for its name, type and shape
    sizes = of_stages(model, {name: x.numel() * x.element_size() + record for name, x in tensors.items()})
    size = sum({name: size for stage in sizes for name, size in stage.items()}.values())
    return Job(Path(folder), step, keep, tensors, size, files)


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def write_job(job: Job, *, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint, publish it and delete old ones. `group`: all ranks, for the use of this thread only."""
    final = job.folder / folder_name(job.step)
    temp = job.folder / (_files.TEMP_PREFIX + final.name)
    per_rank = len(job.files[_rank_file()])
    needed = job.size + sum(map(len, job.files.values())) + (world_size() - 1) * per_rank + (1 << 16)
    item = f"the checkpoint of step {job.step}"
    on_rank0(lambda: _make_room(job.folder, temp, item, needed), group=group)
    cleanup = _files.removed_on_error(temp) if rank() == 0 else nullcontext()
    with _files.explain_full_disk(item, job.folder, needed=needed, fix=_SAVE_FIX), cleanup:
        write_tensors(job.tensors, temp, group=group)
        files = on_all_ranks(lambda: _write_files(job.files, temp), group=group)
        on_rank0(lambda: _publish(job.step, files, temp, final), group=group)
    on_rank0(lambda: _prune(job.folder, job.keep, job.spared), group=group)
    return final


def _make_room(folder: Path, temp: Path, item: str, needed: int) -> None:
    """Delete the leftovers of crashed saves, refuse early on a full disk, and make the temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(_files.TEMP_PREFIX + "*"):
        _files.remove_folder(leftover)
    _files.require_room(item, folder, needed=needed, fix=_SAVE_FIX)
    temp.mkdir()


def _write_files(files: dict[str, bytes], temp: Path) -> dict[str, dict[str, int]]:
    """Write this rank's `files`; return name -> size and checksum of every file that this rank has written."""
    for name, data in files.items():
        _files.write_file(temp / name, data)
    written = [temp / name for name in files] + [f for f in temp.iterdir() if f.name.startswith(f"__{rank()}_")]
    if rank() == 0:
        written.append(temp / ".metadata")
    return {f.name: {"size": f.stat().st_size, "crc32": _files.crc32(f)} for f in written}


def _publish(step: int, files: list[dict[str, dict[str, int]]], temp: Path, final: Path) -> None:
    """Write the manifest, then rename the folder: this is what makes the checkpoint exist."""
    if lost := [(r, name) for r, of_rank in enumerate(files) for name in of_rank if not (temp / name).exists()]:
        r, name = lost[0]
        fault = f"rank 0 does not see {name}, which rank {r} wrote into {temp}"
        raise ValueError(f"{fault}: use a disk that all nodes share")
    manifest = {
        "format": FORMAT,
        "rlkit": rlkit.__version__,
        "step": step,
        "order": 1 + max((_manifest(path)["order"] for path in _complete(final.parent)), default=0),
        "world_size": len(files),
        "torch": torch.__version__,
        "files": {name: entry for of_rank in files for name, entry in sorted(of_rank.items())},
    }
    _files.write_file(temp / _MANIFEST, json.dumps(manifest, indent=1).encode())
    _files.replace_folder(temp, final)


def _prune(folder: Path, keep: int, spared: tuple[int, ...]) -> None:
    for path in _complete(folder)[:-keep]:
        if path.name not in map(folder_name, spared):
            _files.remove_folder(path)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, in the order of writing."""
    manifests = {path: _manifest(path) for path in _folders(folder)}
    return sorted((p for p, m in manifests.items() if not _fault(p, m)), key=lambda p: manifests[p]["order"])


def _folders(folder: Path) -> list[Path]:
    """Everything in `folder` except leftovers of crashed saves."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if not path.name.startswith(_files.TEMP_PREFIX))


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, complete or not; {} for anything else."""
    try:
        manifest = untrusted.read_json(path / _MANIFEST)
        return manifest if type(manifest["step"]) is int and 0 <= manifest["step"] < 2**53 else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _fault(path: Path, manifest: dict[str, Any]) -> str:
    """Why a folder is no complete checkpoint: the file, and what is wrong with it; "" for a complete one."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        return f"{path} has no {_MANIFEST}{' that can be read' if (path / _MANIFEST).exists() else ''}"
    for name, entry in files.items():
        if not os.path.isfile(path / name):  # False too for a name that no disk can hold
            return f"{path}: {name[:80]} is missing"
        wanted = entry.get("size") if isinstance(entry, dict) else None
        if (size := (path / name).stat().st_size) != wanted:
            return f"{path}: {name} is damaged: it has {size} bytes, and was written with {wanted}"
    fine = manifest.get("format") == FORMAT and isinstance(manifest.get("order"), int)
    return "" if fine else f"{path}: {_MANIFEST} is damaged"


def _check_format(path: Path, header: dict[str, Any]) -> None:
    """ValueError if `header`, the manifest or the state at `path`, has another format than this version's."""
    if header and header.get("format") != FORMAT:
        wrote = f"rlkit {header['rlkit']}" if "rlkit" in header else "an rlkit without format numbers"
        raise ValueError(
            f"{path} has checkpoint format {header.get('format')}, written by {wrote}, and rlkit "
            f"{rlkit.__version__} reads format {FORMAT}: resume with the version that wrote it, or start a new run in "
            "another folder"
        )


def _check_formats(folder: Path) -> None:
    for path in _folders(folder):
        _check_format(path, _manifest(path))


def _verified(path: Path) -> dict[str, Any]:
    """The manifest, after verifying every file's checksum (each rank verifies its share)."""
    manifest = _manifest(path)
    _check_format(path, manifest)
    if _fault(path, manifest):
        fault = f"{path} is not a complete checkpoint: it has no {_MANIFEST}, or files that are missing or cut off"
        raise FileNotFoundError(f"{fault}; latest_checkpoint(folder) finds the newest complete one")
    mine = list(manifest["files"].items())[rank() :: world_size()]
    differing = on_all_ranks(lambda: [name for name, entry in mine if _files.crc32(path / name) != entry.get("crc32")])
    if changed := [name for names in differing for name in names]:
        raise DamagedCheckpoint(f"{path}: {', '.join(changed)} changed after it was written")
    return manifest


def _serialized(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    keys = np.asarray(keys).tolist()
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, keys, *rest)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _rank_file() -> str:
    return f"rank_{rank():05d}.pt"


class BackgroundSaver:
    """`save_checkpoint` in the background: the run waits for a copy into CPU memory, a thread writes it.

        with BackgroundSaver(run.checkpoints, keep=2) as saver:
            for step in ...:
                saver.save(step=step, model=model, optimizer=optimizer, state=state)

    Files and atomicity are those of `save_checkpoint`. One save runs at a time: the next `save`, `wait` and the end of
    the block first wait for it and raise its error, on every rank; the saver stays usable afterwards. All ranks create
    it, save and wait together. Nothing else may save into the folder meanwhile. An interrupted block (Ctrl-C) does not
    wait; a half-written checkpoint is ignored on resume.

    Memory: one copy of this rank's shards on the host, reused by the next save (pinned if they are on a GPU, each
    rounded up to a power of two). A rank whose host has no room for the copy waits for the disk instead.
    Differs: torch's `async_save` is not atomic, and its caller must check the future.
    """

    def __init__(self, folder: Path | str, *, keep: int) -> None:
        self._folder, self._keep = Path(folder), keep
        self._group: dist.ProcessGroup | None = None
        if distributed():
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
        self._buffers: dict[str, Tensor] = {}
        self._running: tuple[Future[Path], Callable[[], object]] | None = None
        self._path: Path | None = None

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return
        try:
            self.wait()
        except Exception:
            if kind is None:  # otherwise the error that ended the block is the one to raise
                raise
        finally:
            if self._group is not None and kind is None:
                dist.destroy_process_group(self._group)

    @property
    def idle(self) -> bool:
        """Whether no save is running, so that `wait` returns at once."""
        return self._running is None or self._running[0].done()

    def save(
        self,
        *,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        state: dict[str, Any],
        then: Callable[[], object] | None = None,
        spared: tuple[int, ...] = (),
        copy: bool = True,
    ) -> None:
        """Start to write a checkpoint of the current state; see `save_checkpoint` for the arguments.

        Without `copy`, which suits the last save of a run, it is written from the live tensors before this returns,
        unless an earlier save has made buffers: these are filled, and `wait` returns once it is written.

        `then` is called by the next `wait`, once the checkpoint is on the disk. Checkpoints of the steps `spared` are
        not deleted; of many ranks those of the first count.
        """
        self.wait()
        job = make_job(self._folder, step=step, model=model, optimizer=optimizer, state=state, keep=self._keep)
        job = job._replace(spared=spared)
        if room := bool(self._buffers) or (copy and _has_room(job.tensors)):
            job = job._replace(tensors=copied(job.tensors, self._buffers))
        future: Future[Path] = Future()
        self._running = (future, then or (lambda: None))
        # a daemon thread, since the pool of concurrent.futures would delay the exit of an interrupted process
        thread = threading.Thread(
            target=on_this_device(self._write), args=(job, future), name="rlkit-checkpoint", daemon=True
        )
        thread.start()
        if not room:
            thread.join()

    def wait(self) -> Path | None:
        """Wait until the last save is on the disk. Returns the folder of the last checkpoint written."""
        if self._running is not None:
            future, then = self._running
            wait([future])  # after a Ctrl-C here the save still runs, and can be waited for again
            self._running = None
            self._path = future.result()
            then()
        return self._path

    def _write(self, job: Job, future: Future[Path]) -> None:
        try:
            future.set_result(write_job(job, group=self._group))
        except BaseException as error:
            future.set_exception(error)


def _has_room(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks of this host can copy as many bytes as this one without running out of memory."""
    local = map(own_part, tensors.values())
    taken = (1 << (x.nbytes - 1).bit_length() if x.is_cuda and x.nbytes else x.nbytes for x in local)  # pinned sizes
    return sum(taken) * local_world_size() < 0.9 * _free_memory()


def _free_memory() -> float:
    """Free bytes of memory of the machine and its container; infinite where neither reports them."""
    free, group = math.inf, Path("/sys/fs/cgroup")
    try:
        free = 1024.0 * _field(Path("/proc/meminfo"), "MemAvailable:")
        limit = int((group / "memory.max").read_text())  # "max": none
        cached = _field(group / "memory.stat", "inactive_file")
        return min(free, limit - int((group / "memory.current").read_text()) + cached)
    except (OSError, LookupError, ValueError):
        return free


def _field(path: Path, name: str) -> int:
    return int({key: value for key, value, *_ in map(str.split, path.read_text().splitlines())}[name])
