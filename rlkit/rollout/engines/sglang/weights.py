"""Transports of weights into running SGLang servers: shared memory, files, a process group."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world
from torch.multiprocessing import reductions

from rlkit.rollout.calling import in_own_thread
from rlkit.rollout.engines.http import all_done
from rlkit.rollout.engines.sglang.checks import NamedTensors
from rlkit.rollout.engines.sglang.replicas import Replica
from rlkit.rollout.rollout import all_or_cancel

Named = list[tuple[str, Tensor]]
NO_TENSORS = "update_weights was given no tensors; pass (name, tensor) pairs, e.g. stream_weights(model)"
UUID_PLACE = 6  # of the device in the arguments of torch's rebuild_cuda_tensor


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
            with _file_system_sharing(), _stderr_not_passed_on():
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
            body = {"load_format": "flattened_bucket", "flush_cache": False} | _stamp(version, last=last)
            handles = ([_handle(bucket) for _ in range(server.num_ranks)] for server in servers)
            await all_done(
                server.post("/update_weights_from_tensor", body | {"serialized_named_tensors": handle})
                for server, handle in zip(servers, handles, strict=True)
            )

    async def close(self) -> None:
        """Free the shared memory: the end of this process would not while a server that has mapped it lives."""
        self._memory = Memory()


class FromDisk:
    """Through checkpoint files on storage that trainer and servers share.

    Args:
        folder: each update writes `folder/<version>/*.safetensors`; the folders of the last two updates are kept.
        file_bytes: size of a file, and of the buffer in this process's memory.
    """

    sessions = False  # SGLang's update from disk is one atomic step, which rolls back if it fails

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
        """Keep the last files."""


class FromGroup:
    """Over a process group, NCCL between machines or gloo on CPUs: a broadcast to all ranks of all servers.

    The group is made at the first update, and again when the set of servers has changed. It is independent of the
    trainer's own process group: of the trainer, only the process that holds the engine joins, as rank 0.

    Args:
        backend: "nccl", from the current CUDA device, or "gloo" for servers on CPUs.
        host, port: rendezvous address: one of this machine that the servers can reach; port 0 takes a free one.
        bucket_bytes: tensors per request, which the servers receive before they load them.
        timeout: seconds for the rendezvous, and for each bucket.

    On a GPU a bucket is one flat buffer and one broadcast; on a CPU, where copying it costs as much as loading it, each
    tensor is broadcast from where it is. Buckets are gathered and sent in turn, never at once: on one GPU a sharded
    model's collectives and this group's would deadlock (TRL issue 7103).
    """

    sessions = True

    def __init__(
        self,
        *,
        backend: str = "nccl",
        host: str = "127.0.0.1",
        port: int = 0,
        bucket_bytes: int = 256 << 20,
        timeout: float = 300.0,
    ) -> None:
        self._backend, self._host, self._port = backend, host, port
        on_gpu = backend == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._bucket_bytes, self._timeout = bucket_bytes, timeout
        self._group: dist.ProcessGroup | None = None
        self._members: list[tuple[Replica, int]] = []  # with `life`: a restarted server has no group
        self._name = ""

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """See `FromTensors.send`."""
        members = [(server, server.life) for server in servers]
        if members != self._members:
            await self.close()
            await self._meet(servers)
            self._members = members
        posts: list[asyncio.Future[Any]] = []
        on_cpu = self._device.type == "cpu"
        for named, last in groups(named_tensors, max_bytes=self._bucket_bytes):
            body = {
                "names": [name for name, _ in named],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
                "shapes": [list(tensor.shape) for _, tensor in named],
                "group_name": self._name,
                "flush_cache": False,
            }
            body |= ({} if on_cpu else {"load_format": "flattened_bucket"}) | _stamp(version, last=last)
            parts = [t.contiguous() for _, t in named] if on_cpu else [flatten(named, None).flat]
            posts += [asyncio.gather(*(server.post("/update_weights_from_distributed", body) for server in servers))]
            await self._with_ours(posts, parts)  # servers load this bucket while the next one is gathered
        await asyncio.gather(*posts)

    async def close(self) -> None:
        """Leave the group, and ask the servers that are still there to leave it."""
        if self._group is None:
            return
        group, members, self._group, self._members = self._group, self._members, None, []
        body = {"group_name": self._name}
        posts = (server.post("/destroy_weights_update_group", body) for server, _ in members)
        await asyncio.gather(*posts, return_exceptions=True)
        await asyncio.to_thread(dist.destroy_process_group, group)

    async def _meet(self, servers: Sequence[Replica]) -> None:
        limit = timedelta(seconds=self._timeout)
        self._name = f"rlkit-{uuid4().hex[:8]}"
        size = 1 + sum(server.num_ranks for server in servers)
        store = _store(self._host, self._port, size, timeout=limit)
        body = {
            "master_address": self._host, "master_port": store.port, "world_size": size, "group_name": self._name,
            "backend": self._backend,
        }  # fmt: skip
        posts, offset = [], 1
        for server in servers:
            posts.append(server.post("/init_weights_update_group", {**body, "rank_offset": offset}))
            offset += server.num_ranks
        # the same nesting of prefixes as in SGLang's init_custom_process_group, or the ranks would not find each other
        join = partial(
            _new_process_group_helper, size, 0, [], Backend(self._backend), dist.PrefixStore(self._name, store),
            group_name=GroupName(self._name), timeout=limit,
        )  # fmt: skip
        (group, _), *_ = await all_or_cancel([in_own_thread(join), *posts])  # a refusal ends it at once
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # destroy_process_group looks it up
        self._group = group

    async def _with_ours(self, posts: Sequence[asyncio.Future[Any]], parts: Sequence[Tensor]) -> None:
        """A broadcast waits for every rank: if a server refuses, tear the group down instead of waiting."""
        ours: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(self._broadcast, parts))
        while not ours.done() and not any(map(_failed, posts)):
            await asyncio.wait({ours, *(p for p in posts if not p.done())}, return_when=asyncio.FIRST_COMPLETED)
        if any(map(_failed, [ours, *posts])):
            group, self._group, self._members = self._group, None, []
            assert group is not None
            await asyncio.to_thread(group.abort)
            await asyncio.to_thread(dist.destroy_process_group, group)
            await all_done([*posts, ours])

    def _broadcast(self, parts: Sequence[Tensor]) -> None:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._timeout)
        for part in parts:
            tensor = part.to(self._device)
            self._group.broadcast([tensor], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _store(host: str, port: int, size: int, *, timeout: timedelta) -> dist.TCPStore:
    """The rendezvous, which listens at `host` only: without a socket of ours it would at every address."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address[:2], family=family)
    number = listening.getsockname()[1]
    return dist.TCPStore(
        host, number, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _stamp(version: int, *, last: bool) -> dict[str, str]:
    """The version goes with the last bucket."""
    return {"weight_version": str(version)} if last else {}


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
