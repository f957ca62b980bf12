"""JSON over HTTP for rewards that a server computes: bounded, retried with backoff, loud when it fails."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkit.rewards._run import turn

if TYPE_CHECKING:
    import aiohttp

_PASSING = {408, 409, 425, 429}  # besides 5xx
_LONGEST_WAIT_S = 60.0


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
    concurrency: int = 64,
) -> Any:
    """What the server answers to `body`, as JSON.

    Sent again after a refused or broken connection, a timeout, truncated JSON and the statuses that pass (408, 409,
    425, 429, 5xx), up to `retries` times: after `backoff_s`, then twice that, ..., each times a random factor in
    [0.5, 1.5], or after what the server says in `Retry-After`. Then, and at once for any other status, `HttpError`.
    `timeout_s` is for each attempt. At most `concurrency` requests to this URL are under way in an event loop; the
    wait for one's turn does not count against a reward's deadline. Asking a judge twice does no harm; do not use this
    for requests that change something.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise ImportError(f"{error}; install the extra `http`: pip install 'rlkit-lm[http]'") from error
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with turn(url, concurrency), aiohttp.ClientSession(headers=headers, timeout=limit) as session:
        for attempt in range(retries + 1):
            try:
                return await _once(session, url, body)
            except _Passing as failure:
                if attempt == retries:
                    tries = "once" if retries == 0 else f"{retries + 1} times"
                    raise HttpError(f"{failure}, tried {tries}", status=failure.status) from failure
                wait = backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(_LONGEST_WAIT_S, max(wait, failure.retry_after)))


class _Passing(HttpError):
    """A failure that may not happen again."""

    retry_after = 0.0


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
        retry_after = response.headers.get("Retry-After", "")
        passing.retry_after = float(retry_after) if retry_after.isdigit() else 0.0
        raise passing
    if status >= 300:
        raise HttpError(f"{url}: HTTP {status}: {text[:300]}", status=status)
    try:
        return json.loads(text)
    except ValueError as error:
        raise _Passing(f"{url}: the answer is not JSON: {text[:300]!r}", status=status) from error
