"""Run a reward function's calls, each with its own deadline, and limit concurrency. Waiting does not count."""

from __future__ import annotations

import _thread
import asyncio
import faulthandler
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from rlkit._util.platform import num_cores, refuse_windows

refuse_windows("rlkit.rewards")
T = TypeVar("T")
_IN_THREAD = "; write a function that waits for a server as `async def`. The hanging call continues in its thread"


class TimedOut(Exception):
    """A call did not return in time (not the same as a TimeoutError that it raised itself). Arguments: cause, fix."""


class _Clock:
    """The deadline of one async call. The clock is stopped while `num_waiting` is positive."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.limit, self.num_waiting, self.left_s = limit, 0, 0.0


_clock: ContextVar[_Clock | None] = ContextVar("clock", default=None)  # of the async call that is running
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


def time_left_s() -> float:
    """The seconds until the deadline of the current async call; infinite without a deadline."""
    if (clock := _clock.get()) is None:
        return math.inf
    if clock.num_waiting:
        return clock.left_s
    return (clock.limit.when() or math.inf) - asyncio.get_running_loop().time()


@asynccontextmanager
async def off_the_clock() -> AsyncIterator[None]:
    """Stop the clock of the current async call: for waiting, and for work that has its own limits."""
    if (clock := _clock.get()) is None:
        yield
        return
    now = asyncio.get_running_loop().time
    with suppress(RuntimeError):  # the call has ended, and this is a task that it started
        if clock.num_waiting == 0:
            clock.left_s = (clock.limit.when() or 0.0) - now()
            clock.limit.reschedule(None)
    clock.num_waiting += 1
    try:
        yield
    finally:
        clock.num_waiting -= 1
        with suppress(RuntimeError):
            if clock.num_waiting == 0:
                clock.limit.reschedule(now() + clock.left_s)


@asynccontextmanager
async def turn(task: str, num: int) -> AsyncIterator[None]:
    """Let at most `num` tasks of this event loop do `task` at a time. The wait is off the clock."""
    turns = _turns.setdefault(asyncio.get_running_loop(), {})
    free = turns.setdefault((task, num), asyncio.Semaphore(num))
    async with off_the_clock():
        await free.acquire()
    try:
        yield
    finally:
        free.release()


async def run_on_a_core(work: Callable[[], T], *, cancel: Callable[[], None]) -> T:
    """The result of blocking work that keeps a core busy. On cancellation, `cancel` makes the work end soon."""
    async with turn("run on a core", num_cores()):
        try:
            return await asyncio.get_running_loop().run_in_executor(_threads(), work)
        except asyncio.CancelledError:
            cancel()
            raise


@cache
def _threads() -> ThreadPoolExecutor:  # the default executor has at most 32
    return ThreadPoolExecutor(num_cores(), thread_name_prefix="rlkit-rewards")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process inherits no threads


async def run_async(
    calls: Sequence[Callable[[], Any]], timeout_s: float, *, go_on: bool, on_block: Callable[[float], object]
) -> list[Any]:
    """The result or the exception of each call. They run concurrently.

    A call that blocks the event loop beyond its deadline cannot be stopped: it has timed out when it returns, and
    unless `go_on` so have those that have not started. One that blocks for 1 s is reported to `on_block`.
    """
    blocked: list[TimedOut] = []

    async def one(call: Callable[[], Any]) -> Any:
        if blocked and not go_on:
            raise blocked[0]
        limit, steps = asyncio.timeout(timeout_s), _Steps(call())
        try:
            async with limit:
                _clock.set(_Clock(limit))
                return await steps
        except TimeoutError as error:
            if limit.expired():
                raise _timed_out(timeout_s) from error
            raise
        finally:
            if steps.longest_s > timeout_s and not isinstance(sys.exception(), asyncio.CancelledError):
                blocked.append(TimedOut(f"blocked the event loop for {steps.longest_s:.1f} s", AWAIT))
                raise blocked[-1]
            if steps.longest_s > _BLOCKS_S:
                on_block(steps.longest_s)

    with _watched(timeout_s):
        return await asyncio.gather(*map(one, calls), return_exceptions=True)


_BLOCKS_S = 1.0
_SILENT_S = 10.0
AWAIT = (
    "await in it (asyncio.sleep, httpx.AsyncClient, asyncio.to_thread), or make it a plain `def`, which runs in a "
    "thread: while it blocks, nothing else is sampled or judged, and its timeout cannot end it"
)


class _Steps:
    """A coroutine, and the longest time that it ran without an await."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine, self.longest_s = coroutine, 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        resume = partial(next, steps)
        while True:
            begun = time.monotonic()
            try:
                waits_for = resume()
            except StopIteration as end:
                return end.value
            finally:
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
            try:
                yield waits_for
                resume = partial(next, steps)
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # of the task, such as a cancellation
                resume = partial(steps.throw, error)


@contextmanager
def _watched(timeout_s: float) -> Iterator[None]:
    """Print the stack of every thread if the event loop does nothing for five timeouts while rewards are computed.

    A function that holds Python's lock, as a regular expression does, stops the loop, all timeouts and Ctrl-C.
    """
    global _num_watched
    handle: Any = None
    limit_s, loop = min(max(_SILENT_S, 5 * timeout_s), 86400.0), asyncio.get_running_loop()

    def alive() -> None:
        nonlocal handle
        if sys.__stderr__ is not None:
            with suppress(OSError, ValueError):  # it is closed
                faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__)  # replaces the one before
        handle = loop.call_later(limit_s / 5, alive)

    _num_watched += 1
    alive()
    try:
        yield
    finally:
        handle.cancel()
        _num_watched -= 1
        if not _num_watched:
            faulthandler.cancel_dump_traceback_later()


_num_watched = 0


async def run_in_thread(calls: Sequence[Callable[[], Any]], timeout_s: float, *, go_on: bool) -> list[Any]:
    """The result or the exception of each call. They run in order in a daemon thread, each with its own deadline.

    The calls of an event loop take turns, so that one runs at a time. Stops after the first exception, unless `go_on`.
    After a timeout a new thread continues.
    """
    results: list[Any] = []
    _keep_stdin()
    with _watched(timeout_s):
        async with turn("call plain functions", 1), off_the_clock():
            while len(results) < len(calls):
                results += await _until_hung(_Job(calls[len(results) :], go_on=go_on), timeout_s)
                if not go_on and isinstance(results[-1], BaseException):
                    break
    return results


async def _until_hung(job: _Job, timeout_s: float) -> list[Any]:
    """Results up to the first call that hangs, or that fails (unless `go_on`)."""
    _thread.start_new_thread(job.run, ())  # Thread.start waits until the thread runs: 0.3 ms
    try:
        while True:
            begun = job.current
            left = timeout_s if begun is None else begun[1] + timeout_s - time.monotonic()
            await asyncio.wait([job.finished], timeout=max(0.0, left))
            if job.finished.done():
                return job.results
            if begun is not None and job.current == begun and time.monotonic() >= begun[1] + timeout_s:
                return [*job.results[: begun[0]], _timed_out(timeout_s, _IN_THREAD)]
    finally:
        job.finished.cancel()  # unless it is done; the thread then makes no further call


@cache
def _keep_stdin() -> None:
    """Never close stdin: a thread that waits in input() holds its lock, and Python would abort (134) at the end."""
    import ctypes

    for stream in (sys.stdin, getattr(sys.stdin, "buffer", None)):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


class _Job:
    """Calls that one thread makes in order."""

    def __init__(self, calls: Sequence[Callable[[], Any]], *, go_on: bool) -> None:
        self.calls, self.go_on, self.results = calls, go_on, list[Any]()
        self.current: tuple[int, float] | None = None  # position and start of the running call: one assignment
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self.loop.create_future()

    def run(self) -> None:
        for position, call in enumerate(self.calls):
            if self.finished.done():  # the caller has given up
                return
            self.current = (position, time.monotonic())
            try:
                self.results.append(call())
            except BaseException as error:  # SystemExit would end the thread silently
                self.results.append(error)
                if not self.go_on:
                    break
        with suppress(RuntimeError):  # the loop was closed while the call was hanging
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)


def _timed_out(timeout_s: float, hint: str = "") -> TimedOut:
    return TimedOut(f"no result after {timeout_s:g} s", f"make it faster or raise timeout_s (--reward-timeout){hint}")
