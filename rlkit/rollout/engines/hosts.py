"""Addresses of servers: their form, and whether they are of this machine."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from rlkit._util.text import masked


def host_of(url: str) -> str:
    """The host in a server's address; ValueError unless it begins with http:// or https:// and has a host and a port
    in range.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = None, None
    if parts is None or parts.scheme not in ("http", "https") or not host:
        fault = f"{masked(url)!r} is no address of a server"
        raise ValueError(f"{fault}: it must begin with http://, as in http://127.0.0.1:30000")
    return host


def is_here(url: str) -> bool:
    """Whether the server's host is this machine: every address of its name is one that a socket can be bound to.

    ValueError for a host whose name has no address.
    """
    host = host_of(url)
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{masked(url)}: the host {host!r} has no address ({error.strerror or error})") from None
    return all(_is_own(family, address) for family, *_, address in addresses)


def refuse_elsewhere(url: str, kind: str, *, instead: str) -> None:
    """ValueError for a server of that kind on another machine, where the trainer's weights do not arrive; `instead` is
    what does."""
    if not is_here(url):
        why = f"weights go to {kind} servers on this machine only, through its memory"
        raise ValueError(f"{masked(url)} is another machine: {why}; {instead}")


def _is_own(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)  # type: ignore[arg-type]
        except OSError:
            return False
    return True
