"""The engine that samples, from the flags."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from inspect import isawaitable
from typing import Any

from rlkit.scripts.args import Engine
from rlkit.scripts.start import function_of
from rlkit.settings import refuse_if


def check_servers(urls: Sequence[str]) -> None:
    """ValueError if none of the addresses takes a connection: before a model is loaded."""
    from urllib.parse import urlsplit

    said = []
    for url in urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname, parts.port or 80), timeout=5).close()
        except OSError as error:
            said.append(f"{url} ({error.strerror or error})")
        else:
            return
    refuse_if(
        said,
        f"`engine_urls`: no SGLang server answers at {', '.join(said)}: start one with `python -m sglang.launch_server "
        "--model-path MODEL --port 30000`, or drop the flag to launch one here",
    )


def own_engine(engine: Engine) -> Any:
    """The function of `--engine FILE.py:FUNCTION`; None for an engine of rlkit."""
    return function_of("engine", engine.engine) if ":" in engine.engine else None


@asynccontextmanager
async def open_engine(args: Any, model: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """The engine of the flags: the training model itself where possible, else one with its own weights on rank 0."""
    from rlkit.model.sharding import mesh_of
    from rlkit.ranks import rank, world_size

    max_len = args.episodes.max_len(args.rollouts)
    if args.engine.engine == "local" and mesh_of(model) is None and not args.rollouts.overlap:
        from rlkit.rollout.engines.local import LocalEngine

        options = _local_options(args, max_len)
        yield LocalEngine(model, tokenizer=tokenizer, **options)
        return
    if world_size() == 1:
        async with _own_engine(args, max_len) as engine:
            yield engine
        return
    from rlkit.rollout.shared import SharedEngine

    async with _own_engine(args, max_len) if rank() == 0 else nullcontext() as engine:
        yield SharedEngine(engine)


def _local_options(args: Any, max_len: int) -> dict[str, Any]:
    """Arguments of a `LocalEngine` from the flags."""
    how, several_turns = args.engine, bool(args.episodes.env or args.episodes.tools)
    return {"max_batch": how.max_batch, "max_len": max_len, "compile": how.compile, "keep_turns": several_turns}


@asynccontextmanager
async def _own_engine(args: Any, max_len: int) -> AsyncIterator[Any]:
    """A local engine in its own process, or SGLang; a server launched here ends with it."""
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
    from rlkit.rollout.engines.sglang import SGLang, launch

    with ExitStack() as stack:
        shared = () if model.device == "cpu" else ("--mem-fraction-static", "0.4")  # the GPU also trains
        if model.deterministic and model.device != "cpu":
            shared = (*shared, "--enable-deterministic-inference")
        urls = how.engine_urls or [stack.enter_context(launch(model.model, device=model.device, args=shared)).url]
        size = load_config(model.model).get_text_config().vocab_size
        async with SGLang(list(urls), vocab_size=size) as engine:
            yield engine


@asynccontextmanager
async def _engine_of_user(args: Any, max_len: int) -> AsyncIterator[Any]:
    """The engine that the function of `--engine` makes; ValueError for an object that is none."""
    from rlkit.rollout.calling import accepted

    make, spec = own_engine(args.engine), args.engine.engine
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
