"""The running requests of an engine as arrays, one row per slot, so that a step is a few vector operations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from rlkit.rollout.stopping import StopStrings
from rlkit.types import Completion, FinishReason, SamplingParams


@dataclass(eq=False)
class Request:
    """One call of `generate`. `end` is the length of prompt and completion at which it must stop; `epoch` numbers
    the weights that computed its prompt's keys and values; `versions` holds (first token, weight version) pairs."""

    rid: str
    prompt: list[int]
    key: bytes
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    seed: int
    end: int
    future: asyncio.Future[Completion]
    stop: StopStrings | None
    slot: int = -1
    epoch: int = -1
    versions: list[tuple[int, int]] = field(default_factory=list)

    def finish(self, ids: list[int], logp: list[float], reason: FinishReason) -> None:
        """Hand the completion to the waiter, unless it has gone."""
        if self.future.done():
            return
        starts = [start for start, _ in self.versions[1:]] + [len(ids)]
        versions: list[int] = []
        for end, (_, version) in zip(starts, self.versions, strict=False):
            versions += [version] * (end - len(versions))
        self.future.set_result(Completion(ids=ids, logp=logp, versions=versions, finish_reason=reason))


class Rows:
    """Per slot: the token to read next, its position, how to sample, when to stop, and what was sampled so far."""

    def __init__(self, max_batch: int) -> None:
        self.requests: list[Request] = []
        self.token = np.zeros(max_batch, np.int64)
        self.position = np.zeros(max_batch, np.int64)
        self.seed = np.zeros(max_batch, np.uint64)
        self.temperature = np.ones(max_batch, np.float32)
        self.top_p = np.ones(max_batch, np.float64)
        self.top_k = np.zeros(max_batch, np.int64)
        self._start = np.zeros(max_batch, np.int64)
        self._end = np.zeros(max_batch, np.int64)
        self._stops = np.full((max_batch, 1), -1, np.int64)
        self._ids = np.zeros((max_batch, 64), np.int64)
        self._logp = np.zeros((max_batch, 64), np.float32)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """Give the request the next slot; the last token of its prompt is read first."""
        slot = request.slot = len(self.requests)
        self.requests.append(request)
        params, length = request.params, len(request.prompt)
        self.token[slot], self.position[slot], self.seed[slot] = request.prompt[-1], length - 1, request.seed
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = params.temperature, params.top_p, params.top_k
        self._start[slot], self._end[slot] = length, request.end
        stops = request.stop_token_ids
        self._stops = _widened(self._stops, len(stops), -1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops
        self._ids = _widened(self._ids, request.end - length, 0)
        self._logp = _widened(self._logp, request.end - length, 0)

    def push(self, ids: Int[np.ndarray, "n"], logp: Float[np.ndarray, "n"]) -> list[tuple[int, FinishReason]]:
        """Note one sampled token per row; which slots are finished now, and why."""
        n = len(self.requests)
        rows = np.arange(n)
        count = self.position[:n] + 1 - self._start[:n]
        self._ids[rows, count], self._logp[rows, count] = ids, logp
        self.token[:n] = ids
        self.position[:n] += 1
        stopped = (self._stops[:n] == ids[:, None]).any(1)
        for slot, request in enumerate(self.requests):
            if request.stop is not None and request.stop.push(int(ids[slot])):
                stopped[slot] = True
        full = self.position[:n] + 1 >= self._end[:n]
        return [(int(s), "stop" if stopped[s] else "length") for s in np.flatnonzero(stopped | full)]

    def num_generated(self, slot: int) -> int:
        """Tokens sampled so far."""
        return int(self.position[slot] + 1 - self._start[slot])

    def complete(self, slot: int, reason: FinishReason) -> None:
        """Hand what was sampled in this slot to the caller."""
        n = self.num_generated(slot)
        self.requests[slot].finish(self._ids[slot, :n].tolist(), self._logp[slot, :n].tolist(), reason)

    def remove(self, gone: Sequence[int]) -> tuple[list[int], list[int]]:
        """Close the gaps of these slots: rows `sources` move to slots `targets`, as must their cache."""
        left = len(self.requests) - len(gone)
        targets = sorted(slot for slot in gone if slot < left)
        sources = [slot for slot in range(left, len(self.requests)) if slot not in gone]
        for array in self._arrays():
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
            self.requests[target].slot = target
        del self.requests[left:]
        self.token[left:], self.position[left:] = 0, 0
        return sources, targets

    def _arrays(self) -> tuple[np.ndarray, ...]:
        sampling = (self.seed, self.temperature, self.top_p, self.top_k)
        return (self.token, self.position, *sampling, self._start, self._end, self._stops, self._ids, self._logp)


def runs(requests: Sequence[Request], *, max_tokens: int = 8192) -> list[list[Request]]:
    """Cut into runs of similar prompt length to prefill together: padded to its longest, a run stays below `max_tokens`
    and wastes at most a third."""
    out: list[list[Request]] = []
    total = 0
    for request in sorted(requests, key=lambda r: len(r.prompt)):
        length = len(request.prompt)
        total += length
        if out and length * (len(out[-1]) + 1) <= min(max_tokens, 1.5 * total):
            out[-1].append(request)
        else:
            out.append([request])
            total = length
    return out


def _widened(array: np.ndarray, width: int, fill: int) -> np.ndarray:
    if width <= array.shape[1]:
        return array
    wide = np.full((array.shape[0], max(width, 2 * array.shape[1])), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
