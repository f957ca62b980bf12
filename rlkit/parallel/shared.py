"""One rollout for many training ranks: rank 0 speaks to the engine and samples, every rank gets the same groups.

The engine is outside the ranks (SGLang servers, or `rlkit.rollout.process` for the CPU), so one speaker is enough for
any number of its replicas. Groups come by a broadcast of trajectories, weights leave as the full tensors that
`stream_weights` gathers from all ranks. Without ranks everything here is the plain object.

Differs: verl and OpenRLHF drive engine and trainer from a third process (Ray), and send each rank its part of the
batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from rlkit.parallel._ranks import rank, world_size
from rlkit.types import Completion

X = TypeVar("X")


async def from_first(work: Callable[[], Awaitable[X]]) -> X:
    """What `work` returns on rank 0, on every rank. What it raises there raises everywhere."""
    if world_size() == 1:
        return await work()
    result: Any = None
    error: Exception | None = None
    if rank() == 0:
        try:
            result = await work()
        except Exception as e:
            error = e
    sent: list[Any] = [(result, None if error is None else repr(error))]
    dist.broadcast_object_list(sent, src=0)
    if error is not None:
        raise error
    if sent[0][1] is not None:
        raise RuntimeError(f"rank 0: {sent[0][1]}")
    return result if rank() == 0 else sent[0][0]


class SharedEngine:
    """An engine as all ranks hold it; rank 0 has the real one, the others None. Only rank 0 samples."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(self, prompt_ids: list[int], **options: Any) -> Completion:
        """As the engine's. On rank 0 only."""
        return await self._engine.generate(prompt_ids, **options)

    async def abort(self, rid: str | None = None) -> Any:
        """As the engine's. On rank 0 only."""
        out = self._engine.abort(rid)
        return await out if isinstance(out, Awaitable) else out

    async def update_weights(self, weights: Iterable[Any], *, version: int) -> None:
        """As the engine's. Every rank reads the stream to its end, since gathering takes all of them."""

        async def send() -> None:
            try:
                await self._engine.update_weights(weights, version=version)
            finally:
                _exhaust(weights)

        if rank() != 0:
            _exhaust(weights)
        await from_first(send)

    @property
    def progress(self) -> Any:
        """The engine's counts; None on the other ranks."""
        return getattr(self._engine, "progress", None)


class SharedStream:
    """A `GroupStream` that rank 0 runs, and whose groups every rank takes. `progress` is that of the last `take`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._stream = make() if rank() == 0 else None
        self.num_dropped = 0
        self.progress: Any = None

    async def __aenter__(self) -> SharedStream:
        if self._stream is not None:
            await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            await self._stream.__aexit__(kind, error, trace)

    async def take(self) -> Any:
        """The next groups, on every rank."""

        async def take() -> tuple[Any, ...]:
            stream: Any = self._stream
            return await stream.take(), stream.num_dropped, stream.progress

        groups, self.num_dropped, self.progress = await from_first(take)
        return groups

    async def pause(self) -> None:
        """As the stream's."""
        if self._stream is not None:
            await self._stream.pause()

    def advance(self, *, version: int) -> None:
        """As the stream's."""
        if self._stream is not None:
            self._stream.advance(version=version)

    def saved(self, state: dict[str, Any]) -> None:
        """As the stream's."""
        if self._stream is not None:
            self._stream.saved(state)

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint, into which rank 0 writes; empty on the others."""
        return {} if self._stream is None else self._stream.state


def _exhaust(weights: Iterable[Any]) -> None:
    for _ in weights:
        pass
