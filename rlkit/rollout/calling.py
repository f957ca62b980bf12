"""Call what a user wrote, sync or async, without holding up the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call(function: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
    """The result of `function(*args, **kwargs)`: awaited if it is async, else run in a daemon thread of its own.

    Raises what it raises, and TimeoutError after `timeout_s`. A thread cannot be stopped: a sync function that hangs
    goes on in the background, keeps neither the others nor the end of the process waiting, and its result is dropped.
    """
    if is_async(function):
        return await asyncio.wait_for(function(*args, **kwargs), timeout_s)
    result = await asyncio.wait_for(_in_thread(lambda: function(*args, **kwargs)), timeout_s)
    return await asyncio.wait_for(result, timeout_s) if inspect.isawaitable(result) else result


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an async function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """One daemon thread per call: an executor's hung thread would block its other calls and the interpreter's exit."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[Any] = loop.create_future()

    def set_result(result: Any, error: BaseException | None) -> None:
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
        except StopIteration as stopped:  # a future cannot hold it
            error = RuntimeError(f"StopIteration: {stopped}")
        except BaseException as raised:  # SystemExit too: the caller must hear of it
            error = raised
        with suppress(RuntimeError):  # the loop was closed while the function was hanging
            loop.call_soon_threadsafe(set_result, result, error)

    threading.Thread(target=run, name="rlkit-call", daemon=True).start()
    return await future
