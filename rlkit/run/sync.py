"""Call coroutines as plain functions, in a script or in a notebook, where an event loop already runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AsyncExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from inspect import isawaitable
from typing import Any, ParamSpec, TypeVar

from rlkit._util.ranks import on_this_device
from rlkit.run.signals import forward_signals

P = ParamSpec("P")
X = TypeVar("X")


_runner: ContextVar[asyncio.Runner | None] = ContextVar("runner", default=None)


@contextmanager
def one_loop() -> Iterator[None]:
    """Within it, `run_sync` runs all its coroutines in one event loop, for what a user's code keeps between them, such
    as the connections of a client that was opened in a trial."""
    with asyncio.Runner() as runner:
        token = _runner.set(runner)
        try:
            yield
        finally:
            _runner.reset(token)


def run_sync(coroutine: Coroutine[Any, Any, X]) -> X:
    """Run a coroutine to its end and return its result, whether or not an event loop runs in this thread.

    Without one this is `asyncio.run`, or in the loop of `one_loop`. With one (a notebook's cell) the coroutine runs in
    its own thread and loop, with this context's variables and this thread's GPU, while the caller's loop waits. Ctrl-C
    acts the same in both cases (see `rlkit.run.signals`); if nothing catches it, the coroutine is cancelled and
    KeyboardInterrupt is raised.

    Objects of another event loop (an engine of `rlkit.rollout.engines.process`, an aiohttp session) cannot be used
    inside: open them in the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        runner = _runner.get()
        return asyncio.run(coroutine) if runner is None else runner.run(coroutine)
    cancel: list[Callable[[], object]] = []
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        with suppress(RuntimeError):  # the loop has closed already
            for end in cancel:
                end()

    async def main() -> X:
        task: Any = asyncio.current_task()
        cancel.append(partial(task.get_loop().call_soon_threadsafe, task.cancel))
        if interrupted:  # before the task existed
            interrupt()
        return await coroutine

    with forward_signals(interrupt), ThreadPoolExecutor(1, thread_name_prefix="rlkit-run-sync") as pool:
        work = pool.submit(copy_context().run, on_this_device(asyncio.run), main())
        while not work.done():
            wait([work], timeout=0.5)  # a signal that arrives just before the wait is handled after it
        try:
            return work.result()
        except asyncio.CancelledError:
            if interrupted:
                raise KeyboardInterrupt from None
            raise


def blocking(function: Callable[P, Coroutine[Any, Any, X]]) -> Callable[P, X]:
    """Turn a coroutine function into a plain function, by `run_sync`.

    An argument that is a coroutine is awaited inside, and its result is closed at the end. So an engine that belongs to
    one event loop is passed as `rlkit.rollout.engines.process.launch(path)`, without await.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> X:
        async def run() -> X:
            async with AsyncExitStack() as stack:

                async def opened(value: Any) -> Any:
                    return await stack.enter_async_context(await value) if isawaitable(value) else value

                positional = [await opened(value) for value in args]
                return await function(*positional, **{name: await opened(value) for name, value in kwargs.items()})

        return run_sync(run())

    return call


async def run_inline(function: Callable[..., X], *args: Any, **kwargs: Any) -> X:
    """Call `function` in this thread: the event loop waits for it."""
    return function(*args, **kwargs)


async def run_in_thread(function: Callable[..., X], *args: Any, **kwargs: Any) -> X:
    """Call `function` in a thread, while the event loop keeps sampling and scoring.

    A cancelled call still waits for the function to return, so that no caller sees a model inside an optimizer step.
    """
    call = partial(on_this_device(function), *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None, call)  # no task: Ctrl-C cancels those
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
