"""The engines of examples/grpo.py, async_grpo.py and ppo.py, by their flags."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from typing import Any

from flag_checks import max_len


@asynccontextmanager
async def open_engine(args: Any, model: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """Embedded where it can share the model that trains, else one with weights of its own."""
    from rlkit.model.forward import mesh_of

    if args.engine == "local" and mesh_of(model) is None:
        from rlkit.rollout.engines.local import LocalEngine

        yield LocalEngine(
            model, tokenizer=tokenizer, max_batch=args.max_batch, max_len=max_len(args), compile=args.compile
        )
        return
    async with own_engine(args) as engine:
        yield engine


@asynccontextmanager
async def own_engine(args: Any, **process: Any) -> AsyncIterator[Any]:
    """An engine with weights of its own, which the first of many ranks has. `process`: how a local one's runs."""
    from rlkit.ranks import rank, world_size

    if world_size() == 1:
        async with _start_engine(args, process) as engine:
            yield engine
        return
    from rlkit.rollout.shared import SharedEngine

    async with _start_engine(args, process) if rank() == 0 else nullcontext() as engine:
        yield SharedEngine(engine)


@asynccontextmanager
async def _start_engine(args: Any, process: dict[str, Any]) -> AsyncIterator[Any]:
    """A local one in a process, or SGLang; a server that was started for it ends with it."""
    if args.engine == "local":
        from rlkit.rollout.engines.process import launch as launch_process

        options = {"max_batch": args.max_batch, "max_len": max_len(args), "compile": args.compile, **process}
        async with await launch_process(args.model, device=args.device, **options) as engine:
            yield engine
        return
    from transformers import AutoConfig

    from rlkit.rollout.engines.sglang import SGLang, launch

    with ExitStack() as stack:
        shared = () if args.device == "cpu" else ("--mem-fraction-static", "0.4")  # of a GPU that trains as well
        if args.deterministic and args.device != "cpu":
            shared = (*shared, "--enable-deterministic-inference")
        urls = args.engine_urls or [stack.enter_context(launch(args.model, device=args.device, args=shared)).url]
        size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
        async with SGLang(list(urls), vocab_size=size) as engine:
            yield engine
