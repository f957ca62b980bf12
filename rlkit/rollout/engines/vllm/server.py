"""Start a vLLM server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.rollout.engines.servers.kinds import Start
from rlkit.rollout.engines.servers.process import Server, start_server

ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_SERVER = Path(__file__).with_name("on_server")
RELOAD = "rlkit_vllm.Reload"  # in that folder
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
CPU_ARGS = ("--enforce-eager", "--worker-extension-cls", RELOAD)
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB of keys and values
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vision towers compile parts of themselves, for minutes
}


def launch(
    model_path: str | os.PathLike[str], *, device: str = "cuda", args: Sequence[str] = (),
    env: Mapping[str, str] | None = None, **where: Any,
) -> Server:  # fmt: skip
    """Start a vLLM server with its endpoints for training, in a process group of its own.

        with launch("Qwen/Qwen3-4B", args=["--tensor-parallel-size", "2"]) as server, ...

    The group ends with `close`, with the `with` block, at exit, and when this process dies in any way.

    Args:
        model_path: of a checkpoint in Hugging Face's layout, or its name on the hub.
        device: "cuda", or "cpu" for a CPU build (see `make vllm-cpu`).
        dtype: of weights and activations; by default the one in a local checkpoint's config.json, else vLLM's choice.
        args: more command-line arguments of `vllm serve`; later ones win. `FromTensors` needs
            `--weight-transfer-config '{"backend": "ipc"}'`, `FromGroup` the backend nccl.
        env: more environment variables, beside those of this process (without those of torchrun). `FromTensors` needs
            VLLM_ALLOW_INSECURE_SERIALIZATION=1: whoever reaches the server can then run code in it.
        python: the interpreter that has vLLM; by default $RLKIT_VLLM_PYTHON, else the running one.
        host, port: where to listen; by default on this machine only, at a free port.
        log: file for the server's output; by default in a new folder of the temporary one.
        wait: whether to return only when the server is healthy (a minute and more). To start several at once, pass
            False and call `Server.wait`.

    Raises:
        RuntimeError: this is not Linux. ValueError: `port` is taken. RuntimeError, TimeoutError: see `Server.wait`.
    """
    options = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path), "--enable-scale-out"]
    options += ["--logprobs-mode", "processed_logprobs", *(CPU_ARGS if device == "cpu" else ())]
    path = os.pathsep.join(filter(None, [str(ON_SERVER), os.environ.get("PYTHONPATH")]))
    ours = {**ENV, **(CPU_ENV | {"PYTHONPATH": path} if device == "cpu" else {}), **(env or {})}
    return start_server("vLLM", options, model_path, args=args, env=ours, **where)


def options(start: Start) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server for a run."""
    args, lora, env = (
        ["--tensor-parallel-size", str(start.flags.engine_tp)] if start.flags.engine_tp > 1 else [],
        start.lora,
        dict[str, str](),
    )
    if lora is not None and (most := next((rank for rank in LORA_RANKS if rank >= lora.rank), None)):
        args += ["--enable-lora", "--max-lora-rank", str(most), "--max-loras", "1", "--max-cpu-loras", "1"]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    args += ["--max-model-len", str(start.max_len)]
    if start.flags.engine_quantization:  # by rows; it takes no fp32
        args += ["--quantization", "fp8_per_channel", "--dtype", "bfloat16"]
    if not start.on_cpu:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = (seen[i] if i < len(seen) and seen[i] else str(i) for i in start.gpus)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        args += ["--gpu-memory-utilization", str(start.flags.engine_memory)]
        args += ["--enable-sleep-mode"] if start.flags.engine_release else []
        env |= {"VLLM_BATCH_INVARIANT": "1"} if start.deterministic else {}
        if start.sync != "disk":
            backend = "nccl" if start.sync == "group" else start.sync
            args += ["--weight-transfer-config", json.dumps({"backend": backend})]
            env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if start.sync == "ipc" else {}  # on 127.0.0.1 only
    return args, env
