"""Kinds of inference servers: each is a row of `rlkit.settings.SERVERS` and a folder beside this one with `KIND`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from rlkit.rollout.engines.servers.engine import ServerEngine, Transport
from rlkit.rollout.engines.servers.process import Server
from rlkit.settings import Engines

if TYPE_CHECKING:
    from rlkit.rollout.engines.servers.api import Api


class Lora(NamedTuple):
    """The adapters that servers are started for: their rank, and the names of their layers."""

    rank: int
    layers: list[str]


class Start(NamedTuple):
    """What a server is started for. `max_len` is the longest sequence.

    `sync`: how it gets its weights ("ipc", "group" or "disk"). `lora`: None where those are merged.
    """

    model: str
    flags: Engines
    on_cpu: bool
    gpus: Sequence[int]
    deterministic: bool
    train_vision: bool
    max_len: int
    sync: str
    lora: Lora | None


class ServerKind(NamedTuple):
    """One kind of server, as the scripts and a served teacher use it.

    Attributes:
        api: makes its `Api`. engine: makes a `ServerEngine` of addresses and a transport.
        launch: starts a server. options: the arguments and environment of one.
        ipc: makes the transport through the memory of one machine.
        group: makes the one over a process group, of the addresses and of whether they compute on CPUs.
    """

    api: Callable[[], Api]
    engine: Callable[..., ServerEngine]
    launch: Callable[..., Server]
    options: Callable[[Start], tuple[list[str], dict[str, str]]]
    ipc: Callable[[], Transport]
    group: Callable[[Sequence[str], bool], Transport]


def kind_named(name: str) -> ServerKind:
    """The kind of this name, a key of `rlkit.settings.SERVERS`."""
    kind: ServerKind = import_module(f"rlkit.rollout.engines.{name}").KIND
    return kind
