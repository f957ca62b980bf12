"""HTTP to inference servers: one connection per request, errors that say what to do, and checks of each reply.

A reply that cannot be the answer to its request is an error and is never trained on.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from reprlib import Repr
from typing import Any, TypeVar

from rlkit._util.extras import missing
from rlkit._util.retrying import BUSY, retried, retry_after_s
from rlkit._util.text import masked
from rlkit.rollout.engines import EngineError
from rlkit.types import Completion

try:
    import aiohttp
except ImportError as error:
    raise missing(error, "aiohttp", "http", "engines behind HTTP need") from None

T = TypeVar("T")
KEEPALIVE = 3.0  # seconds; below the 5 after which uvicorn closes an idle connection, perhaps under a request
CONNECT_TIMEOUT = 60.0
MIN_OPEN_FILES = 65536
MAX_REPLY = 256 << 20  # bytes; a completion of a million tokens has about 60 MiB
_LOWEST = -3.4e38  # what fp32, in which log-probs are packed, can hold
_short = Repr()
vars(_short).update(maxstring=200, maxother=200, maxlong=200, maxlevel=5)


class ReplicaError(EngineError):
    """A server failed a request that is safe to repeat elsewhere: it is gone, hangs, or its answer is invalid."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class Unreached(ReplicaError):
    """No connection was made: the server has not seen the request."""


class Busy(ReplicaError):
    """A server did not take a request (408, 425, 429, 503): it may later, after `retry_after_s` seconds at least."""

    def __init__(self, message: str, status: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class Refused(EngineError, ValueError):
    """A server answered another 4xx: the request itself is at fault, and repeating it would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(masked(message))
        self.status = status


class Http:
    """JSON over one `aiohttp` session for the running event loop; a new loop gets a new session.

    `patient` repeats a request to a busy server: after about `backoff_s`, twice that, ..., for `busy_s` in total.
    """

    def __init__(self, *, backoff_s: float = 0.5, busy_s: float = 600.0) -> None:
        self._backoff_s, self._busy_s = backoff_s, busy_s
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(self, url: str, body: Any = None, *, timeout: float | None, method: str = "POST") -> Any:
        """The parsed JSON of the reply (None for an empty one, and for plain text).

        Raises:
            ReplicaError: no connection, a broken one, status 5xx, or a body above 256 MiB or of JSON that is broken.
            Busy: status 408, 425, 429 or 503. Refused: any other status 4xx.
            TimeoutError: no reply within `timeout` seconds.
        """
        data = None if body is None else json.dumps(body).encode()
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._open().request(method, url, data=data, headers=headers, timeout=limits) as reply:
                raw, status, after = await _read(url, reply), reply.status, reply.headers.get("Retry-After")
        except aiohttp.ClientPayloadError as error:
            raise ReplicaError(f"{url}: the reply was cut off ({error})") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise Unreached(f"{url}: no connection within {CONNECT_TIMEOUT} s; is the server up?") from error
        except TimeoutError as error:
            fault = f"{masked(url)}: no reply within {timeout} s"
            raise TimeoutError(f"{fault}; the server hangs or the limit is low") from error
        except (aiohttp.ClientError, OSError) as error:
            problem = f"{url}: connection failed ({type(error).__name__}: {error})"
            kind = Unreached if isinstance(error, aiohttp.ClientConnectorError) else ReplicaError
            raise kind(f"{problem}; is the server up?") from error
        return _parse(url, status, raw, after)

    async def patient(
        self, attempt: Callable[[], Awaitable[T]], *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> T:
        """`await attempt()`, repeated while it raises `Busy`; see `retried`."""
        return await retried(attempt, on=Busy, backoff_s=self._backoff_s, total_s=self._busy_s, sleep=sleep)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            raise_open_files()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)
            self._session, self._loop = aiohttp.ClientSession(connector=connector), loop
        return self._session


@contextmanager
def reading(url: str, subject: str, reply: Any) -> Iterator[None]:
    """Turn every error of the block, which reads `subject` from a reply of any form, into a `ReplicaError`."""
    try:
        yield
    except ReplicaError:
        raise
    except Exception as error:  # no list of types is complete: a reply may hold anything that JSON can
        raise ReplicaError(f"{url}: not {subject} ({_short.repr(error)}): {_short.repr(reply)}") from error


def whole_number(value: Any, name: str, *, low: int, high: float) -> int:
    """`value`, or ValueError unless it is an integer in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {_short.repr(value)}")
    return value


async def all_done(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls; return the results, or raise the first error once every call has ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _read(url: str, reply: aiohttp.ClientResponse) -> bytes:
    """The body, decompressed; ReplicaError as soon as it is longer than any reply that is right."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > MAX_REPLY:
            raise ReplicaError(f"{url}: the reply has more than {MAX_REPLY >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


def _parse(url: str, status: int, raw: bytes, after: str | None) -> Any:
    text = raw[:1000].decode(errors="replace")
    if status in BUSY:
        raise Busy(f"{url}: status {status}: {text}", status, retry_after_s(after))
    if status >= 500:
        raise ReplicaError(f"{url}: status {status}: {text}")
    if status >= 400:
        hint = "; is this the address of the server itself?" if status == 404 else ""
        raise Refused(f"{url}: status {status}: {text}{hint}", status)
    try:
        return json.loads(raw) if raw.strip() else None
    except (ValueError, RecursionError) as error:
        if raw[:1] not in b"{[":  # /flush_cache answers in plain text
            return None
        raise ReplicaError(f"{url}: status {status}, but the reply is not JSON ({error}): {text}") from error


def raise_open_files() -> int:
    """Raise the limit of open files, and return it: a connection is one, and many systems start processes with a limit
    of 1024 (macOS: 256)."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MIN_OPEN_FILES, hard)
    for limit in (wanted, min(wanted, 10240)):  # macOS refuses more than that despite its hard limit
        if soft != resource.RLIM_INFINITY and soft < limit:
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return wanted if soft == resource.RLIM_INFINITY else soft


def check_prompt(prompt_ids: list[int], *, vocab_size: float) -> None:
    """ValueError unless there is a token and all ids are in [0, vocab_size): one beyond it kills an SGLang server."""
    if not prompt_ids:
        raise ValueError("prompt_ids must hold at least one token")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise ValueError(f"prompt_ids must be in [0, {vocab_size}), got {min(prompt_ids)} to {max(prompt_ids)}")


_ROUNDING = 1e-4  # nats by which the log-prob of a certain token may exceed 0


def check_reply(out: Completion, *, url: str, request: str, **expected: Any) -> Completion:
    """Return `out` if the server at `url` can have sampled it for the request named `request`.

    There are as many log-probs as tokens; at most `max_new_tokens`, and at least one unless it was aborted; ids are
    integers in [0, vocab_size); log-probs are finite and at most 0 (1e-4 for rounding). `reported` has pairs of what
    the server reports of the request and what was asked, by name; None: not reported, or not asked. `expected` are
    these three.

    Raises:
        ReplicaError: one of these does not hold; it names the server, the request and the value.
    """
    if problem := next(_problems(out, **expected), None):
        raise ReplicaError(f"{url}: the reply to request {request} is wrong: {problem}")
    return out


def _problems(
    out: Completion, reported: Mapping[str, tuple[Any, Any]], max_new_tokens: float, vocab_size: float
) -> Iterator[str]:
    for name, (told, asked) in reported.items():
        if told is not None and asked is not None and told != asked:
            yield f"it is of another request: {name} is {_short.repr(told)}, {_short.repr(asked)} was asked"
    if len(out.ids) != len(out.logp):
        yield f"{len(out.ids)} tokens but {len(out.logp)} log-probs"
    if len(out.ids) > max_new_tokens:
        yield f"{len(out.ids)} tokens, at most {max_new_tokens} were asked"
    if not out.ids and out.finish_reason != "abort":
        yield f"no token, and finish_reason {out.finish_reason!r}"
    for i, (token, logp) in enumerate(zip(out.ids, out.logp, strict=True)):
        if type(token) is not int or not 0 <= token < vocab_size:
            yield f"token {i} has the id {_short.repr(token)}, which is not in [0, {vocab_size})"
        elif type(logp) not in (float, int) or not _LOWEST <= logp < math.inf:
            value = _short.repr(logp)
            yield f"token {i} has the log-prob {value}, which is not finite; have weights or activations overflowed?"
        elif logp > _ROUNDING:
            yield f"token {i} has the log-prob {_short.repr(logp)}, which is above 0"
