"""SGLang servers as a rollout engine: start them, sample from one or many, and load new weights into them.

    with launch("model", args=["--tp", "2"]) as server:
        async with SGLang(server.url) as engine:
            completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))
            await engine.update_weights(stream_weights(model), version=1)

`SGLang` is an `rlkit.types.Engine`. This process needs no SGLang, only `aiohttp`: the servers may run in another
environment or on other machines. Written for SGLang 0.5 and tested against 0.5.23; servers without weight-update
sessions or per-token weight versions work as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkit.rollout.engines.http import ReplicaError
from rlkit.rollout.engines.servers.checks import Probe, WeightMismatch
from rlkit.rollout.engines.servers.engine import ServerEngine, Transport
from rlkit.rollout.engines.servers.kinds import ServerKind
from rlkit.rollout.engines.servers.process import Server
from rlkit.rollout.engines.servers.tensors import FromDisk
from rlkit.rollout.engines.sglang.api import SGLangApi
from rlkit.rollout.engines.sglang.server import launch, options
from rlkit.rollout.engines.sglang.weights import FromGroup, FromTensors, group_to

__all__ = [
    "FromDisk", "FromGroup", "FromTensors", "Probe", "ReplicaError", "SGLang", "Server", "WeightMismatch", "launch",
]  # fmt: skip


class SGLang(ServerEngine):
    """The engine of these servers; see `ServerEngine` for the other arguments.

    Servers use `seed` only in deterministic mode (see `launch`).

    Args:
        urls: the servers, replicas of one model.
        transport: `FromTensors` (the default, one machine), `FromDisk`, `FromGroup`.
    """

    def __init__(self, urls: str | Sequence[str], *, transport: Transport | None = None, **options: Any) -> None:
        super().__init__(urls, api=SGLangApi(), transport=FromTensors() if transport is None else transport, **options)


KIND = ServerKind(SGLangApi, SGLang, launch, options, ipc=FromTensors, group=group_to)
