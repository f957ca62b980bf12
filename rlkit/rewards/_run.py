"""Run the calls of a reward function, each under its deadline: concurrently if async, else one by one in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

Outcome = tuple[list[Any], tuple[int, BaseException] | None]  # results; the first failure with its position

_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class TimedOut(Exception):
    """A call did not return in time (not the same as a TimeoutError that the call itself raised)."""


async def run_async(calls: Sequence[Callable[[], Any]], timeout_s: float) -> Outcome:
    async def one(call: Callable[[], Any]) -> Any:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await call()
        except TimeoutError as error:
            if limit.expired():
                raise TimedOut from error
            raise

    results = await asyncio.gather(*map(one, calls), return_exceptions=True)
    failures = ((i, result) for i, result in enumerate(results) if isinstance(result, BaseException))
    return results, next(failures, None)


async def run_in_thread(calls: Sequence[Callable[[], Any]], timeout_s: float) -> Outcome:
    """Run the calls in order in a daemon thread, up to the first that fails; each has its own deadline."""
    loop = asyncio.get_running_loop()
    async with _TURNS.setdefault(loop, asyncio.Lock()):
        worker = _Worker(calls, loop)
        threading.Thread(target=worker.run, name="rlkit-reward", daemon=True).start()
        try:
            while True:
                position, started = worker.current
                await asyncio.wait([worker.finished], timeout=max(0.0, started + timeout_s - time.monotonic()))
                if worker.finished.done():
                    return worker.results, worker.failure
                if worker.current == (position, started) and time.monotonic() >= started + timeout_s:
                    return [], (position, TimedOut())
        finally:
            worker.stop = True


class _Worker:
    """State that the thread writes and the event loop reads; each is one assignment, hence atomic."""

    def __init__(self, calls: Sequence[Callable[[], Any]], loop: asyncio.AbstractEventLoop) -> None:
        self.calls, self.loop = calls, loop
        self.finished: asyncio.Future[None] = loop.create_future()
        self.current = (0, time.monotonic())
        self.results: list[Any] = []
        self.failure: tuple[int, BaseException] | None = None
        self.stop = False

    def run(self) -> None:
        for position, call in enumerate(self.calls):
            if self.stop:
                return
            self.current = (position, time.monotonic())
            try:
                self.results.append(call())
            except BaseException as error:  # SystemExit, too, must not end the thread without a word
                self.failure = (position, error)
                break
        with suppress(RuntimeError):  # the loop was closed while the call was hanging
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
