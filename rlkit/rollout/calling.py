"""Call user code, sync or async, without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from typing import Any, TypeVar

X = TypeVar("X")
_ATOMS = {str, int, float, bool, bytes, type(None)}


async def call(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """Return `function(*args)`: awaited if it is async, else run by `in_own_thread`.

    Errors: those of the function (SystemExit and StopIteration, which no task may raise, as RuntimeError), and
    TimeoutError after `timeout_s`; a sync function then keeps running in the background, and its result is dropped.
    """
    return await asyncio.wait_for(_run(function, *args), timeout_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def own_copy(value: Any) -> Any:
    """A copy of plain data, of which the user's code may change any part without changing ours."""
    if type(value) is dict:
        return {name: part if type(part) in _ATOMS else own_copy(part) for name, part in value.items()}
    if type(value) is list:
        return [part if type(part) in _ATOMS else own_copy(part) for part in value]
    return value if type(value) in _ATOMS else deepcopy(value)


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
        result = function(*args) if is_async(function) else await in_own_thread(lambda: function(*args))
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error
