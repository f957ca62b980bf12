"""Run the calls of a reward function, each under its deadline: concurrently if async, else one by one in a thread."""

from __future__ import annotations

import _thread
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

_LIMIT: ContextVar[asyncio.Timeout | None] = ContextVar("limit", default=None)  # of the async call that is running
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class TimedOut(Exception):
    """A call did not return in time (not the same as a TimeoutError that the call itself raised)."""


_waiting: WeakKeyDictionary[asyncio.Timeout, tuple[int, float]] = WeakKeyDictionary()  # how many wait; seconds left


@asynccontextmanager
async def off_the_clock() -> AsyncIterator[None]:
    """Stop the deadline of the async call that this runs in: for what waits for its turn, or has limits of its own."""
    limit = _LIMIT.get()
    when = limit.when() if limit else None
    if limit is None or (when is None and limit not in _waiting):
        yield
        return
    now = asyncio.get_running_loop().time
    num, left = _waiting.get(limit, (0, (when or 0.0) - now()))
    _waiting[limit] = num + 1, left
    limit.reschedule(None)
    try:
        yield
    finally:
        num, left = _waiting.pop(limit)
        if num > 1:
            _waiting[limit] = num - 1, left
        else:
            limit.reschedule(now() + left)


async def run_async(calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
    """The result or the exception of each call; all run at once."""

    async def one(call: Callable[[], Any]) -> Any:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                _LIMIT.set(limit)
                return await call()
        except TimeoutError as error:
            if limit.expired():
                raise TimedOut from error
            raise

    return await asyncio.gather(*map(one, calls), return_exceptions=True)


async def run_in_thread(calls: Sequence[Callable[[], Any]], timeout_s: float, *, go_on: bool) -> list[Any]:
    """The result or the exception of each call, in order, in a daemon thread; each call has its own deadline.

    Ends after the first exception, unless `go_on`. After a timeout that goes on in a new thread.
    """
    loop = asyncio.get_running_loop()
    async with _TURNS.setdefault(loop, asyncio.Lock()):
        results: list[Any] = []
        while len(results) < len(calls):
            results += await _in_one_thread(calls[len(results) :], timeout_s, go_on, loop)
            if not go_on and isinstance(results[-1], BaseException):
                break
        return results


async def _in_one_thread(
    calls: Sequence[Callable[[], Any]], timeout_s: float, go_on: bool, loop: asyncio.AbstractEventLoop
) -> list[Any]:
    """Results up to the first call that hangs, or, unless `go_on`, that fails."""
    worker = _Worker(calls, go_on, loop)
    _thread.start_new_thread(worker.run, ())  # does not wait until it runs, as Thread.start does: 0.3 ms a call
    try:
        while True:
            position, started = worker.current
            await asyncio.wait([worker.finished], timeout=max(0.0, started + timeout_s - time.monotonic()))
            if worker.finished.done():
                return worker.results
            if worker.current == (position, started) and time.monotonic() >= started + timeout_s:
                return [*worker.results[:position], TimedOut()]
    finally:
        worker.stop = True


class _Worker:
    """State that the thread writes and the event loop reads; each is one assignment, hence atomic."""

    def __init__(self, calls: Sequence[Callable[[], Any]], go_on: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.calls, self.go_on, self.loop = calls, go_on, loop
        self.finished: asyncio.Future[None] = loop.create_future()
        self.current = (0, time.monotonic())
        self.results: list[Any] = []
        self.stop = False

    def run(self) -> None:
        for position, call in enumerate(self.calls):
            if self.stop:
                return
            self.current = (position, time.monotonic())
            try:
                self.results.append(call())
            except BaseException as error:  # SystemExit, too, must not end the thread without a word
                self.results.append(error)
                if not self.go_on:
                    break
        with suppress(RuntimeError):  # the loop was closed while the call was hanging
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
