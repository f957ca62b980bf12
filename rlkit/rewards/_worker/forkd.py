"""A server that forks children around file descriptors it is handed, ends them in time, and says how they ended.

It is a program of its own, in a process without threads, and imports the standard library only. Requests come as one
datagram each on fd 0 (a SOCK_SEQPACKET socket): a JSON object, with file descriptors attached of which the first is the
request's control socket. The child's end is reported there as JSON. The child is killed when its time is up, when the
other end of its control socket is closed, and when fd 0 is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

Start = Callable[[dict[str, Any], list[int]], int]  # request and its file descriptors -> pid; the child never returns


class _Child(NamedTuple):
    pid: int
    control: socket.socket
    started: float
    deadline: float


def serve(start: Start) -> None:
    """Serve fd 0 until it is closed."""
    requests = socket.socket(fileno=0)
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    for fd in (0, wake):
        poll.register(fd, select.POLLIN)
    children: dict[int, _Child] = {}  # by the fd of the control socket
    while True:
        for fd, _ in poll.poll(_milliseconds(children)):
            if fd == 0:
                message, fds, _flags, _address = socket.recv_fds(requests, 1 << 16, 8)
                if not message:
                    for child in children.values():
                        os.kill(child.pid, signal.SIGKILL)
                    return
                _begin(start, json.loads(message), fds, children, poll)
            elif fd == wake:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
            elif fd in children:  # the other end hung up
                _end(children[fd], children, poll, "cancelled")
        _reap(children, poll)
        now = time.monotonic()
        for child in [c for c in children.values() if c.deadline <= now]:
            _end(child, children, poll, "timeout")


def _milliseconds(children: dict[int, _Child]) -> float | None:
    nearest = min((c.deadline for c in children.values()), default=float("inf"))
    return None if nearest == float("inf") else max(0.0, (nearest - time.monotonic()) * 1e3 + 1)


def _begin(
    start: Start, request: dict[str, Any], fds: list[int], children: dict[int, _Child], poll: select.poll
) -> None:
    control = socket.socket(fileno=fds[0])
    try:
        pid = start(request, fds)
    except Exception as error:
        _tell(control, {"error": f"{type(error).__name__}: {error}"})
        control.close()
    else:
        now = time.monotonic()
        children[fds[0]] = _Child(pid, control, now, now + (request.get("wall_s") or float("inf")))
        poll.register(fds[0], select.POLLIN)
    for fd in fds[1:]:
        os.close(fd)


def _end(child: _Child, children: dict[int, _Child], poll: select.poll, reason: str) -> None:
    os.kill(child.pid, signal.SIGKILL)
    _, status, usage = os.wait4(child.pid, 0)
    _report(child, children, poll, status, usage, reason)


def _reap(children: dict[int, _Child], poll: select.poll) -> None:
    for child in list(children.values()):
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            _report(child, children, poll, status, usage, "exit")


def _report(
    child: _Child, children: dict[int, _Child], poll: select.poll, status: int, usage: Any, reason: str
) -> None:
    poll.unregister(child.control)
    del children[child.control.fileno()]
    code = os.waitstatus_to_exitcode(status)
    wall_s, cpu_s = time.monotonic() - child.started, usage.ru_utime + usage.ru_stime
    _tell(child.control, {"reason": reason, "code": code, "wall_s": wall_s, "cpu_s": cpu_s})
    child.control.close()


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # nobody listens any more
        control.send(json.dumps(message).encode())
