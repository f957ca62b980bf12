"""Running inference servers as a rollout engine: sample from one or many, and load new weights into them."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self
from uuid import uuid4

from rlkit._util.text import masked
from rlkit.data.images import Image
from rlkit.model.weights import AdapterStream, Payload, WeightStream
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.hosts import host_of, refuse_elsewhere
from rlkit.rollout.engines.http import Busy, Http, Refused, ReplicaError, Unreached, all_done
from rlkit.rollout.engines.servers.adapters import Adapters, LoraSync
from rlkit.rollout.engines.servers.api import PauseMode, ServerLimits
from rlkit.rollout.engines.servers.checks import NamedTensors, Probe, check_probe, check_release, checked, shapes
from rlkit.rollout.engines.servers.replicas import CLEAN_UP_S, Replica, Replicas, named
from rlkit.rollout.groups import cancel_all
from rlkit.rollout.stream import continue_aborted
from rlkit.types import Completion, Progress, SamplingParams, request_ids

if TYPE_CHECKING:
    from rlkit.rollout.engines.servers.api import Api

_RESTING = ("weights", "kv_cache")  # what `rest` frees and an update has taken back; "all" has SGLang's graphs, too
UNFINISHED = "the update to version {} was not finished: call update_weights again"
ASK_QUEUES_EVERY = 1.0  # seconds
CLOSE_TIMEOUT = 10.0
LOOK_EVERY = 1.0  # seconds, while no server is up
_log = logging.getLogger("rlkit.rollout")


class Transport(Protocol):
    """How weights travel. `sessions`: between `Api.begin` and `end`. `here`: within this machine only.

    One with an attribute `folder`, which all servers see, also carries LoRA adapters there.
    """

    sessions: bool
    here: bool

    async def send(self, servers: Sequence[Replica], named_tensors: NamedTensors, *, version: int) -> None:
        """Load `named_tensors` into every server and stamp the version."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


@dataclass
class _Call:
    """A `generate` in flight: its images, its server, its name there, whether it was aborted and whether it has ended.

    `again`: it was aborted for an update, finished or not, and continues from its tokens after one.
    """

    images: Sequence[Image]
    replica: Replica | None = None
    wire: str = ""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    done: bool = False
    again: bool = False


class ServerEngine:
    """An `rlkit.types.Engine` over running servers. It starts and stops no server, and sends nothing when it is made.

    It serves one event loop at a time and can be used from one `asyncio.run` after another.

    Args:
        urls: the servers, replicas of one model. A request goes to the one with the fewest outstanding.
        router: address of a router in front of them, which then distributes requests instead; weights still go to
            each of `urls`.
        api: the kind of server. transport: how weights travel.
        pause: what an update does to requests in flight. "retract": they wait, and continue under the new weights with
            recomputed keys and values. "in_place": they continue with the keys and values they have, which is faster
            and less exact. "abort": they return what they have. In every mode each token has its own version.
        lora: how weights with a LoRA adapter go to the servers. "adapter": the adapter alone, which they add; requests
            in flight then continue with recomputed keys and values, also with "in_place". "merged": all weights, with
            the adapter added. "auto": the adapter where all servers take one, else merged, with the reason in the log.
        release: `rest` frees the servers' GPU memory until the next update, for training on the same GPUs.
        probe: check every update, see `Probe`.
        unsent: prefixes of the names of served tensors that the trainer does not have. An update that lacks any other
            tensor is an error, but for those that transformers drops, such as `mtp.*` (layers that draft tokens).
        timeout: seconds that one attempt of a generation may take.
        stall: seconds without any answer from a server until its health is checked; after three failed checks its
            requests go elsewhere.
        tries: attempts of a generation until its error is raised. Weight updates are never repeated.
        wait_s: seconds for which requests and updates wait for a server to come back where none is up; see `lost`.
        tokenizer: of the model; with stop strings it keeps every token of a request that an update interrupts, see
            `rlkit.rollout.stream.continue_aborted`.
        vocab_size: number of token ids of the model, to check prompts and replies; by default that of the served
            checkpoint, where this machine can read it.
        backoff_s, busy_s: a server that answers 408, 425, 429 or 503 is asked again after about `backoff_s` seconds,
            twice that, ..., or after its Retry-After, for `busy_s` in total. Weight updates wait in the same way: such
            a request was not processed.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api: Api,
        transport: Transport,
        router: str | None = None,
        pause: PauseMode = "retract",
        lora: LoraSync = "auto",
        release: bool = False,
        probe: Probe | None = None,
        unsent: Sequence[str] = (),
        timeout: float = 7200.0,
        stall: float = 120.0,
        tries: int = 3,
        wait_s: float = 0.0,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        backoff_s: float = 0.5,
        busy_s: float = 600.0,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else list(urls)
        routers = [router] if router else []
        if not addresses:
            raise ValueError("urls must be one or more addresses, as http://127.0.0.1:30000")
        for url in [*addresses, *routers]:
            host_of(url)
        self.version, self.positional_noise, self._tokenizer = 0, api.positional_noise, tokenizer
        self._http = Http(backoff_s=backoff_s, busy_s=busy_s)
        self._servers = Replicas(self._http, addresses, api, stall=stall, vocab_size=vocab_size)
        self._serving = Replicas(self._http, routers, api, stall=stall) if routers else self._servers
        self._api, self._transport = api, transport
        self._pause, self._release, self._probe, self._unsent = pause, release, probe, tuple(unsent)
        never = "they free their weights while the trainer works" if release else None
        never = "requests go through a router" if routers else never
        folder = getattr(transport, "folder", None)
        self._adapters = Adapters(self._servers, mode=lora, folder=folder, never=never)
        self._gate: asyncio.Event | None = None  # while no request may be in flight: they wait for it
        # what each server has not taken back, with its `life`: a restarted one has its memory
        self._resting: dict[Replica, tuple[int, list[str]]] = {}
        self._timeout, self._tries = timeout, tries
        self._salt: str | None = None
        self._broken: str | None = None
        self._primed = self._closed = self._warned = False
        self._updating = asyncio.Lock()
        self._wait_s, self._forgot = wait_s, asyncio.Event()
        self._return: asyncio.Task[None] | None = None
        self._calls: dict[str, _Call] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._num_tokens = self._num_waiting = 0
        self._asked = 0.0
        self._moved: float | None = None  # when the update last read a tensor

    async def __aenter__(self) -> Self:
        try:
            await self._servers.learn()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None, images: Sequence[Image] = ()
    ) -> Completion:
        """Sample a completion of `prompt_ids`. See `rlkit.types.SamplingParams` and `Completion`.

        A call whose server dies, hangs, answers 5xx or with what cannot be the answer (see `check_reply`) is sampled
        again, on another server where there is one. A cancelled call is aborted on its server.

        Raises:
            ValueError: the prompt is empty, too long or has ids out of range; `rid` is in use; the server refuses.
            RuntimeError (ReplicaError): no server could do it; the last reason is in the message.
            TimeoutError: `timeout` has passed.
        """
        prompt_ids = request_ids(prompt_ids, params)
        limits = await self._usable()
        name = uuid4().hex if rid is None else rid
        if name in self._calls:
            raise ValueError(f"rid {name!r} is already in flight")
        if 0 < (room := limits.max_len - len(prompt_ids)) < params.max_new_tokens:  # where an abort is no abort either
            params = replace(params, max_new_tokens=int(room))
        call = self._calls[name] = _Call(images)

        async def part(context: list[int], left: SamplingParams) -> Completion | None:
            nonlocal call, limits
            if call.done:  # an update has ended the part before
                limits = await self._usable()
                if not call.again:  # aborted while it waited
                    return None
                call = self._calls[name] = _Call(images)
            return await self._sampled(call, context, left, limits)

        try:
            done = await continue_aborted(
                part, prompt_ids, params, again=lambda: call.again, tokenizer=self._tokenizer,
                positional_noise=self.positional_noise, ends=(getattr(self._tokenizer, "eos_token_id", None),),
            )  # fmt: skip
            self._num_tokens += len(done.ids)
            return done
        finally:
            del self._calls[name]
            if self._calls and time.monotonic() - self._asked > ASK_QUEUES_EVERY:
                self._asked = time.monotonic()
                self._spawn(self._count_waiting())

    async def _usable(self) -> ServerLimits:
        """The servers' limits, as soon as they can sample; RuntimeError if they cannot until the next update."""
        end = time.monotonic() + self._wait_s
        while True:
            if self._gate is not None:
                await self._gate.wait()
            elif self._broken is not None and time.monotonic() < end and not self._closed:
                await asyncio.sleep(LOOK_EVERY)  # the failed update is sent again
            elif self._closed or self._broken is not None:
                raise RuntimeError(self._broken or "the engine is closed")
            elif self._resting:
                raise RuntimeError("the servers' memory is released: call update_weights")
            elif self._servers.limits is None:
                await self._servers.learn()
            else:
                return self._servers.limits

    async def _sampled(
        self, call: _Call, context: list[int], params: SamplingParams, limits: ServerLimits
    ) -> Completion:
        """What a server samples after the context, until it ends or is aborted."""
        # built again for every attempt: an update in between may have changed the key of the prefix cache
        request = partial(self._body, context, params, limits)
        try:
            attempts = partial(self._attempts, call, request, limits)
            return await self._http.patient(attempts, sleep=partial(_sleep, unless=call.aborted))
        finally:
            call.done = True

    def _body(self, context: list[int], params: SamplingParams, limits: ServerLimits) -> dict[str, Any]:
        """The request, to the adapter where the servers have one."""
        body = self._api.body(context, params, limits, self._salt)
        return body if self._servers.adapter is None else self._api.adapted(body, self._servers.adapter)

    @property
    def progress(self) -> Progress:
        """Requests running and waiting, and tokens of the calls that have ended.

        The servers are asked for their queues when a call ends, at most once a second.
        """
        waiting = min(self._num_waiting, len(self._calls))
        return Progress(len(self._calls) - waiting, waiting, self._num_tokens)

    @property
    def silent_s(self) -> float:
        """Seconds for which a server has left requests without any sign of life, or an update has stood still; else 0.

        A server that waits in a collective for an update's tensors may still answer questions. After a failed update
        the seconds go on: requests wait for the next one.
        """
        still = 0.0 if self._moved is None else time.monotonic() - self._moved
        return max(still, *(r.silence.seconds for r in [*self._servers.all, *self._serving.all]))

    def measured(self) -> dict[str, float]:
        """Metrics since the last call: tokens per forward where servers draft tokens and report it."""
        return self._servers.measured()

    async def abort(self, rid: str | None = None) -> int:
        """End the request `rid` (None: all of this engine's): its caller gets the tokens so far, as "abort".

        Returns the number of requests; they end a moment later.
        """
        calls = list(self._calls.values()) if rid is None else [self._calls[rid]] if rid in self._calls else []
        for call in calls:
            self._end(call, again=False)
        return len(calls)

    def _end(self, call: _Call, *, again: bool) -> None:
        call.again = again and (call.again or not call.aborted.is_set())
        if not call.aborted.is_set():
            call.aborted.set()
            self._spawn(self._abort_until_done(call))

    async def form(self, weights: WeightStream) -> Payload:
        """What the servers need of a LoRA model's weights: where several engines get them, all get the largest form.

        Errors: ValueError where `lora` is "adapter" and they do not take one.
        """
        async with self._updating:
            return await self._adapters.form(await self._revive(), weights.model)

    async def update_weights(self, weights: NamedTensors, *, version: int) -> None:
        """Load `weights` into every server and stamp what is sampled from here on with `version`.

        Pauses generation, opens the server's update session, sends, flushes the prefix cache, closes the session,
        resumes, and runs the probe. After an in-place pause the cache cannot be flushed (running requests hold it);
        later requests then get a cache of their own, by a salt. A dead server is left out; one that has come back takes
        part again. An update also ends a `pause`.

        Of a `stream_weights` with a LoRA adapter only the adapter is sent where `lora` and the servers allow it. It has
        a name of its own at every update, which requests carry: those in flight are interrupted, and continue from
        their tokens with the new one (pause "abort": they end).

        Raises:
            ValueError, TypeError: the tensors are not those of the served checkpoint (names, shapes, one is missing),
            as far as it can be read on this machine; they are sharded; the servers run with `--pp` or `--dp`, to which
            only `FromDisk` and `FromChanges` send. WeightMismatch: see `Probe`. ReplicaError.
            After any failure the servers may hold mixed weights: `generate` raises until an update succeeds, or with
            `wait_s` waits for it, also what was in flight.
        """
        async with self._updating:
            self._moved = time.monotonic()
            servers = await self._revive()
            if self._release:
                check_release(servers)
            if isinstance(weights, WeightStream) and weights.has_adapter:
                weights = weights.in_form(await self._adapters.form(servers, weights.model))
            probe = self._probe
            if probe is not None and not self._primed:
                await all_done(self._sample(server, probe) for server in servers)
                self._primed = True
            try:
                await self._take_back(servers, "weights")
                await self._send(servers, weights, version)
                await self._take_back(servers, "kv_cache")
                self._resting = {}
                if self._pause == "in_place":
                    self._salt = f"rlkit-{version}"
                self.version = self._servers.version = self._serving.version = version
                for server in [*self._servers.all, *self._serving.all]:
                    server.forgot = False
                if probe is not None:
                    for server in servers:
                        check_probe(probe, await self._sample(server, probe), url=server.url, version=version)
            except BaseException as error:
                self._broken = UNFINISHED.format(version)
                if isinstance(error, TimeoutError) and any(await all_done(map(self._servers.suspect, servers))):
                    raise ReplicaError(str(error)) from error  # it is left out, and the update can be sent again
                raise
            self._broken = self._moved = None
            self._forgot.clear()

    async def lost(self) -> None:
        """Returns once requests wait because no server is up, and one has come back without the weights: they go on
        after `update_weights`. With `wait_s` only."""
        await self._forgot.wait()

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling on all servers; see the class for what happens to requests in flight. New ones wait."""
        await self._set_paused(self._servers.up(), mode)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._set_paused(self._servers.up(), None)

    async def rest(self) -> None:
        """With `release`: free the servers' GPU memory until `update_weights`. The loops call it after sampling."""
        if not self._release or self._resting:
            return
        while self._calls:  # aborted ones end a moment later, and a server with requests frees nothing
            await asyncio.sleep(0.05)

        async def release(server: Replica) -> bool:
            try:
                await self._api.release(server, _RESTING)
            except ReplicaError:
                if not await self._servers.suspect(server):
                    raise
            return server.down is None

        servers = self._servers.up()
        released = await all_done(map(release, servers))
        took = (server for server, done in zip(servers, released, strict=True) if done)
        self._resting = {server: (server.life, [*_RESTING]) for server in took}

    async def _take_back(self, servers: Sequence[Replica], tag: str) -> None:
        """Have the servers that have freed this memory take it back, once: SGLang dies of a second request."""

        async def one(server: Replica) -> None:
            life, tags = self._resting.get(server, (server.life, []))
            if tag not in tags or server.life != life:
                return
            if self._servers.version is not None and tag == "weights" and await server.is_untouched():
                server.reborn()  # while it rested
                return
            await self._api.take_back(server, [tag])
            tags.remove(tag)

        await all_done(map(one, servers))

    async def release_memory(self, *tags: str) -> None:
        """Free GPU memory for training on the same device; `tags`: "kv_cache", "weights", "cuda_graph", or all.

        Nothing may be in flight. Released weights come back undefined: update them after `resume_memory`. SGLang needs
        `--enable-memory-saver`, vLLM `--enable-sleep-mode`.
        """
        await all_done(self._api.release(server, tags) for server in self._servers.up())

    async def resume_memory(self, *tags: str) -> None:
        """Take the memory back. To keep the peak low, resume "weights", update them, then resume "kv_cache"."""
        await all_done(self._api.take_back(server, tags) for server in self._servers.up())

    async def close(self) -> None:
        """Abort what is in flight and close all connections. The servers keep running; a closed engine refuses."""
        self._closed = True
        if self._return is not None:
            self._return.cancel()
        await self.abort()
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT)
        await cancel_all(self._background)
        self._adapters.close()  # before the transport removes its empty folder
        try:
            await self._transport.close()
        finally:
            await self._http.close()

    async def _attempts(self, call: _Call, request: Callable[[], dict[str, Any]], limits: ServerLimits) -> Completion:
        failures = deaths = 0
        stale: list[Replica] = []
        while not call.aborted.is_set():
            replica = await self._pick(call)
            if replica is None or call.aborted.is_set():
                break
            given, direct = self._servers.version, self._serving is self._servers
            start = 0 if given is None or not direct else -1  # after an update, none of ours
            call.replica, call.wire = replica, uuid4().hex  # SGLang aborts by prefix: no name may begin with another
            body, version = self._api.named(request(), call.wire), self.version
            sent = self._api.showing(body, call.images) if call.images else body
            try:
                reply = await self._serving.request(replica, self._api.generate, sent, timeout=self._timeout)
                done = self._api.completion(reply, body, limits, url=replica.url, version=version, start=start)
                self._servers.note_drafts(len(done.ids), self._api.num_verified(reply))
                if given is None or not direct or (oldest := min(done.versions, default=given)) >= given:
                    return done
                if replica in stale:  # taken back, as what it says of itself is right
                    fault = f"says that it serves version {given}, and samples of {named(oldest)}"
                    raise ReplicaError(f"{replica.url} {fault}")
                stale.append(replica)
                self._servers.forget(replica, f"serves version {named(oldest)}, not {given}")  # between two requests
            except Busy:
                raise
            except Refused:
                if not await self._servers.lacks_adapter(replica):
                    raise
                self._servers.forget(replica, "lacks the adapter")
            except ReplicaError as error:
                failures += 1
                deaths += await self._serving.suspect(replica) and not isinstance(error, Unreached)
                if failures >= self._tries or deaths > 1:  # whatever kills two servers must not see a third
                    last = str(error)[:2000]  # of what a server replied
                    raise ReplicaError(f"generation failed {failures} times, the last time: {last}") from error
                await asyncio.sleep(min(0.1 * 2**failures, 5.0))
            except (asyncio.CancelledError, TimeoutError):
                self._spawn(self._abort_once(replica, call.wire))
                raise
        return Completion([], [], [], "abort")

    async def _pick(self, call: _Call) -> Replica | None:
        """Pick a healthy server, waiting up to `wait_s` for one. None: the call was aborted meanwhile."""
        while True:
            try:
                return await self._serving.pick()
            except ReplicaError as error:
                if not self._wait_s:
                    raise
                if self._return is None or self._return.done():  # one wait for all calls
                    self._return = asyncio.create_task(self._until_up(error), name="rlkit-servers-return")
            aborted = asyncio.create_task(call.aborted.wait())
            try:
                await asyncio.wait({self._return, aborted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                aborted.cancel()
            if call.aborted.is_set():
                return None
            self._return.result()

    async def _until_up(self, why: ReplicaError) -> None:
        """Return when a server with the current weights is up; raise `why` after `wait_s`."""
        _log.warning("no %s server is up: waiting for one, for up to %.0f s", self._api.name, self._wait_s)
        end = time.monotonic() + self._wait_s
        while time.monotonic() < end:
            with suppress(ReplicaError):
                await self._serving.pick()
                return
            if any(server.forgot for server in self._serving.all):
                self._forgot.set()
            await asyncio.sleep(LOOK_EVERY)
        raise why

    async def _revive(self) -> list[Replica]:
        """The servers that new weights go to, after the wait for one where none answers."""
        end = time.monotonic() + self._wait_s
        while True:
            try:
                return await self._servers.revive()
            except ReplicaError:
                if time.monotonic() >= end:
                    raise
                await asyncio.sleep(LOOK_EVERY)

    async def _abort_until_done(self, call: _Call) -> None:
        pause = 0.05
        while not call.done and call.replica is not None:
            # SGLang forgets an abort that comes before its request, and loses one that comes while it is paused
            if not call.replica.paused:
                await self._abort_once(call.replica, call.wire)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _abort_once(self, replica: Replica, wire: str) -> None:
        servers = [replica] if replica in self._servers.all else self._servers.up()
        posts = (self._api.abort(server, wire, timeout=10.0) for server in servers)
        await asyncio.gather(*posts, return_exceptions=True)  # a server that is gone samples no more

    async def _count_waiting(self) -> None:
        """Requests that wait inside the servers, for `progress`; 0 for a server that does not report them."""
        asked = map(self._api.waiting, self._servers.up())
        told = await asyncio.gather(*asked, return_exceptions=True)  # only for display
        self._num_waiting = sum(num for num in told if isinstance(num, int))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _send(self, servers: Sequence[Replica], weights: NamedTensors, version: int) -> None:
        """The weights in the form that they have: all of them, the adapter, or both."""
        apart, had = isinstance(weights, AdapterStream), self._servers.adapter is not None
        whole = weights.base if isinstance(weights, AdapterStream) else weights
        async with self._interrupted(servers) if apart or had else nullcontext():
            if whole is not None:
                for server in servers:
                    server.base = False
                await self._load(servers, whole, version, getattr(weights, "model", None))
                for server in servers:
                    server.base = apart
            if isinstance(weights, AdapterStream):
                await self._adapters.load(servers, weights, version)
            elif had:
                await self._adapters.unload(servers)

    @asynccontextmanager
    async def _interrupted(self, servers: Sequence[Replica]) -> AsyncIterator[None]:
        """Abort the requests in flight for the block; they resume after it, with the adapter of then."""
        self._gate = asyncio.Event()
        try:
            await self._set_paused(servers, None)  # an abort that comes while a server is paused is lost
            for call in self._calls.values():
                self._end(call, again=self._pause != "abort")
            while not all(call.done for call in self._calls.values()):
                await asyncio.sleep(0.02)
            yield
        finally:
            gate, self._gate = self._gate, None
            gate.set()

    async def _load(self, servers: Sequence[Replica], weights: NamedTensors, version: int, model: Any) -> None:
        for server in servers:
            if self._transport.here:
                refuse_elsewhere(server.url, self._api.name, instead="give `transport` FromGroup(...) or FromDisk(...)")
            if server.facts.quantized:
                fault = f"{masked(server.url)} was started with --quantization and would read new weights as its codes"
                raise ValueError(f"{fault}: start it without, by --engine-quantization, or train an adapter alone")
            stages, copies = server.facts.num_stages, server.facts.num_copies
            if self._transport.sessions and (stages > 1 or copies > 1):
                raise ValueError(
                    f"{masked(server.url)} runs with pp_size {stages} and dp_size {copies}, to which {self._api.name} "
                    "loads from disk only: use transport=FromDisk(...), or one server per replica, with tensor "
                    "parallelism only"
                )
        served = shapes(servers[0].model_path)
        if not served and self._probe is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"rlkit cannot read the checkpoint {servers[0].model_path!r} of {masked(servers[0].url)} on this "
                "machine, so names and shapes of weights go unchecked, and unknown names may be ignored: pass a probe",
                stacklevel=2,
            )
        try:
            await self._set_paused(servers, self._pause)
            if self._transport.sessions:
                await all_done(map(self._api.begin, servers))
            read = self._noted(checked(weights, served, unsent=self._unsent, model=model))
            await self._transport.send(servers, read, version=version)
            if self._pause != "in_place":
                await all_done(map(self._api.flush, servers))
            if self._transport.sessions:
                await all_done(map(self._api.end, servers))
        except BaseException:
            self._broken = UNFINISHED.format(version)
            for call in self._calls.values():  # what is in flight must not continue under mixed weights
                self._end(call, again=self._wait_s > 0 and self._pause != "abort")  # but under those sent again
            with suppress(TimeoutError):  # the first error tells the cause, and servers that hang do not answer
                await asyncio.wait_for(self._undo(servers), CLEAN_UP_S)
            raise
        await self._set_paused(servers, None)

    async def _undo(self, servers: Sequence[Replica]) -> None:
        """After a failed update, on each server as far as it answers: end the session and all requests, and resume."""

        async def one(server: Replica) -> None:
            if self._transport.sessions:
                with suppress(EngineError, ValueError):
                    await self._api.end(server)
            with suppress(EngineError, ValueError):
                await self._api.abort(server, None, timeout=CLEAN_UP_S)
            await self._set_paused([server], None)

        await asyncio.gather(*map(one, servers), return_exceptions=True)

    def _noted(self, weights: NamedTensors) -> NamedTensors:
        for pair in weights:
            self._moved = time.monotonic()
            yield pair

    async def _set_paused(self, servers: Sequence[Replica], mode: PauseMode | None) -> None:
        async def one(server: Replica) -> None:
            server.paused = True
            try:
                await (self._api.resume(server) if mode is None else self._api.pause(server, mode))
            finally:
                server.paused = mode is not None

        await all_done(one(server) for server in servers)

    async def _sample(self, server: Replica, probe: Probe) -> Completion:
        greedy = SamplingParams(max_new_tokens=probe.num_tokens, temperature=0.0)
        limits = self._servers.limits or await self._servers.learn()
        request = self._body(probe.prompt_ids, greedy, limits)
        reply = await server.post(self._api.generate, request)
        return self._api.completion(reply, request, limits, url=server.url, version=self.version)


async def _sleep(seconds: float, *, unless: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(unless.wait(), seconds)
