"""Requests of the embedded engine, when they end, and the batch rows of the running ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from rlkit.rollout.groups import joined_support
from rlkit.types import Completion, FinishReason, Picture, SamplingParams, Support

MAX_SUPPORT = 1024  # tokens that top-p and min-p keep at most, since each of them is recorded: 4 KB a sampled token


class StopStrings:
    """Report after each new token whether the text of the completion so far contains one of `stop`.

    A stop string may begin and end inside tokens; special tokens are part of the text; the prompt is not searched.
    Only a window of the last tokens is decoded, long enough for the longest stop string, an unfinished character
    before it and the leading space that some tokenizers drop, so the cost of a token does not grow with the
    completion. `tokenizer` needs `decode(ids, skip_special_tokens=False)`: a transformers or a tokenizers one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        if "" in stop:
            raise ValueError("stop must not hold an empty string: it would end every completion at its first token")
        self._decode = tokenizer.decode
        self._stop = tuple(stop)
        self._needed = max(map(len, stop)) + 4
        self._window: list[int] = []

    def push(self, token: int) -> bool:
        """Add one token; True if a stop string is now in the text."""
        self._window.append(token)
        text = self._decode(self._window, skip_special_tokens=False)
        if any(s in text for s in self._stop):
            return True
        if len(text) > 3 * self._needed:
            newer = self._window[len(self._window) // 2 :]
            if len(self._decode(newer, skip_special_tokens=False)) >= self._needed:
                self._window = newer
        return False


@dataclass(eq=False)
class Request:
    """One call of `generate`, and the tokens sampled so far.

    `max_tokens` is its limit; `epoch` numbers the weights that computed its prompt's keys and values, of which `held`
    are those of its first `start` tokens, of the turn before.
    """

    rid: str
    prompt: list[int]
    key: bytes
    params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    max_tokens: int
    future: asyncio.Future[Completion]
    stop: StopStrings | None
    slot: int = -1
    epoch: int = -1
    start: int = 0
    held: Any = None
    images: tuple[Picture, ...] = ()
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    support: list[Support] = field(default_factory=list)

    @property
    def final_length(self) -> int:
        """Prompt and completion together, in tokens, at most."""
        return len(self.prompt) + self.max_tokens

    def push(self, token: int, logp: float, version: int) -> FinishReason | None:
        """Add a token; returns the finish reason if it is the last one."""
        self.ids.append(token)
        self.logp.append(logp)
        self.versions.append(version)
        if token in self.stop_token_ids or (self.stop is not None and self.stop.push(token)):
            return "stop"
        return "length" if len(self.ids) == self.max_tokens else None

    def finish(self, reason: FinishReason, experts: Any = None) -> None:
        """Return the completion to the caller, unless it was cancelled."""
        if not self.future.done():
            support = joined_support(*self.support) if self.params.truncates and self.ids else None
            self.future.set_result(Completion(self.ids, self.logp, self.versions, reason, experts, support))


class Flight(NamedTuple):
    """A decoding step whose ids and log-probs `read` waits for: its requests by slot, the version of its weights."""

    requests: list[Request]
    version: int
    read: Callable[[], tuple[np.ndarray, np.ndarray]]

    def of(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
        """The ids and log-probs of those of its requests."""
        slots = {id(request): slot for slot, request in enumerate(self.requests)}
        at = [slots[id(request)] for request in requests]
        ids, logp = self.read()
        return ids[at], logp[at]


class Rows:
    """Per slot: the request, the token to read next, its position, and how to sample."""

    def __init__(self, max_batch: int) -> None:
        self.requests: list[Request] = []
        self.token = np.zeros(max_batch, np.int64)
        self.position = np.zeros(max_batch, np.int64)
        self.seed = np.zeros(max_batch, np.uint64)
        self.temperature = np.ones(max_batch, np.float32)
        self.top_p = np.ones(max_batch, np.float64)
        self.top_k = np.zeros(max_batch, np.int64)
        self.min_p = np.zeros(max_batch, np.float64)
        self.final = np.zeros(max_batch, np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """Give the request the next slot; the last token of its prompt is read first."""
        slot = request.slot = len(self.requests)
        self.requests.append(request)
        params = request.params
        self.token[slot], self.position[slot] = request.prompt[-1], len(request.prompt) - 1
        self.seed[slot], self.final[slot] = request.seed, request.final_length
        for name in ("temperature", "top_p", "top_k", "min_p"):
            getattr(self, name)[slot] = getattr(params, name)
        if params.truncates and not params.top_k:
            self.top_k[slot] = MAX_SUPPORT

    def temperatures(self, count: int) -> np.ndarray | None:
        """Those of the first `count` slots; None where all requests have 1."""
        return self.temperature[:count] if (self.temperature[: len(self)] != 1).any() else None

    def limits(self) -> dict[str, np.ndarray]:
        """Those of top-p, top-k and min-p that some row has on."""
        values = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        off = {"top_p": 1}
        return {k: x[: len(self)] for k, x in values.items() if (x[: len(self)] != off.get(k, 0)).any()}

    def push(
        self, ids: Int[np.ndarray, "n"], logp: Float[np.ndarray, "n"], version: int
    ) -> list[tuple[int, FinishReason]]:
        """Add one token per row, sampled by weights of `version`; returns the finished slots with their reasons."""
        n = len(self.requests)
        self.token[:n] = ids
        self.position[:n] += 1
        reasons = map(Request.push, self.requests, ids.tolist(), logp.tolist(), repeat(version))
        return [(slot, reason) for slot, reason in enumerate(reasons) if reason is not None]

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """Close the gaps of these slots: rows `sources` move to slots `targets`, as must their cache."""
        left = len(self.requests) - len(gone)
        targets = sorted(slot for slot in gone if slot < left)
        sources = [slot for slot in range(left, len(self.requests)) if slot not in gone]
        for array in (x for x in vars(self).values() if isinstance(x, np.ndarray)):
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
            self.requests[target].slot = target
        del self.requests[left:]
        self.token[left:], self.position[left:] = 0, 0
        return sources, targets


def runs(requests: Sequence[Request], *, max_tokens: int = 8192) -> list[list[Request]]:
    """Split into runs with similar numbers of new prompt tokens to prefill together: padded to its longest, a run has
    at most `max_tokens` tokens and wastes at most a third."""
    out: list[list[Request]] = []
    total = 0
    for request in sorted(requests, key=lambda r: len(r.prompt) - r.start):
        length = len(request.prompt) - request.start
        total += length
        if out and length * (len(out[-1]) + 1) <= min(max_tokens, 1.5 * total):
            out[-1].append(request)
        else:
            out.append([request])
            total = length
    return out
