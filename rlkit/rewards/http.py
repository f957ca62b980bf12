"""JSON over HTTP for rewards that a server computes: bounded, retried with backoff, loud when it fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rlkit._extras import optional
from rlkit._retrying import BUSY, retried, retry_after_s
from rlkit.rewards.timeouts import off_the_clock, turn

if TYPE_CHECKING:
    import aiohttp

_PASSING = BUSY | {409}  # besides 5xx


class HttpError(RuntimeError):
    """A request that failed for good. `status` is the HTTP status, or None where there was no whole answer."""

    def __init__(self, message: str, *, status: int | None) -> None:
        super().__init__(message)
        self.status = status


async def post_json(
    url: str,
    body: Any,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    retries: int = 4,
    backoff_s: float = 0.5,
    total_s: float = 600.0,
    concurrency: int = 64,
) -> Any:
    """What the server answers to `body`, as JSON.

    Sent again after a refused or broken connection, a timeout, truncated JSON and the statuses that pass (408, 409,
    425, 429, 5xx), up to `retries` times: after `backoff_s`, then twice that, ..., each times a random factor in
    [0.5, 1.5], or after what the server says in `Retry-After`, and for `total_s` seconds at most. Then, and at once for
    any other status, `HttpError`. `timeout_s` is for each attempt. At most `concurrency` requests to this URL are under
    way in an event loop; the wait for one's turn and between attempts does not count against a reward's deadline.
    Asking a judge twice does no harm; do not use this for requests that change something.
    """
    aiohttp = optional("aiohttp", "http", "rewards behind HTTP need")
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with turn(url, concurrency), aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        ask = partial(_once, session, url, body)
        return await retried(
            ask, on=_Passing, backoff_s=backoff_s, total_s=total_s, max_retries=retries, sleep=_sleep_off_the_clock
        )


async def _sleep_off_the_clock(seconds: float) -> None:
    async with off_the_clock():
        await asyncio.sleep(seconds)


class _Passing(HttpError):
    """A failure that may not happen again."""

    retry_after_s = 0.0


async def _once(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    import aiohttp

    try:
        async with session.post(url, json=body) as response:
            text = await response.text(errors="replace")
    except TimeoutError as error:
        raise _Passing(f"{url}: no answer after {session.timeout.total:g} s", status=None) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _Passing(f"{url}: {type(error).__name__}: {error}", status=None) from error
    status = response.status
    if status >= 500 or status in _PASSING:
        passing = _Passing(f"{url}: HTTP {status}: {text[:300]}", status=status)
        passing.retry_after_s = retry_after_s(response.headers.get("Retry-After"))
        raise passing
    if status >= 300:
        raise HttpError(f"{url}: HTTP {status}: {text[:300]}", status=status)
    try:
        return json.loads(text)
    except ValueError as error:
        raise _Passing(f"{url}: the answer is not JSON: {text[:300]!r}", status=status) from error
