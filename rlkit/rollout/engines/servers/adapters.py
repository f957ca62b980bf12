"""LoRA adapters on servers: whether they take one alone, loading it, and the name under which requests ask for it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from rlkit._util.text import masked
from rlkit.model.lora import lora_config, write_adapter
from rlkit.model.weights import AdapterStream, Payload
from rlkit.rollout.engines.hosts import is_here
from rlkit.rollout.engines.http import Refused, ReplicaError, all_done
from rlkit.rollout.engines.servers.replicas import Replica, Replicas

OURS = "rlkit-"  # how the names of our adapters begin
SHARED_MEMORY = Path("/dev/shm")
LoraSync = Literal["auto", "adapter", "merged"]
_log = logging.getLogger("rlkit.rollout")


class Adapters:
    """The adapter of the current weights on all servers.

    Args:
        servers: they know the adapter's name, `adapter`, which a restarted server lacks.
        mode: see `ServerEngine`.
        folder: where files go that all servers see; None: a temporary one, for servers on this machine.
        never: why these servers get merged weights whatever they can; None: nothing prevents it.
    """

    def __init__(self, servers: Replicas, *, mode: LoraSync, folder: Path | None, never: str | None) -> None:
        self._servers, self._mode, self._folder, self._never = servers, mode, folder, never
        self._temporary: Path | None = None
        self._written: list[Path] = []
        self._told: str | None = None

    async def form(self, servers: Sequence[Replica], model: Any) -> Payload:
        """What the servers need of a LoRA model. The reason for merged weights is logged once.

        A server has the base weights if it was started from the trainer's checkpoint and nothing was loaded since, or
        if this engine sent them.

        Errors: ValueError with the reason, where `mode` is "adapter".
        """
        if self._mode == "merged":
            return Payload.MERGED
        if reason := self._why_merged(servers, rank=lora_config(model).r):
            if self._mode == "adapter":
                raise ValueError(f"the servers take no adapter alone: {reason}; or have merged weights sent")
            if reason != self._told:
                _log.warning("LoRA: the servers get merged weights: %s", reason)
            self._told = reason
            return Payload.MERGED
        have = await all_done(self._has_base(server, str(model.name_or_path)) for server in servers)
        return Payload.ADAPTER if all(have) else Payload.BASE

    def _why_merged(self, servers: Sequence[Replica], *, rank: int) -> str | None:
        """Why not the adapter alone; None if they take it."""
        if self._never:
            return self._never
        for server in servers:
            url, most = masked(server.url), server.facts.max_lora_rank
            if not most:
                return f"{url} was started without LoRA ({server.api.lora})"
            if most < rank:
                return f"{url} takes adapters up to rank {most}, and this one has {rank} ({server.api.lora})"
            if server.facts.num_copies > 1:
                return f"{url} has {server.facts.num_copies} data parallel copies, which take no adapter while they run"
            if self._folder is None and not is_here(server.url):
                return f"{url} is another machine, which reads an adapter from a shared folder: use FromDisk(...)"
        return None

    async def _has_base(self, server: Replica, path: str) -> bool:
        if (name := self._servers.adapter) is not None and name not in await server.adapters():
            server.reborn()  # between two requests
        if server.base is None:
            server.base = _same(server.model_path, path) and await server.is_untouched()
        return server.base

    async def load(self, servers: Sequence[Replica], weights: AdapterStream, version: int) -> None:
        """Load the adapter in place of the one before, stamp the version, and have requests name it.

        No request may be in flight: a server unloads an adapter once no request uses it.

        Errors: ReplicaError if a server refuses it; the next update sends merged weights.
        """
        name, tensors = f"{OURS}{version}-{uuid4().hex[:8]}", dict(weights.adapter)
        folder = self._place() / name
        await asyncio.to_thread(_write, weights.model, tensors, folder)
        self._written.append(folder)

        async def one(server: Replica) -> None:
            await self._unload(server)
            try:
                adapter = {"lora_name": name, "lora_path": str(folder)}
                await server.post(f"{server.api.lora_root}/load_lora_adapter", adapter)
                await server.api.stamp(server, version)
            except (Refused, ReplicaError) as error:
                if await self._servers.suspect(server):
                    raise
                self._never = f"{masked(server.url)} refused the adapter ({str(error).splitlines()[0]})"
                raise ReplicaError(f"{self._never}: call update_weights again, for merged weights") from error

        self._servers.adapter = name  # also if one dies: the others have it, and none has the one before
        await all_done(map(one, servers))
        while len(self._written) > 1:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    async def unload(self, servers: Sequence[Replica]) -> None:
        """Back to requests without an adapter, after merged weights."""
        await all_done(map(self._unload, servers))
        self._servers.adapter = None

    async def _unload(self, server: Replica) -> None:
        for name in await server.adapters():
            if name.startswith(OURS):
                await server.post(f"{server.api.lora_root}/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        """Remove the files."""
        for path in (*self._written, *filter(None, [self._temporary])):
            shutil.rmtree(path, ignore_errors=True)
        self._written.clear()

    def _place(self) -> Path:
        if self._folder is None and self._temporary is None:
            where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            self._temporary = Path(tempfile.mkdtemp(prefix="rlkit-adapter-", dir=where))
        place = self._folder or self._temporary
        assert place is not None
        return place


def _same(served: str | None, ours: str) -> bool:
    """Whether both are one checkpoint, by its name or as a folder."""
    if not served or not ours:
        return False
    return served == ours or (Path(served).is_dir() and Path(served).resolve() == Path(ours).resolve())


def _write(model: Any, tensors: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    write_adapter(model, tensors, folder)
