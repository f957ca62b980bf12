"""Blocking work of an async function, in as many threads as there are cores; the wait for one is off the clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakKeyDictionary

from rlkit.rewards._run import off_the_clock

T = TypeVar("T")


class Slots:
    """At most `num` calls at a time in an event loop."""

    def __init__(self, num: int, name: str) -> None:
        self._num, self._name = num, name
        self._pool: ThreadPoolExecutor | None = None
        self._owner = 0
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, work: Callable[[], T], *, cancel: Callable[[], None]) -> T:
        """Do the work in a thread. When the waiting task is cancelled, `cancel` makes the work return soon."""
        loop = asyncio.get_running_loop()
        free = self._free.setdefault(loop, asyncio.Semaphore(self._num))
        async with off_the_clock():
            await free.acquire()
        try:
            return await loop.run_in_executor(self._threads(), work)
        except asyncio.CancelledError:
            cancel()
            raise
        finally:
            free.release()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._owner != os.getpid():
            self._pool, self._owner = ThreadPoolExecutor(self._num, thread_name_prefix=self._name), os.getpid()
        return self._pool


def num_cores() -> int:
    """Cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))
