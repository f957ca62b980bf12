"""Checkpoints that are complete or absent, and restore every bit.

A checkpoint is a folder `step_00000050` of

    __0_0.distcp ...  .metadata     weights and optimizer tensors, by torch.distributed.checkpoint: each rank writes its
                                    shards, and any layout can load them
    state.pt                        the caller's `state`, the optimizer's group options
    rank_00000.pt ...               random states, one file per rank
    manifest.json                   step, order of writing, size and CRC-32 of every other file; written last

Everything is written into `.tmp_step_00000050`, synced, and renamed. All ranks call each function together; without a
process group there is one rank.
"""

from __future__ import annotations

import errno
import io
import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlkit.parallel import _files
from rlkit.parallel._dcp import (
    empty_optimizer_tensors,
    install_optimizer,
    model_tensors,
    of_stages,
    optimizer_options,
    optimizer_tensors,
    plain,
    read_tensors,
    write_tensors,
)
from rlkit.parallel._ranks import first, rank, together, world_size
from rlkit.parallel.weights import export_hf as export_hf

_MANIFEST = "manifest.json"
_SAVE_FIX = "Earlier checkpoints are untouched. Free space there, keep fewer or save to another disk, then resume."


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is not what was written."""


def save_checkpoint(
    folder: Path | str, *, step: int, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_{step:08d}` and then delete all but the `keep` newest checkpoints of `folder`.

    `step` is the number of optimizer steps done. `state` is whatever else the loop needs to continue (data position,
    controllers, config): None, bool, int, float, str, bytes, tensors, and lists, tuples and dicts of them. A NamedTuple
    comes back as a plain tuple: `PidState(*state["kl"])`. The random states of torch, CUDA, Python and numpy are added.
    Model, optimizer and random states are only read: a run that saves has the same bits as one that does not.

    Errors: OSError (ENOSPC, EDQUOT, EFBIG) with the path and the space needed and free, where the disk is full: nothing
    of the new checkpoint stays, the old ones do. TypeError for a `state` entry that could not be read back. ValueError
    (on many ranks RuntimeError) where nodes do not share the folder's disk.

    Differs: TRL, verl and OpenRLHF write into the final folder and find the newest by its name or a pointer file.
    torch's `get_optimizer_state_dict` takes an optimizer step with zero gradients where the state is still empty, so
    saving at step 0 would change the run; here an empty state is stored as empty. `BackgroundSaver` does the same
    without holding up the run.
    """
    return write_job(make_job(folder, step=step, model=model, optimizer=optimizer, state=state, keep=keep))


def latest_checkpoint(folder: Path | str) -> Path | None:
    """The checkpoint of `folder` written last, or None.

    Found by content: its manifest is whole and every file it lists is there with its size. The name decides nothing.
    Written last, not of the highest step: after going back to an older checkpoint the run continues from there.
    """
    found = _complete(Path(folder))
    return found[-1] if found else None


def load_checkpoint(path: Path | str, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Load weights and optimizer state in place, set the random states, and return `state` with "step" added.

    Every file's checksum is verified first. The number of ranks and the layout may differ from those that wrote it;
    a rank that did not exist then keeps its random states. The optimizer's options (learning rate, betas) come from the
    checkpoint. `optimizer=None` loads the weights only, and leaves the random states alone.

    Errors: FileNotFoundError for a folder that is no complete checkpoint; DamagedCheckpoint for a file that changed
    since it was written; ValueError for a model or optimizer that does not fit, naming the first tensors that differ.
    """
    path = Path(path)
    manifest = _verified(path)
    side = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    tensors = model_tensors(model)
    if optimizer is not None:
        tensors |= empty_optimizer_tensors(path, model, optimizer, side["optimizer"])
    read_tensors(tensors, path, model)
    if optimizer is not None:
        install_optimizer(tensors, model, optimizer, side["optimizer"])
        own = path / _rank_file()
        if own.exists():
            _set_random_states(torch.load(own, map_location="cpu", weights_only=True))
    return {**side["state"], "step": manifest["step"]}


def load_latest(
    folder: Path | str, *, model: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, Any], list[str]]:
    """`load_checkpoint` of the newest checkpoint that is whole, and what is wrong with each one that was skipped.

    Without any checkpoint the state is {}. Nothing is loaded from a damaged one.
    Errors: FileNotFoundError where there are checkpoints and none is whole; those of `load_checkpoint`.
    """
    folder, complete = Path(folder), _complete(Path(folder))
    torn = {path for path in folder.glob("step_*") if path.is_dir()} - {*complete}
    skipped = [f"{path} has no {_MANIFEST}, or files that are missing or cut off" for path in sorted(torn)]
    for path in reversed(complete):
        try:
            return load_checkpoint(path, model=model, optimizer=optimizer), skipped
        except DamagedCheckpoint as error:
            skipped.append(str(error))
    if skipped:
        fix = "put back what they lack, or delete them to start from step 0 again"
        raise FileNotFoundError(errno.ENOENT, f"no checkpoint is whole: {'; '.join(skipped)}; {fix}", str(folder))
    return {}, []


class Job(NamedTuple):
    """A checkpoint that is to be written: everything but the tensors is serialized already. `size`: bytes of all
    stages' tensors."""

    folder: Path
    step: int
    keep: int
    tensors: dict[str, Tensor]
    size: int
    files: dict[str, bytes]


def make_job(
    folder: Path | str, *, step: int, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any], keep: int
) -> Job:
    """What `save_checkpoint` writes. The tensors are the live ones."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1 (the checkpoint just written), got {keep}")
    side, tensors = {"state": plain(state, "state"), "optimizer": None}, model_tensors(model)
    if optimizer is not None:
        side["optimizer"] = optimizer_options(model, optimizer)
        tensors |= optimizer_tensors(model, optimizer)
    files = {_rank_file(): _serialized(_random_states())}
    if rank() == 0:
        files["state.pt"] = _serialized(side)
    record = 2048  # of each tensor: name, type, shape
    sizes = of_stages(model, {name: x.numel() * x.element_size() + record for name, x in tensors.items()})
    size = sum({name: size for stage in sizes for name, size in stage.items()}.values())
    return Job(Path(folder), step, keep, tensors, size, files)


def write_job(job: Job, *, group: dist.ProcessGroup | None = None) -> Path:
    """Write a checkpoint, publish it and delete old ones. `group`: all ranks, in a group that nobody else uses now."""
    final = job.folder / f"step_{job.step:08d}"
    temp = job.folder / (_files.TEMP_PREFIX + final.name)
    own = len(job.files[_rank_file()])
    needed = job.size + sum(map(len, job.files.values())) + (world_size() - 1) * own + (1 << 16)
    what = f"the checkpoint of step {job.step}"
    first(lambda: _make_room(job.folder, temp, what, needed), group=group)
    cleanup = _files.removed_on_error(temp) if rank() == 0 else nullcontext()
    with _files.explain_full_disk(what, job.folder, needed=needed, fix=_SAVE_FIX), cleanup:
        write_tensors(job.tensors, temp, group=group)
        files = together(lambda: _write_files(job.files, temp), group=group)
        first(lambda: _publish(job.step, files, temp, final), group=group)
    first(lambda: _prune(job.folder, job.keep), group=group)
    return final


def _make_room(folder: Path, temp: Path, what: str, needed: int) -> None:
    """Delete what crashed saves left, refuse early where the disk is too full, and make the temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(_files.TEMP_PREFIX + "*"):
        _files.remove_folder(leftover)
    _files.require_room(what, folder, needed=needed, fix=_SAVE_FIX)
    temp.mkdir()


def _write_files(files: dict[str, bytes], temp: Path) -> dict[str, dict[str, int]]:
    """Write this rank's other files; name, size and checksum of every file that this rank wrote."""
    for name, data in files.items():
        _files.write_file(temp / name, data)
    own = [temp / name for name in files] + [f for f in temp.iterdir() if f.name.startswith(f"__{rank()}_")]
    if rank() == 0:
        own.append(temp / ".metadata")
    return {f.name: {"size": f.stat().st_size, "crc32": _files.crc32(f)} for f in own}


def _publish(step: int, files: list[dict[str, dict[str, int]]], temp: Path, final: Path) -> None:
    """The manifest, then the rename: from here on the checkpoint exists."""
    if lost := [(r, name) for r, of_rank in enumerate(files) for name in of_rank if not (temp / name).exists()]:
        r, name = lost[0]
        raise ValueError(
            f"rank 0 does not see {name}, which rank {r} wrote into {temp}: use a disk that all nodes share"
        )
    earlier = [_manifest(path) for path in _complete(final.parent)]
    manifest = {
        "step": step,
        "order": 1 + max((m["order"] for m in earlier if m), default=0),
        "world_size": len(files),
        "torch": torch.__version__,
        "files": {name: entry for of_rank in files for name, entry in sorted(of_rank.items())},
    }
    _files.write_file(temp / _MANIFEST, json.dumps(manifest, indent=1).encode())
    _files.replace_folder(temp, final)


def _prune(folder: Path, keep: int) -> None:
    for path in _complete(folder)[:-keep]:
        _files.remove_folder(path)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, in the order in which they were written."""
    if not folder.is_dir():
        return []
    found = {path: _manifest(path) for path in folder.iterdir() if not path.name.startswith(_files.TEMP_PREFIX)}
    return sorted((p for p, m in found.items() if m), key=lambda p: found[p]["order"])


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there with their sizes; {} for anything else."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        whole = all((path / name).stat().st_size == entry["size"] for name, entry in manifest["files"].items())
        return manifest if whole and isinstance(manifest["order"], int) and isinstance(manifest["step"], int) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _verified(path: Path) -> dict[str, Any]:
    """The manifest, after every file's checksum was compared (each rank takes its share of the files)."""
    manifest = _manifest(path)
    if not manifest:
        raise FileNotFoundError(
            f"{path} is not a complete checkpoint: it has no {_MANIFEST}, or files that are missing or cut off; "
            "latest_checkpoint(folder) finds the newest complete one"
        )
    mine = list(manifest["files"].items())[rank() :: world_size()]
    found = together(lambda: [name for name, entry in mine if _files.crc32(path / name) != entry["crc32"]])
    if changed := [name for names in found for name in names]:
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
