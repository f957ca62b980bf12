"""An HTTP server whose completions a test decides, for the engines behind HTTP."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rlkit.testing import FakeEngine
from rlkit.types import SamplingParams


@asynccontextmanager
async def serving(answer: Callable[[int, dict[str, Any]], Any]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve `answer(number, request)`, JSON or a whole response, to SGLang's and to vLLM's path.

    Yields the address and the requests so far.
    """
    seen: list[dict[str, Any]] = []

    async def completions(request: web.Request) -> web.Response:
        seen.append(await request.json())
        made = answer(len(seen) - 1, seen[-1])
        made = await made if inspect.isawaitable(made) else made
        return made if isinstance(made, web.Response) else web.json_response(made)

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", completions)
    app.router.add_post("/v1/completions", completions)
    for page in ("server_info", "v1/models", "model_info", "health"):
        app.router.add_get(f"/{page}", nothing)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def vllm_answers() -> Callable[[int, dict[str, Any]], Any]:
    """Replies of a vLLM server, with the tokens of a `FakeEngine`."""
    fake = FakeEngine()

    async def answer(_: int, request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            max_new_tokens=request["max_tokens"], temperature=request["temperature"], seed=request.get("seed"),
            stop_token_ids=tuple(request["stop_token_ids"]),
        )  # fmt: skip
        out = await fake.generate(request["prompt"], params=params)
        choice = {
            "token_ids": out.ids, "logprobs": {"token_logprobs": out.logp}, "finish_reason": out.finish_reason,
            "prompt_token_ids": request["prompt"],
        }  # fmt: skip
        return {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": len(request["prompt"])}}

    return answer
