"""A `generate` that can be paused: what was sampled so far is kept, and goes on after the weights have changed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from rlkit.types import Completion, Generate, SamplingParams

NOTHING = Completion([], [], [], "abort")


class Pausable:
    """`generate` and an engine's `abort`, as one `generate` whose calls survive a pause.

    `pause()` aborts what is in flight and keeps the tokens, with their log-probs and versions. After `resume()` each
    call goes on by sampling from the prompt and the tokens so far, and returns all of them as one completion. Calls
    made while it is paused wait. The caller of `generate` notices nothing but the time, so environments of any kind
    are interrupted in the middle of a turn and continue.

    The noise of a token depends on its seed and position only, so under unchanged weights a completion is the same
    with or without pauses, up to the rounding of its prefill. Where there are stop strings, tokens at the end that may
    begin one are given back and sampled again: the engine looks for stop strings in what it samples itself.

    `abort(None)` ends everything the engine is serving, also what did not come through here.
    """

    def __init__(self, generate: Generate, abort: Callable[..., Any]) -> None:
        self._generate, self._abort = generate, abort
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._pauses = 0
        self.num_running = 0

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """See `rlkit.types.Generate`. "abort" is returned only where somebody else than `pause` aborted the call."""
        done = NOTHING
        while True:
            while not self._open.is_set():  # it may have been closed again before this task's turn came
                await self._open.wait()
            pauses = self._pauses
            out = await self._count(continued(self._generate, prompt_ids, done, params=params, rid=rid))
            done = joined(done, out)
            if out.finish_reason != "abort" or pauses == self._pauses:
                return done
            done = resumable(done, params)
            if done.finish_reason != "abort":
                return done

    async def pause(self) -> None:
        """Returns when the engine has nothing of ours left; waiting calls stay where they are."""
        self._open.clear()
        self._pauses += 1
        while self.num_running:
            self._idle.clear()
            aborted = self._abort(None)
            if inspect.isawaitable(aborted):
                await aborted
            try:  # a request that was still on its way to a server is not among those it aborts
                await asyncio.wait_for(self._idle.wait(), timeout=1.0)
            except TimeoutError:
                continue

    def resume(self) -> None:
        """Let everything go on."""
        self._open.set()

    async def _count(self, call: Coroutine[Any, Any, Completion]) -> Completion:
        self.num_running += 1
        try:
            return await call
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()


async def continued(
    generate: Generate, prompt_ids: list[int], done: Completion, *, params: SamplingParams, rid: str | None = None
) -> Completion:
    """What follows after the tokens that are `done`, within what is left of `max_new_tokens`."""
    left = replace(params, max_new_tokens=params.max_new_tokens - len(done.ids)) if done.ids else params
    return await generate([*prompt_ids, *done.ids], params=left, rid=rid)


def joined(first: Completion, second: Completion) -> Completion:
    """One completion of two that follow each other; it ended as the second did."""
    return Completion(
        first.ids + second.ids, first.logp + second.logp, first.versions + second.versions, second.finish_reason
    )


def resumable(done: Completion, params: SamplingParams) -> Completion:
    """What of an aborted completion is kept to be continued; finish_reason "length" where no room is left to do so.

    Tokens at its end with which a stop string could begin are given back (a token is a byte of it or more).
    """
    if len(done.ids) >= params.max_new_tokens:
        return replace(done, finish_reason="length")
    keep = max(0, len(done.ids) - max((len(s.encode()) - 1 for s in params.stop), default=0))
    return replace(done, ids=done.ids[:keep], logp=done.logp[:keep], versions=done.versions[:keep])
