"""SGLang servers as a rollout engine: start them, sample from one or many, and put new weights into them.

    with launch("model", args=["--tp", "2"]) as server:
        async with connect(server.url) as engine:
            completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))
            await engine.update_weights(stream_weights(model), version=1)

`generate`, `abort`, `update_weights` and `close` are those of `rlkit.rollout.local.LocalEngine`. This process needs no
SGLang, only `aiohttp`: the servers may run in another environment or on other machines. Written for SGLang 0.5 and
tested against 0.5.23; versions without weight-update sessions or per-token weight versions are served as well.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal
from uuid import uuid4

from rlkit.rollout._http import Http, ReplicaError
from rlkit.rollout._sglang_checkpoint import checked, shapes
from rlkit.rollout._sglang_group import FromGroup
from rlkit.rollout._sglang_probe import Probe, WeightMismatch, check
from rlkit.rollout._sglang_replicas import Replica, Replicas
from rlkit.rollout._sglang_server import Server, launch
from rlkit.rollout._sglang_weights import FromDisk, FromTensors, NamedTensors, Target, Transport
from rlkit.rollout._sglang_wire import body, completion
from rlkit.types import Completion, SamplingParams

__all__ = ["FromDisk", "FromGroup", "FromTensors", "Probe", "SGLang", "Server", "WeightMismatch", "connect", "launch"]

PauseMode = Literal["retract", "in_place", "abort"]
CONTROL_TIMEOUT = 600.0


@dataclass
class _Call:
    """A `generate` in flight: where it is now, under which name, and whether it was aborted."""

    replica: Replica | None = None
    wire: str = ""
    aborted: bool = False


def connect(
    urls: str | Sequence[str],
    *,
    router: str | None = None,
    transport: Transport | None = None,
    pause: PauseMode = "retract",
    probe: Probe | None = None,
    timeout: float = 7200.0,
    stall: float = 120.0,
    tries: int = 3,
) -> SGLang:
    """An engine over running servers. Nothing is sent yet.

    Args:
        urls: the servers, replicas of one model. A request goes to the one with the fewest outstanding.
        router: address of an SGLang router in front of them, which then distributes requests instead; weights still
            go to each of `urls`.
        transport: how weights travel: `FromTensors` (the default, one machine), `FromDisk`, `FromGroup`.
        pause: what an update does to requests in flight. "retract": they wait, and go on under the new weights with
            keys and values computed anew. "in_place": they go on with the keys and values they have, which is faster
            and less exact. "abort": they return what they have. In all cases each token's version says who made it.
        probe: check every update, see `Probe`.
        timeout: seconds that one attempt of a generation may take.
        stall: a server that has answered nothing for so many seconds is asked whether it is alive; where it does not
            answer that three times, its requests go elsewhere.
        tries: how often a generation is attempted before its error is raised. Weight updates are never repeated.
    """
    addresses = [urls] if isinstance(urls, str) else list(urls)
    if not addresses or any(
        not url.startswith(("http://", "https://")) for url in [*addresses, *([router or "http://"])]
    ):
        raise ValueError(
            f"urls must be one or more addresses like http://host:30000, got {urls!r} and router {router!r}"
        )
    transport = FromTensors() if transport is None else transport
    return SGLang(addresses, router, transport, pause=pause, probe=probe, timeout=timeout, stall=stall, tries=tries)


class SGLang:
    """See `connect`. It serves one event loop at a time and can be used from one `asyncio.run` after another."""

    def __init__(
        self,
        urls: Sequence[str],
        router: str | None,
        transport: Transport,
        *,
        pause: PauseMode,
        probe: Probe | None,
        timeout: float,
        stall: float,
        tries: int,
    ) -> None:
        self.version = 0
        self._http = Http()
        self._servers = Replicas(self._http, urls, stall=stall)
        self._serving = Replicas(self._http, [router], stall=stall) if router else self._servers
        self._transport, self._pause, self._probe = transport, pause, probe
        self._timeout, self._tries = timeout, tries
        self._calls: dict[str, _Call] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._salt: str | None = None
        self._broken: str | None = None
        self._primed = self._closed = False
        self._names = itertools.count()
        self._updating = asyncio.Lock()

    async def __aenter__(self) -> SGLang:
        await self._servers.learn()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """Sample a completion of `prompt_ids`. See `rlkit.types.SamplingParams` and `Completion`.

        A call whose server dies, hangs, answers 5xx or nonsense is sampled anew, on another server where there is one.
        A cancelled call is aborted on its server. A `seed` is heeded by servers in deterministic mode (see `launch`).

        Raises:
            ValueError: the prompt is empty, too long or has ids out of range; `rid` is in use; the server refuses.
            RuntimeError (ReplicaError): no server could do it; the last reason is in the message.
            TimeoutError: `timeout` has passed.
        """
        self._check_usable()
        request = body(prompt_ids, params, self._servers.limits or await self._servers.learn(), self._salt)
        name = rid if rid is not None else f"rlkit-{next(self._names)}"
        if name in self._calls:
            raise ValueError(f"rid {rid!r} is already in flight")
        call = self._calls[name] = _Call()
        try:
            return await self._attempts(call, request)
        finally:
            del self._calls[name]

    def abort(self, rid: str | None = None) -> int:
        """End the request `rid` (None: all of this engine's): its caller gets the tokens so far, as "abort".

        Returns how many requests that concerns; they end a moment later. Call it in the event loop's thread.
        """
        calls = list(self._calls.values()) if rid is None else [self._calls[rid]] if rid in self._calls else []
        for call in calls:
            if not call.aborted:
                call.aborted = True
                self._spawn(self._abort_until_done(call))
        return len(calls)

    async def update_weights(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Load weights into every server and stamp what is sampled from here on with `version`.

        Pauses generation, opens SGLang's update session, sends, flushes the prefix cache, closes the session,
        continues, and runs the probe. After an in-place pause the cache cannot be flushed (running requests hold it);
        later requests then get a cache of their own, by SGLang's `extra_key`. A server found dead is left out; one
        that has come back takes part again.

        Raises:
            WeightMismatch: see `Probe`. Whatever went wrong otherwise: the servers may hold a mixture of weights, so
            `generate` refuses until an update has succeeded.
        """
        async with self._updating:
            servers = await self._servers.revive()
            if self._probe is not None and not self._primed:
                await asyncio.gather(*(self._probe_sample(s, self._probe.prompt_ids) for s in servers))
                self._primed = True
            self._broken = f"the update to version {version} was not finished: call update_weights again"
            await self._load(servers, named_tensors, version)
            if self._pause == "in_place":
                self._salt = f"rlkit-{version}"
            self.version = self._servers.version = self._serving.version = version
            self._broken = None
            if self._probe is not None:
                for server in servers:
                    sample = partial(self._probe_sample, server)
                    await check(self._probe, sample, url=server.url, version=version)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling on all servers; see `connect` for what happens to requests in flight. New ones wait."""
        await self._set_paused(self._servers.up(), mode)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._set_paused(self._servers.up(), None)

    async def release_memory(self, *tags: str) -> None:
        """Free GPU memory for training on the same device; `tags`: "kv_cache", "weights", "cuda_graph", or all.

        The server needs `--enable-memory-saver`, and nothing in flight. Released weights come back undefined: update
        them after `resume_memory`.
        """
        await self._all(self._servers.up(), "/release_memory_occupation", {"tags": list(tags) or None})

    async def resume_memory(self, *tags: str) -> None:
        """Take the memory back. To keep the peak low, resume "weights", update them, then resume "kv_cache"."""
        await self._all(self._servers.up(), "/resume_memory_occupation", {"tags": list(tags) or None})

    async def close(self) -> None:
        """Abort what is in flight and close all connections. The servers go on running; a closed engine refuses."""
        self._closed = True
        self.abort()
        if self._background:
            await asyncio.wait(self._background, timeout=10.0)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        try:
            await self._transport.close()
        finally:
            await self._http.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._broken is not None and not self._updating.locked():
            raise RuntimeError(self._broken)

    async def _attempts(self, call: _Call, request: dict[str, Any]) -> Completion:
        failures = deaths = 0
        while not call.aborted:
            call.replica = await self._serving.pick()
            call.wire = uuid4().hex  # SGLang aborts by prefix, so names must not begin with one another
            try:
                named = {**request, "rid": call.wire}
                reply = await self._serving.request(call.replica, "/generate", named, timeout=self._timeout)
                return completion(reply, url=call.replica.url, version=self.version)
            except ReplicaError as error:
                failures += 1
                deaths += await self._serving.suspect(call.replica)
                if failures >= self._tries or deaths > 1:  # whatever kills two servers must not see a third
                    raise ReplicaError(f"generation failed {failures} times, the last time: {error}") from error
                await asyncio.sleep(0.1 * 2**failures)
            except (asyncio.CancelledError, TimeoutError):
                self._spawn(self._abort_once(call.replica, call.wire))
                raise
        return Completion([], [], [], "abort")

    async def _abort_until_done(self, call: _Call) -> None:
        pause = 0.05
        while call in self._calls.values() and call.replica is not None:
            # SGLang forgets an abort that comes before its request, and one that comes while it is paused for good
            if not call.replica.paused:
                await self._abort_once(call.replica, call.wire)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _abort_once(self, replica: Replica, wire: str) -> None:
        for server in [replica] if replica in self._servers.all else self._servers.up():
            try:
                await self._http.request(f"{server.url}/abort_request", {"rid": wire}, timeout=10.0)
            except (ReplicaError, TimeoutError, ValueError):
                continue  # a server that is gone samples no more

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _load(self, servers: Sequence[Replica], named_tensors: NamedTensors, version: int) -> None:
        targets = [Target(s.url, s.num_ranks, partial(self._control, s)) for s in servers]
        await self._set_paused(servers, self._pause)
        try:
            if self._transport.sessions:
                await self._servers.session(servers, "begin")
            try:
                sound = checked(named_tensors, shapes(servers[0].model_path))
                await self._transport.send(targets, sound, version=version)
                if self._pause != "in_place":
                    await self._all(servers, "/flush_cache")
            finally:
                if self._transport.sessions:
                    await self._servers.session(servers, "end")
        except BaseException:
            self.abort()  # what is in flight must not go on under a mixture of weights
            everything = (self._control(s, "/abort_request", {"abort_all": True}) for s in servers)
            await asyncio.gather(*everything, return_exceptions=True)
            raise
        finally:
            await self._set_paused(servers, None)

    async def _set_paused(self, servers: Sequence[Replica], mode: PauseMode | None) -> None:
        for server in servers:
            server.paused = True
        path, body = ("/continue_generation", {}) if mode is None else ("/pause_generation", {"mode": mode})
        await self._all(servers, path, body)
        for server in servers:
            server.paused = mode is not None

    async def _all(self, servers: Sequence[Replica], path: str, body: dict[str, Any] | None = None) -> None:
        await asyncio.gather(*(self._control(server, path, body) for server in servers))

    async def _control(self, server: Replica, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._http.request(server.url + path, body, timeout=CONTROL_TIMEOUT)

    async def _probe_sample(self, server: Replica, prompt_ids: list[int]) -> Completion:
        assert self._probe is not None
        greedy = SamplingParams(max_new_tokens=self._probe.num_tokens, temperature=0.0)
        request = body(prompt_ids, greedy, await self._servers.learn(), self._salt)
        reply = await self._control(server, "/generate", request)
        return completion(reply, url=server.url, version=self.version)
