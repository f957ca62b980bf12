"""One address for all episodes of a run, with a secret path for each.

It listens while an episode is open. A request to a path that no open episode has is refused before its body is read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlkit.agents import completions, messages, responses
from rlkit.agents.demands import BadRequest
from rlkit.agents.request import Request, event_stream, parsed

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY = 32 << 20  # bytes of a request: a million tokens of text are about 5 MiB
MAX_ACTIVE = 64  # requests of an episode at once
_LARGE, _NUM_LARGE = 1 << 20, 8  # bytes of a body that counts as large, and how many of them are read at once
_READ_S = 60.0  # seconds in which a body must have come
_WAIT_S = 30.0  # seconds in which a connection must name an open episode
_IDLE_S = 75.0  # seconds between the requests of a connection
_MOST_CONNECTIONS = 4096
_quiet = logging.getLogger("rlkit.agents.http")  # aiohttp's: each malformed request is a traceback there
_quiet.disabled = True
_FORMATS: Mapping[str, ModuleType] = {
    "chat/completions": completions, "responses": responses, "messages": messages, "messages/count_tokens": messages,
}  # fmt: skip


@dataclass(eq=False)
class _Episode:
    """An open episode, its requests in flight, and the conversations of its Responses."""

    session: Any  # see `rlkit.agents.endpoint._Episode`
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    stored: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(eq=False)
class _Listening:
    """A server in an event loop: its start, which gives the runner and the URL, and its open episodes."""

    start: asyncio.Future[tuple[Any, str]]
    episodes: dict[str, _Episode] = field(default_factory=dict)
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_NUM_LARGE))
    connections: set[_Connection] = field(default_factory=set)
    unknown: dict[_Connection, None] = field(default_factory=dict)
    """the connections that have named no open episode, the oldest first"""
    most: int = _MOST_CONNECTIONS


class _Connection:
    """A connection of aiohttp's (`inner`), closed if it names no open episode in time, or where there are too many.

    asyncio's other events go to `inner` as they are.
    """

    def __init__(self, now: _Listening, inner: asyncio.Protocol) -> None:
        self._now, self._inner = now, inner
        self._timer: asyncio.TimerHandle | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._now.connections.add(self)
        self._now.unknown[self] = None
        self._timer = asyncio.get_running_loop().call_later(_WAIT_S, self.transport.abort)
        self._inner.connection_made(transport)
        if len(self._now.connections) > self._now.most:
            next(iter(self._now.unknown)).transport.abort()

    def known(self) -> None:
        """It has named an open episode."""
        self._now.unknown.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self.known()
        self._now.connections.discard(self)
        self._inner.connection_lost(error)

    def __getattr__(self, event: str) -> Any:
        return getattr(self._inner, event)


class Server:
    """A server at `address`, "HOST" or "HOST:PORT" (without a port, or with 0: any free one), plain or with TLS."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port = _split(address)
        self._tls = tls
        self._now: _Listening | None = None
        self._closing: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def episode(self, session: Any) -> AsyncIterator[str]:
        """The `base_url` of an episode, which ends in /v1. Requests left at its end are cancelled."""
        now = self._now = self._now or _Listening(asyncio.ensure_future(self._start()))
        name = secrets.token_urlsafe(18)
        episode = now.episodes[name] = _Episode(session)
        try:
            _, url = await asyncio.shield(now.start)
            yield f"{url}/{name}/v1"
        finally:
            del now.episodes[name]
            for task in episode.tasks:
                task.cancel()
            if not now.episodes:
                self._now, self._closing = None, asyncio.ensure_future(_stop(now))
                await asyncio.shield(self._closing)

    async def _start(self) -> tuple[Any, str]:
        from aiohttp import web

        from rlkit.rollout.engines.http import raise_open_files  # needs aiohttp

        if self._closing is not None and not self._closing.done():
            await self._closing
        now = self._now
        assert now is not None
        app, respond = web.Application(client_max_size=MAX_BODY), partial(_respond, now)
        for path in _FORMATS:
            app.router.add_post(f"/{{episode}}/v1/{path}", respond)
        app.router.add_get("/{episode}/v1/models", respond)
        app.router.add_get("/{episode}/v1/models/{model:.+}", respond)
        app.router.add_route("*", "/{elsewhere:.*}", _elsewhere)
        options: dict[str, Any] = {"shutdown_timeout": 0.1, "handler_cancellation": True, "keepalive_timeout": _IDLE_S}
        runner = web.AppRunner(app, access_log=None, logger=_quiet, **options)
        await runner.setup()
        serve: Any = runner.server
        now.most = min(_MOST_CONNECTIONS, raise_open_files() // 4)  # the run needs the others for its own files
        try:
            made: Any = lambda: _Connection(now, serve())  # noqa: E731
            loop = asyncio.get_running_loop()
            site = await loop.create_server(made, self._host, self._port, backlog=1024, ssl=self._tls)
        except OSError as error:
            await runner.cleanup()
            raise OSError(f"cannot listen at {self._host}:{self._port}: {error.strerror or error}") from None
        host = f"[{self._host}]" if ":" in self._host else self._host
        port = site.sockets[0].getsockname()[1]
        return (site, runner), f"http{'s' if self._tls else ''}://{host}:{port}"


def check_address(address: str) -> None:
    """ValueError where nothing can listen at an address now."""
    host, port = _split(address)
    try:
        (family, kind, _, _, where), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ValueError(f"nothing can listen at {address}: {error.strerror or error}") from None


def tls_of(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """What `Server` needs for TLS: a certificate with its chain, and the key, in files of PEM (None: in the same file).

    ValueError for files that have none, and for a key with a password.
    """
    for file in filter(None, (certificate, key)):
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=_without_password)
    except ssl.SSLError as error:
        both = f"{certificate}, {key}" if key else certificate
        raise ValueError(f"{both}: no certificate with its key ({error.reason or 'no PEM'})") from None
    return context


def _without_password() -> str:
    raise ValueError("the key has a password: remove it with `openssl pkey -in KEY -out NEW`")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if address.count(":") == 1 else (address, "", "0")
    return host, int(port)


async def _stop(now: _Listening) -> None:
    await asyncio.wait({now.start})
    if not now.start.cancelled() and now.start.exception() is None:
        site, runner = now.start.result()[0]
        site.close()
        await runner.cleanup()


async def _respond(now: _Listening, request: web.Request) -> web.StreamResponse:
    """The answer of the episode that the path names, or a failure in the format of the request."""
    path = request.path.partition("/v1/")[2]
    if (episode := now.episodes.get(request.match_info["episode"])) is None:
        return _failure(path, "this episode is over, or there is none of this name", "not_found", 404, close=True)
    connection = None if request.transport is None else request.transport.get_protocol()
    if isinstance(connection, _Connection):
        connection.known()
    if path.startswith("models"):
        return _models(request.match_info.get("model"))
    if len(episode.tasks) >= MAX_ACTIVE:
        episode.session.refused()
        return _failure(path, f"more than {MAX_ACTIVE} requests at once", "rate_limit_exceeded", 429, close=True)
    work = asyncio.ensure_future(_answer(now, episode, path, request))
    episode.tasks.add(work)
    try:
        return await work
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():  # the client has gone
            work.cancel()
            raise
        return _failure(path, "this episode is over", "not_found", 404, close=True)
    except BadRequest as error:
        episode.session.refused()
        return _failure(path, str(error), error.code, error.status, close=error.status == 413)
    except Exception as error:
        return _failure(path, f"{type(error).__name__}: {error}", "server_error", 500)
    finally:
        episode.tasks.discard(work)


async def _answer(now: _Listening, episode: _Episode, path: str, request: web.Request) -> web.StreamResponse:
    from aiohttp import web

    form: Any = _FORMATS[path]
    raw = await _body(now, request)
    body = await asyncio.to_thread(parsed, raw) if len(raw) > _LARGE else parsed(raw)
    if path == "messages/count_tokens":
        count = await episode.session.count(form.read(body, counting=True))
        return web.json_response({"input_tokens": count})
    wanted: Request = form.read(body, episode.stored) if form is responses else form.read(body)
    answers = await episode.session.answers(wanted)
    whole = form.write(wanted, answers)
    if form is responses:  # instructions are not part of what a later request continues
        history = wanted.messages[1:] if body.get("instructions") else wanted.messages
        episode.stored[whole["id"]] = [*history, answers[0].message]
    if not wanted.stream:
        return web.json_response(whole)
    return web.Response(text=event_stream(form.events(wanted, whole)), content_type="text/event-stream")


async def _body(now: _Listening, request: web.Request) -> bytes:
    """The body of a request; few large ones are read at once, so that many do not fill the memory."""
    from aiohttp import web

    size = request.content_length
    too_large = BadRequest(f"the request has more than {MAX_BODY >> 20} MiB", status=413)
    if size is not None and size > MAX_BODY:
        raise too_large
    try:
        async with now.large if size is None or size > _LARGE else nullcontext():
            return await asyncio.wait_for(request.read(), _READ_S)
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {' '.join(str(error).split())}") from None
    except TimeoutError:
        raise BadRequest(f"the body did not come within {_READ_S:g} s", status=408) from None


def _failure(path: str, message: str, code: str, status: int, *, close: bool = False) -> web.Response:
    from aiohttp import web

    form: Any = _FORMATS.get(path, completions)
    retry = {} if status == 429 else {"x-should-retry": "false"}
    response = web.json_response(form.failure(message, code, status), status=status, headers=retry)
    if close:
        response.force_close()
    return response


async def _elsewhere(request: web.Request) -> web.Response:
    """The failure of a request to a path that is not served."""
    path = request.path.partition("/v1/")[2]
    served = ", ".join(f"POST {name}" for name in _FORMATS)
    message = f"there is no {request.method} {path[:80]} here: after /v1/ are {served}, GET models"
    return _failure(path, message, "unknown_url", 405 if path in _FORMATS and request.method != "POST" else 404)


def _models(name: str | None) -> web.Response:
    """The one model; of any name, since requests may name any."""
    from aiohttp import web

    policy: dict[str, Any] = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "rlkit"}
    policy |= {"type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's fields
    ends = {"first_id": "policy", "last_id": "policy"}
    return web.json_response(policy if name else {"object": "list", "data": [policy], "has_more": False, **ends})
