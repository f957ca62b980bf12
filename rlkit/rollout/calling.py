"""Call user code, sync or async, without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from typing import Any, TypeVar

X = TypeVar("X")
_log = logging.getLogger("rlkit.rollout")
_ATOMS = {str, int, float, bool, bytes, type(None)}


async def call(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """Return `function(*args)`: awaited if it is async, else run by `in_own_thread`.

    Errors: those of the function (SystemExit and StopIteration, which no task may raise, and a CancelledError of its
    own as RuntimeError), and TimeoutError after `timeout_s`; a sync function then keeps running in the background, and
    its result is dropped.
    """
    return await asyncio.wait_for(_run(function, *args), timeout_s)


@contextmanager
def not_cancelled() -> Iterator[None]:
    """Around an await of the user's code: a CancelledError is a RuntimeError unless this task was cancelled.

    Code that awaits a task which it has cancelled lets one out, and would end this task without an error.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        leaked = RuntimeError("CancelledError: it awaits a task that was cancelled, and must catch this error")
        raise leaked.with_traceback(error.__traceback__) from error  # which has the user's line


class Clock:
    """The time of a user's program, which stands still while one of its turns waits for the end of a pause.

    `on_change(stands)` is called when it stops, and when it goes on.
    """

    def __init__(self) -> None:
        self._waits, self._passed, self._since = 0, 0.0, time.monotonic()
        self.on_change: Callable[[bool], object] = bool

    @property
    def seconds(self) -> float:
        """Those that have passed."""
        return self._passed + (0.0 if self._waits else time.monotonic() - self._since)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Around the wait of a turn."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, step: int) -> None:
        stood, self._passed, self._since = self._waits > 0, self.seconds, time.monotonic()
        self._waits += step
        if stood != (self._waits > 0):
            self.on_change(not stood)


CLOCK: ContextVar[Clock] = ContextVar("CLOCK")  # of the program that runs, or whose turn is sampled


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a call with these arguments fits the signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are parameters of the function."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def own_copy(value: Any) -> Any:
    """A copy of plain data, of which the user's code may change any part without changing ours."""
    if type(value) in (dict, Watched):
        return {name: part if type(part) in _ATOMS else own_copy(part) for name, part in value.items()}
    if type(value) is list:
        return [part if type(part) in _ATOMS else own_copy(part) for part in value]
    return value if type(value) in _ATOMS else deepcopy(value)


class Watched(dict[str, Any]):
    """A copy of a row, or of an object in it, for the user's code; `absent` records the keys that it looked up and
    missed, and `read` those that it found.

    A key that is required (`row[key]`) is an error anyway; `get`, `pop` and `in` would hide a wrong name.
    """

    def __init__(self, row: Mapping[str, Any], absent: set[str], read: set[str] | None = None) -> None:
        super().__init__(own_copy(dict(row)))
        self._absent, self._read = absent, set[str]() if read is None else read

    def __setitem__(self, key: str, value: Any) -> None:
        self._absent.discard(key)
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _noting(method: Any) -> Callable[..., Any]:
    """A method of a dict that notes the key, unless a module of this package asks for it."""

    def noted(self: Watched, key: Any, *default: Any) -> Any:
        if isinstance(key, str) and not str(sys._getframe(1).f_globals.get("__name__")).startswith("rlkit."):
            (self._read if key in self.keys() else self._absent).add(key)
        return method(self, key, *default)

    return noted


for _name in ("__getitem__", "__contains__", "get", "pop"):
    setattr(Watched, _name, _noting(getattr(dict, _name)))


def report_absent(
    who: str, absent: set[str], columns: Collection[str], *, what: str = "the data has no column"
) -> None:
    """Warn once of the keys that `who` has asked for and that are not among the columns."""
    names = ", ".join(map(repr, sorted(absent - {*columns})))
    absent.clear()
    if names:
        report_once(who, f"reads {names}, of which {what}", f"; found: {', '.join(sorted(columns))}")


def report_once(who: str, fact: str, more: str = "") -> None:
    """Warn of a fact about a function of the user's, once in a process; `more` may differ from time to time."""
    if (who, fact) not in _reported:
        _reported.add((who, fact))
        _log.warning("%s %s%s", who, fact, more)


_reported = set[tuple[str, str]]()


async def in_own_thread(function: Callable[[], X]) -> X:
    """`asyncio.to_thread` in a new daemon thread.

    A thread cannot be stopped; in an executor, a hanging one would block other calls and the exit of the process.
    """
    future: Future[X] = Future()
    future.set_running_or_notify_cancel()  # a waiter may be cancelled, the thread continues
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if fit else RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, name="rlkit-call", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _run(function: Callable[..., Any], *args: Any) -> Any:
    try:
        with not_cancelled():
            result = function(*args) if is_async(function) else await in_own_thread(lambda: function(*args))
            return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
