"""How vLLM servers are spoken to."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from jaxtyping import Int

from rlkit._util.text import masked
from rlkit.data.images import Image
from rlkit.rollout.engines.http import check_reply, reading, whole_number
from rlkit.rollout.engines.servers import api
from rlkit.rollout.engines.vllm.server import RELOAD
from rlkit.types import Completion, FinishReason, SamplingParams

PREFIX = "generate-tokens-"  # vLLM's name of a request is this and ours
EXACT = ("standard", "block", "strict", "probabilistic")  # how drafts may be accepted
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")  # ways to draft
MODES = {"retract": "keep", "in_place": "keep", "abort": "abort"}  # see `flush` for what makes the first two differ


def _experts(text: str | None, size: int) -> Int[np.ndarray, "size layers k"] | None:
    """The experts of the tokens that were read, from base64 of a .npy file; -1 for those that it lacks."""
    if not text:
        return None
    experts = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)[:size]
    return np.concatenate([experts.astype(np.int16), np.full((size - len(experts), *experts.shape[1:]), -1, np.int16)])


class VLLMApi:
    """vLLM's endpoint of token ids, and those for training. See `SGLangApi` for what is not described here."""

    name = "vLLM"
    start = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"
    generate = "/inference/v1/generate"
    alive = "/health"
    info, lora_root = "/weight_info", "/v1"
    lora = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve ... --enable-lora --max-lora-rank RANK"
    positional_noise = False  # runner V1 has a generator per request
    vision_env: Mapping[str, str] = {}

    def __init__(self) -> None:
        self._processed = True  # what the servers' log-probs describe
        self._reload = "reload_weights"  # or what `on_server` has
        self._seeds = True  # on a CPU, vLLM 0.32 dies at a seeded request whose prompt it reads in two steps

    def body(
        self, prompt_ids: list[int], params: SamplingParams, limits: api.ServerLimits, salt: str | None
    ) -> dict[str, Any]:
        """The request, or ValueError.

        Every parameter is sent, but for the seed on a CPU: the server takes those that are missing from the model's
        generation_config.json. Above 63 bits a seed is folded. The completion is cut at the context limit, which vLLM
        would refuse to do.
        """
        longest = api.max_new_tokens(prompt_ids, params, limits)
        if self._processed and params.truncates:
            fault = "vLLM's log-probs would be those of the truncated distribution: sample without top_p, top_k"
            raise ValueError(f"{fault} and min_p, or start the server without --logprobs-mode processed_logprobs")
        if not self._processed and params.temperature not in (0.0, 1.0):
            raise ValueError(f"temperature {params.temperature} needs a server with --logprobs-mode processed_logprobs")
        sampling: dict[str, Any] = {
            "max_tokens": longest,
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": list(params.stop_token_ids), "stop": list(params.stop),
            "include_stop_str_in_output": True, "detokenize": bool(params.stop), "logprobs": 0,
        }  # fmt: skip
        if params.seed is not None and self._seeds:
            sampling["seed"] = params.seed & (2**63 - 1)
        salted = {} if salt is None else {"cache_salt": salt}
        return {"token_ids": prompt_ids, "sampling_params": sampling, "stream": False, **salted}

    def showing(self, body: dict[str, Any], images: Sequence[Image]) -> dict[str, Any]:  # noqa: D102
        parts = [{"type": "image_url", "url": url} for url in api.data_urls(images)]
        inputs = {"token_ids": api.collapsed(body["token_ids"], images), "content_parts": parts}
        return body | inputs | api.unsampled(body, images) | {"return_token_ids": True}

    def named(self, body: dict[str, Any], wire: str) -> dict[str, Any]:  # noqa: D102
        return body | {"request_id": wire}

    def completion(
        self, reply: Any, request: dict[str, Any], limits: api.ServerLimits, *, url: str, version: int, start: int = 0
    ) -> Completion:
        """A `Completion` from the reply of /inference/v1/generate to `request`.

        Raises:
            ReplicaError: fields are missing, or `check_reply` refuses it. ValueError: it has read another prompt.
        """
        with reading(url, "a reply of /inference/v1/generate", reply):
            [choice] = reply["choices"]
            ids, entries = list(choice["token_ids"]), choice["logprobs"]["content"] or []
            reason, spans = choice["finish_reason"], choice.get("weight_versions")
            if reason not in get_args(FinishReason):
                raise ValueError(f"finish_reason {reason!r}")
            if [entry["token_id"] for entry in entries] != ids:
                raise ValueError(f"{len(ids)} tokens, and log-probs of {len(entries)} others")
            logp, prompt = [entry["logprob"] for entry in entries], reply.get("prompt_token_ids")
            versions = api.versions_of(spans, len(ids), start=start) if spans else [version] * len(ids)
            experts = _experts(choice.get("routed_experts"), len(request["token_ids"]) + len(ids) - 1)
            name = request.get("request_id")
            reported = {
                "request_id": (reply.get("request_id"), None if name is None else PREFIX + name),
                "prompt_tokens": ((reply.get("usage") or {}).get("prompt_tokens"), len(prompt or request["token_ids"])),
            }
        api.check_expanded(prompt, request["token_ids"], url=url)
        return check_reply(
            Completion(ids, logp, versions, reason, experts), url=url, request=str(name or "of the probe"),
            max_new_tokens=request["sampling_params"]["max_tokens"], vocab_size=limits.vocab_size, reported=reported,
        )  # fmt: skip

    def num_verified(self, reply: Any) -> int:  # noqa: ARG002, D102
        return 0

    def scoring(self, prompt: list[int], ids: list[int], k: int, *, model: str) -> api.Scoring:  # noqa: D102
        body = {"model": model, "prompt": prompt + ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}

        def at(token: int, row: dict[str, Any]) -> tuple[list[int], list[float]]:
            ranked = sorted(row, key=lambda name: row[name]["rank"])[:k] if k else [str(token)]
            return [int(name) for name in ranked], [row[name]["logprob"] for name in ranked]

        def read(reply: Any) -> api.LogProbs:
            rows = reply["choices"][0]["prompt_logprobs"][len(prompt) :]
            return [at(token, row) for token, row in zip(ids, rows, strict=True)]

        return "/v1/completions", body, read

    async def learn(self, server: Any, *, timeout: float) -> api.Facts:
        """What the server reports of itself; ValueError for one that has no endpoints for training."""
        if not (told := await server.get("/server_info?config_format=json", timeout=timeout)):
            problem = f"{server.url} has no endpoints for training"
            raise ValueError(f"{problem}: start vLLM 0.32 or later with `{self.start}`")
        with reading(server.url, "what vLLM reports of itself", told):
            model, parallel = told["vllm_config"]["model_config"], told["vllm_config"]["parallel_config"]
            tp, pp, dp = (api.degree(parallel, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data"))
            max_len, path = model.get("max_model_len"), model.get("model")
            max_len = math.inf if max_len is None else whole_number(max_len, "max_model_len", low=1, high=math.inf)
            if not isinstance(path, str | None):
                raise TypeError(f"model must be a string, got {type(path).__name__}")
            rank = api.degree(told["vllm_config"].get("lora_config") or {}, "max_lora_rank", least=0)
            loads = (told.get("vllm_env") or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
            self._processed = model.get("logprobs_mode") == "processed_logprobs"
            extended = parallel.get("worker_extension_cls") == RELOAD
            on_cpu = told["vllm_config"].get("device_config", {}).get("device") == "cpu"
            self._reload = "rlkit_reload" if extended else "" if on_cpu else "reload_weights"
            self._seeds = not on_cpu
            drafts = told["vllm_config"].get("speculative_config") or {}
            rule = drafts.get("rejection_sample_method") or EXACT[0]
            has_draft = bool(drafts) and drafts.get("method") not in WITHOUT_WEIGHTS
        if rule not in EXACT:
            fault = f"{masked(server.url)} drafts tokens with rejection_sample_method {rule!r}, which samples from"
            raise ValueError(f"{fault} another distribution than the model's: leave it out of --speculative-config")
        return api.Facts(tp, pp, dp, max_len, path, rank if loads else 0, has_draft=has_draft)

    async def pause(self, server: Any, mode: api.PauseMode) -> None:  # noqa: D102
        await server.post(f"/pause?mode={MODES[mode]}", None)

    async def resume(self, server: Any) -> None:  # noqa: D102
        await server.post("/resume", None)

    async def flush(self, server: Any) -> None:  # noqa: D102
        await server.post("/reset_prefix_cache?reset_running_requests=true", None)

    async def abort(self, server: Any, wire: str | None, *, timeout: float) -> None:  # noqa: D102
        body = {} if wire is None else {"request_ids": [PREFIX + wire]}
        await server.post_once("/abort_requests", body, timeout=timeout)

    async def begin(self, server: Any) -> None:  # noqa: D102
        await server.post("/start_weight_update", None)

    async def end(self, server: Any) -> None:  # noqa: D102
        await server.post("/finish_weight_update", {})

    async def load(self, server: Any, folder: Path, version: int) -> None:  # noqa: D102
        if not self._reload:
            fault = f"{masked(server.url)} runs on a CPU, where vLLM keeps the old weights of a head that is tied"
            raise ValueError(f"{fault}: start it by `launch`, or with --worker-extension-cls {RELOAD} (docs/vllm.md)")
        body = {"method": self._reload, "kwargs": {"weights_path": str(folder)}}
        await server.post("/collective_rpc", body)
        await self.stamp(server, version)

    def adapted(self, body: dict[str, Any], adapter: str) -> dict[str, Any]:  # noqa: D102
        return body | {"model": adapter}

    async def stamp(self, server: Any, version: int) -> None:  # noqa: D102
        await server.post("/update_weight_version", {"new_version": str(version)})

    async def waiting(self, server: Any) -> int:  # noqa: ARG002, D102
        return 0

    async def release(self, server: Any, tags: Sequence[str]) -> None:  # noqa: D102
        await server.post("/release_kv_cache_memory" if [*tags] == ["kv_cache"] else "/sleep?level=2&mode=wait", None)

    async def take_back(self, server: Any, tags: Sequence[str]) -> None:  # noqa: D102
        await server.post("/wake_up" + "".join(f"{'&' if i else '?'}tags={tag}" for i, tag in enumerate(tags)), None)
