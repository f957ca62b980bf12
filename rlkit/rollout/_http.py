"""HTTP to inference servers: one connection per request without a limit, and errors that say what to do."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Iterable
from typing import Any

try:
    import aiohttp
except ImportError as error:  # pragma: no cover
    raise ImportError("engines behind HTTP need aiohttp: pip install 'rlkit-lm[http]'") from error

KEEPALIVE = 3.0  # seconds; below the 5 after which uvicorn closes an idle connection, perhaps under a request
CONNECT_TIMEOUT = 60.0
MIN_OPEN_FILES = 65536


class ReplicaError(RuntimeError):
    """A server failed a request that is safe to repeat elsewhere: it is gone, hangs, or its answer makes no sense."""


class Refused(ValueError):
    """A server answered 4xx: the request itself is at fault, and repeating it would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """JSON over one `aiohttp` session for the running event loop; a new loop gets a new session."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(self, url: str, body: Any = None, *, timeout: float | None, method: str = "POST") -> Any:
        """The parsed JSON of the reply (None for an empty one).

        Raises:
            ReplicaError: no connection, a broken one, status 5xx, or a body that is not JSON.
            Refused: status 4xx. TimeoutError: no reply within `timeout` seconds.
        """
        data = None if body is None else json.dumps(body).encode()
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._open().request(method, url, data=data, headers=headers, timeout=limits) as reply:
                raw, status = await reply.read(), reply.status
        except aiohttp.ClientPayloadError as error:
            raise ReplicaError(f"{url}: the reply was cut off ({error})") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise ReplicaError(f"{url}: no connection within {CONNECT_TIMEOUT} s; is the server up?") from error
        except TimeoutError as error:
            raise TimeoutError(f"{url}: no reply within {timeout} s; the server hangs or the limit is low") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaError(
                f"{url}: connection failed ({type(error).__name__}: {error}); is the server up?"
            ) from error
        return _parse(url, status, raw)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            _raise_open_files()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)
            self._session, self._loop = aiohttp.ClientSession(connector=connector), loop
        return self._session


async def all_done(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """The results of all of them. An error is raised when the last one has ended: nothing is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _parse(url: str, status: int, raw: bytes) -> Any:
    text = raw[:1000].decode(errors="replace")
    if status >= 500:
        raise ReplicaError(f"{url}: status {status}: {text}")
    if status >= 400:
        hint = "; is this the address of the server itself?" if status == 404 else ""
        raise Refused(f"{url}: status {status}: {text}{hint}", status)
    try:
        return json.loads(raw) if raw.strip() else None
    except ValueError as error:
        if raw[:1] not in b"{[":  # /flush_cache answers in plain words
            return None
        raise ReplicaError(f"{url}: status {status}, but the reply is not JSON ({error}): {text}") from error


def _raise_open_files() -> None:
    """A connection is an open file, and many systems start processes with a limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MIN_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
