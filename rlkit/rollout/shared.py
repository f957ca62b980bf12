"""One rollout for many training ranks: rank 0 samples, and every rank gets the same groups.

The engine runs outside the ranks (SGLang servers, or `rlkit.rollout.engines.process` for the CPU), so one client is
enough for any number of replicas. Groups are broadcast as trajectories; weights are sent as the full tensors that
`stream_weights` gathers from all ranks. On one rank nothing is broadcast.

Differs: verl and OpenRLHF drive engine and trainer from a third process (Ray) and send each rank its part of the
batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from rlkit.ranks import rank, world_size
from rlkit.rollout.engines import EngineError

X = TypeVar("X")


async def from_first(work: Callable[[], Awaitable[X]]) -> X:
    """Run `work` on rank 0 and return its result, or raise its error, on every rank."""
    if world_size() == 1:
        return await work()
    sent: list[Any] = [None, None]  # what it returned, what it raised
    error: Exception | None = None
    if rank() == 0:
        try:
            sent[0] = await work()
        except Exception as e:
            of_engine = isinstance(e, EngineError)  # its message says all: one line on every rank
            error, sent[1] = e, EngineError(str(e)) if of_engine else RuntimeError(f"rank 0: {e!r}")
    dist.broadcast_object_list(sent, src=0)
    if sent[1] is not None:
        raise error or sent[1]
    return sent[0]


async def rest(engine: Any) -> None:
    """Tell an engine that sampling is over until the next update; one without a method `rest` has nothing to do."""
    if hasattr(engine, "rest"):
        await engine.rest()


class SharedEngine:
    """An `rlkit.types.Engine` for all ranks around `engine`: the real one on rank 0, which samples, None elsewhere."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.generate, self.abort = getattr(engine, "generate", None), getattr(engine, "abort", None)

    async def update_weights(self, weights: Iterable[Any], *, version: int) -> None:
        """See `Engine`. Every rank consumes all of `weights`, because gathering a tensor involves all ranks."""

        async def send() -> None:
            try:
                await self.engine.update_weights(weights, version=version)
            finally:
                deque(weights, maxlen=0)

        if rank() != 0:
            deque(weights, maxlen=0)
        await from_first(send)

    async def rest(self) -> None:
        """Of an engine that frees memory between sampling and the next update: all ranks wait until it has."""
        await from_first(partial(rest, self.engine))

    @property
    def progress(self) -> Any:
        """The engine's counts; None on the other ranks."""
        return getattr(self.engine, "progress", None)

    @property
    def silent_s(self) -> float:
        """Of the engine of rank 0: seconds without any sign of life."""
        return getattr(self.engine, "silent_s", 0.0)

    async def close(self) -> None:
        """Close the engine of rank 0."""
        if self.engine is not None:
            await self.engine.close()


class SharedStream:
    """A `GroupStream` that runs on rank 0 and gives its groups to every rank.

    `num_dropped`, `progress` and, on rank 0, `prompts` are those of the last `take`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._stream = make() if rank() == 0 else None
        self.num_dropped = 0
        self.prompts: Any = []
        self.progress: Any = None

    async def __aenter__(self) -> SharedStream:
        if self._stream is not None:
            await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._stream is not None:
            await self._stream.__aexit__(*error)

    async def take(self) -> Any:
        """The next groups, on every rank."""

        async def take() -> tuple[Any, ...]:
            stream: Any = self._stream
            return await stream.take(), stream.num_dropped, stream.progress

        groups, self.num_dropped, self.progress = await from_first(take)
        self.prompts = [] if self._stream is None else self._stream.prompts
        return groups

    async def pause(self) -> None:
        """See `GroupStream`."""
        if self._stream is not None:
            await self._stream.pause()

    def advance(self, *, version: int) -> None:
        """See `GroupStream`."""
        if self._stream is not None:
            self._stream.advance(version=version)

    def saved(self, state: dict[str, Any]) -> None:
        """See `GroupStream`."""
        if self._stream is not None:
            self._stream.saved(state)

    @property
    def state(self) -> dict[str, Any]:
        """The state to checkpoint, on rank 0, which writes it; empty on other ranks."""
        return {} if self._stream is None else self._stream.state
