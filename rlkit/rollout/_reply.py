"""Whether a server's reply can be the answer to the request: what is wrong is an error and never trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlkit.rollout._http import ReplicaError
from rlkit.types import Completion

_ROUNDING = 1e-4  # nats by which the log-prob of a certain token may exceed 0


def check_reply(
    out: Completion,
    *,
    url: str,
    request: str,
    max_new_tokens: float,
    vocab_size: float,
    reported: Mapping[str, tuple[Any, Any]],
) -> Completion:
    """`out`, if the server at `url` can have sampled it for the request named `request`.

    As many log-probs as tokens; at most `max_new_tokens` of them, at least one unless it was aborted; ids are integers
    in [0, vocab_size); log-probs are finite and at most 0 (1e-4 for rounding). `reported` has, by name, what the server
    says of the request and what was asked; None: it does not say, or was not asked.

    Raises:
        ReplicaError: something of this does not hold; it names the server, the request and the value.
    """
    problem = next((p for p in (_of_request(reported), _of_tokens(out, max_new_tokens, vocab_size)) if p), None)
    if problem:
        raise ReplicaError(f"{url}: the reply to request {request} is wrong: {problem}")
    return out


def _of_request(reported: Mapping[str, tuple[Any, Any]]) -> str | None:
    for name, (told, asked) in reported.items():
        if told is not None and asked is not None and told != asked:
            return f"it is of another request: {name} is {_shown(told)}, {_shown(asked)} was asked"
    return None


def _of_tokens(out: Completion, max_new_tokens: float, vocab_size: float) -> str | None:
    if len(out.ids) != len(out.logp):
        return f"{len(out.ids)} tokens but {len(out.logp)} log-probs"
    if len(out.ids) > max_new_tokens:
        return f"{len(out.ids)} tokens, at most {max_new_tokens} were asked"
    if not out.ids and out.finish_reason != "abort":
        return f"no token, and finish_reason {out.finish_reason!r}"
    for i, (token, logp) in enumerate(zip(out.ids, out.logp, strict=True)):
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"token {i} has the id {token!r}, which is not in [0, {vocab_size})"
        if type(logp) not in (float, int) or not math.isfinite(logp):
            return f"token {i} has the log-prob {logp!r}, which is not finite; have weights or activations overflowed?"
        if logp > _ROUNDING:
            return f"token {i} has the log-prob {logp!r}, which is above 0"
    return None


def _shown(value: Any) -> str:
    return f"{value!r:.100}"
