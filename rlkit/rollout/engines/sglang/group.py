"""Weights over a process group: NCCL between machines, gloo on CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from rlkit.rollout.calling import in_own_thread
from rlkit.rollout.engines.sglang.checks import NamedTensors
from rlkit.rollout.engines.sglang.replicas import Replica
from rlkit.rollout.engines.sglang.weights import flatten, groups
from rlkit.rollout.rollout import all_or_cancel


class FromGroup:
    """Broadcast from this process to all ranks of all servers, bucket by bucket.

    The group is made at the first update, and again when the set of servers has changed. It is not part of the
    trainer's own process group: only the process that holds the engine is in it, as rank 0.

    Args:
        backend: "nccl", from the current CUDA device, or "gloo" for servers on CPUs.
        host, port: where the ranks meet: an address of this machine that the servers can reach, and 0 for a free port.
        bucket_bytes: of the tensors that one request to the servers covers, and that they receive before they load.
        timeout: seconds for the ranks to meet, and for each bucket.

    On a GPU a bucket is one flat buffer and one broadcast; on a CPU, where laying it out would cost as much as loading
    it, its tensors are broadcast from where they are. Buckets are gathered and sent in turn, never at once: a sharded
    model's collectives and this group's would wait for each other on one GPU (seen in TRL, issue 7103).
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
        self._members: list[tuple[Replica, int]] = []  # and in which of its lives: a restarted one knows no group
        self._name = ""

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """See `FromTensors.send`."""
        members = [(server, server.life) for server in servers]
        if members != self._members:
            await self.close()
            await self._meet(servers)
            self._members = members
        posts: list[asyncio.Future[Any]] = []
        for named, last in groups(named_tensors, max_bytes=self._bucket_bytes):
            on_cpu = self._device.type == "cpu"
            body = {
                "names": [name for name, _ in named],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
                "shapes": [list(tensor.shape) for _, tensor in named],
                "group_name": self._name,
                "flush_cache": False,
                **({} if on_cpu else {"load_format": "flattened_bucket"}),
                **({"weight_version": str(version)} if last else {}),
            }
            if on_cpu:
                parts = [tensor.to(self._device).contiguous() for _, tensor in named]
            else:
                parts = [flatten(named, None).flat.to(self._device)]
            posts += [asyncio.gather(*(server.post("/update_weights_from_distributed", body) for server in servers))]
            await self._with_ours(posts, parts)  # servers load this bucket while the next one is gathered
        await asyncio.gather(*posts)

    async def close(self) -> None:
        """Leave the group; the servers are asked to leave as well, as far as they are still there."""
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
        store = dist.TCPStore(self._host, self._port, size, is_master=True, timeout=limit, wait_for_workers=False)
        body = {
            "master_address": self._host,
            "master_port": store.port,
            "world_size": size,
            "group_name": self._name,
            "backend": self._backend,
        }
        posts, offset = [], 1
        for server in servers:
            posts.append(server.post("/init_weights_update_group", {**body, "rank_offset": offset}))
            offset += server.num_ranks
        # the same nesting of prefixes as in SGLang's init_custom_process_group, or the ranks would not find each other
        join = partial(
            _new_process_group_helper,
            size,
            0,
            [],
            Backend(self._backend),
            dist.PrefixStore(self._name, store),
            group_name=GroupName(self._name),
            timeout=limit,
        )
        (group, _), *_ = await all_or_cancel([in_own_thread(join), *posts])  # one that refuses ends it at once
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # destroy_process_group looks it up
        self._group = group

    async def _with_ours(self, posts: Sequence[asyncio.Future[Any]], parts: Sequence[Tensor]) -> None:
        """A broadcast blocks until everybody has come: where a server refuses, ours is torn down, not waited for."""
        ours: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(self._broadcast, parts))
        while not ours.done() and not any(map(_failed, posts)):
            open_posts = [post for post in posts if not post.done()]
            await asyncio.wait({ours, *open_posts}, return_when=asyncio.FIRST_COMPLETED)
        if any(map(_failed, [ours, *posts])):
            group, self._group, self._members = self._group, None, []
            await asyncio.to_thread(_tear_down, group)
            await asyncio.gather(ours, *posts, return_exceptions=True)
            for post in [*posts, ours]:
                post.result()

    def _broadcast(self, parts: Sequence[Tensor]) -> None:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._timeout)
        for part in parts:
            self._group.broadcast([part], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _tear_down(group: Any) -> None:
    group.abort()
    dist.destroy_process_group(group)
