"""The ranks of torchrun, and calls that all ranks make together: an error on one rank is raised on all of them, so none
waits for it forever.

The environment variables of torchrun are read here only. Importing this module does not import torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup

P = ParamSpec("P")
T = TypeVar("T")
_awaited = count()  # calls of `await_all`: as many on all ranks
_SIOCGIFADDR = 0x8915  # of Linux: the address of a network interface


class Stopped(KeyboardInterrupt):
    """A run stopped on the signal `number`, after saving a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__("the run was stopped after saving a checkpoint; resume it to continue")
        self.number = number


def launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ


def number(name: str, default: int = 1) -> int:
    """A variable that torchrun sets; ValueError, with its name, for one that is no number."""
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} is {text!r}, and torchrun sets a number: unset it") from None


def local_rank() -> int | None:
    """The number of this process on its machine, as torchrun gives it; None in a plain process."""
    return number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None


def local_world_size() -> int:
    """Number of ranks on this machine; 1 in a plain process."""
    return number("LOCAL_WORLD_SIZE")


def num_nodes() -> int:
    """Number of machines of the run, each with as many ranks; 1 where torchrun did not start this process."""
    return num_ranks() // local_world_size() if "LOCAL_WORLD_SIZE" in os.environ else 1


def node() -> int:
    """The number of this process's machine, also before there is a process group."""
    return number("RANK", 0) // local_world_size() if num_nodes() > 1 else 0


def num_ranks() -> int:
    """Number of ranks that torchrun starts, also before there is a process group; 1 in a plain process."""
    return number("WORLD_SIZE")


def own_address() -> str:
    """The address of this machine from which it reaches the others: that of its way to torchrun's first node.

    In a plain process, and where that node is this one, it is the way to any other machine; without one, the first
    network interface that has an address; 127.0.0.1 without one.
    """
    first = os.environ.get("MASTER_ADDR", "")
    for target in dict.fromkeys((first, "192.0.2.1")):  # an address of no machine: nothing is sent
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
            if target and not address.startswith("127."):
                return address
    return next((address for address in interfaces().values() if not address.startswith("127.")), "127.0.0.1")


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by the interface's name. Linux only: {} elsewhere."""
    if sys.platform != "linux":
        return {}
    import fcntl

    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def name_interface(*, far: bool = False) -> None:
    """Where this machine's name stands for a loopback address, as on Debian, have gloo use the way to other machines.

    gloo tells the other ranks the address of the machine's name. Those on other machines would wait for it in silence.
    It sets $GLOO_SOCKET_IFNAME, where that is not given, and only in a run of several machines or with `far` servers.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or (num_ranks() <= local_world_size() and not far):
        return
    address = "127."
    with suppress(OSError):
        address = str(socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)[0][4][0])
    host_address = own_address()
    if address.startswith("127.") and (name := next((n for n, a in interfaces().items() if a == host_address), None)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def is_first() -> bool:
    """Whether this is rank 0, also before there is a process group."""
    if "torch" in sys.modules and distributed():
        return rank() == 0
    return os.environ.get("RANK", "0") == "0"


def distributed() -> bool:
    """Whether there is a process group."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    import torch.distributed as dist

    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if distributed() else 1


def timeout_of(group: Any) -> timedelta:
    """The timeout of the collectives of `group`."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def on_this_device(work: Callable[P, T]) -> Callable[P, T]:
    """`work` for another thread, on this thread's GPU: a new thread starts on GPU 0, whatever the rank's GPU is."""
    import torch

    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.cuda.set_device(device)
        return work(*args, **kwargs)

    return run


def reshard(model: Any) -> None:
    """Free the parameters that a forward left gathered under FSDP2, so that the model holds this rank's shards."""
    for module in list(model.modules()):
        if hasattr(module, "reshard"):
            module.reshard()


def await_all() -> None:
    """Wait until all ranks are here, however long that takes: a collective raises after its timeout."""
    if world_size() == 1:
        return
    from torch.distributed.distributed_c10d import _get_default_store

    store, key = _get_default_store(), f"rlkit/await_all/{next(_awaited)}"
    store.add(key, 1)
    while store.add(key, 0) < world_size():  # not `wait`: signals are handled between the calls
        time.sleep(0.1)


def on_rank0(work: Callable[[], object], *, group: ProcessGroup | None = None) -> None:
    """Run `work` on rank 0. Every rank waits for it, and raises its error."""
    on_all_ranks(lambda: work() if rank() == 0 else None, group=group)


def on_all_ranks(work: Callable[[], T], *, group: ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank and return the results of all ranks; an error of any rank is raised on all of them.

    `group`: a process group of all ranks, for a thread whose collectives must not mix with those of the main thread.
    """
    if not distributed():
        return [work()]
    import torch.distributed as dist

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
