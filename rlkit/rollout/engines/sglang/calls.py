"""`generate` calls in flight on SGLang servers: their attempts, their abort, and how many there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from rlkit.rollout.engines.http import Busy, Http, ReplicaError
from rlkit.rollout.engines.sglang.replicas import Replica, Replicas
from rlkit.rollout.engines.sglang.wire import completion
from rlkit.types import Completion, Progress

ASK_QUEUES_EVERY = 1.0  # seconds
CLOSE_TIMEOUT = 10.0


@dataclass
class _Call:
    """A `generate` in flight: where it is now, under which name, whether it was aborted and whether it has ended."""

    replica: Replica | None = None
    wire: str = ""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    done: bool = False


class Calls:
    """The calls of one engine. `serving` is who samples (the servers, or a router in front of them)."""

    def __init__(self, http: Http, serving: Replicas, servers: Replicas, *, timeout: float, tries: int) -> None:
        self._http, self.serving, self._servers = http, serving, servers
        self._timeout, self._tries = timeout, tries
        self._calls: dict[str, _Call] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._num_tokens = self._num_waiting = 0
        self._asked = 0.0

    @property
    def progress(self) -> Progress:
        """See `SGLang.progress`."""
        waiting = min(self._num_waiting, len(self._calls))
        return Progress(len(self._calls) - waiting, waiting, self._num_tokens)

    async def run(self, name: str, request: Callable[[], dict[str, Any]], *, version: int) -> Completion:
        """Attempt `request()` until it succeeds or fails for good; it is made anew for every attempt.

        `version` is for servers that do not report theirs. Raises as `SGLang.generate`.
        """
        if name in self._calls:
            raise ValueError(f"rid {name!r} is already in flight")
        call = self._calls[name] = _Call()
        try:
            attempts = partial(self._attempts, call, request, version)
            out = await self._http.patient(attempts, sleep=partial(_sleep, unless=call.aborted))
            self._num_tokens += len(out.ids)
            return out
        finally:
            call.done = True
            del self._calls[name]
            if self._calls and time.monotonic() - self._asked > ASK_QUEUES_EVERY:
                self._asked = time.monotonic()
                self._spawn(self._count_waiting())

    def abort(self, name: str | None) -> int:
        """End one call, or all. They end a moment later. Returns how many."""
        calls = list(self._calls.values()) if name is None else [self._calls[name]] if name in self._calls else []
        for call in calls:
            if not call.aborted.is_set():
                call.aborted.set()
                self._spawn(self._abort_until_done(call))
        return len(calls)

    async def close(self) -> None:
        """Abort all calls; after this nothing runs in the background."""
        self.abort(None)
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _attempts(self, call: _Call, request: Callable[[], dict[str, Any]], version: int) -> Completion:
        failures = deaths = 0
        while not call.aborted.is_set():
            replica = await self.serving.pick()
            if call.aborted.is_set():
                break
            call.replica, call.wire = replica, uuid4().hex  # SGLang aborts by prefix: no name may begin with another
            try:
                named = {**request(), "rid": call.wire}
                reply = await self.serving.request(replica, "/generate", named, timeout=self._timeout)
                limits = self._servers.limits or await self._servers.learn()
                return completion(reply, named, limits, url=replica.url, version=version)
            except Busy:
                raise
            except ReplicaError as error:
                failures += 1
                deaths += await self.serving.suspect(replica)
                if failures >= self._tries or deaths > 1:  # whatever kills two servers must not see a third
                    raise ReplicaError(f"generation failed {failures} times, the last time: {error}") from error
                await asyncio.sleep(min(0.1 * 2**failures, 5.0))
            except (asyncio.CancelledError, TimeoutError):
                self._spawn(self._abort_once(replica, call.wire))
                raise
        return Completion([], [], [], "abort")

    async def _abort_until_done(self, call: _Call) -> None:
        pause = 0.05
        while not call.done and call.replica is not None:
            # SGLang forgets an abort that comes before its request, and one that comes while it is paused for good
            if not call.replica.paused:
                await self._abort_once(call.replica, call.wire)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _abort_once(self, replica: Replica, wire: str) -> None:
        servers = [replica] if replica in self._servers.all else self._servers.up()
        posts = (server.post_once("/abort_request", {"rid": wire}, timeout=10.0) for server in servers)
        await asyncio.gather(*posts, return_exceptions=True)  # a server that is gone samples no more

    async def _count_waiting(self) -> None:
        """How many requests wait inside the servers, for `progress`. One that does not say has no queue."""
        asked = (server.get("/v1/loads?include=core", timeout=5.0) for server in self._servers.up())
        replies = await asyncio.gather(*asked, return_exceptions=True)
        loads = [load for reply in replies if isinstance(reply, dict) for load in reply.get("loads", [])]
        self._num_waiting = sum(load.get("num_waiting_reqs", 0) for load in loads)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _sleep(seconds: float, *, unless: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(unless.wait(), seconds)
