"""Ways for weights into running SGLang servers: shared memory, files, a process group. Each is given to `SGLang`."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

from rlkit.rollout.engines.http import all_done
from rlkit.rollout.engines.sglang.checks import NamedTensors
from rlkit.rollout.engines.sglang.replicas import Replica

Named = list[tuple[str, Tensor]]
NO_TENSORS = "update_weights was given no tensors; pass (name, tensor) pairs, e.g. stream_weights(model)"
UUID_PLACE = 6  # of the device in the arguments of torch's rebuild_cuda_tensor


class Bucket(NamedTuple):
    """Tensors of one dtype laid end to end as bytes, and where each lies."""

    flat: Tensor
    metadata: list[SimpleNamespace]


class Memory:
    """Shared bytes that every bucket on a CPU is laid out in anew: fresh pages would cost more than the copy itself."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """The first `num_bytes`; what an earlier call returned is overwritten with them."""
        if self._flat.numel() < num_bytes:
            self._flat = torch.empty(num_bytes, dtype=torch.uint8)
            with _file_system_sharing(), _stderr_not_passed_on():
                self._flat.share_memory_()
        return self._flat[:num_bytes]


def groups(named_tensors: NamedTensors, *, max_bytes: int) -> Iterator[tuple[Named, bool]]:
    """(tensors of one dtype with at most `max_bytes` together, whether they are the last). A larger one is alone.

    One dtype, so that each is aligned in the bucket.

    Raises:
        ValueError: there are none.
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
        size, end = part.numel(), start + part.numel()
        place = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "start_idx": start, "end_idx": end}
        metadata.append(SimpleNamespace(**place, numel=size))
        start = end
    out = None if memory is None or parts[0].device.type != "cpu" else memory.take(start)
    return Bucket(torch.cat(parts, out=out), metadata)


class FromTensors:
    """Through memory that trainer and server share on one machine: CUDA IPC, or shared memory for CPU tensors.

    Only a handle goes over HTTP. The trainer's and the server's GPU may have different numbers in the two processes
    (it is named by its UUID), but must be visible to both. On a CPU the buckets lie in /dev/shm, `bucket_bytes`
    of it, until `close`, and a small helper process of torch's lives as long as this one and the servers.

    Args:
        bucket_bytes: size of the flat buffers.

    Differs from verl, slime and RL2, which use SGLang's own classes in the trainer: here the trainer needs no SGLang.
    """

    sessions = True  # updates run between SGLang's begin and end

    def __init__(self, *, bucket_bytes: int = 512 << 20) -> None:
        self._bucket_bytes = bucket_bytes
        self._memory = Memory()

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every server and stamp the version."""
        for named, last in groups(named_tensors, max_bytes=self._bucket_bytes):
            bucket = flatten(named, self._memory)
            stamp = {"weight_version": str(version)} if last else {}
            await all_done(
                server.post(
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [_handle(bucket) for _ in range(server.num_ranks)],
                        "load_format": "flattened_bucket",
                        "flush_cache": False,
                        **stamp,
                    },
                )
                for server in servers
            )

    async def close(self) -> None:
        """Free the shared memory: no end of this process would, as long as a server lives that has seen it."""
        self._memory = Memory()


class FromDisk:
    """Through checkpoint files on storage that trainer and servers share.

    Args:
        folder: each update writes `folder/<version>/*.safetensors` and removes those of the one before the last.
        file_bytes: size of a file; as much is held in this process's memory.
    """

    sessions = False  # SGLang's update from disk is one step by itself, and rolls back if it fails

    def __init__(self, folder: str | Path, *, file_bytes: int = 4 << 30) -> None:
        self._folder, self._file_bytes = Path(folder).absolute(), file_bytes
        self._written: list[Path] = []

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """See `FromTensors.send`."""
        path = self._folder / str(version)
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.safetensors"):
            old.unlink()
        for number, (named, _) in enumerate(groups(named_tensors, max_bytes=self._file_bytes)):
            await asyncio.to_thread(_write, path / f"{number:05d}.safetensors", named)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": False}
        await all_done(server.post("/update_weights_from_disk", body) for server in servers)
        self._written.append(path)
        while len(self._written) > 2:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    async def close(self) -> None:
        """The last files stay where they are."""


def _write(path: Path, named: Named) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.cpu().contiguous() for name, tensor in named}, path, metadata={"format": "pt"})


def _handle(bucket: Bucket) -> str:
    """What SGLang unpickles: names and places as plain namespaces, and the shared buffer by reference."""
    out = io.BytesIO()
    with _file_system_sharing():
        _Pickler(out).dump({"flattened_tensor": bucket.flat, "metadata": bucket.metadata})
    return base64.b64encode(out.getvalue()).decode()


@contextmanager
def _file_system_sharing() -> Iterator[None]:
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


class _Pickler(ForkingPickler):
    """torch's pickler of shared tensors, with the UUID of a GPU for its number, which SGLang translates back."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, args = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(args[UUID_PLACE]).uuid)
            return rebuild, (*args[:UUID_PLACE], uuid, *args[UUID_PLACE + 1 :])
        return NotImplemented
