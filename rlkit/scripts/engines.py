"""The engine that samples, from the flags: where it runs, and how weights reach it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from inspect import isawaitable
from typing import Any, NamedTuple

from rlkit._extras import interpreter, lacks
from rlkit.ranks import is_first, local_world_size, node, num_nodes, on_all_ranks, own_address, rank, world_size
from rlkit.scripts.start import function_of
from rlkit.settings import SERVERS, Engines, refuse_if

_log = logging.getLogger("rlkit.rollout")
SGLANG_LAYERS = {  # values of --lora-target-modules
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "down_proj", "gate_up_proj",
}  # fmt: skip
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
SERVER_BACK_S = 900.0  # wait for a server where none is up: as long as one may take to start


def check_engine(args: Any) -> None:
    """Refuse (ValueError) an engine that cannot be opened, as far as that is known before torch is loaded."""
    how = args.engine
    users_function(how)
    if not how.serves:
        return
    refuse_if(not find_spec("aiohttp"), lacks("aiohttp", "http", f"`engine` {how.engine} needs"))
    kind = _sync_kind(args)
    refuse_if(
        how.engine == "vllm" and args.model.device == "cpu" and kind != "disk",
        f"`weight_sync` {kind}: vLLM on a CPU takes weights from files only: drop it, or use disk",
    )
    refuse_if(
        how.engine_release and (args.model.device == "cpu" or args.rollouts.overlap),
        "`engine_release` frees GPU memory while no engine samples: drop it with `device` cpu and with `overlap`",
    )
    alone = how.weight_sync_lora == "adapter"
    refuse_if(alone and not args.lora.lora_rank, "`weight_sync_lora` adapter needs `lora_rank`")
    refuse_if(
        alone and args.lora.lora_base,
        f"`weight_sync_lora` adapter needs servers with the weights of `lora_base` {args.lora.lora_base}: drop one",
    )
    if is_first():
        _check_answers(how)
    if not how.engine_urls:
        interpreter(how.engine)


def users_function(how: Engines) -> Any:
    """The function of `--engine FILE.py:FUNCTION`; None for an engine of rlkit."""
    return function_of("engine", how.engine) if ":" in how.engine else None


def _sync_kind(args: Any) -> str:
    """How weights go to the servers of this rank: "ipc", "group" or "disk". ValueError for a malformed address, and for
    ipc to another machine."""
    from rlkit.rollout.engines.hosts import host_of, is_here, refuse_elsewhere

    how = args.engine
    for url in _given_urls(how):
        try:
            host_of(url)
            if how.weight_sync == "ipc":
                refuse_elsewhere(url, SERVERS[how.engine], instead="use `weight_sync` group, or disk")
            elif how.weight_sync == "auto" and not is_here(url):
                return "group" if how.weight_sync_folder is None else "disk"
        except ValueError as error:
            refuse_if(True, f"`engine_urls` {error}")
    if how.weight_sync != "auto":
        return how.weight_sync
    return "ipc" if how.engine == "sglang" or _one_gpu(args) else "disk"


def _one_gpu(args: Any) -> bool:
    """Whether there is one server, of one GPU, which trains too: vLLM shares memory with that only."""
    how = args.engine
    if args.model.device == "cpu":
        return False
    import torch

    return len(_given_urls(how) or how.engine_gpus or range(torch.cuda.device_count())) == how.engine_tp == 1


def _samplers(how: Engines) -> range:
    """The ranks that sample: the first one of each machine, as far as there are servers for them.

    Servers behind a router are one client's, and so is an engine of the user.
    """
    nodes = num_nodes()
    if how.engine_urls:
        nodes = 1 if how.engine_router else min(nodes, len(how.engine_urls))
    return range(0, nodes * local_world_size(), local_world_size()) if ":" not in how.engine else range(1)


def _given_urls(how: Engines) -> Sequence[str]:
    """Of the addresses given, those of the servers of this machine's sampler."""
    return how.engine_urls[node() :: len(_samplers(how))]


def _check_answers(how: Engines) -> None:
    """ValueError if none of the addresses takes a connection: before a model is loaded."""
    from urllib.parse import urlsplit

    said = []
    for url in how.engine_urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname, parts.port or 80), timeout=5).close()
        except OSError as error:
            said.append(f"{url} ({error.strerror or error})")
        else:
            return
    if said:
        where, start = ", ".join(said), api_of(how).start
        what = f"`engine_urls`: no {SERVERS[how.engine]} server answers at {where}"
        raise ValueError(f"{what}: start one with `{start}`, or drop the flag to launch one here")


@asynccontextmanager
async def open_engine(args: Any, model: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """The engine of the flags: the training model itself where possible, else one with its own weights, on rank 0 or on
    the first rank of each machine."""
    from rlkit.model.lora import only_adapter_trains
    from rlkit.model.sharding import is_cut
    from rlkit.run.console import say

    refuse_if(
        args.engine.weight_sync_lora == "adapter" and not only_adapter_trains(model),
        "`weight_sync_lora` adapter: servers take adapters of linear layers only, not of experts or transposed layers: "
        "name others by `lora_targets`, or drop the flag",
    )
    max_len = args.episodes.max_len(args.rollouts)
    if args.engine.engine == "local" and not is_cut(model) and not args.rollouts.overlap:
        from rlkit.rollout.engines.local import LocalEngine

        options = _local_options(args, max_len)
        local = LocalEngine(model, tokenizer=tokenizer, **options)
        if local.copied_bytes:
            size = f"{local.copied_bytes / 2**30:.1f} GiB"
            say(f"engine: samples from a copy of the weights in 16 bits ({size}), updated after every step")
        yield local
        return
    with _servers(args, model) as urls:
        if world_size() == 1:
            async with _own_engine(args, max_len, urls) as engine:
                yield engine
            return
        from rlkit.rollout.shared import SharedEngine

        samplers = _samplers(args.engine)
        async with _own_engine(args, max_len, urls) if rank() in samplers else nullcontext() as engine:
            yield SharedEngine(engine, samplers=samplers)


def _local_options(args: Any, max_len: int) -> dict[str, Any]:
    """Arguments of a `LocalEngine` from the flags."""
    from rlkit.model.forward import DTYPES, default_dtype

    how, device = args.engine, args.model.device
    dtype = args.optim.dtype or default_dtype(device or "cpu")  # `rlkit eval` leaves it open
    half = {"dtype": DTYPES[dtype]} if dtype != "fp32" else {}
    options = {"max_batch": how.max_batch, "max_len": max_len, "compile": how.compile}
    return options | {"keep_turns": not args.episodes.one_turn} | half


@contextmanager
def _servers(args: Any, model: Any) -> Iterator[Sequence[str]]:
    """The addresses of this sampler's servers: given, or started here, on this machine, until the block ends.

    All ranks call it together. It returns when every server is healthy.
    """
    how = args.engine
    if not how.serves or how.engine_urls:
        yield _given_urls(how)
        return
    with ExitStack() as stack:
        lora = _lora_of(how, model)
        yield on_all_ranks(lambda: _start(args, lora, stack) if rank() in _samplers(how) else [])[rank()]


class _Lora(NamedTuple):
    """The adapters that servers are started for: their rank, and the names of their layers."""

    rank: int
    layers: list[str]


def _lora_of(how: Engines, model: Any) -> _Lora | None:
    """Those of the model, on all ranks together; None where the servers get merged weights."""
    from rlkit.model.lora import adapters, lora_config, only_adapter_trains

    if how.weight_sync_lora == "merged" or how.engine_release or not only_adapter_trains(model):
        return None
    found = on_all_ranks(lambda: [(lora_config(model).r, name.split(".")[-2]) for name in adapters(model)])
    ranks, layers = zip(*{pair for of_rank in found for pair in of_rank}, strict=True)  # pipeline stages have their own
    return _Lora(max(ranks), sorted(layers))


def _start(args: Any, lora: _Lora | None, stack: ExitStack) -> list[str]:
    """Start this node's servers, each on its own GPUs, and wait for them; they end with `stack`.

    Where they do not start with support of adapters, they start without it, unless --weight-sync-lora asks for it.
    """
    from rlkit.rollout.engines import EngineError
    from rlkit.rollout.engines.servers.process import kept_running

    with ExitStack() as own:
        try:
            servers = _launched(args, lora, own)
        except EngineError as error:
            if lora is None or args.engine.weight_sync_lora == "adapter":
                raise
            why = str(error).partition(" ends:")[0]
            _log.warning("the servers are started without LoRA, and get merged weights: %s", why)
            own.close()
            servers = _launched(args, None, own)
        stack.enter_context(own.pop_all())
    stack.enter_context(kept_running(servers))
    return [server.url for server in servers]


def _launched(args: Any, lora: _Lora | None, stack: ExitStack) -> list[Any]:
    import torch

    how, model = args.engine, args.model
    launch, on_cpu = _package(how).launch, model.device == "cpu"
    gpus = [0] if on_cpu else [*(how.engine_gpus or range(torch.cuda.device_count()))]
    size = 1 if on_cpu else how.engine_tp
    if len(gpus) % size:
        raise ValueError(f"`engine_tp` {size} must divide the {len(gpus)} GPUs of this node: give `engine_gpus`")
    servers = []
    for number, first in enumerate(range(0, len(gpus), size)):
        options = _sglang_options if how.engine == "sglang" else _vllm_options
        given, env = options(args, gpus[first : first + size], lora)
        log = args.schedule.output / f"{how.engine}_{rank()}_{number}.log"
        given += shlex.split(how.engine_args)
        launched = launch(model.model, device=model.device, args=given, env=env, log=log, wait=False)
        servers.append(stack.enter_context(launched))
    return [server.wait() for server in servers]


def _sglang_options(args: Any, gpus: Sequence[int], lora: _Lora | None) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of an SGLang server on these GPUs."""
    from rlkit.model.pretrained import load_config
    from rlkit.model.routing import replays

    how, model = args.engine, args.model
    given = ["--tp", str(how.engine_tp)] if how.engine_tp > 1 else []
    if lora is not None:
        layers = lora.layers if {*lora.layers} <= SGLANG_LAYERS else ["all"]
        given += ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *layers]
        given += ["--max-loras-per-batch", "2", "--lora-strict-loading"]  # the adapter, and requests without one
    config, longest = load_config(model.model), args.episodes.max_len(args.rollouts)
    if replays(config):  # the trainer replays them
        given += ["--enable-return-routed-experts"]
    env = {"SGLANG_VLM_CACHE_SIZE_MB": "0"} if model.train_vision else {}  # features outlive an update of the tower
    if longest > (getattr(config.get_text_config(), "max_position_embeddings", None) or longest):
        given += ["--context-length", str(longest)]  # of YaRN it ignores the factor
        env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if model.device != "cpu":  # not by CUDA_VISIBLE_DEVICES: IPC needs the trainer's GPU to be visible to the server
        given += ["--base-gpu-id", str(gpus[0]), "--mem-fraction-static", str(how.engine_memory)]
        given += ["--enable-deterministic-inference"] if model.deterministic else []
        given += ["--enable-memory-saver"] if how.engine_release else []
    return given, env


def _vllm_options(args: Any, gpus: Sequence[int], lora: _Lora | None) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a vLLM server on these GPUs."""
    how, model, env = args.engine, args.model, dict[str, str]()
    given = ["--tensor-parallel-size", str(how.engine_tp)] if how.engine_tp > 1 else []
    if lora is not None and (most := next((rank for rank in VLLM_RANKS if rank >= lora.rank), None)):
        given += ["--enable-lora", "--max-lora-rank", str(most), "--max-loras", "1", "--max-cpu-loras", "1"]
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    longest = args.episodes.max_len(args.rollouts)
    given += [] if longest is None else ["--max-model-len", str(longest)]
    if model.device != "cpu":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(seen[i] if i < len(seen) and seen[i] else str(i) for i in gpus)
        given += ["--gpu-memory-utilization", str(how.engine_memory)]
        given += ["--enable-sleep-mode"] if how.engine_release else []
        env |= {"VLLM_BATCH_INVARIANT": "1"} if model.deterministic else {}
        if (kind := _sync_kind(args)) != "disk":
            given += ["--weight-transfer-config", json.dumps({"backend": "nccl" if kind == "group" else kind})]
            env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if kind == "ipc" else {}  # it listens on 127.0.0.1 only
    return given, env


def _package(how: Engines) -> Any:
    """`rlkit.rollout.engines.sglang` or `vllm`."""
    return import_module(f"rlkit.rollout.engines.{how.engine}")


def api_of(how: Engines) -> Any:
    """How the servers of the flags are spoken to."""
    from rlkit.rollout.engines.sglang.api import SGLangApi
    from rlkit.rollout.engines.vllm.api import VLLMApi

    return SGLangApi() if how.engine == "sglang" else VLLMApi()


@asynccontextmanager
async def _own_engine(args: Any, max_len: int, urls: Sequence[str]) -> AsyncIterator[Any]:
    """The user's engine, a local one in its own process, or a client of the servers."""
    how, model = args.engine, args.model
    if ":" in how.engine:
        async with _engine_of_user(args, max_len) as engine:
            yield engine
        return
    if how.engine == "local":
        from rlkit.rollout.engines.process import launch as launch_process

        options = {**_local_options(args, max_len), "device": model.device}
        threads = {"num_threads": how.engine_threads, "cpus": how.engine_cpus}
        async with await launch_process(model.model, **options, **threads) as engine:
            yield engine
        return
    from rlkit.model.pretrained import load_config

    size = load_config(model.model).get_text_config().vocab_size
    routing: Any = {"router": how.engine_router, "pause": how.engine_pause, "release": how.engine_release}
    routing["lora"] = how.weight_sync_lora
    routing |= {"transport": _transport(args), "wait_s": SERVER_BACK_S}
    package = _package(how)
    kind = package.SGLang if how.engine == "sglang" else package.VLLM
    async with kind(list(urls), vocab_size=size, **routing) as engine:
        yield engine


def _transport(args: Any) -> Any:
    """How weights go to the servers."""
    how, kind, package = args.engine, _sync_kind(args), _package(args.engine)
    if kind == "ipc":
        return package.FromTensors()
    if kind == "disk":
        folder = how.weight_sync_folder or args.schedule.output / "weights"
        return package.FromDisk(folder / f"machine_{node()}" if len(_samplers(how)) > 1 else folder)
    if how.engine == "vllm":
        return package.FromGroup()
    from rlkit.rollout.engines.hosts import is_here

    near = all(map(is_here, _given_urls(how)))
    return package.FromGroup(
        backend="gloo" if args.model.device == "cpu" else "nccl", host="127.0.0.1" if near else own_address()
    )


@asynccontextmanager
async def _engine_of_user(args: Any, max_len: int) -> AsyncIterator[Any]:
    """The engine that the function of `--engine` makes; ValueError for an object without its members."""
    from rlkit.rollout.calling import accepted

    make, spec = users_function(args.engine), args.engine.engine
    engine = make(args.model.model, **accepted(make, {"device": args.model.device, "max_len": max_len}))
    engine = await engine if isawaitable(engine) else engine
    members = ("generate", "abort", "update_weights", "progress", "close")
    if missing := [name for name in members if not hasattr(engine, name)]:
        what = f"must return an engine (rlkit.types.Engine), got {type(engine).__name__} without {', '.join(missing)}"
        raise ValueError(f"`engine` {spec} {what}")
    try:
        yield engine
    finally:
        await engine.close()
