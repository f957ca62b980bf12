"""The engine that samples, from the flags: where it runs, and how weights reach it."""

from __future__ import annotations

import logging
import shlex
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit._util.extras import interpreter, lacks
from rlkit._util.ranks import is_first, local_world_size, node, num_nodes, on_all_ranks, rank, world_size
from rlkit.scripts.args import Evaluation, Model, log
from rlkit.scripts.trial import function_of
from rlkit.settings import SERVERS, Engines, Rollouts, is_default, refuse_if

if TYPE_CHECKING:
    from rlkit.rollout.engines.servers.kinds import Lora, ServerKind

_log = logging.getLogger("rlkit.rollout")
SERVER_BACK_S = 900.0  # wait for a server where none is up: as long as one may take to start


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is opened with; `output` is the folder of servers' logs, and of weights on their way to them."""

    engines: Engines
    model: Model
    output: Path
    max_len: int
    one_turn: bool = True
    overlap: bool = False
    dtype: str | None = None


def check_engine(engines: Engines, *, device: str | None = None, overlap: bool = False) -> None:
    """Refuse (ValueError) an engine that cannot be opened, as far as that is known before torch is loaded."""
    users_function(engines)
    if not engines.serves:
        return
    refuse_if(not find_spec("aiohttp"), lacks("aiohttp", "http", f"`engine` {engines.engine} needs"))
    kind, traits = _sync_kind(engines, device), SERVERS[engines.engine]
    refuse_if(
        traits.cpu_from_disk and device == "cpu" and kind not in ("disk", "changes"),
        f"`weight_sync` {kind}: {traits.name} on a CPU takes weights from files only: drop it, or use disk",
    )
    refuse_if(
        engines.engine_release and (device == "cpu" or overlap),
        "`engine_release` frees GPU memory while no engine samples: drop it with `device` cpu and with `overlap`",
    )
    if is_first():
        _check_answers(engines)
    if not engines.engine_urls:
        interpreter(engines.engine)


def check_truncation(engines: Engines, rollouts: Rollouts, evaluation: Evaluation = Evaluation()) -> None:
    """Refuse (ValueError) truncated samples of older weights from servers, and of servers that cannot give them, before
    these start."""
    names = ("top_p", "top_k", "min_p")
    own = zip(evaluation.eval_sampling, evaluation.samplings().values(), strict=True)
    usual = {name: getattr(Rollouts, name) for name in names}
    cut = next((text for text, x in own if any(x[name] != usual[name] for name in usual.keys() & x)), "")
    limits = " and ".join(f"`{name}`" for name in names if not is_default(rollouts, name))
    lacks_tokens = "needs the tokens that were kept, which servers do not report: use `engine` local"
    older = engines.serves and limits and rollouts.max_age
    refuse_if(older, f"{limits} with `overlap` or `staleness` {lacks_tokens}")
    limits = limits or f"`eval_sampling` {cut}" * bool(cut)
    started = limits and engines.serves and not engines.engine_urls and not SERVERS[engines.engine].truncates
    fix = "drop it, or give `engine_urls` of servers without --logprobs-mode processed_logprobs"
    refuse_if(started, f"{limits}: log-probs of {engines.engine} are those after the limit; {fix}")


def check_images(engines: Engines, config: Any, *, train_vision: bool) -> None:
    """Refuse what would not show the prompts' images, and warn of what would show old features of them."""
    moves, of_user = engines.serves and config.model_type == "gemma3", ":" in engines.engine
    why = f"servers write other tokens around the images of {config.model_type}: use local"
    why = f"the prompts show images, which only local, {' and '.join(SERVERS)} are given" if of_user else why
    refuse_if(moves or of_user, f"`engine` {engines.engine}: {why}")
    if train_vision and engines.engine_urls and (env := server_kind(engines).api().vision_env):
        said = " ".join(f"{name}={value}" for name, value in env.items())
        log.warning("start the servers of `engine_urls` with %s: they keep features of images", said)


def users_function(engines: Engines) -> Any:
    """The function of `--engine FILE.py:FUNCTION`; None for an engine of rlkit."""
    return function_of("engine", engines.engine) if ":" in engines.engine else None


def _sync_kind(engines: Engines, device: str | None) -> str:
    """How weights go to the servers of this rank: "ipc", "group", "disk" or "changes". ValueError for a malformed
    address, and for ipc to another machine."""
    from rlkit.rollout.engines.hosts import host_of, is_here, refuse_elsewhere

    for url in _node_urls(engines):
        try:
            host_of(url)
            if engines.weight_sync == "ipc":
                refuse_elsewhere(url, SERVERS[engines.engine].name, instead="use `weight_sync` group, or disk")
            elif engines.weight_sync == "auto" and not is_here(url):
                return "group" if engines.weight_sync_folder is None else "disk"
        except ValueError as error:
            raise ValueError(f"`engine_urls` {error}") from None
    if engines.weight_sync != "auto":
        return engines.weight_sync
    return "ipc" if not SERVERS[engines.engine].one_gpu_ipc or _one_gpu(engines, device) else "disk"


def _one_gpu(engines: Engines, device: str | None) -> bool:
    """Whether there is one server, of one GPU, which trains too."""
    if device == "cpu":
        return False
    import torch

    return len(_node_urls(engines) or engines.engine_gpus or range(torch.cuda.device_count())) == engines.engine_tp == 1


def _samplers(engines: Engines) -> range:
    """The ranks that sample: the first one of each machine, as far as there are servers for them.

    Servers behind a router are one client's, and so is an engine of the user.
    """
    nodes = num_nodes()
    if engines.engine_urls:
        nodes = 1 if engines.engine_router else min(nodes, len(engines.engine_urls))
    return range(0, nodes * local_world_size(), local_world_size()) if ":" not in engines.engine else range(1)


def _node_urls(engines: Engines) -> Sequence[str]:
    """The server URLs assigned to this node."""
    return engines.engine_urls[node() :: len(_samplers(engines))]


def _check_answers(engines: Engines) -> None:
    """ValueError if none of the addresses takes a connection: before a model is loaded."""
    from urllib.parse import urlsplit

    said = []
    for url in engines.engine_urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname, parts.port or 80), timeout=5).close()
        except OSError as error:
            said.append(f"{url} ({error.strerror or error})")
        else:
            return
    if said:
        where, start = ", ".join(said), server_kind(engines).api().start
        fault = f"`engine_urls`: no {SERVERS[engines.engine].name} server answers at {where}"
        raise ValueError(f"{fault}: start one with `{start}`, or drop the flag to launch one here")


@asynccontextmanager
async def open_engine(spec: EngineSpec, model: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """The engine of the flags: the training model itself where possible, else one with its own weights, on rank 0 or on
    the first rank of each machine."""
    from rlkit.model.lora import only_adapter_trains
    from rlkit.model.sharding import is_cut, is_offloaded
    from rlkit.run.console import say

    others = spec.engines.weight_sync_lora == "adapter" and not only_adapter_trains(model)
    fault = "servers take adapters of linear layers only, not of experts or transposed layers"
    refuse_if(others, f"`weight_sync_lora` adapter: {fault}: name others by `lora_targets`, or drop the flag")
    if spec.engines.is_local and not spec.overlap and not is_cut(model) and not is_offloaded(model):
        from rlkit.rollout.engines.local import LocalEngine

        local = LocalEngine(model, tokenizer=tokenizer, **_local_options(spec))
        if local.copied_bytes:
            size = f"{local.copied_bytes / 2**30:.1f} GiB"
            say(f"engine: samples from a copy of the weights in 16 bits ({size}), updated after every step")
        yield local
        return
    with _servers(spec, model) as urls:
        if world_size() == 1:
            async with _own_engine(spec, urls, tokenizer) as engine:
                yield engine
            return
        from rlkit.rollout.shared import SharedEngine

        samplers = _samplers(spec.engines)
        async with _own_engine(spec, urls, tokenizer) if rank() in samplers else nullcontext() as engine:
            yield SharedEngine(engine, samplers=samplers)


def _local_options(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of a `LocalEngine`."""
    from rlkit.model.forward import DTYPES, default_dtype

    engines, dtype = spec.engines, spec.dtype or default_dtype(spec.model.device or "cpu")
    half = {"dtype": DTYPES[dtype]} if dtype != "fp32" else {}
    options = {"max_batch": engines.max_batch, "max_len": spec.max_len, "compile": engines.compile}
    return options | {"keep_turns": not spec.one_turn} | half


@contextmanager
def _servers(spec: EngineSpec, model: Any) -> Iterator[Sequence[str]]:
    """The addresses of this sampler's servers: given, or started here, on this machine, until the block ends.

    All ranks call it together. It returns when every server is healthy.
    """
    from rlkit.model.source import source_of

    engines = spec.engines
    if not engines.serves or engines.engine_urls:
        yield _node_urls(engines)
        return
    with ExitStack() as stack:
        lora = _lora_of(engines, model)
        double = engines.engine_quantization is not None and source_of(model).in_fp8
        refuse_if(double, f"`engine_quantization` {engines.engine_quantization}: `model` is in FP8; drop the flag")
        fix = "`lora_rank`, on linear layers, without `weight_sync_lora` merged and `engine_release`; or `engine` local"
        refuse_if(lora is None and source_of(model).in_fp8, f"servers of a `model` in FP8 take adapters alone: {fix}")
        yield on_all_ranks(lambda: _start(spec, lora, stack) if rank() in _samplers(engines) else [])[rank()]


def _lora_of(engines: Engines, model: Any) -> Lora | None:
    """LoRA rank and target modules of the model, over all ranks; None if the servers get merged weights."""
    from rlkit.model.lora import adapters, lora_config, only_adapter_trains
    from rlkit.rollout.engines.servers.kinds import Lora

    if engines.weight_sync_lora == "merged" or engines.engine_release or not only_adapter_trains(model):
        return None
    pairs = on_all_ranks(lambda: [(lora_config(model).r, name.split(".")[-2]) for name in adapters(model)])
    ranks, layers = zip(*{pair for of_rank in pairs for pair in of_rank}, strict=True)  # pipeline stages have their own
    return Lora(max(ranks), sorted(layers))


def _start(spec: EngineSpec, lora: Lora | None, stack: ExitStack) -> list[str]:
    """Start this node's servers, each on its own GPUs, and wait for them; they end with `stack`.

    Where they do not start with support of adapters, they start without it, unless --weight-sync-lora asks for it.
    """
    from rlkit.rollout.engines import EngineError
    from rlkit.rollout.engines.servers.process import kept_running

    with ExitStack() as attempt:
        try:
            servers = _launched(spec, lora, attempt)
        except EngineError as error:
            if lora is None or spec.engines.weight_sync_lora == "adapter":
                raise
            why = str(error).partition(" ends:")[0]
            _log.warning("the servers are started without LoRA, and get merged weights: %s", why)
            attempt.close()
            servers = _launched(spec, None, attempt)
        stack.enter_context(attempt.pop_all())
    stack.enter_context(kept_running(servers))
    return [server.url for server in servers]


def _launched(spec: EngineSpec, lora: Lora | None, stack: ExitStack) -> list[Any]:
    import torch

    from rlkit.rollout.engines.servers.kinds import Start

    engines, model = spec.engines, spec.model
    kind, on_cpu = server_kind(engines), model.device == "cpu"
    gpus = [0] if on_cpu else [*(engines.engine_gpus or range(torch.cuda.device_count()))]
    size = 1 if on_cpu else engines.engine_tp
    if len(gpus) % size:
        raise ValueError(f"`engine_tp` {size} must divide the {len(gpus)} GPUs of this node: give `engine_gpus`")
    start = Start(
        model.model, engines, on_cpu, gpus, deterministic=model.deterministic, train_vision=model.train_vision,
        max_len=spec.max_len, sync=_sync_kind(engines, model.device), lora=lora,
    )  # fmt: skip
    servers = []
    for number, first in enumerate(range(0, len(gpus), size)):
        options, env = kind.options(start._replace(gpus=gpus[first : first + size]))
        log = spec.output / f"{engines.engine}_{rank()}_{number}.log"
        options += shlex.split(engines.engine_args)
        launched = kind.launch(model.model, device=model.device, args=options, env=env, log=log, wait=False)
        servers.append(stack.enter_context(launched))
    return [server.wait() for server in servers]


def server_kind(engines: Engines) -> ServerKind:
    """The kind of server of the flags."""
    from rlkit.rollout.engines.servers.kinds import kind_named

    return kind_named(engines.engine)


@asynccontextmanager
async def _own_engine(spec: EngineSpec, urls: Sequence[str], tokenizer: Any) -> AsyncIterator[Any]:
    """The user's engine, a local one in its own process, or a client of the servers."""
    engines, model = spec.engines, spec.model
    if ":" in engines.engine:
        async with _engine_of_user(spec) as engine:
            yield engine
        return
    if engines.is_local:
        from rlkit.rollout.engines.process import launch as launch_process

        options = {**_local_options(spec), "device": model.device}
        options |= {"num_threads": engines.engine_threads, "cpus": engines.engine_cpus}
        async with await launch_process(model.model, **options) as engine:
            yield engine
        return
    from rlkit.model.pretrained import load_config

    size = load_config(model.model).get_text_config().vocab_size
    routing: Any = {"router": engines.engine_router, "pause": engines.engine_pause, "release": engines.engine_release}
    routing["lora"] = engines.weight_sync_lora
    routing |= {"transport": _transport(spec), "wait_s": SERVER_BACK_S, "tokenizer": tokenizer}
    async with server_kind(engines).engine(list(urls), vocab_size=size, **routing) as engine:
        yield engine


def _transport(spec: EngineSpec) -> Any:
    """How weights go to the servers."""
    from rlkit.rollout.engines.servers.tensors import FromChanges, FromDisk

    engines, sync = spec.engines, _sync_kind(spec.engines, spec.model.device)
    if sync == "ipc":
        return server_kind(engines).ipc()
    if sync == "group":
        return server_kind(engines).group(_node_urls(engines), spec.model.device == "cpu")
    folder = engines.weight_sync_folder or spec.output / "weights"
    folder = folder / f"machine_{node()}" if len(_samplers(engines)) > 1 else folder
    return FromChanges(folder) if sync == "changes" else FromDisk(folder)


@asynccontextmanager
async def _engine_of_user(spec: EngineSpec) -> AsyncIterator[Any]:
    """The engine that the function of `--engine` makes; ValueError for an object without its members."""
    from rlkit.rollout.calling import accepted

    make, name = users_function(spec.engines), spec.engines.engine
    engine = make(spec.model.model, **accepted(make, {"device": spec.model.device, "max_len": spec.max_len}))
    engine = await engine if isawaitable(engine) else engine
    members = ("generate", "abort", "update_weights", "progress", "close")
    if missing := [member for member in members if not hasattr(engine, member)]:
        fault = f"must return an engine (rlkit.types.Engine), got {type(engine).__name__} without {', '.join(missing)}"
        raise ValueError(f"`engine` {name} {fault}")
    try:
        yield engine
    finally:
        await engine.close()
