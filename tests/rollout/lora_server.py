"""A stand-in for a server that takes LoRA adapters, as SGLang and vLLM do, with the tokens of a `FakeEngine`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from fake_server import running, vllm_reply
from safetensors.torch import load_file

from rlkit.testing import FakeEngine
from rlkit.types import SamplingParams

CONTROL = {  # what the list of requests leaves out
    "/generate", "/inference/v1/generate", "/abort_request", "/abort_requests", "/continue_generation", "/resume",
}  # fmt: skip


class LoraServer:
    """It lists its POST requests, and refuses one to an adapter that it does not have.

    rank: of adapters; 0: it takes none. loads: whether it loads what it is given.
    """

    def __init__(self, model_path: str, *, rank: int = 8, loads: bool = True) -> None:
        self.model_path, self.rank, self.loads, self.url = model_path, rank, loads, ""
        self.seen: list[str] = []
        self.named: list[str | None] = []  # the adapter of each completion
        self.engine = FakeEngine()
        self.restart()

    def restart(self) -> None:
        """Forget what was loaded, at once."""
        self.version, self.adapters = "default", dict[str, dict[str, Any]]()

    async def answer(self, request: web.Request) -> web.Response:
        """Any request."""
        body: Any = await request.json() if request.can_read_body else {}
        path, body = request.path, body or {}
        if request.method == "GET":
            return web.json_response(self.told(path))
        if path not in CONTROL:
            self.seen.append(path)
        if "load_lora_adapter" in path:
            return self.load(path, body)
        if path.endswith("generate"):
            return await self.complete(path, body)
        self.version = body.get("new_version") or body.get("weight_version") or self.version
        if path == "/collective_rpc":
            self.seen[-1] += f" {body['method']}"
        return web.json_response({"success": True})

    def told(self, path: str) -> Any:
        """What the server reports, in the form of both kinds."""
        lora = {"max_lora_rank": self.rank} if self.rank else None
        config = {"model_config": {"logprobs_mode": "processed_logprobs", "model": self.model_path}}
        names = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in self.adapters)]
        return {
            "data": names, "weight_version": self.version, "model_path": self.model_path,
            "enable_lora": bool(self.rank), "max_lora_rank": self.rank or None,
            "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
            "vllm_config": config | {"parallel_config": {}, "lora_config": lora},
        }  # fmt: skip

    def load(self, path: str, body: dict[str, Any]) -> web.Response:
        """Load or unload an adapter."""
        name = body["lora_name"]
        if "unload" in path:
            del self.adapters[name]
            return web.json_response({"success": True})
        if not self.loads or name in self.adapters:
            return web.json_response({"success": False, "error_message": "its shapes do not fit"}, status=400)
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        self.adapters[name] = {"r": config["r"], **load_file(folder / "adapter_model.safetensors")}
        return web.json_response({"success": True})

    async def complete(self, path: str, body: dict[str, Any]) -> web.Response:
        """Sample; each reply has the version of now."""
        vllm = "inference" in path
        name = body.get("model" if vllm else "lora_path")
        if name is not None and name not in self.adapters:
            return web.json_response({"error": f"no adapter {name}"}, status=404 if vllm else 400)
        asked, ids = body["sampling_params"], body["token_ids" if vllm else "input_ids"]
        most = asked["max_tokens" if vllm else "max_new_tokens"]
        params = SamplingParams(max_new_tokens=most, temperature=asked["temperature"], seed=1)
        self.named.append(name)
        rid, version = body["request_id" if vllm else "rid"], self.version
        out = await self.engine.generate(ids, params=params, rid=rid)
        spans = [{"version": version, "start": 0, "end": len(out.ids)}]
        if vllm:
            reply = vllm_reply(body, out.ids, out.logp, out.finish_reason)
            reply["choices"][0]["weight_versions"] = spans
            return web.json_response(reply)
        pairs = [[x, i, None] for x, i in zip(out.logp, out.ids, strict=True)]
        meta = {"id": rid, "prompt_tokens": len(ids), "completion_tokens": len(out.ids), "weight_versions": spans}
        meta |= {"finish_reason": {"type": out.finish_reason}, "output_token_logprobs": pairs}
        return web.json_response({"output_ids": out.ids, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        """End a request."""
        told: Any = await request.json()
        for name in told.get("request_ids", [told.get("rid")]):
            await self.engine.abort(name and name.removeprefix("generate-tokens-"))
        return web.json_response({})


@asynccontextmanager
async def serving(server: LoraServer) -> AsyncIterator[LoraServer]:
    """The server, running until the block ends."""
    app = web.Application()
    for path in ("/abort_request", "/abort_requests"):
        app.router.add_post(path, server.abort)
    app.router.add_route("*", "/{page:.*}", server.answer)
    async with running(app) as server.url:
        yield server
