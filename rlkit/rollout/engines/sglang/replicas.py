"""Which servers there are, which of them is up, and whose turn it is."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

from rlkit.rollout.engines.http import Busy, Http, Refused, ReplicaError, all_done
from rlkit.rollout.engines.sglang.checks import vocab_size
from rlkit.rollout.engines.sglang.wire import Limits, parse_version

CONTROL_TIMEOUT = 600.0
_log = logging.getLogger("rlkit.rollout")


class Replica:
    """One server: its outstanding requests, and why it is `down` (None: it is up)."""

    def __init__(self, http: Http, url: str) -> None:
        self._http, self.url = http, url.rstrip("/")
        self.outstanding = 0
        self.down: str | None = None
        self.paused = False
        self.life = 0  # how often it has come back
        self.num_ranks = 1
        self.num_stages = self.num_copies = 1  # pipeline and data parallel sizes
        self.has_sessions = True
        self.model_path: str | None = None
        self.last_reply = 0.0
        self.question: asyncio.Task[None] | None = None

    async def post(self, path: str, body: Any, *, timeout: float = CONTROL_TIMEOUT) -> Any:
        """The server's reply; see `Http.request`. Repeated while the server is busy."""
        return await self._http.patient(partial(self.post_once, path, body, timeout=timeout))

    async def post_once(self, path: str, body: Any, *, timeout: float) -> Any:
        """The server's reply, or `Busy`."""
        return await self._http.request(self.url + path, body, timeout=timeout)

    async def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        """{} where the server does not have the page."""
        try:
            return await self._http.request(self.url + path, method="GET", timeout=timeout) or {}
        except Refused:
            return {}


class Replicas:
    """Servers of one model behind one client. A server that died is out until an update of the weights includes it."""

    def __init__(self, http: Http, urls: Sequence[str], *, stall: float, vocab_size: int | None = None) -> None:
        self._http, self.all = http, [Replica(http, url) for url in urls]
        self.limits: Limits | None = None
        self.version = 0
        self._vocab_size = vocab_size
        self._stall, self._patience = stall, max(1.0, stall / 4)
        self._turn = 0

    def up(self) -> list[Replica]:
        """Those not known to be down."""
        return [r for r in self.all if r.down is None]

    async def learn(self) -> Limits:
        """Ask every server what it serves; `limits` are those of the smallest."""
        answers = await asyncio.gather(*(self._learn(r) for r in self.up()))
        if not self.up():
            raise self._none_left()
        known = [answer for answer in answers if answer is not None]
        self.limits = Limits(min(a.max_len for a in known), min(a.vocab_size for a in known))
        return self.limits

    async def pick(self) -> Replica:
        """The server with the fewest outstanding requests, in turn among equals.

        Raises:
            ReplicaError: all are down.
        """
        candidates = self.up()
        if not candidates:
            await asyncio.gather(*(self._readmit(r) for r in self.all))
            candidates = self.up()
            if not candidates:
                raise self._none_left()
        self._turn += 1
        turn = self._turn % len(candidates)
        return min(candidates[turn:] + candidates[:turn], key=lambda r: r.outstanding)

    async def request(self, replica: Replica, path: str, body: Any, *, timeout: float) -> Any:
        """POST, watched: when the server has not answered anything for `stall` seconds it is asked for its health."""
        if not replica.outstanding:
            replica.last_reply = time.monotonic()
        replica.outstanding += 1
        task = asyncio.ensure_future(replica.post_once(path, body, timeout=timeout))
        try:
            while not (await asyncio.wait({task}, timeout=self._stall))[0]:
                await self._still_there(replica)
            replica.last_reply = time.monotonic()
            return task.result()
        finally:
            replica.outstanding -= 1
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def suspect(self, replica: Replica) -> bool:
        """After a failed request: whether the server is gone. Many callers ask once."""
        if replica.down is None:
            await self._ask(replica, self._is_gone)
        return replica.down is not None

    async def revive(self) -> list[Replica]:
        """The servers that new weights go to: those that answer, also those that have come back."""
        await all_done(self._revive(replica) for replica in self.all)
        if self.limits is None:
            await self.learn()
        if not self.up():
            raise self._none_left()
        return self.up()

    async def session(self, servers: Sequence[Replica], edge: Literal["begin", "end"]) -> None:
        """Open or close SGLang's weight-update session; a server that knows none needs none."""
        await all_done(self._session(server, edge) for server in servers if server.has_sessions)

    async def _session(self, server: Replica, edge: Literal["begin", "end"]) -> None:
        try:
            await server.post(f"/{edge}_weight_update", {})
        except Refused as error:
            if error.status == 404:
                server.has_sessions = False
            elif edge == "begin" and "already open" in str(error):  # by a trainer that died in the middle of an update
                await self._session(server, "end")
                await server.post("/begin_weight_update", {})
            else:
                raise

    async def _revive(self, replica: Replica) -> None:
        was_down = replica.down is not None
        self._note(replica, await self._answers(replica, "/model_info"))
        if was_down and replica.down is None:
            replica.life += 1
            replica.has_sessions = True
            await self._learn(replica)

    async def _learn(self, replica: Replica) -> Limits | None:
        get = partial(replica.get, timeout=self._patience)
        try:
            info = await self._http.patient(partial(get, "/server_info"))
            replica.num_ranks, replica.num_stages, replica.num_copies = (
                int(info.get(f"{kind}_size") or 1) for kind in ("tp", "pp", "dp")
            )
            models = await self._http.patient(partial(get, "/v1/models"))
            max_len = models["data"][0].get("max_model_len") if models.get("data") else None
            replica.model_path = replica.model_path or info.get("model_path")  # that of an update from disk, later on
            return Limits(max_len or math.inf, self._vocab_size or vocab_size(replica.model_path) or math.inf)
        except (ReplicaError, TimeoutError) as error:
            self._note(replica, str(error))
            return None

    async def _readmit(self, replica: Replica) -> None:
        try:
            info = await replica.get("/model_info", timeout=self._patience)
        except (ReplicaError, TimeoutError):
            return  # why it went down says more
        served = parse_version(info.get("weight_version"), 0)
        other = f"it was restarted and serves version {served}, not {self.version}: call update_weights"
        self._note(replica, None if served == self.version else other)

    async def _still_there(self, replica: Replica) -> None:
        if not replica.paused and time.monotonic() - replica.last_reply >= self._stall:
            await self._ask(replica, self._hangs)
        if replica.down is not None:
            raise ReplicaError(f"{replica.url}: {replica.down}")

    async def _ask(self, replica: Replica, question: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
        if replica.question is None or replica.question.done():
            replica.question = asyncio.create_task(question(replica))
        await asyncio.shield(replica.question)

    def _note(self, replica: Replica, down: str | None) -> None:
        """Keep why a server is down, and say so when that changes: with one less a run goes on, only slower."""
        if (down is None) != (replica.down is None):
            _log.warning("SGLang server %s is %s", replica.url, "back" if down is None else f"left out: {down}")
        replica.down = down

    async def _is_gone(self, replica: Replica) -> None:
        self._note(replica, await self._answers(replica, "/model_info"))

    async def _hangs(self, replica: Replica) -> None:
        for _ in range(3):
            error = await self._answers(replica, "/health")
            if error is None:
                replica.last_reply = time.monotonic()
                return
        self._note(replica, f"it hangs: nothing for {self._stall} s, and it does not answer /health ({error})")

    async def _answers(self, replica: Replica, path: str) -> str | None:
        began = time.monotonic()
        try:
            await replica.get(path, timeout=self._patience)
        except Busy as error:
            return str(error) if error.status == 503 else None  # too many requests: it is there
        except (ReplicaError, TimeoutError) as error:
            ours = time.monotonic() - began > 2 * self._patience
            return None if ours else str(error)  # this process did not listen: a training step kept its event loop
        return None

    def _none_left(self) -> ReplicaError:
        reasons = "\n".join(f"  {r.url}: {r.down}" for r in self.all)
        return ReplicaError(f"no SGLang server is up; restart one and resume the run:\n{reasons}")
