import asyncio
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from functools import partial

import pytest

from rlkit.rollout.calling import call, is_async


class Adder:
    async def __call__(self, a, b):
        await asyncio.sleep(0)
        return a + b


async def later(x):
    return x


async def test_sync_async_objects_and_functions_that_return_a_coroutine():
    assert await call(lambda a, b: (a, b), 1, 2) == (1, 2)
    assert await call(Adder(), 1, 2) == 3
    assert await call(later, 5) == 5
    assert await call(partial(later, x=5)) == 5
    assert await call(lambda: later(6)) == 6


async def test_sync_functions_leave_the_event_loop_and_see_its_context():
    value = ContextVar("value")
    value.set(3)
    thread, seen = await call(lambda: (threading.current_thread(), value.get()))
    assert (thread is threading.main_thread(), seen) == (False, 3)
    barrier = threading.Barrier(20, timeout=60)  # all at once, or nobody passes
    await asyncio.gather(*(call(barrier.wait) for _ in range(20)))


async def test_exceptions_are_propagated():
    def fails(error):
        raise error

    async def fails_later(error):
        raise error

    for function in (fails, fails_later):
        with pytest.raises(KeyError, match="x"):
            await call(function, KeyError("x"))
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await call(function, SystemExit(3))
    with pytest.raises(RuntimeError, match="StopIteration: 4"):
        await call(fails, StopIteration(4))
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        await call(fails, KeyboardInterrupt())


async def leaks():
    task = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    task.cancel()
    await task


@pytest.mark.parametrize("timeout_s", [None, 60])
async def test_a_cancellation_that_leaks_is_an_error_and_one_of_the_caller_is_none(timeout_s):
    with pytest.raises(RuntimeError, match="CancelledError: it awaits a task that was cancelled"):
        await call(leaks, timeout_s=timeout_s)
    caller = asyncio.create_task(call(asyncio.sleep, 60, timeout_s=timeout_s))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_timeout_of_sync_and_async_functions():
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await call(release.wait, timeout_s=0.05)
    release.set()
    with pytest.raises(TimeoutError):
        await call(asyncio.sleep, 60, timeout_s=0.05)
    assert await call(time.sleep, 0, timeout_s=60) is None


def test_a_hanging_function_does_not_block_exit():
    code = """
import asyncio, time
from rlkit.rollout.calling import call
try:
    asyncio.run(call(time.sleep, 1000, timeout_s=0.1))
except TimeoutError:
    print("late")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert (out.stdout, out.stderr) == ("late\n", "")


def test_an_async_function_is_one_or_an_object_that_is_called_like_one():
    class Called:
        async def __call__(self):
            return 1

    async def function():
        return 1

    assert is_async(function)
    assert is_async(Called())
    assert not is_async(lambda: function())
    assert not is_async(Called)
