"""Health tracking and least-loaded selection of inference servers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rlkit._util.text import masked
from rlkit.rollout.engines.http import Busy, Http, Refused, ReplicaError, all_done, reading
from rlkit.rollout.engines.servers.api import Facts, ServerLimits, parse_version
from rlkit.rollout.engines.servers.checks import experts_of, vocab_size
from rlkit.rollout.engines.silence import Silence

if TYPE_CHECKING:
    from rlkit.rollout.engines.servers.api import Api

CONTROL_TIMEOUT = 600.0
CLEAN_UP_S = 10.0  # for what follows a failure: the server may hang
HEALTH_TIMEOUT = 20.0
_log = logging.getLogger("rlkit.rollout")


class Replica:
    """One server: its outstanding requests, and why it is `down` (None: it is up)."""

    def __init__(self, http: Http, url: str, api: Api) -> None:
        self._http, self.url, self.api = http, url.rstrip("/"), api
        self.down: str | None = None
        self.forgot = False  # it was restarted, and has not been given the weights yet
        self.paused, self.has_sessions = False, True
        self.facts = Facts()
        self.outstanding = self.life = 0  # life: how often it has come back
        self.base: bool | None = None  # whether it has the trainer's weights without the adapter; None: ask it
        self.model_path: str | None = None
        self.last_reply = 0.0
        self.question: asyncio.Task[None] | None = None
        self.silence = Silence(f"the {api.name} server {self.url}")
        self._num_posts = 0
        self._ping: asyncio.Task[None] | None = None

    def reborn(self) -> None:
        """Note that it was restarted: what it was given is gone."""
        self.life += 1
        self.has_sessions, self.base = True, None

    async def post(self, path: str, body: Any, *, timeout: float = CONTROL_TIMEOUT) -> Any:
        """The server's reply; see `Http.request`. Repeated while the server is busy."""
        return await self._http.patient(partial(self.post_once, path, body, timeout=timeout))

    async def post_once(self, path: str, body: Any, *, timeout: float) -> Any:
        """The server's reply, or `Busy`."""
        with self._watched():
            try:
                reply = await self._http.request(self.url + path, body, timeout=timeout)
            except (Busy, Refused):
                self.silence.heard()
                raise
        self.silence.heard()
        return reply

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside the block, which awaits an answer, the server's silence is counted."""
        self._num_posts += 1
        if self._num_posts == 1:
            watch = self.silence.watch(self._ask_health, waiting=lambda: True)
            self._watcher = asyncio.get_running_loop().create_task(watch, name="rlkit-server-watch")
        try:
            yield
        finally:
            self._num_posts -= 1
            if not self._num_posts:
                self._watcher.cancel()
                self.silence.seconds = 0.0

    def _ask_health(self) -> None:
        async def ask() -> None:
            with suppress(ReplicaError, TimeoutError):  # a paused server generates nothing, so it is not "healthy"
                await self.get(self.api.alive if self.paused else "/health", timeout=HEALTH_TIMEOUT)
                self.silence.heard()

        if self._ping is None or self._ping.done():
            self._ping = asyncio.get_running_loop().create_task(ask(), name="rlkit-server-health")

    async def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        """The object that the server answers; {} where it answers nothing or does not have the page.

        Raises:
            ReplicaError: the answer is something else; see also `Http.request`.
        """
        try:
            reply = await self._http.request(self.url + path, method="GET", timeout=timeout) or {}
        except Refused:
            return {}
        with reading(self.url, f"a reply of {path}", reply):
            return dict(reply.items())

    async def version(self, *, timeout: float) -> int:
        """The version of the weights that it serves; -1: those that it was started with."""
        info = await self.get(self.api.info, timeout=timeout)
        with reading(self.url, f"a reply of {self.api.info}", info):
            served = parse_version(info.get("weight_version"), 0, start=-1)
        return served

    async def is_untouched(self) -> bool:
        """Whether it still has the weights that it was started with."""
        return (await self.get(self.api.info, timeout=60.0)).get("weight_version") == "default"

    async def adapters(self) -> list[str]:
        """Names of the adapters that it lists among its models."""
        models = await self.get("/v1/models", timeout=60.0)
        with reading(self.url, "a reply of /v1/models", models):
            names = [str(model["id"]) for model in models.get("data", []) if model.get("parent") is not None]
        return names


def named(version: int) -> str:
    """A served version as the server calls it; -1: "default"."""
    return "default" if version < 0 else str(version)


class Replicas:
    """Servers of one model behind one client. A dead server stays out until a weight update includes it again,
    or, where none is left, until it answers and has the current weights."""

    def __init__(
        self, http: Http, urls: Sequence[str], api: Api, *, stall: float, vocab_size: int | None = None
    ) -> None:
        self._http, self._api, self.all = http, api, [Replica(http, url, api) for url in urls]
        self.limits: ServerLimits | None = None
        self._turn = 0
        self.version: int | None = None  # that they were given; None: none yet
        self._drafted = self._verified = 0  # tokens of completions with drafts, and the forwards that verified them
        self.adapter: str | None = None  # that requests name
        self._vocab_size = vocab_size
        self._stall, self._patience = stall, max(1.0, stall / 4)

    def up(self) -> list[Replica]:
        """Servers not known to be down."""
        return [r for r in self.all if r.down is None]

    async def learn(self) -> ServerLimits:
        """Ask every server what it serves; `limits` are those of the smallest."""
        answers = [limits for limits in await asyncio.gather(*map(self._learn, self.up())) if limits is not None]
        if not answers:
            raise self._none_left()
        self.limits = ServerLimits(*(min(values) for values in zip(*answers, strict=True)))
        return self.limits

    async def pick(self) -> Replica:
        """The server with the fewest outstanding requests, in turn among equals.

        Raises:
            ReplicaError: all are down.
        """
        if not self._ready():
            await asyncio.gather(*(self._readmit(r) for r in self.all if r.down is not None))
            if not self._ready():
                raise self._none_left()
        ready = self._ready()
        self._turn += 1
        turn = self._turn % len(ready)
        return min(ready[turn:] + ready[:turn], key=lambda r: r.outstanding)

    def _ready(self) -> list[Replica]:
        """Servers that are up and have the weights."""
        return [r for r in self.up() if not r.forgot]

    async def request(self, replica: Replica, path: str, body: Any, *, timeout: float) -> Any:
        """POST; a server that has answered nothing for `stall` seconds is asked for its health meanwhile.

        Raises:
            ReplicaError: the health checks failed too; see also `Http.request`.
        """
        if not replica.outstanding:
            replica.last_reply = time.monotonic()
        replica.outstanding += 1
        task = asyncio.ensure_future(replica.post_once(path, body, timeout=timeout))
        try:
            while not (await asyncio.wait({task}, timeout=self._stall))[0]:
                if not replica.paused and time.monotonic() - replica.last_reply >= self._stall:
                    await self._check(replica, "/health", tries=3, then=f"it hangs: nothing for {self._stall} s, and ")
                if replica.down is not None:
                    raise ReplicaError(f"{replica.url}: {replica.down}")
            replica.last_reply = time.monotonic()
            return task.result()
        finally:
            replica.outstanding -= 1
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def note_drafts(self, num_tokens: int, num_verified: int) -> None:
        """Count a completion whose drafts took so many forwards; its first token came with the prompt."""
        if num_verified:
            self._drafted, self._verified = self._drafted + num_tokens - 1, self._verified + num_verified

    def measured(self) -> dict[str, float]:
        """Tokens per forward since the last call; {} without drafts."""
        drafted, verified, self._drafted, self._verified = self._drafted, self._verified, 0, 0
        return {"engine/tokens_per_forward": drafted / verified} if verified else {}

    async def suspect(self, replica: Replica) -> bool:
        """After a failed request: whether the server is gone."""
        if replica.down is None:
            await self._check(replica, self._api.alive)
        return replica.down is not None

    async def lacks_adapter(self, replica: Replica) -> bool:
        """Whether requests name an adapter that the server does not have: it was restarted, or is gone."""
        if self.adapter is None:
            return False
        try:
            return self.adapter not in await replica.adapters()
        except (ReplicaError, TimeoutError):
            return True

    def forget(self, replica: Replica, state: str) -> None:
        """Leave out a server that was restarted, until it is given the weights."""
        replica.forgot = True
        self._note(replica, f"it was restarted and {state}: call update_weights")

    async def revive(self) -> list[Replica]:
        """The servers that new weights go to: all that answer, including those that have come back."""
        await all_done(map(self._revive, self.all))
        if self.limits is None:
            await self.learn()
        if not self.up():
            raise self._none_left()
        return self.up()

    async def _revive(self, replica: Replica) -> None:
        was_down = replica.down is not None
        self._note(replica, await self._answers(replica, self._api.alive))
        if was_down and replica.down is None:
            replica.reborn()
            replica.forgot = True
            await self._learn(replica)

    async def _learn(self, replica: Replica) -> ServerLimits | None:
        try:
            facts = await self._http.patient(partial(self._api.learn, replica, timeout=self._patience))
            replica.facts = facts
            replica.model_path = replica.model_path or facts.model_path  # that of an update from disk, later on
            size = self._vocab_size or vocab_size(replica.model_path) or math.inf
            return ServerLimits(facts.max_len, size, experts_of(replica.model_path) if facts.experts else 0)
        except (ReplicaError, TimeoutError) as error:
            self._note(replica, str(error))
            return None

    async def _readmit(self, replica: Replica) -> None:
        """Take a server back that still has the current weights, after its connection or this machine failed."""
        with suppress(ReplicaError, TimeoutError):  # why it went down says more
            served = await replica.version(timeout=self._patience)
            if self.version not in (served, None):
                self.forget(replica, f"serves version {named(served)}, not {self.version}")
            elif await self.lacks_adapter(replica):
                self.forget(replica, "lacks the adapter")
            else:
                replica.forgot = False
                self._note(replica, None)

    async def _check(self, replica: Replica, path: str, *, tries: int = 1, then: str = "") -> None:
        """Note the server as down unless it answers `path`. Concurrent callers share one check."""

        async def check() -> None:
            for _ in range(tries):
                if (error := await self._answers(replica, path)) is None:
                    replica.last_reply = time.monotonic()
                    return
            self._note(replica, f"{then}{error}")

        if replica.question is None or replica.question.done():
            replica.question = asyncio.create_task(check())
        await asyncio.shield(replica.question)

    async def _answers(self, replica: Replica, path: str) -> str | None:
        """None if the server answers, else why not."""
        began = time.monotonic()
        try:
            await replica.get(path, timeout=self._patience)
        except Busy as error:
            return str(error) if error.status == 503 else None  # too many requests: it is there
        except (ReplicaError, TimeoutError) as error:
            blocked = time.monotonic() - began > 2 * self._patience  # a training step held this event loop
            return None if blocked else str(error)
        return None

    def _note(self, replica: Replica, down: str | None) -> None:
        """Set why a server is down, and log changes: the run continues with one server fewer, only slower."""
        if (down is None) != (replica.down is None):
            state = "back" if down is None else f"left out: {down}"
            _log.warning("%s server %s is %s", self._api.name, masked(replica.url), state)
        replica.down = down

    def _none_left(self) -> ReplicaError:
        reasons = "\n".join(f"  {r.url}: {r.down or 'it is being given the weights'}" for r in self.all)
        if self.limits is None:  # none has ever answered
            fix = f"start one with `{self._api.start}`"
            fault = f"no {self._api.name} server answers"
            return ReplicaError(f"{fault}: {fix}, or give no addresses to launch one here:\n{reasons}")
        return ReplicaError(f"no {self._api.name} server is up; restart one and resume the run:\n{reasons}")
