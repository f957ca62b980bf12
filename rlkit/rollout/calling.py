"""Call what a user wrote, sync or async, without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
    """The result of `function(*args)`: awaited if it is async, else run in a daemon thread of its own.

    Raises what it raises (a SystemExit or StopIteration, which no task may raise, as RuntimeError), and TimeoutError
    after `timeout_s`. A thread cannot be stopped: a sync function that hangs goes on in the background, keeps neither
    the others nor the end of the process waiting, and its result is dropped.
    """
    return await asyncio.wait_for(_run(function, *args), timeout_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _run(function: Callable[..., Any], *args: Any) -> Any:
    try:
        result = function(*args) if is_async(function) else await _in_thread(lambda: function(*args))
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


async def _in_thread(function: Callable[[], Any]) -> Any:
    """One daemon thread per call: an executor's hung thread would block its other calls and the interpreter's exit."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():  # timed out or cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except Exception as raised:
            error = RuntimeError(f"StopIteration: {raised}") if isinstance(raised, StopIteration) else raised
        except BaseException as raised:
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with suppress(RuntimeError):  # the loop was closed while the function was hanging
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="rlkit-call", daemon=True).start()
    return await future
