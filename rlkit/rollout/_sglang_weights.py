"""Ways for weights into running SGLang servers: shared memory, files, a process group. Each is given to `connect`."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

NamedTensors = Iterable[tuple[str, Tensor]]
NO_TENSORS = "update_weights was given no tensors; pass (name, tensor) pairs, e.g. stream_weights(model)"
UUID_PLACE = 6  # of the device in the arguments of torch's rebuild_cuda_tensor


class Target(NamedTuple):
    """A server to update: `post(path, body)` raises unless it succeeds; `num_ranks` is its tensor parallel size."""

    url: str
    num_ranks: int
    post: Callable[[str, dict[str, Any]], Awaitable[Any]]


class Transport(Protocol):
    """How weights travel. `sessions` says whether its updates run between SGLang's begin and end."""

    sessions: bool

    async def send(self, targets: Sequence[Target], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every target and stamp the version."""
        ...

    async def close(self) -> None:
        """Let go of what is held between updates."""
        ...


class Bucket(NamedTuple):
    """Tensors of one dtype laid end to end as bytes, and where each lies."""

    flat: Tensor
    metadata: list[SimpleNamespace]


def buckets(named_tensors: NamedTensors, *, max_bytes: int, dtype: torch.dtype | None = None) -> Iterator[Bucket]:
    """Pack a stream of tensors into flat byte buffers of at most `max_bytes` (one larger tensor is alone in its own).

    A bucket holds one dtype, so that every tensor in it is aligned. `dtype` casts floating-point tensors first: an
    engine that serves bf16 needs no fp32 copy sent. A `DTensor` is gathered (on every rank, in the same order).
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        full = tensor.detach()
        full = full.full_tensor() if hasattr(full, "full_tensor") else full
        full = full.to(dtype) if dtype is not None and full.is_floating_point() else full
        if pending and (size + full.nbytes > max_bytes or full.dtype != pending[0][1].dtype):
            yield _flatten(pending)
            pending, size = [], 0
        pending.append((name, full))
        size += full.nbytes
    if pending:
        yield _flatten(pending)


def _flatten(named: list[tuple[str, Tensor]]) -> Bucket:
    parts = [t.contiguous().reshape(-1).view(torch.uint8) for _, t in named]
    metadata, start = [], 0
    for (name, tensor), part in zip(named, parts, strict=True):
        end = start + part.numel()
        place = SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end)
        metadata.append(SimpleNamespace(**vars(place), numel=end - start))
        start = end
    return Bucket(torch.cat(parts), metadata)


def with_last(items: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """(item, whether it is the last one)."""
    previous = next(items, None)
    if previous is None:
        raise ValueError(NO_TENSORS)
    for item in items:
        yield previous, False
        previous = item
    yield previous, True


class FromTensors:
    """Through memory that trainer and server share on one machine: CUDA IPC, or shared memory for CPU tensors.

    Only a handle goes over HTTP. The trainer's and the server's GPU may have different numbers in the two processes
    (it is named by its UUID), but must be visible to both. On a CPU the buckets lie in /dev/shm: it needs twice
    `bucket_bytes`, and a small helper process of torch's lives as long as this one.

    Args:
        bucket_bytes: size of the flat buffers.
        dtype: send floating-point tensors in this dtype.

    Differs from verl, slime and RL2, which use SGLang's own classes in the trainer: here the trainer needs no SGLang.
    """

    sessions = True

    def __init__(self, *, bucket_bytes: int = 512 << 20, dtype: torch.dtype | None = None) -> None:
        self._bucket_bytes, self._dtype = bucket_bytes, dtype

    async def send(self, targets: Sequence[Target], named_tensors: NamedTensors, *, version: int) -> None:
        """See `Transport`."""
        for bucket, last in with_last(buckets(named_tensors, max_bytes=self._bucket_bytes, dtype=self._dtype)):
            stamp = {"weight_version": str(version)} if last else {}
            await all_done(
                target.post(
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [_handle(bucket) for _ in range(target.num_ranks)],
                        "load_format": "flattened_bucket",
                        "flush_cache": False,
                        **stamp,
                    },
                )
                for target in targets
            )

    async def close(self) -> None:
        """Nothing is held."""


class FromDisk:
    """Through a checkpoint file on storage that trainer and servers share.

    Args:
        folder: each update writes `folder/<version>/model.safetensors` and removes the one before the last.
        dtype: write floating-point tensors in this dtype.
    """

    sessions = False  # SGLang's update from disk is one step by itself, and rolls back if it fails

    def __init__(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        self._folder, self._dtype = Path(folder).absolute(), dtype
        self._written: list[Path] = []

    async def send(self, targets: Sequence[Target], named_tensors: NamedTensors, *, version: int) -> None:
        """See `Transport`."""
        path = self._folder / str(version)
        _write(path, named_tensors, self._dtype)
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": False}
        await all_done(target.post("/update_weights_from_disk", body) for target in targets)
        self._written.append(path)
        for old in self._written[:-2]:
            shutil.rmtree(old, ignore_errors=True)
        del self._written[:-2]

    async def close(self) -> None:
        """The last files stay where they are."""


async def all_done(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all of them, then raise the first error: nothing is left running on a server."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _write(path: Path, named_tensors: NamedTensors, dtype: torch.dtype | None) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for bucket in buckets(named_tensors, max_bytes=1, dtype=dtype):
        for place in bucket.metadata:
            tensors[place.name] = bucket.flat.cpu().view(place.dtype).reshape(place.shape)
    if not tensors:
        raise ValueError(NO_TENSORS)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _handle(bucket: Bucket) -> str:
    """What SGLang unpickles: names and places as plain namespaces, and the shared buffer by reference."""
    strategy = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")  # file descriptors cannot be passed to an unrelated process
    try:
        out = io.BytesIO()
        _Pickler(out).dump({"flattened_tensor": bucket.flat, "metadata": bucket.metadata})
    finally:
        mp.set_sharing_strategy(strategy)
    return base64.b64encode(out.getvalue()).decode()


class _Pickler(ForkingPickler):
    """torch's pickler of shared tensors, with the UUID of a GPU for its number, which SGLang translates back."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, args = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(args[UUID_PLACE]).uuid)
            return rebuild, (*args[:UUID_PLACE], uuid, *args[UUID_PLACE + 1 :])
        return NotImplemented
