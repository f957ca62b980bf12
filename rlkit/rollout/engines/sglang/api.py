"""How SGLang servers are spoken to."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from jaxtyping import Int

from rlkit._util.retrying import BUSY
from rlkit._util.text import masked
from rlkit.data.images import Image
from rlkit.rollout.engines.http import Busy, Refused, ReplicaError, check_reply, reading, whole_number
from rlkit.rollout.engines.servers import api
from rlkit.rollout.engines.sglang.server import VISION_ENV
from rlkit.types import Completion, FinishReason, SamplingParams


def _experts(text: str | None, size: int, k: int) -> Int[np.ndarray, "size layers k"] | None:
    """The experts of the tokens that were read, from base64 of int32; None where an aborted request has none."""
    if not text:
        return None
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(size, -1, k).astype(np.int16)


def _speculation(info: dict[str, Any], url: str) -> str:
    """The algorithm that drafts tokens ("": none), or ValueError where samples would not be of the model's distribution
    (SGLang 0.5.23: `eagle_utils.eagle_sample`)."""
    method = str(info.get("speculative_algorithm") or "")
    fault, names = f"{masked(url)} runs with --speculative-algorithm {method}", ("single", "acc")
    if method and (device := info.get("device")) in ("cpu", "xpu"):
        greedy = f"on {device} SGLang then takes the most likely token at every temperature"
        raise ValueError(f"{fault}, and {greedy}: start it without")
    for name in (f"speculative_accept_threshold_{x}" for x in names if method):
        if info.get(name, 1.0) != 1.0:
            flag = f"--{name.replace('_', '-')} {info[name]}"
            raise ValueError(f"{fault} and {flag}, which accepts what the model would not sample: leave it at 1")
    return method


class SGLangApi:
    """SGLang's /generate, with token ids in and out, and its control of weights.

    `server` is a `Replica`; each call awaits the server's answer.

    Attributes:
        start: a command that starts one; `lora`: what starts one that takes adapters.
        generate: path of a completion. alive: one that a paused server answers too. info: one that reports the version
            of its weights. lora_root: before the paths that load and unload adapters.
        positional_noise: the noise of a token is a function of its seed and position.
        vision_env: variables with which it keeps no features of images, for a tower that trains.
    """

    name = "SGLang"
    start = "python -m sglang.launch_server --model-path MODEL --port 30000"
    generate = "/generate"
    alive = "/model_info"  # /health generates a token, which a paused server does not
    info, lora_root = "/model_info", ""
    lora = "--enable-lora --max-lora-rank RANK --lora-target-modules all"
    positional_noise = True
    vision_env = VISION_ENV

    def __init__(self) -> None:
        self._speculates = False

    def body(
        self, prompt_ids: list[int], params: SamplingParams, limits: api.ServerLimits, salt: str | None
    ) -> dict[str, Any]:
        """The request, or ValueError.

        `no_stop_trim` keeps the tokens of a stop string. Above 63 bits a seed is folded. The completion is cut at the
        context limit, which SGLang would refuse to do.
        """
        longest = api.max_new_tokens(prompt_ids, params, limits)
        if self._speculates and params.min_p:
            raise ValueError("SGLang ignores min_p with --speculative-algorithm: sample without one of them")
        sampling: dict[str, Any] = {
            "max_new_tokens": longest,
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids), "stop": list(params.stop),
            "no_stop_trim": True, "skip_special_tokens": False,
        }  # fmt: skip
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed & (2**63 - 1)
        more: dict[str, Any] = {} if salt is None else {"extra_key": salt}
        more |= {"return_routed_experts": True} if limits.experts else {}
        return {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, "stream": False, **more}

    def showing(self, body: dict[str, Any], images: Sequence[Image]) -> dict[str, Any]:
        """The request with the images of its prompt, in which each is one placeholder (`collapsed`).

        The reply then has the prompt's tokens, as the server has expanded it, for `completion` to compare.
        """
        inputs = {"input_ids": api.collapsed(body["input_ids"], images), "image_data": api.data_urls(images)}
        return body | inputs | api.unsampled(body, images) | {"return_prompt_token_ids": True}

    def completion(
        self, reply: Any, request: dict[str, Any], limits: api.ServerLimits, *, url: str, version: int, start: int = 0
    ) -> Completion:
        """A `Completion` from the reply of SGLang's /generate to `request`.

        `version` is for servers that do not report theirs, `start` that of the weights that a server was started with.

        Raises:
            ReplicaError: fields are missing, the server gave up, or `check_reply` refuses it. Busy: its queue is full.
            ValueError: it has read another prompt.
        """
        with reading(url, "a reply of /generate", reply):
            meta = reply["meta_info"]
            finish, entries, num_tokens = (
                meta["finish_reason"],
                meta["output_token_logprobs"],
                meta["completion_tokens"],
            )
            ids, logp = [entry[1] for entry in entries], [entry[0] for entry in entries]
            reason, status = finish["type"], finish.get("status_code") or 200
            if status in BUSY:
                raise Busy(f"{url}: the server gave up: {finish}", status, 0.0)
            if status >= 400:
                raise ReplicaError(f"{url}: the server gave up: {finish}")
            if reason not in get_args(FinishReason):
                raise ValueError(f"finish_reason {reason!r}")
            if len(ids) != num_tokens or reply.get("output_ids", ids) != ids:
                raise ReplicaError(f"{url}: {num_tokens} tokens but {len(ids)} log-probs")
            spans = meta.get("weight_versions")
            one = api.parse_version(meta.get("weight_version"), version, start=start)
            versions = api.versions_of(spans, len(ids), start=start) if spans else [one] * len(ids)
            prompt, size = reply.get("prompt_token_ids"), len(request["input_ids"]) + len(ids) - 1
            experts = _experts(meta.get("routed_experts"), size, limits.experts) if limits.experts else None
            reported = {
                "id": (meta.get("id"), request.get("rid")),
                "prompt_tokens": (meta.get("prompt_tokens"), len(prompt or request["input_ids"])),
            }
        api.check_expanded(prompt, request["input_ids"], url=url)
        limit = request["sampling_params"]["max_new_tokens"]
        return check_reply(
            Completion(ids, logp, versions, reason, experts), url=url, request=str(request.get("rid", "of the probe")),
            max_new_tokens=limit, vocab_size=limits.vocab_size, reported=reported,
        )  # fmt: skip

    def named(self, body: dict[str, Any], wire: str) -> dict[str, Any]:
        """The request under the name by which it can be aborted."""
        return body | {"rid": wire}

    def num_verified(self, reply: Any) -> int:
        """Forwards that verified drafts for a completion; 0 without speculative decoding, or where it does not say."""
        return whole_number(reply["meta_info"].get("spec_verify_ct") or 0, "spec_verify_ct", low=0, high=math.inf)

    def scoring(self, prompt: list[int], ids: list[int], k: int, *, model: str) -> api.Scoring:  # noqa: ARG002
        """A request for log-probs of temperature 1 at each of `ids` after the prompt: of the `k` most likely tokens
        there, or with 0 of `ids` themselves. `model` is the name in /v1/models."""
        body = {
            "input_ids": prompt + ids, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": k, "stream": False,
        }  # fmt: skip

        def read(reply: Any) -> api.LogProbs:
            rows = reply["meta_info"]["input_top_logprobs" if k else "input_token_logprobs"][-len(ids) :]
            rows = rows if k else [[entry] for entry in rows]
            return [([entry[1] for entry in row], [entry[0] for entry in row]) for row in rows]

        return self.generate, body, read

    async def learn(self, server: Any, *, timeout: float) -> api.Facts:
        """What the server reports of itself."""
        info = await server.get("/server_info", timeout=timeout)
        models = await server.get("/v1/models", timeout=timeout)
        with reading(server.url, "what SGLang reports of itself", {"server_info": info, "models": models}):
            tp, pp, dp = (api.degree(info, f"{kind}_size") for kind in ("tp", "pp", "dp"))
            told = models["data"][0].get("max_model_len") if models.get("data") else None
            max_len = whole_number(told, "max_model_len", low=1, high=math.inf) if told else math.inf
            rank = api.degree(info, "max_lora_rank", least=0) if info.get("enable_lora") else 0
            path = info.get("model_path")
            if not isinstance(path, str | None):
                raise TypeError(f"model_path must be a string, got {type(path).__name__}")
            experts = bool(info.get("enable_return_routed_experts"))
            quantized = bool(info.get("quantization")) and info.get("load_format") != "flash_rl"
        method = _speculation(info, server.url)
        self._speculates |= bool(method)
        return api.Facts(tp, pp, dp, max_len, path, rank, experts, method not in ("", "NGRAM"), quantized)

    async def pause(self, server: Any, mode: api.PauseMode) -> None:
        """Stop sampling; see `ServerEngine`."""
        await server.post("/pause_generation", {"mode": mode})

    async def resume(self, server: Any) -> None:
        """Sample again."""
        await server.post("/continue_generation", {})

    async def flush(self, server: Any) -> None:
        """Forget all keys and values, also those of requests in flight, which are then computed again."""
        await server.post("/flush_cache", None)

    async def abort(self, server: Any, wire: str | None, *, timeout: float) -> None:
        """End the request of that name (None: all), whose caller gets the tokens so far."""
        body = {"abort_all": True} if wire is None else {"rid": wire}
        await server.post_once("/abort_request", body, timeout=timeout)

    async def begin(self, server: Any) -> None:
        """Before the first weights of an update."""
        await self._session(server, "begin")

    async def end(self, server: Any) -> None:
        """After the last ones."""
        await self._session(server, "end")

    async def _session(self, server: Any, edge: str) -> None:
        """Open or close a weight-update session; older servers have none."""
        if not server.has_sessions:
            return
        try:
            await server.post(f"/{edge}_weight_update", {})
        except Refused as error:
            if error.status == 404:
                server.has_sessions = False
            elif edge == "begin" and "already open" in str(error):  # by a trainer that died in the middle of an update
                await self._session(server, "end")
                await server.post("/begin_weight_update", {})
            else:
                raise

    async def load(self, server: Any, folder: Path, version: int) -> None:
        """Load the safetensors of a folder and stamp the version, in one step."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": False}
        await server.post("/update_weights_from_disk", body)

    def adapted(self, body: dict[str, Any], adapter: str) -> dict[str, Any]:
        """The request to the adapter of that name."""
        return body | {"lora_path": adapter}

    async def stamp(self, server: Any, version: int) -> None:
        """Set the version of what is sampled from here on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await server.post("/update_weight_version", body)

    async def waiting(self, server: Any) -> int:
        """Requests that wait in its queue; 0 where it does not say."""
        reply = await server.get("/v1/loads?include=core", timeout=5.0)
        with reading(server.url, "a reply of /v1/loads", reply):
            waiting = int(sum(load.get("num_waiting_reqs", 0) for load in reply.get("loads", [])))
        return waiting

    async def release(self, server: Any, tags: Sequence[str]) -> None:
        """Free GPU memory; see `ServerEngine.release_memory`."""
        await server.post("/release_memory_occupation", {"tags": tags or None})

    async def take_back(self, server: Any, tags: Sequence[str]) -> None:
        """Take it back."""
        await server.post("/resume_memory_occupation", {"tags": tags or None})
