"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlkit.parallel._dcp import copied
from rlkit.parallel._ranks import distributed, on_this_device, timeout_of
from rlkit.parallel.checkpoint import Job, make_job, write_job


class BackgroundSaver:
    """`save_checkpoint` in the background: the run waits for a copy into CPU memory, a thread writes it.

        with BackgroundSaver(run.checkpoints, keep=2) as saver:
            for step in ...:
                saver.save(step=step, model=model, optimizer=optimizer, state=state)

    The files, what is atomic and what is read back are those of `rlkit.parallel.checkpoint`. One save at a time: the
    next one, `wait` and the end of the block first wait for the one before, and raise what it raised, on every rank;
    the saver can then go on. All ranks make it, save and wait together. Nothing else may save into the folder
    meanwhile. A block that is interrupted (Ctrl-C) does not wait; what was half written is no checkpoint.

    Memory: one copy of this rank's shards on the host, kept for the next save (pinned, where they are on a GPU, each
    rounded up to a power of two). A rank whose host has no room for it waits for the disk instead.
    Differs: torch's `async_save` has no atomic end, and leaves it to the caller to look at its future.
    """

    def __init__(self, folder: Path | str, *, keep: int) -> None:
        self._folder, self._keep = Path(folder), keep
        self._group: dist.ProcessGroup | None = None
        if distributed():
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._then: Callable[[], object] | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return
        try:
            self.wait()
        except Exception:
            if kind is None:  # else the error that ends the block is the one to show
                raise
        finally:
            if self._group is not None and kind is None:
                dist.destroy_process_group(self._group)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, so that `wait` returns at once."""
        return self._thread is None or not self._thread.is_alive()

    def save(
        self,
        *,
        step: int,
        model: nn.Module,
        optimizer: Optimizer | None,
        state: dict[str, Any],
        then: Callable[[], object] | None = None,
    ) -> None:
        """Begin to write the checkpoint of `step` as things are now; see `save_checkpoint` for the arguments.

        `then` is called once it is on the disk, by the `wait` that finds it there: for what relies on it.
        """
        self.wait()
        job = make_job(self._folder, step=step, model=model, optimizer=optimizer, state=state, keep=self._keep)
        room = bool(self._buffers) or _has_room(job.tensors)
        if room:
            job = job._replace(tensors=copied(job.tensors, self._buffers))
        self._then = then
        write = on_this_device(self._write)
        self._thread = threading.Thread(target=write, args=(job,), name="rlkit-checkpoint", daemon=True)
        self._thread.start()
        if not room:
            self._thread.join()

    def wait(self) -> Path | None:
        """Until the last save is on the disk. Returns the folder of the last one that was written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            error, then = self._error, self._then
            self._error = self._then = None
            if error is not None:
                raise error
            if then is not None:
                then()
        return self._path

    def _write(self, job: Job) -> None:
        try:
            self._path = write_job(job, group=self._group)
        except BaseException as error:
            self._error = error


def _has_room(tensors: dict[str, Tensor]) -> bool:
    """Whether the ranks of this host, if all are like this one, can copy their shards without being killed for it."""
    local = (x.to_local() if hasattr(x, "to_local") else x for x in tensors.values())
    taken = (1 << (x.nbytes - 1).bit_length() if x.is_cuda and x.nbytes else x.nbytes for x in local)  # torch pins so
    return sum(taken) * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < 0.9 * _free_memory()


def _free_memory() -> float:
    """Bytes of memory that the machine, and the container, still have; infinite where they do not say."""
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
