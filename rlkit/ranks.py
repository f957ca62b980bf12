"""Acting together: the same call on every rank, one answer, and no rank left waiting for one that failed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


class Stopped(KeyboardInterrupt):
    """A run was asked to end by the signal `number`, and has saved what it had."""

    def __init__(self, number: int) -> None:
        super().__init__("the run was asked to stop, and has saved; resume it to go on")
        self.number = number


def distributed() -> bool:
    """Whether there is a process group, so that the ranks act together."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if distributed() else 1


def timeout_of(group: Any) -> timedelta:
    """How long a collective of `group` waits for another rank."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def on_this_device(work: Callable[P, T]) -> Callable[P, T]:
    """`work` for another thread, on the GPU of this one: a thread begins on the first GPU, whatever its rank's is."""
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(device)
        return work(*args, **kwargs)

    return run


def reshard(model: Any) -> None:
    """Cut again what a forward left gathered of a model under FSDP2: its parameters are then this rank's shards."""
    for module in list(model.modules()):
        if hasattr(module, "reshard"):
            module.reshard()


def first(work: Callable[[], object], *, group: dist.ProcessGroup | None = None) -> None:
    """`work` on rank 0. Every rank waits for it, and raises if it raised."""
    together(lambda: work() if rank() == 0 else None, group=group)


def together(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """`work` on every rank, and all their results. What raised on one rank raises on all, so none waits forever.

    `group`: all ranks again, in a group of its own, for a thread that must not mix with what the others talk about.
    """
    if not distributed():
        return [work()]
    result, error = None, None
    try:
        result = work()
    except Exception as e:
        error = e if isinstance(e, OSError) else RuntimeError(f"rank {rank()}: {e!r}")
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, (result, error), group=group)
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [value for value, _ in outcomes]
