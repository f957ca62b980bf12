"""A server that forks children around file descriptors it is handed, ends them in time, and says how they ended.

It is a program of its own, in a process without threads, and imports the standard library only. Requests come as one
message each on fd 0 (a socket): a JSON object, with file descriptors attached of which the first is the
request's control socket. The child's end is reported there as JSON. The child is killed when its time is up, when the
other end of its control socket is closed, and when fd 0 is closed.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

Start = Callable[[dict[str, Any], list[int]], int]  # request and its file descriptors -> pid; the child never returns


def refuse(why: str) -> Start:
    """What starts nothing, and says why."""

    def start(_request: dict[str, Any], _fds: list[int]) -> int:
        raise RuntimeError(why)

    return start


class _Child(NamedTuple):
    pid: int
    control: socket.socket
    started: float
    deadline: float


def serve(start: Start) -> None:
    """Serve fd 0 until it is closed."""
    requests = socket.socket(fileno=0)
    wake = _wake_when_a_child_ends()
    children: dict[int, _Child] = {}  # by the fd of the control socket
    while True:
        ready = _ready([0, wake, *children], min((c.deadline for c in children.values()), default=math.inf))
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready:
            message, fds, *_ = socket.recv_fds(requests, 1 << 16, 8)  # of one request: its fds end it
            if not message:
                break
            if child := _begun(start, json.loads(message), fds):
                children[fds[0]] = child
        for fd, child in list(children.items()):
            if _ended(child, hung_up=fd in ready):
                del children[fd]
    for child in children.values():
        os.kill(child.pid, signal.SIGKILL)


def _wake_when_a_child_ends() -> int:
    """A pipe that can be read then."""
    wake, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def _ready(fds: list[int], deadline: float) -> set[int]:
    """Which of these can be read, as soon as one can be, or when it is time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    milliseconds = None if deadline == math.inf else max(0.0, (deadline - time.monotonic()) * 1e3 + 1)
    return {fd for fd, _ in poll.poll(milliseconds)}


def _begun(start: Start, request: dict[str, Any], fds: list[int]) -> _Child | None:
    control = socket.socket(fileno=fds[0])
    try:
        pid = start(request, fds)
    except Exception as error:
        _tell(control, {"error": f"{type(error).__name__}: {error}"})
        return None
    finally:
        for fd in fds[1:]:
            os.close(fd)
    now = time.monotonic()
    return _Child(pid, control, now, now + request.get("wall_s", math.inf))


def _ended(child: _Child, *, hung_up: bool) -> bool:
    """Whether a child has ended, by itself or because it had to; then this is told."""
    pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    reason = "exit"
    if not pid and (hung_up or child.deadline <= time.monotonic()):
        os.kill(child.pid, signal.SIGKILL)
        pid, status, usage = os.wait4(child.pid, 0)
        reason = "cancelled" if hung_up else "timeout"
    if pid:
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        wall_s = time.monotonic() - child.started
        _tell(child.control, {"reason": reason, "code": code, "wall_s": wall_s, "cpu_s": cpu_s})
    return bool(pid)


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    """The last word on a control socket."""
    with control, suppress(OSError):  # nobody listens any more
        control.send(json.dumps(message).encode() + b"\n")
