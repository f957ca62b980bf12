"""Start an SGLang server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.model.pretrained import load_config
from rlkit.model.routing import replays
from rlkit.rollout.engines.servers.kinds import Start
from rlkit.rollout.engines.servers.process import Server, start_server

LAYERS = {  # values of --lora-target-modules
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "down_proj", "gate_up_proj",
}  # fmt: skip
REQUANTIZED = ("qwen2", "qwen3")  # model types whose loader "flash_rl" takes
# else features of images outlive an update of the tower that made them
VISION_ENV: Mapping[str, str] = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
CPU_ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--sleep-on-idle", "--grammar-backend", "none", "--lora-backend", "torch_native"),
)
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_MAX_": "0",  # glibc keeps freed pages: fresh ones for every bucket of weights cost as much as the copy
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}


def launch(
    model_path: str | os.PathLike[str], *, device: str = "cuda", args: Sequence[str] = (),
    env: Mapping[str, str] | None = None, **where: Any,
) -> Server:  # fmt: skip
    """Start an SGLang server in a process group of its own.

        with launch("Qwen/Qwen3-4B", args=["--tp", "2"]) as server, ...

    The group ends with `close`, with the `with` block, at exit, and when this process dies in any way.
    Initial weights have version 0. SGLang uses the seed of a request only if it is started with
    `args=["--enable-deterministic-inference"]`, which it refuses on a CPU.

    Args:
        model_path: of a checkpoint in Hugging Face's layout, or its name on the hub.
        device: "cuda", or "cpu" for a server without a GPU (see `make sglang-cpu`).
        dtype: of weights and activations; by default the one in a local checkpoint's config.json, else SGLang's choice
            (which turns a float32 checkpoint into float16).
        args: more command-line arguments of `sglang.launch_server`; later ones win.
        env: more environment variables, beside those of this process (without those of torchrun).
        python: the interpreter that has SGLang; by default $RLKIT_SGLANG_PYTHON, else the running one.
        host, port: where to listen; by default on this machine only, at a free port.
        log: file for the server's output; by default in a new folder of the temporary one.
        wait: whether to return only when the server is healthy (half a minute and more). To start several at once,
            pass False and call `Server.wait`.

    Raises:
        RuntimeError: this is not Linux. ValueError: `port` is taken. RuntimeError, TimeoutError: see `Server.wait`.
    """
    options = ["-m", "sglang.launch_server", "--model-path", str(model_path)]
    options += CPU_ARGS if device == "cpu" else ()
    ours = {**(CPU_ENV if device == "cpu" else {}), **(env or {})}
    return start_server("SGLang", options, model_path, args=args, env=ours, **where)


def _quantizing(model_type: str, start: Start) -> list[str]:
    """The arguments of a server that quantizes at every update. ValueError where SGLang 0.5 would not."""
    why = f"it quantizes {' and '.join(REQUANTIZED)} only, not {model_type}" if model_type not in REQUANTIZED else ""
    why = "its kernels for it need a GPU" if start.on_cpu else why
    why = why or ("it takes no files (`weight_sync` disk)" if start.sync == "disk" else "")
    if why:
        raise ValueError(
            f"`engine_quantization` {start.flags.engine_quantization} with SGLang: {why}; try `engine` vllm"
        )
    return ["--quantization", "fp8", "--load-format", "flash_rl"]


def options(start: Start) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a server for a run."""
    args, lora = ["--tp", str(start.flags.engine_tp)] if start.flags.engine_tp > 1 else [], start.lora
    if lora is not None:
        layers = lora.layers if {*lora.layers} <= LAYERS else ["all"]
        args += ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *layers]
        args += ["--max-loras-per-batch", "2", "--lora-strict-loading"]  # the adapter, and requests without one
    config, longest = load_config(start.model), start.max_len
    if start.flags.engine_quantization:
        args += _quantizing(config.model_type, start)
    if replays(config):  # the trainer replays them
        args += ["--enable-return-routed-experts"]
    env = {**VISION_ENV} if start.train_vision else {}
    if longest > (getattr(config.get_text_config(), "max_position_embeddings", None) or longest):
        args += ["--context-length", str(longest)]  # of YaRN it ignores the factor
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if not start.on_cpu:  # not by CUDA_VISIBLE_DEVICES: IPC needs the trainer's GPU to be visible to the server
        args += ["--base-gpu-id", str(start.gpus[0]), "--mem-fraction-static", str(start.flags.engine_memory)]
        args += ["--enable-deterministic-inference"] if start.deterministic else []
        args += ["--enable-memory-saver"] if start.flags.engine_release else []
    return args, env
