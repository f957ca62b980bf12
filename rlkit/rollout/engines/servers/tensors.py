"""Tensors on their way to a server: in buckets, in shared memory, in files."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor

from rlkit._util.files import share
from rlkit.rollout.engines.http import all_done
from rlkit.rollout.engines.servers.checks import NamedTensors
from rlkit.rollout.engines.servers.replicas import Replica

Named = list[tuple[str, Tensor]]
NO_TENSORS = "update_weights was given no tensors; pass (name, tensor) pairs, e.g. stream_weights(model)"


class Bucket(NamedTuple):
    """Tensors of one dtype laid end to end as bytes, and where each lies."""

    flat: Tensor
    metadata: list[SimpleNamespace]


class Memory:
    """Shared bytes, reused for every bucket on a CPU: fresh pages would cost more than the copy itself."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """The first `num_bytes`, which overwrite what an earlier call returned."""
        if self._flat.numel() < num_bytes:
            self._flat = torch.empty(num_bytes, dtype=torch.uint8)
            with file_system_sharing(), _stderr_not_passed_on():
                self._flat.share_memory_()
        return self._flat[:num_bytes]


def groups(named_tensors: NamedTensors, *, max_bytes: int) -> Iterator[tuple[Named, bool]]:
    """Yield (tensors of one dtype and at most `max_bytes`, whether they are the last); a larger tensor is alone.

    One dtype keeps each tensor aligned in its bucket. ValueError if there are no tensors.
    """
    pending: Named = []
    size = 0
    for name, tensor in named_tensors:
        if pending and (size + tensor.nbytes > max_bytes or tensor.dtype != pending[0][1].dtype):
            yield pending, False
            pending, size = [], 0
        pending.append((name, tensor.detach()))
        size += tensor.nbytes
    if not pending:
        raise ValueError(NO_TENSORS)
    yield pending, True


def flatten(named: Named, memory: Memory | None) -> Bucket:
    """Lay tensors end to end, in `memory` if they are on a CPU."""
    parts = [t.contiguous().reshape(-1).view(torch.uint8) for _, t in named]
    metadata, start = [], 0
    for (name, tensor), part in zip(named, parts, strict=True):
        place = {"start_idx": start, "end_idx": start + part.numel(), "numel": part.numel()}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
        start += part.numel()
    out = None if memory is None or parts[0].device.type != "cpu" else memory.take(start)
    return Bucket(torch.cat(parts, out=out), metadata)


class FromDisk:
    """Through checkpoint files on storage that trainer and servers share, for any kind of server.

    Args:
        folder: each update writes `folder/<version>/*.safetensors`; the last two are kept until `close`.
        file_bytes: size of a file, and of the buffer in this process's memory.
    """

    sessions = False  # SGLang's is one atomic step, which rolls back if it fails
    here = False

    def __init__(self, folder: str | Path, *, file_bytes: int = 4 << 30) -> None:
        self.folder, self._file_bytes = Path(folder).absolute(), file_bytes
        self._written: list[Path] = []

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every server and stamp the version."""
        path = self.folder / str(version)
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.safetensors"):
            old.unlink()
        for number, (named, _) in enumerate(groups(named_tensors, max_bytes=self._file_bytes)):
            await asyncio.to_thread(_write, path / f"{number:05d}.safetensors", named)
        await all_done(server.api.load(server, path, version) for server in servers)
        self._written.append(path)
        while len(self._written) > 2:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    async def close(self) -> None:
        """Delete the files: each is as large as the model, and the servers have read them."""
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)
        self._written.clear()
        with suppress(OSError):  # not empty, or gone
            self.folder.rmdir()


@contextmanager
def file_system_sharing() -> Iterator[None]:
    """By name, for file descriptors cannot be passed to an unrelated process."""
    strategy = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        mp.set_sharing_strategy(strategy)


@contextmanager
def _stderr_not_passed_on() -> Iterator[None]:
    """To torch's helper process, which the first shared tensor starts and which lives while a server maps it.

    It would hold a pipe open after this process has ended: `... 2>&1 | tee log`, or that of a parent, would not return.
    """
    ours, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
        os.close(null)


def _write(path: Path, named: Named) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in named}, path, metadata={"format": "pt"})
    share(path)
