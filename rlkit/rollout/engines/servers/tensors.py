"""Tensors on their way to a server: in buckets, in shared memory, in files."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from zlib import crc32

import torch
import torch.multiprocessing as mp
from safetensors.torch import save
from torch import Tensor

from rlkit._util.changes import ANSWER, CHANGES, MANIFEST, changes
from rlkit._util.files import TEMP_PREFIX, replace_file, share
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.hosts import host_of
from rlkit.rollout.engines.http import all_done
from rlkit.rollout.engines.servers.checks import NamedTensors
from rlkit.rollout.engines.servers.replicas import Replica

Named = list[tuple[str, Tensor]]
_log = logging.getLogger("rlkit.rollout")
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
        folder: each update writes `folder/<version>/*.safetensors`; the last two are kept until `close`, which also
            deletes what a process that was killed has left there.
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
        self._written = self._written or self._left()
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.safetensors"):
            old.unlink()
        for number, (named, _) in enumerate(groups(named_tensors, max_bytes=self._file_bytes)):
            await asyncio.to_thread(_write, path / f"{number:05d}.safetensors", named)
        await all_done(server.api.load(server, path, version) for server in servers)
        self._written = [old for old in self._written if old != path] + [path]  # a version may be sent again
        while len(self._written) > 2:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def _left(self) -> list[Path]:
        """Folders of updates by an earlier process."""
        folders = [path for path in self.folder.glob("*") if path.name.isdecimal() and path.is_dir()]
        return [path for path in folders if all(re.fullmatch(r"\d{5}\.safetensors", x.name) for x in path.iterdir())]

    async def close(self) -> None:
        """Delete the files: each is as large as the model, and the servers have read them."""
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)
        self._written.clear()
        with suppress(OSError):  # not empty, or gone
            self.folder.rmdir()


class FromChanges:
    """As `FromDisk`, to servers that see only a slow folder: it carries the values that changed since the last update.

    Each server's machine runs `rlkit patch FOLDER COPY`, and the server loads COPY, which the trainer need not see. The
    first update carries whole files, and so does one after which a copy has other checksums than it should.

    Args:
        folder: that of the updates; the last two are kept until `close`.
        file_bytes: size of a file of the copies.
        wait_s: seconds in which each machine's copy must answer.

    Memory: the weights of the last update, on the CPU.
    """

    sessions = here = False

    def __init__(self, folder: str | Path, *, file_bytes: int = 1 << 30, wait_s: float = 1800.0) -> None:
        self._place, self._file_bytes, self._wait_s = Path(folder).absolute(), file_bytes, wait_s
        self._sent: list[bytes] = []
        self._written: list[Path] = []

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every server and stamp the version."""
        hosts, before, self._sent = {host_of(server.url) for server in servers}, self._sent, []
        update = self._new_folder()
        for named, _ in groups(named_tensors, max_bytes=self._file_bytes):
            new = await asyncio.to_thread(save, {name: tensor.cpu().contiguous() for name, tensor in named})
            await asyncio.to_thread(_put, update / _name(len(self._sent)), new, before.pop(0) if before else b"")
            self._sent.append(new)
        copies = await self._copies(update, hosts)
        if copies is None:
            update = self._new_folder()
            for number, new in enumerate(self._sent):
                await asyncio.to_thread(_put, update / _name(number), new, b"")
            copies = await self._copies(update, hosts)
        if copies is None or len(copies) > 1:
            fault = f"are in several folders ({', '.join(sorted(copies))})" if copies else "cannot be written"
            raise EngineError(
                f"the copies of the weights {fault}: start `rlkit patch {self._place} COPY` with one COPY"
            )
        await all_done(server.api.load(server, Path(*copies), version) for server in servers)

    def _new_folder(self) -> Path:
        """The folder of the next update, beside the last one; older ones are deleted."""
        for old in {file.parent for file in self._place.glob(f"*/{MANIFEST}")} - {*self._written[-1:]}:
            shutil.rmtree(old, ignore_errors=True)
        self._written.append(self._place / str(time.time_ns()))
        self._written[-1].mkdir(parents=True)
        return self._written[-1]

    async def _copies(self, update: Path, hosts: set[str]) -> set[str] | None:
        """Publish the update: the paths of all copies once they hold it, or None where one needs whole files."""
        sums = {_name(number): await asyncio.to_thread(crc32, new) for number, new in enumerate(self._sent)}
        replace_file(update / MANIFEST, json.dumps(sums).encode())
        end = time.monotonic() + self._wait_s
        while len(answers := [x for x in update.glob(f"*{ANSWER}") if not x.name.startswith(TEMP_PREFIX)]) < len(hosts):
            if time.monotonic() > end:
                fault = f"{len(answers)} of {len(hosts)} machines ({', '.join(sorted(hosts))}) answer for their copy"
                raise EngineError(f"{fault} of the weights: run `rlkit patch {self._place} COPY` on each")
            await asyncio.sleep(0.05)
        told = [json.loads(answer.read_text()) for answer in answers]
        for fault in {x["fault"] for x in told} - {""}:
            _log.warning("weights: %s; whole files are sent", fault)
        return None if any(x["fault"] for x in told) else {x["copy"] for x in told}

    async def close(self) -> None:
        """Delete the updates."""
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)
        self._written, self._sent = [], []


def _name(number: int) -> str:
    return f"{number:05d}.safetensors"


def _put(path: Path, new: bytes, old: bytes) -> None:
    """Write a file's changes since `old` where they are less than the file, else the file."""
    small = changes(old, new) if len(old) == len(new) else new
    path.with_name(path.name + CHANGES * (len(small) < len(new))).write_bytes(min(small, new, key=len))


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
