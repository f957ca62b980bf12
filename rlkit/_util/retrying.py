"""Retries for requests that a busy server rejects: exponential backoff with jitter, Retry-After, a total time limit."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")
BUSY = frozenset({408, 425, 429, 503})
"""HTTP status codes of requests that were not processed and may be retried."""
_LONGEST_S = 60.0
_LONGEST_ASKED_S = 3600.0


def retry_after_s(header: str | None) -> float:
    """The wait in seconds given by a Retry-After header, a number or a date; 0 if it is missing, invalid or above an
    hour, which no busy server means (a wrong clock does).

    >>> retry_after_s("2.5"), retry_after_s(None), retry_after_s("soon"), retry_after_s("nan"), retry_after_s("1e9")
    (2.5, 0.0, 0.0, 0.0, 0.0)
    """
    try:
        wait = float(header or 0)
    except ValueError:
        try:
            wait = parsedate_to_datetime(header or "").timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return wait if 0 < wait <= _LONGEST_ASKED_S else 0.0  # also for nan


async def retried(
    attempt: Callable[[], Awaitable[T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    backoff_s: float = 0.5,
    total_s: float = 600.0,
    max_retries: int | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """Call `await attempt()`, and retry while it raises `on`.

        wait_n = max(min(60, backoff_s 2^n) u_n, error.retry_after_s)        u_n ~ U[0.5, 1.5],  n = 0, 1, ...

    Errors: raises the last error, with the number of attempts in its message, after `max_retries` retries (None: no
    limit), or if the next wait would end more than `total_s` seconds after the first of them.
    Reference: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """
    end = math.inf
    for n in itertools.count():
        try:
            return await attempt()
        except on as error:
            end = min(end, time.monotonic() + total_s)
            asked = getattr(error, "retry_after_s", 0.0)
            wait = max(min(_LONGEST_S, backoff_s * 2.0 ** min(n, 30)) * random.uniform(0.5, 1.5), asked)
            if n == max_retries or time.monotonic() + wait > end:
                times = "once" if n == 0 else f"{n + 1} times"
                longer = f"; the server asks to wait {asked:g} s" if asked > total_s else ""
                error.args = (f"{error}, tried {times}{longer}", *error.args[1:])
                raise
        await sleep(wait)
    raise AssertionError
