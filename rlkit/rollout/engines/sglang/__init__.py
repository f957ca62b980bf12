"""SGLang servers as a rollout engine: start them, sample from one or many, and put new weights into them.

    with launch("model", args=["--tp", "2"]) as server:
        async with SGLang(server.url) as engine:
            completion = await engine.generate(prompt_ids, params=SamplingParams(max_new_tokens=64))
            await engine.update_weights(stream_weights(model), version=1)

`generate`, `abort`, `update_weights` and `close` are those of `LocalEngine`. This process needs no SGLang, only
`aiohttp`: the servers may run in another environment or on other machines. Written for SGLang 0.5 and tested against
0.5.23; versions without weight-update sessions or per-token weight versions are served as well.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Sequence
from typing import Literal

from rlkit.rollout.engines.http import Http, ReplicaError, all_done
from rlkit.rollout.engines.sglang.calls import Calls
from rlkit.rollout.engines.sglang.checks import (
    NamedTensors,
    Probe,
    Shapes,
    WeightMismatch,
    check_probe,
    checked,
    shapes,
)
from rlkit.rollout.engines.sglang.group import FromGroup
from rlkit.rollout.engines.sglang.replicas import Replica, Replicas
from rlkit.rollout.engines.sglang.server import Server, launch
from rlkit.rollout.engines.sglang.weights import FromDisk, FromTensors
from rlkit.rollout.engines.sglang.wire import body, completion
from rlkit.types import Completion, Progress, SamplingParams

__all__ = [
    "FromDisk",
    "FromGroup",
    "FromTensors",
    "Probe",
    "ReplicaError",
    "SGLang",
    "Server",
    "WeightMismatch",
    "launch",
]

Transport = FromTensors | FromDisk | FromGroup
PauseMode = Literal["retract", "in_place", "abort"]
UNFINISHED = "the update to version {} was not finished: call update_weights again"


class SGLang:
    """An engine over running servers. Nothing is sent when it is made, and it starts and ends no server.

    It serves one event loop at a time and can be used from one `asyncio.run` after another.

    Args:
        urls: the servers, replicas of one model. A request goes to the one with the fewest outstanding.
        router: address of an SGLang router in front of them, which then distributes requests instead; weights still
            go to each of `urls`.
        transport: how weights travel: `FromTensors` (the default, one machine), `FromDisk`, `FromGroup`.
        pause: what an update does to requests in flight. "retract": they wait, and go on under the new weights with
            keys and values computed anew. "in_place": they go on with the keys and values they have, which is faster
            and less exact. "abort": they return what they have. In all cases each token's version says who made it.
        probe: check every update, see `Probe`.
        unsent: beginnings of the names of served tensors that the trainer does not have, such as "mtp." (layers for
            speculative decoding, which transformers drops). Any other one that an update does not bring is an error.
        timeout: seconds that one attempt of a generation may take.
        stall: a server that has answered nothing for so many seconds is asked whether it is alive; where it does not
            answer that three times, its requests go elsewhere.
        tries: how often a generation is attempted before its error is raised. Weight updates are never repeated.
        vocab_size: number of token ids of the model, to check what is sent and sampled; by default that of the served
            checkpoint, where this machine can read it.
        backoff_s, busy_s: a server that answers 408, 425, 429 or 503 is asked again after about `backoff_s` seconds,
            twice that, ..., or after its Retry-After, for `busy_s` in total. Weight updates wait in the same way: such
            a request was not processed.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        router: str | None = None,
        transport: Transport | None = None,
        pause: PauseMode = "retract",
        probe: Probe | None = None,
        unsent: Sequence[str] = (),
        timeout: float = 7200.0,
        stall: float = 120.0,
        tries: int = 3,
        vocab_size: int | None = None,
        backoff_s: float = 0.5,
        busy_s: float = 600.0,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else list(urls)
        routers = [router] if router else []
        if not addresses or not all(url.startswith(("http://", "https://")) for url in [*addresses, *routers]):
            raise ValueError(f"urls must be one or more addresses like http://host:30000, got {urls!r}, {router=}")
        self.version = 0
        self._http = Http(backoff_s=backoff_s, busy_s=busy_s)
        self._servers = Replicas(self._http, addresses, stall=stall, vocab_size=vocab_size)
        serving = Replicas(self._http, routers, stall=stall) if routers else self._servers
        self._calls = Calls(self._http, serving, self._servers, timeout=timeout, tries=tries)
        self._transport = FromTensors() if transport is None else transport
        self._pause, self._probe, self._unsent = pause, probe, tuple(unsent)
        self._salt: str | None = None
        self._broken: str | None = None
        self._primed = self._closed = self._warned = False
        self._names = itertools.count()
        self._updating = asyncio.Lock()

    async def __aenter__(self) -> SGLang:
        try:
            await self._servers.learn()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """Sample a completion of `prompt_ids`. See `rlkit.types.SamplingParams` and `Completion`.

        A call whose server dies, hangs, answers 5xx or with what cannot be the answer (see `check_reply`) is sampled
        anew, on another server where there is one.
        A cancelled call is aborted on its server. A `seed` is heeded by servers in deterministic mode (see `launch`).

        Raises:
            ValueError: the prompt is empty, too long or has ids out of range; `rid` is in use; the server refuses.
            RuntimeError (ReplicaError): no server could do it; the last reason is in the message.
            TimeoutError: `timeout` has passed.
        """
        if self._closed or self._broken is not None:
            raise RuntimeError(self._broken or "the engine is closed")
        limits = self._servers.limits or await self._servers.learn()
        name = rid if rid is not None else f"rlkit-{next(self._names)}"
        # made anew for every attempt: an update in between may have given the prefix cache another key
        return await self._calls.run(name, lambda: body(prompt_ids, params, limits, self._salt), version=self.version)

    @property
    def progress(self) -> Progress:
        """How many requests run and wait, and how many tokens came back so far (those of calls that have ended).

        Which of the requests wait, the servers are asked at most once a second, when a call ends.
        """
        return self._calls.progress

    async def abort(self, rid: str | None = None) -> int:
        """End the request `rid` (None: all of this engine's): its caller gets the tokens so far, as "abort".

        Returns the number of requests; they end a moment later.
        """
        return self._calls.abort(rid)

    async def update_weights(self, named_tensors: NamedTensors, *, version: int) -> None:
        """Load weights into every server and stamp what is sampled from here on with `version`.

        Pauses generation, opens SGLang's update session, sends, flushes the prefix cache, closes the session,
        continues, and runs the probe. After an in-place pause the cache cannot be flushed (running requests hold it);
        later requests then get a cache of their own, by SGLang's `extra_key`. A server found dead is left out; one
        that has come back takes part again. An update also ends a `pause`.

        Raises:
            ValueError, TypeError: the tensors are not those of the served checkpoint (names, shapes, one is missing),
            as far as it can be read on this machine; or they are sharded. WeightMismatch: see `Probe`. ReplicaError.
            Whatever it was, the servers may hold a mixture of weights: `generate` refuses until an update has
            succeeded.
        """
        async with self._updating:
            servers = await self._servers.revive()
            probe = self._probe
            if probe is not None and not self._primed:
                await all_done(self._sample(server, probe) for server in servers)
                self._primed = True
            try:
                await self._load(servers, named_tensors, version)
                if self._pause == "in_place":
                    self._salt = f"rlkit-{version}"
                self.version = self._servers.version = self._calls.serving.version = version
                if probe is not None:
                    for server in servers:
                        check_probe(probe, await self._sample(server, probe), url=server.url, version=version)
            except BaseException:
                self._broken = UNFINISHED.format(version)
                raise
            self._broken = None

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling on all servers; see `SGLang` for what happens to requests in flight. New ones wait."""
        await self._set_paused(self._servers.up(), mode)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._set_paused(self._servers.up(), None)

    async def release_memory(self, *tags: str) -> None:
        """Free GPU memory for training on the same device; `tags`: "kv_cache", "weights", "cuda_graph", or all.

        The server needs `--enable-memory-saver`, and nothing in flight. Released weights come back undefined: update
        them after `resume_memory`.
        """
        body = {"tags": list(tags) or None}
        await all_done(server.post("/release_memory_occupation", body) for server in self._servers.up())

    async def resume_memory(self, *tags: str) -> None:
        """Take the memory back. To keep the peak low, resume "weights", update them, then resume "kv_cache"."""
        body = {"tags": list(tags) or None}
        await all_done(server.post("/resume_memory_occupation", body) for server in self._servers.up())

    async def close(self) -> None:
        """Abort what is in flight and close all connections. The servers go on running; a closed engine refuses."""
        self._closed = True
        await self._calls.close()
        try:
            await self._transport.close()
        finally:
            await self._http.close()

    async def _load(self, servers: Sequence[Replica], named_tensors: NamedTensors, version: int) -> None:
        for server in servers:
            self._refuse_layout(server)
        sound = checked(named_tensors, self._known(servers[0]), unsent=self._unsent)
        try:
            await self._set_paused(servers, self._pause)
            if self._transport.sessions:
                await self._servers.session(servers, "begin")
            try:
                await self._transport.send(servers, sound, version=version)
                if self._pause != "in_place":
                    await all_done(server.post("/flush_cache", None) for server in servers)
            finally:
                if self._transport.sessions:
                    await self._servers.session(servers, "end")
        except BaseException:
            self._broken = UNFINISHED.format(version)
            self._calls.abort(None)  # what is in flight must not go on under a mixture of weights
            everything = (s.post("/abort_request", {"abort_all": True}) for s in servers)
            await asyncio.gather(*everything, return_exceptions=True)
            raise
        finally:
            await self._set_paused(servers, None)

    def _refuse_layout(self, server: Replica) -> None:
        if self._transport.sessions and (server.num_stages > 1 or server.num_copies > 1):
            raise ValueError(
                f"{server.url} runs with pp_size {server.num_stages} and dp_size {server.num_copies}, to which SGLang "
                "sends no weights but from disk: use transport=FromDisk(...), or one server per replica, --tp only"
            )

    def _known(self, server: Replica) -> Shapes:
        known = shapes(server.model_path)
        if not known and self._probe is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"rlkit cannot read the checkpoint {server.model_path!r} of {server.url} on this machine, so names and "
                "shapes of weights go unchecked, and SGLang ignores names that it does not know: pass a probe",
                stacklevel=2,
            )
        return known

    async def _set_paused(self, servers: Sequence[Replica], mode: PauseMode | None) -> None:
        path, body = ("/continue_generation", {}) if mode is None else ("/pause_generation", {"mode": mode})

        async def one(server: Replica) -> None:
            server.paused = True
            try:
                await server.post(path, body)
            finally:
                server.paused = mode is not None

        await all_done(one(server) for server in servers)

    async def _sample(self, server: Replica, probe: Probe) -> Completion:
        greedy = SamplingParams(max_new_tokens=probe.num_tokens, temperature=0.0)
        limits = await self._servers.learn()
        request = body(probe.prompt_ids, greedy, limits, self._salt)
        reply = await server.post("/generate", request)
        return completion(reply, request, limits, url=server.url, version=self.version)
