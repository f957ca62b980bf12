"""Transports of weights into running vLLM servers: CUDA IPC, NCCL. `FromDisk` is that of every kind of server.

Both follow the requests that vLLM 0.32 documents for trainers without vLLM. They need GPUs and have not run on one yet;
tests check the requests against the schema of a real server.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from rlkit._util.ranks import on_this_device
from rlkit.rollout.calling import in_own_thread
from rlkit.rollout.engines.http import all_done
from rlkit.rollout.engines.servers.checks import NamedTensors
from rlkit.rollout.engines.servers.replicas import CLEAN_UP_S, Replica
from rlkit.rollout.engines.servers.tensors import Named, groups
from rlkit.rollout.groups import all_or_cancel


class FromTensors:
    """Through CUDA memory that trainer and server share: the handles of a bucket go over HTTP.

    For servers of one GPU, the trainer's. They need `--weight-transfer-config '{"backend": "ipc"}'` and
    VLLM_ALLOW_INSECURE_SERIALIZATION=1.
    """

    sessions = here = True

    def __init__(self, *, bucket_bytes: int = 1 << 30) -> None:
        self._bucket_bytes, self._ready = bucket_bytes, set[tuple[str, int]]()

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every server and stamp the version."""
        if wide := [server.url for server in servers if server.facts.num_ranks > 1]:
            raise ValueError(f"{wide[0]} has several GPUs, the trainer's memory is on one: use FromGroup or FromDisk")
        new = [server for server in servers if (server.url, server.life) not in self._ready]
        self._ready.clear()  # a failure may be that of a server that was restarted unnoticed
        await all_done(s.post("/init_weight_transfer_engine", {"init_info": {"packed": False}}) for s in new)
        for named, _ in groups(named_tensors, max_bytes=self._bucket_bytes):
            if not named[0][1].is_cuda:
                raise ValueError("the weights are on the CPU, from which vLLM takes none: use transport=FromDisk(...)")
            held = [(name, tensor.contiguous()) for name, tensor in named]  # until the servers have copied them
            info = metadata(held) | {"ipc_handles_pickled": _handles(held)}
            await all_done(server.post("/update_weights", {"update_info": info}) for server in servers)
        await all_done(server.api.stamp(server, version) for server in servers)
        self._ready |= {(server.url, server.life) for server in servers}

    async def close(self) -> None:
        """Nothing is kept."""


class FromGroup:
    """Over NCCL, from the process that holds the engine, which is rank 0, to all ranks of all servers.

    The servers need `--weight-transfer-config '{"backend": "nccl"}'`. The group is made at the first update, and again
    when the set of servers has changed.
    """

    sessions, here = True, False

    def __init__(self, *, bucket_bytes: int = 256 << 20) -> None:
        self._bucket_bytes = bucket_bytes
        self._comm: Any = None
        self._members: list[tuple[Replica, int]] = []  # with `life`: a restarted server has no group

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """See `FromTensors.send`."""
        members = [(server, server.life) for server in servers]
        if members != self._members:
            await self.close()
            self._comm = await self._meet(servers)
            self._members = members
        for named, _ in groups(named_tensors, max_bytes=self._bucket_bytes):
            body = {"update_info": metadata(named)}
            posts = [server.post("/update_weights", body) for server in servers]
            try:  # a broadcast that lacks a rank never ends, nor does its thread
                await all_or_cancel([in_own_thread(on_this_device(partial(_broadcast, named, self._comm))), *posts])
            except BaseException:
                self._members, self._comm = [], None
                raise
        await all_done(server.api.stamp(server, version) for server in servers)

    async def close(self) -> None:
        """Leave the group."""
        members, self._members, self._comm = self._members, [], None
        posts = (server.post("/shutdown_weight_transfer_engine", None, timeout=CLEAN_UP_S) for server, _ in members)
        await asyncio.gather(*posts, return_exceptions=True)

    async def _meet(self, servers: Sequence[Replica]) -> Any:
        """NCCL's communicator: its id goes to the servers over HTTP. They then expect a sum of one element."""
        *offsets, size = accumulate((server.facts.num_ranks for server in servers), initial=1)
        uid = torch.cuda.nccl.unique_id()
        info = {"world_size": size, "packed": False, "nccl_unique_id_b64": base64.b64encode(uid).decode()}
        posts = [
            server.post("/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": offset}})
            for server, offset in zip(servers, offsets, strict=True)
        ]

        def join() -> Any:
            comm = torch.cuda.nccl.init_rank(size, uid, 0)
            torch.cuda.nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[comm])
            torch.cuda.synchronize()
            return comm

        comm, *_ = await all_or_cancel([in_own_thread(on_this_device(join)), *posts])
        return comm


def _broadcast(named: Named, comm: Any) -> None:
    for _, tensor in named:
        torch.cuda.nccl.broadcast([tensor.to("cuda").contiguous()], 0, comms=[comm])
    torch.cuda.synchronize()


def metadata(named: Named) -> dict[str, Any]:
    """Names, dtypes and shapes of a bucket, as vLLM takes them."""
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def _handles(named: Named) -> str:
    """What vLLM unpickles: per tensor, the arguments of torch's rebuild_cuda_tensor by the UUID of its GPU."""
    uuids = [str(torch.cuda.get_device_properties(tensor.device).uuid) for _, tensor in named]
    handles = [{uuid: reduce_tensor(tensor)[1]} for uuid, (_, tensor) in zip(uuids, named, strict=True)]
    return base64.b64encode(pickle.dumps(handles)).decode()
