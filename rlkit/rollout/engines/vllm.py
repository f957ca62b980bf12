"""A vLLM server as a generator, for evaluation, judges and loops of your own.

    engine = VLLM("http://host:8000", model="Qwen/Qwen3-4B")
    completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))

It uses OpenAI's /v1/completions with token ids in and out (`return_token_ids`, vLLM 0.10.2 and later). It was written
from vLLM's documented request and response schema and is tested against a hand-written exchange, not against a server.
Its `generate` is an `rlkit.types.Generate`; without `abort` and `update_weights` the loops of `rlkit.loops` refuse it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

from rlkit.rollout.engines.http import Busy, Http, ReplicaError, check_prompt, check_reply, reading
from rlkit.types import Completion, FinishReason, SamplingParams


class VLLM:
    """One vLLM server (or a load balancer in front of several).

    Args:
        url, model: its address, and the name under which it serves the model.
        version: stamped on every token; vLLM reports none. Set it after each update of the served weights.
        processed_logprobs: whether the server runs with `--logprobs-mode processed_logprobs`. By default vLLM reports
            log-probs at temperature 1, with that option those of the scaled and truncated distribution. A `Completion`
            needs the scaled, untruncated one: other temperatures need the option, and truncation forbids it.
        timeout: seconds for one attempt. tries: attempts of a failed request until its error is raised.
        vocab_size: number of token ids, to check prompts and replies; vLLM does not report it. None: not checked.
        backoff_s, busy_s: a server that answers 408, 425, 429 or 503 is asked again after about `backoff_s` seconds,
            twice that, ..., or after its Retry-After, for `busy_s` in total.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        version: int = 0,
        processed_logprobs: bool = False,
        timeout: float = 7200.0,
        tries: int = 3,
        vocab_size: int | None = None,
        backoff_s: float = 0.5,
        busy_s: float = 600.0,
    ) -> None:
        self.url, self.version = url.rstrip("/") + "/v1/completions", version
        self._model, self._processed, self._timeout, self._tries = model, processed_logprobs, timeout, tries
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        self._http = Http(backoff_s=backoff_s, busy_s=busy_s)

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """See `rlkit.types.Generate`. A cancelled call closes its connection, which makes vLLM abort the request.

        Raises:
            ValueError: `prompt_ids` is empty or has ids out of range; the server would report log-probs of another
            distribution than that of `params`; the server refuses the request.
            ReplicaError: it failed `tries` times. TimeoutError.
        """
        check_prompt(prompt_ids, vocab_size=self._vocab_size)
        if self._processed and (params.top_p < 1 or params.top_k or params.temperature == 0):
            raise ValueError("processed_logprobs describe the truncated distribution: no top_p, top_k or greedy")
        if not self._processed and params.temperature not in (0.0, 1.0):
            raise ValueError(f"temperature {params.temperature} needs a server with --logprobs-mode processed_logprobs")
        request, version = self._request(prompt_ids, params, rid), self.version
        send = partial(self._http.request, self.url, request, timeout=self._timeout)
        for attempt in range(1, self._tries + 1):
            try:
                return self._completion(await self._http.patient(send), request, version)
            except Busy:
                raise
            except ReplicaError:
                if attempt == self._tries:
                    raise
        raise AssertionError

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    def _request(self, prompt_ids: list[int], params: SamplingParams, rid: str | None) -> dict[str, Any]:
        optional = {"seed": params.seed and params.seed & (2**63 - 1), "request_id": rid}
        return {
            "model": self._model, "prompt": prompt_ids, "max_tokens": params.max_new_tokens,
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
            "stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids),
            "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True,
            **{name: value for name, value in optional.items() if value is not None},
        }  # fmt: skip

    def _completion(self, reply: Any, request: dict[str, Any], version: int) -> Completion:
        with reading(self.url, "a completion with token ids and log-probs", reply):
            choice, told = reply["choices"][0], reply.get("id")
            ids, logp = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
            reason = choice["finish_reason"]
            if reason not in get_args(FinishReason):
                raise ValueError(f"{len(ids)} tokens, finish_reason {reason!r}")
            rid, prompt = request.get("request_id"), request["prompt"]
            reported = {
                "id": (told, told if rid is None or rid in str(told) else rid),  # "cmpl-" before it, more after it
                "prompt_token_ids": (choice.get("prompt_token_ids"), prompt),
                "prompt_tokens": ((reply.get("usage") or {}).get("prompt_tokens"), len(prompt)),
            }
            out, name = Completion(ids, logp, [version] * len(ids), reason), str(rid or told)
        return check_reply(
            out, url=self.url, request=name, max_new_tokens=request["max_tokens"], vocab_size=self._vocab_size,
            reported=reported,
        )  # fmt: skip
