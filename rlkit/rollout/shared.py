"""One rollout for many training ranks: a few of them sample, and every rank gets all groups.

The engine runs outside the ranks (servers, or `rlkit.rollout.engines.process` for the CPU). On one machine rank 0 has
the one client, which is enough for any number of servers. On several, the first rank of each samples, scores and
journals its share of the prompts, with the servers of its own machine (`Share`), so that K machines sample what one
would. Groups are broadcast as trajectories. Weights do not travel for the engines' sake: `stream_weights` gathers each
tensor on every rank, and each sampler hands it to its own servers.

Differs: verl and OpenRLHF drive engine and trainer from a third process (Ray) and send each rank its part of the
batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from rlkit._util.ranks import on_this_device, rank, world_size
from rlkit.model.weights import Payload, WeightStream
from rlkit.rollout.engines import EngineError, Unreachable
from rlkit.rollout.groups import Group, Prompt, rollout
from rlkit.rollout.stream import Counts, GroupStream, continue_aborted

X = TypeVar("X")
Resend = Callable[[], Awaitable[object]]  # publishes the current weights again, on all ranks together


async def gathered(work: Callable[[], Awaitable[X]], *, samplers: Sequence[int] = (0,)) -> list[X]:
    """Run `work` on the ranks `samplers`. Every rank returns their results, in that order, or raises their first error.

    A sampler that waits for a slower one keeps its event loop running.
    """
    if world_size() == 1:
        return [await work()]
    mine: list[Any] = [None, None]  # what it returned, what it raised
    error: Exception | None = None
    if rank() in samplers:
        try:
            mine[0] = await work()
        except Exception as e:
            kind = Unreachable if isinstance(e, Unreachable) else EngineError  # its message says all: one line
            error, mine[1] = e, kind(str(e)) if isinstance(e, EngineError) else RuntimeError(f"rank {rank()}: {e!r}")
    share = partial(_broadcast, mine, samplers)
    sent = await asyncio.to_thread(on_this_device(share)) if len(samplers) > 1 else share()
    for source, (_, failed) in zip(samplers, sent, strict=True):
        if failed is not None:
            raise error if error is not None and source == rank() else failed
    return [value for value, _ in sent]


def _broadcast(mine: list[Any], samplers: Sequence[int]) -> list[list[Any]]:
    """What each sampler has, on every rank."""
    sent = [mine if source == rank() else [None] * len(mine) for source in samplers]
    for source, values in zip(samplers, sent, strict=True):
        dist.broadcast_object_list(values, src=source)
    return sent


async def from_first(work: Callable[[], Awaitable[X]]) -> X:
    """Run `work` on rank 0 and return its result, or raise its error, on every rank."""
    return (await gathered(work))[0]


def samplers_of(engine: Any) -> tuple[int, ...]:
    """The ranks on which an engine samples."""
    return getattr(engine, "samplers", (0,))


async def sampled(
    work: Callable[[], Awaitable[X]], *, engine: Any, samplers: Sequence[int], resend: Resend | None
) -> list[X]:
    """`gathered` for work that samples with `engine`.

    Where a sampler lost all its servers and one has come back without the weights (`ServerEngine.lost`), all ranks call
    `resend`; the work waits meanwhile.
    """
    if resend is None or not hasattr(engine, "lost"):
        return await gathered(work, samplers=samplers)
    task: asyncio.Future[X] | None = None

    async def until_lost() -> list[X]:
        nonlocal task
        task = task or asyncio.ensure_future(work())
        lost = asyncio.ensure_future(_lost(engine))
        try:
            both: set[asyncio.Future[Any]] = {task, lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        return [task.result()] if task.done() else []

    try:
        while not all(shares := await gathered(until_lost, samplers=samplers)):
            await resend()
        return [x for of_sampler in shares for x in of_sampler]
    finally:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _lost(engine: Any) -> None:
    """Returns when the engine needs its weights again; never for one that has no method `lost`."""
    await (engine.lost() if hasattr(engine, "lost") else asyncio.Event().wait())


async def shared_rollout(
    prompts: Sequence[Prompt], *, engine: Any = None, resend: Resend | None = None,
    on_group: Callable[[Prompt, Group], None] | None = None, **options: Any,
) -> list[Group]:  # fmt: skip
    """`rollout` of which each sampler of `engine` (None: rank 0) takes its share; every rank gets all groups.

    `on_group` is called where a group is sampled, and on the first sampler for all. `resend`: see `sampled`.
    """
    samplers = samplers_of(engine)
    num, k = len(samplers), samplers.index(rank()) if rank() in samplers else 0
    mine = partial(rollout, prompts[k::num], indices=range(k, len(prompts), num), on_group=on_group, **options)
    shares = await sampled(mine, engine=engine, samplers=samplers, resend=resend)
    groups = [shares[i % num][i // num] for i in range(len(prompts))]
    if on_group is not None and rank() == samplers[0]:
        for i, group in enumerate(groups):
            if i % num:
                on_group(prompts[i], group)
    return groups


SEND_TRIES = 5


async def publish(engine: Any, weights: Callable[[], WeightStream], *, version: int) -> dict[str, float]:
    """Send the weights to the engine; returns the bytes that it has read of them as `sync/bytes`, if any, and what it
    has measured since the last time, where it has an optional method `measured`.

    A server may fail meanwhile: those that are up then get the weights anew, in at most `SEND_TRIES` tries.
    """
    for left in reversed(range(SEND_TRIES)):
        stream = weights()
        try:
            await engine.update_weights(stream, version=version)
            break
        except EngineError as error:
            if not left or not hasattr(engine, "lost") or isinstance(error, Unreachable):
                raise
    measured: dict[str, float] = getattr(engine, "measured", dict)()
    return measured | ({"sync/bytes": stream.num_bytes} if stream.num_bytes else {})


async def rest(engine: Any) -> None:
    """Tell an engine that sampling is over until the next update; one without a method `rest` has nothing to do."""
    if hasattr(engine, "rest"):
        await engine.rest()


async def _form(engine: Any, weights: WeightStream) -> Payload:
    """What an engine needs of a LoRA model's weights; all of them where it has no method `form`."""
    return Payload.MERGED if not hasattr(engine, "form") else await engine.form(weights)


class SharedEngine:
    """An `rlkit.types.Engine` for all ranks around `engine`: a real one on each of `samplers`, None elsewhere."""

    def __init__(self, engine: Any, *, samplers: Sequence[int] = (0,)) -> None:
        self.engine, self.samplers = engine, tuple(samplers)
        self.generate, self.abort = getattr(engine, "generate", None), getattr(engine, "abort", None)
        self.positional_noise = getattr(engine, "positional_noise", False)
        self.measured = getattr(engine, "measured", dict)

    async def update_weights(self, weights: Iterable[Any], *, version: int) -> None:
        """See `Engine`. Every rank consumes all of `weights`, because gathering a tensor involves all ranks.

        Those with a LoRA adapter are sent in one form on all ranks: the largest that a sampler's servers need.
        """
        if isinstance(weights, WeightStream) and weights.has_adapter:
            forms = await gathered(partial(_form, self.engine, weights), samplers=self.samplers)
            weights = weights.in_form(max(forms))

        async def send() -> None:
            try:
                await self.engine.update_weights(weights, version=version)
            finally:
                deque(weights, maxlen=0)

        if rank() not in self.samplers:
            deque(weights, maxlen=0)
        await gathered(send, samplers=self.samplers)

    async def rest(self) -> None:
        """Have the engines free memory until the next update; all ranks wait until they have."""
        await gathered(partial(rest, self.engine), samplers=self.samplers)

    async def lost(self) -> None:
        """`ServerEngine.lost` of this rank's engine."""
        await _lost(self.engine)

    @property
    def progress(self) -> Any:
        """The counts of this rank's engine; None on ranks that do not sample."""
        return getattr(self.engine, "progress", None)

    @property
    def silent_s(self) -> float:
        """Seconds since this rank's engine last answered."""
        return getattr(self.engine, "silent_s", 0.0)

    async def close(self) -> None:
        """Close this rank's engine."""
        if self.engine is not None:
            await self.engine.close()


class Share(NamedTuple):
    """The places of one of K samplers among the `num` groups of a step: [k num / K, (k + 1) num / K)."""

    first: int
    size: int
    num: int

    @staticmethod
    def of(k: int, samplers: int, num: int) -> Share:
        """The share of sampler k."""
        first, end = num * k // samplers, num * (k + 1) // samplers
        return Share(first, end - first, num)

    def place(self, j: int) -> int:
        """The number, in the stream of all prompts, of the j-th prompt that this sampler starts."""
        return j // self.size * self.num + self.first + j % self.size


class _Taken(NamedTuple):
    """What a sampler's `take` returns to all ranks."""

    groups: list[Group]
    prompts: list[Prompt]
    num_dropped: int
    outcomes: list[tuple[int, bool]]
    progress: Counts
    state: dict[str, Any]
    dropped: list[tuple[Prompt, Group, int]]


class SharedStream:
    """A `GroupStream` on each sampler of `engine`, for its share of the prompts; every rank takes all groups.

    All samplers take together. `num_dropped`, `outcomes`, `progress`, `prompts` and `state` are of all samplers, right
    after the last `take`. A group that `keep` rejects is replaced by the next prompt of the same sampler. A run can be
    resumed on another number of samplers: they go on with the first step of which no prompt was started, and finish the
    groups in flight.

    Args:
        on_group: of `GroupStream`; called where a group is sampled, and on rank 0 also for each one that another
            sampler dropped.
        journal: of `GroupStream`; the k-th sampler's is `{journal}_{k}`, except the first one's.
        max_dropped: of `GroupStream`; each sampler has its share.
        tokenizer: of `continue_aborted`.
        turns: sampling and training take turns: after each `take` the stream pauses, and the engine rests.
        options: the other arguments of `GroupStream`.
    """

    def __init__(
        self, prompt_at: Callable[[int], Prompt], *, engine: Any, groups_per_step: int, on_group: Callable[..., None],
        journal: Path | None = None, max_dropped: int | None = None, state: Mapping[str, Any] | None = None,
        turns: bool = False, tokenizer: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self._engine, self._on_group, self._group_size = engine, on_group, options["group_size"]
        self._samplers, self._turns = samplers_of(engine)[:groups_per_step], turns
        self._number = self._samplers.index(rank()) if rank() in self._samplers else None
        self._dropped: list[tuple[Prompt, Group, int]] = []
        self._stream: GroupStream | None = None
        self.num_dropped, self.prompts, self.progress = 0, list[Prompt](), Counts(0, 0)
        self.outcomes = list[tuple[int, bool]]()
        self.state: dict[str, Any] = {}
        if (k := self._number) is not None:
            positional = getattr(engine, "positional_noise", False)
            share = Share.of(k, len(self._samplers), groups_per_step)
            folder = journal.with_name(f"{journal.name}_{k}") if journal is not None and k else journal
            limit = None if max_dropped is None else -(-max_dropped * share.size // groups_per_step)
            self._stream = GroupStream(
                prompt_at, generate=engine.generate, abort=engine.abort, groups_per_step=share.size,
                index_of=share.place, on_group=self._note if k else on_group, journal=folder, max_dropped=limit,
                continued=partial(continue_aborted, tokenizer=tokenizer, positional_noise=positional),
                state=state and state_of(state, k=k, samplers=len(self._samplers), num=groups_per_step), **options,
            )  # fmt: skip

    async def __aenter__(self) -> SharedStream:
        if self._stream is not None:
            await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._stream is not None:
            await self._stream.__aexit__(*error)

    async def take(self, resend: Resend | None = None) -> list[Group]:
        """The next groups of all samplers, on every rank, in the order in which they were started. See `sampled`."""
        shares = await sampled(self._take, engine=self._engine, samplers=self._samplers, resend=resend)
        if self._turns:
            await self.pause()
            await rest(self._engine)
        self.num_dropped = sum(x.num_dropped for x in shares)
        self.prompts = [prompt for x in shares for prompt in x.prompts]
        self.outcomes = [outcome for x in shares for outcome in x.outcomes]
        self.progress = Counts(*map(sum, zip(*(x.progress for x in shares), strict=True)))
        self.state = shares[0].state if len(shares) == 1 else {"samplers": [x.state for x in shares]}
        if self._number == 0:
            for prompt, group, step in (dropped for x in shares for dropped in x.dropped):
                self._on_group(prompt, group, step=step, kept=False)
        return [group for x in shares for group in x.groups]

    async def _take(self) -> _Taken:
        stream = self._stream
        assert stream is not None
        groups = await stream.take()
        dropped, self._dropped = self._dropped, []
        return _Taken(
            groups, stream.prompts, stream.num_dropped, stream.outcomes, stream.progress, stream.state, dropped
        )

    def _note(self, prompt: Prompt, group: Group, *, step: int, kept: bool) -> None:
        """`on_group` of a sampler other than the first: what is dropped goes to rank 0 with the next `take`."""
        if not kept:
            self._dropped.append((prompt, group, step))

    def facts(self) -> dict[str, float]:
        """Metrics of the last `take`: the groups dropped, the share whose rewards are all equal (of groups of several
        samples), and without `turns` the number that can be taken now."""
        line: dict[str, float] = {"groups/dropped": self.num_dropped}
        if self._group_size > 1:
            line["groups/equal"] = sum(not varied for _, varied in self.outcomes) / len(self.outcomes)
        return line if self._turns else line | {"groups/ready": self.progress.ready}

    async def pause(self) -> None:
        """See `GroupStream`."""
        if self._stream is not None:
            await self._stream.pause()

    def advance(self, *, version: int) -> None:
        """See `GroupStream`."""
        if self._stream is not None:
            self._stream.advance(version=version)

    def saved(self, state: Mapping[str, Any]) -> None:
        """See `GroupStream`."""
        if self._stream is not None and state:
            self._stream.saved(state.get("samplers", [state])[self._number or 0])


def reached(state: Mapping[str, Any] | None, *, num: int, step: int) -> int:
    """The place in the stream of prompts up to which the samplers of a checkpoint of `step` have started prompts."""
    if not state:  # nothing was taken
        return step * num
    states = state.get("samplers", [state])
    if len(states) == 1:
        return int(states[0]["next"])
    return num * max(-(-x["next"] // Share.of(i, len(states), num).size) for i, x in enumerate(states))


def state_at(place: int, *, samplers: int, num: int) -> dict[str, Any]:
    """The state of samplers that start at `place` of the stream with nothing in flight."""
    sizes = [Share.of(k, samplers, num).size for k in range(samplers)]
    return {"samplers": [{"next": place if samplers == 1 else place // num * n, "waiting": []} for n in sizes]}


def state_of(state: Mapping[str, Any], *, k: int, samplers: int, num: int) -> dict[str, Any]:
    """The state of the k-th of `samplers` streams that resume a run with `num` groups a step, see `SharedStream`."""
    states = state.get("samplers", [state])
    if len(states) == samplers:
        return dict(states[k])
    begun = max(-(-x["next"] // Share.of(i, len(states), num).size) for i, x in enumerate(states))
    waiting = sorted(entry for x in states for entry in x["waiting"])
    return {"next": begun * Share.of(k, samplers, num).size, "waiting": waiting[k::samplers]}
