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
async def running(app: web.Application) -> AsyncIterator[str]:
    """The address of the application, which runs until the block ends."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(
    answer: Callable[[int, dict[str, Any]], Any], *, mode: str = "processed_logprobs"
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve `answer(number, request)`, JSON or a whole response, to SGLang's and to vLLM's path.

    Yields the address and the requests so far. `mode`: vLLM's of log-probs.
    """
    seen: list[dict[str, Any]] = []

    async def completions(request: web.Request) -> web.Response:
        seen.append(await request.json())
        made = answer(len(seen) - 1, seen[-1])
        made = await made if inspect.isawaitable(made) else made
        return made if isinstance(made, web.Response) else web.json_response(made)

    async def nothing(request: web.Request) -> web.Response:
        of_vllm = {"vllm_config": {"model_config": {"logprobs_mode": mode}, "parallel_config": {}}}
        return web.json_response(of_vllm if request.query.get("config_format") else {})

    app = web.Application()
    app.router.add_post("/generate", completions)
    app.router.add_post("/inference/v1/generate", completions)
    for page in ("server_info", "v1/models", "model_info", "health"):
        app.router.add_get(f"/{page}", nothing)
    async with running(app) as url:
        yield url, seen


def vllm_reply(request: dict[str, Any], ids: list[int], logp: list[float], reason: str = "stop") -> dict[str, Any]:
    """As vLLM 0.32 answers at its endpoint of token ids, with the fields that a client reads."""
    entries = [{"token_id": i, "logprob": x, "rank": 1} for i, x in zip(ids, logp, strict=False)]
    choice = {
        "index": 0, "finish_reason": reason, "token_ids": ids, "logprobs": {"content": entries},
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }  # fmt: skip
    usage = {"prompt_tokens": len(request["token_ids"])}
    return {"request_id": f"generate-tokens-{request['request_id']}", "choices": [choice], "usage": usage}


def vllm_answers() -> Callable[[int, dict[str, Any]], Any]:
    """Replies of a vLLM server, with the tokens of a `FakeEngine`."""
    fake = FakeEngine()

    async def answer(_: int, request: dict[str, Any]) -> dict[str, Any]:
        told = request["sampling_params"]
        params = SamplingParams(
            max_new_tokens=told["max_tokens"], temperature=told["temperature"], seed=told.get("seed"),
            stop_token_ids=tuple(told["stop_token_ids"]),
        )  # fmt: skip
        out = await fake.generate(request["token_ids"], params=params)
        return vllm_reply(request, out.ids, out.logp, out.finish_reason)

    return answer
