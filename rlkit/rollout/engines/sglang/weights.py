"""Transports of weights into running SGLang servers: shared memory, a process group, and files (`FromDisk`)."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world
from torch.multiprocessing import reductions

from rlkit._util.ranks import name_interface, own_address
from rlkit._util.text import masked
from rlkit.rollout.calling import in_own_thread
from rlkit.rollout.engines import EngineError, Unreachable
from rlkit.rollout.engines.hosts import is_here
from rlkit.rollout.engines.http import Refused, all_done
from rlkit.rollout.engines.servers.checks import NamedTensors
from rlkit.rollout.engines.servers.replicas import CLEAN_UP_S, Replica
from rlkit.rollout.engines.servers.tensors import Bucket, Memory, file_system_sharing, flatten, groups
from rlkit.rollout.groups import all_or_cancel

UUID_PLACE = 6  # of the device in the arguments of torch's rebuild_cuda_tensor


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
    here = True

    def __init__(self, *, bucket_bytes: int = 512 << 20) -> None:
        self._bucket_bytes = bucket_bytes
        self._memory = Memory()

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every server and stamp the version."""
        for named, last in groups(named_tensors, max_bytes=self._bucket_bytes):
            bucket = flatten(named, self._memory)
            body = {"load_format": "flattened_bucket", "flush_cache": False} | _stamp(version, last=last)
            handles = ([_handle(bucket) for _ in range(server.facts.num_ranks)] for server in servers)
            await all_done(
                server.post("/update_weights_from_tensor", body | {"serialized_named_tensors": handle})
                for server, handle in zip(servers, handles, strict=True)
            )

    async def close(self) -> None:
        """Free the shared memory: the end of this process would not while a server that has mapped it lives."""
        self._memory = Memory()


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
    here = False

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
        posts = (server.post("/destroy_weights_update_group", body, timeout=CLEAN_UP_S) for server, _ in members)
        await asyncio.gather(*posts, return_exceptions=True)
        await asyncio.to_thread(dist.destroy_process_group, group)

    async def _meet(self, servers: Sequence[Replica]) -> None:
        limit = timedelta(seconds=self._timeout)
        self._name = f"rlkit-{uuid4().hex[:8]}"
        *offsets, size = accumulate((server.facts.num_ranks for server in servers), initial=1)
        store = _store(self._host, self._port, size, timeout=limit)
        body = {
            "master_address": self._host, "master_port": store.port, "world_size": size, "group_name": self._name,
            "backend": self._backend,
        }  # fmt: skip
        posts = [
            server.post("/init_weights_update_group", {**body, "rank_offset": offset})
            for server, offset in zip(servers, offsets, strict=True)
        ]
        # the same nesting of prefixes as in SGLang's init_custom_process_group, or the ranks would not find each other
        join = partial(
            _new_process_group_helper, size, 0, [], Backend(self._backend), dist.PrefixStore(self._name, store),
            group_name=GroupName(self._name), timeout=limit,
        )  # fmt: skip
        try:
            joined = asyncio.wait_for(in_own_thread(join), self._timeout + 1)
            (group, _), *_ = await all_or_cancel([joined, *posts])  # a refusal ends it at once
        except (TimeoutError, RuntimeError, Refused) as error:
            if isinstance(error, EngineError) and not (isinstance(error, Refused) and "connect" in str(error)):
                raise
            raise Unreachable(self._no_group(servers, error)) from error
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # destroy_process_group looks it up
        self._group = group

    def _no_group(self, servers: Sequence[Replica], error: Exception) -> str:
        cause = str(error).partition("\n")[0][:400]
        urls, backend = ", ".join(masked(server.url) for server in servers), self._backend
        return (
            f"{urls}: no {backend} group for the weights from {self._host} (limit {self._timeout:g} s): the "
            "server and this process do not reach each other at the addresses that they name. A machine whose name "
            f"stands for a loopback address names that one: start the server with {backend.upper()}_SOCKET_IFNAME=ETH, "
            "its network interface (`ip -br address` lists them), set it here too, and open the firewall between them; "
            "or send the weights by files (--weight-sync disk)" + (f" ({cause})" if cause else "")
        )

    async def _with_ours(self, posts: Sequence[asyncio.Future[Any]], parts: Sequence[Tensor]) -> None:
        """A broadcast waits for every rank: if a server refuses, tear the group down instead of waiting."""
        ours: asyncio.Future[Any] = asyncio.ensure_future(in_own_thread(partial(self._broadcast, parts)))
        try:
            while not ours.done() and not any(map(_failed, posts)):
                await asyncio.wait({ours, *(p for p in posts if not p.done())}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not ours.done() or any(map(_failed, [ours, *posts])):  # refused, or cancelled by a stop request
                group, self._group, self._members = self._group, None, []
                assert group is not None
                for post in posts if not ours.done() else ():
                    post.cancel()
                await asyncio.to_thread(group.abort)
                await asyncio.to_thread(dist.destroy_process_group, group)
        if any(map(_failed, [ours, *posts])):
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


def group_to(urls: Sequence[str], on_cpu: bool) -> FromGroup:
    """The transport to these servers, which meet at an address of this machine that all of them reach."""
    host = "127.0.0.1" if all(map(is_here, urls)) else own_address()
    name_interface(far=host != "127.0.0.1")
    return FromGroup(backend="gloo" if on_cpu else "nccl", host=host)


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


def _handle(bucket: Bucket) -> str:
    """What SGLang unpickles: names and places as plain namespaces, and the shared buffer by reference."""
    out = io.BytesIO()
    with file_system_sharing():
        _Pickler(out).dump({"flattened_tensor": bucket.flat, "metadata": bucket.metadata})
    return base64.b64encode(out.getvalue()).decode()


class _Pickler(ForkingPickler):
    """torch's pickler of shared tensors, with the UUID of a GPU for its number, which SGLang translates back."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, args = reductions.reduce_tensor(value)
            uuid = str(torch.cuda.get_device_properties(args[UUID_PLACE]).uuid)
            return rebuild, (*args[:UUID_PLACE], uuid, *args[UUID_PLACE + 1 :])
        return NotImplemented
