"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rlkit.parallel._dcp import copied
from rlkit.parallel._ranks import distributed
from rlkit.parallel.checkpoint import Job, make_job, write_job


class BackgroundSaver:
    """`save_checkpoint` in the background: the run waits for a copy into CPU memory, a thread writes it.

        with BackgroundSaver(run.checkpoints, keep=2) as saver:
            for step in ...:
                saver.save(step=step, model=model, optimizer=optimizer, state=state)

    The files, what is atomic and what is read back are those of `rlkit.parallel.checkpoint`. One save at a time: the
    next one, `wait` and the end of the block first wait for the one before, and raise what it raised, on every rank;
    the saver can then go on. All ranks make it, save and wait together. Nothing else may save into the folder
    meanwhile.

    Memory: one copy of this rank's shards on the host, kept for the next save (pinned, where they are on a GPU).
    Differs: torch's `async_save` has no atomic end, and leaves it to the caller to look at its future.
    """

    def __init__(self, folder: Path | str, *, keep: int) -> None:
        self._folder, self._keep = Path(folder), keep
        self._group = dist.new_group(backend="gloo") if distributed() else None
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else the error that ends the block is the one to show
                raise
        finally:
            if self._group is not None and kind is None:
                dist.destroy_process_group(self._group)

    def save(self, *, step: int, model: nn.Module, optimizer: Optimizer | None, state: dict[str, Any]) -> None:
        """Begin to write the checkpoint of `step` as things are now; see `save_checkpoint` for the arguments."""
        self.wait()
        job = make_job(self._folder, step=step, model=model, optimizer=optimizer, state=state, keep=self._keep)
        job = job._replace(tensors=copied(job.tensors, self._buffers))
        self._thread = threading.Thread(target=self._write, args=(job,), name="rlkit-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        """Until the last save is on the disk. Returns the folder of the last one that was written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error
        return self._path

    def _write(self, job: Job) -> None:
        try:
            self._path = write_job(job, group=self._group)
        except BaseException as error:
            self._error = error
