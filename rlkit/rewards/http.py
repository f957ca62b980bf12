"""POST JSON to a server that computes rewards: with timeouts, retries and backoff, and an error if all fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rlkit._util.extras import optional
from rlkit._util.retrying import BUSY, retried, retry_after_s
from rlkit._util.text import masked
from rlkit._util.untrusted import loads
from rlkit.rewards.timeouts import off_the_clock, turn

if TYPE_CHECKING:
    import aiohttp

MAX_REPLY = 64 << 20  # bytes
_TRANSIENT = BUSY | {409}  # besides 5xx


class HttpError(RuntimeError):
    """A request that finally failed. `status` is the HTTP status, or None without a complete answer."""

    def __init__(self, message: str, *, status: int | None) -> None:
        super().__init__(masked(message))
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
    """The server's JSON answer to a POST of `body`.

    A request is retried after a refused or broken connection, a timeout, truncated JSON and transient statuses (408,
    409, 425, 429, 5xx), up to `retries` times: after `backoff_s`, then twice that, ..., each times a random factor in
    [0.5, 1.5], or after the server's `Retry-After`, for at most `total_s` seconds in all. Then, and immediately for any
    other status, it raises `HttpError`. `timeout_s` bounds each attempt. At most `concurrency` requests to this URL are
    in flight per event loop; waiting for that and between attempts does not count against a reward's deadline. Only for
    idempotent requests.
    """
    aiohttp = optional("aiohttp", "http", "rewards behind HTTP need")
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with turn(url, concurrency), aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        ask = partial(_once, session, url, body)
        return await retried(
            ask, on=_Transient, backoff_s=backoff_s, total_s=total_s, max_retries=retries, sleep=_sleep_off_the_clock
        )


async def _sleep_off_the_clock(seconds: float) -> None:
    async with off_the_clock():
        await asyncio.sleep(seconds)


class _Transient(HttpError):
    """A transient failure."""

    retry_after_s = 0.0


async def _once(session: aiohttp.ClientSession, url: str, body: Any) -> Any:
    import aiohttp

    try:
        async with session.post(url, json=body) as response:
            raw = bytearray()
            async for part in response.content.iter_any():
                raw += part
                if len(raw) > MAX_REPLY:
                    raise HttpError(f"{url}: the answer has more than {MAX_REPLY >> 20} MiB", status=response.status)
            text = raw.decode(errors="replace")
    except TimeoutError as error:
        raise _Transient(f"{url}: no answer after {session.timeout.total:g} s", status=None) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _Transient(f"{url}: {type(error).__name__}: {error}", status=None) from error
    status = response.status
    if status >= 500 or status in _TRANSIENT:
        transient = _Transient(f"{url}: HTTP {status}: {text[:300]}", status=status)
        transient.retry_after_s = retry_after_s(response.headers.get("Retry-After"))
        raise transient
    if status >= 300:
        raise HttpError(f"{url}: HTTP {status}: {text[:300]}", status=status)
    try:
        return loads(text)
    except ValueError as error:
        raise _Transient(f"{url}: the answer is not JSON: {text[:300]!r}", status=status) from error
