"""Sampling parameters and completions in the format of SGLang's /generate."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from rlkit._retrying import BUSY
from rlkit.rollout.engines.http import Busy, ReplicaError, check_prompt, check_reply, reading, whole_number
from rlkit.types import Completion, FinishReason, SamplingParams

MAX_VERSION = 2**31 - 1


class ServerLimits(NamedTuple):
    """Context length and vocabulary size of the served model, in tokens; infinite where unknown."""

    max_len: float
    vocab_size: float


def body(prompt_ids: list[int], params: SamplingParams, limits: ServerLimits, salt: str | None) -> dict[str, Any]:
    """The request, or ValueError.

    `no_stop_trim` keeps the tokens of a stop string. Above 63 bits a seed is folded. The completion is cut at the
    context limit, which SGLang would refuse to do.
    """
    check_prompt(prompt_ids, vocab_size=limits.vocab_size)
    if len(prompt_ids) >= limits.max_len:
        raise ValueError(f"prompt_ids must be shorter than the context of {limits.max_len}, got {len(prompt_ids)}")
    sampling: dict[str, Any] = {
        "max_new_tokens": min(params.max_new_tokens, limits.max_len - len(prompt_ids)),
        "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids), "stop": list(params.stop),
        "no_stop_trim": True, "skip_special_tokens": False,
    }  # fmt: skip
    if params.seed is not None:
        sampling["sampling_seed"] = params.seed & (2**63 - 1)
    salted = {} if salt is None else {"extra_key": salt}
    return {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, "stream": False, **salted}


def completion(reply: Any, request: dict[str, Any], limits: ServerLimits, *, url: str, version: int) -> Completion:
    """A `Completion` from the reply of SGLang's /generate to `request`.

    `version` is for servers that do not report theirs.

    Raises:
        ReplicaError: fields are missing, the server gave up, or `check_reply` refuses it. Busy: its queue is full.
    """
    with reading(url, "a reply of /generate", reply):
        meta = reply["meta_info"]
        finish, entries, num_tokens = meta["finish_reason"], meta["output_token_logprobs"], meta["completion_tokens"]
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
        versions = _versions(meta, len(ids), version)
        reported = {
            "id": (meta.get("id"), request.get("rid")),
            "prompt_tokens": (meta.get("prompt_tokens"), len(request["input_ids"])),
        }
    return check_reply(
        Completion(ids, logp, versions, reason), url=url, request=str(request.get("rid", "of the probe")),
        max_new_tokens=request["sampling_params"]["max_new_tokens"], vocab_size=limits.vocab_size, reported=reported,
    )  # fmt: skip


def _versions(meta: dict[str, Any], num_tokens: int, version: int) -> list[int]:
    """The version of each token. The spans of a reply must be disjoint and cover all tokens: nothing else is built."""
    spans = meta.get("weight_versions") or ()
    if not spans:
        return [parse_version(meta.get("weight_version"), version)] * num_tokens
    edges = []
    for span in spans:
        start = whole_number(span["start"], "start", low=0, high=num_tokens)
        edges.append((start, whole_number(span["end"], "end", low=start, high=num_tokens), span["version"]))
    if sum(end - start for start, end, _ in edges) != num_tokens:
        raise ValueError(f"weight_versions do not cover {num_tokens} tokens once")
    versions = [-1] * num_tokens
    for start, end, served in edges:
        versions[start:end] = [parse_version(served, 0)] * (end - start)
    if -1 in versions:
        raise ValueError(f"weight_versions do not cover {num_tokens} tokens once")
    return versions


def parse_version(told: Any, missing: int) -> int:
    """SGLang's version, a string or an integer, as a number; "default", what a server starts with, is 0.

    Errors: ValueError for any other value.
    """
    if told is None:
        return missing
    served = 0 if told == "default" else int(told) if isinstance(told, str) else told
    return whole_number(served, "weight_version", low=0, high=MAX_VERSION)
