"""The server of `rlkit.rewards.sandbox`: a warm interpreter that forks isolated processes, kills them in time, and
reports how they ended.

It is a program of its own, in a process without threads, and imports the standard library only. A request is one
message on fd 0 (a socket): a JSON object, with file descriptors attached of which the first is the request's control
socket. The end of the child is reported there as JSON. A child is killed when its time is up, when the other end of
its control socket is closed, and when fd 0 is closed.

Nothing that belongs to a request passes through the server's memory: programs and inputs are files that only the child
reads. So a child cannot find in its memory what an earlier one was given.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import json
import math
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from . import isolate, program, rpc

_RUN = {"program": program.run, "solution": rpc.run_solution, "tests": rpc.run_tests}
_PURE = [
    "abc", "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "collections", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "graphlib",
    "hashlib", "heapq", "html", "inspect", "io", "itertools", "json", "keyword", "linecache", "locale",
    "logging", "numbers", "operator", "pickle", "pprint", "queue", "random", "re", "secrets", "shlex", "signal",
    "statistics", "string", "struct", "tempfile", "textwrap", "threading", "time", "timeit", "token",
    "tokenize", "traceback", "types", "typing", "unittest", "uuid", "warnings", "weakref", "zlib",
]  # fmt: skip


def _preload() -> None:
    """Import what solutions often import, and every extension module: shared libraries cannot be loaded inside."""
    folder = Path(sysconfig.get_path("platstdlib"), "lib-dynload")
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    extensions = {p.name.split(".")[0] for p in folder.glob("*") if p.name.endswith(suffixes)}
    for name in [*_PURE, *sorted(n for n in extensions if "test" not in n and n not in ("_tkinter", "readline"))]:
        try:
            importlib.import_module(name)
        except ImportError:  # built without a library that it needs
            continue


class _Packages:
    """An import finder for the packages that programs may import, and for nothing else in their folders."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        """The finder protocol of `sys.meta_path`."""
        folder = os.path.dirname(self._places.get(name, ""))
        return importlib.machinery.PathFinder.find_spec(name, [folder]) if path is None and folder else None

    def shown(self) -> list[str]:
        """The paths to show: the packages, and the shared libraries that their wheels contain."""
        libraries = [f"{os.path.dirname(place)}/{name}.libs" for name, place in self._places.items()]
        return [*self._places.values(), *filter(os.path.isdir, libraries)]

    def load(self) -> None:
        """Import them all. Errors: ImportError where a dependency is missing."""
        for name in self._places:
            try:
                importlib.import_module(name)
            except Exception as error:
                fault = f"package {name!r} cannot be imported in the sandbox ({type(error).__name__}"
                raise ImportError(f"{fault}: {error}); name the packages that it needs, too") from error


class _Child(NamedTuple):
    pid: int
    control: socket.socket
    started: float
    deadline: float


def main() -> None:
    """Load, and serve until fd 0 is closed. The argument is JSON: names and places of packages for the programs."""
    sys.dont_write_bytecode = True
    os.umask(0o077)
    _preload()
    packages = _Packages(json.loads(sys.argv[1]))
    sys.meta_path.append(packages)
    problem = ""
    try:
        packages.load()
    except ImportError as error:
        problem = f"nothing was run: {error}"
    gc.collect()
    gc.freeze()
    base_pages = int(Path("/proc/self/statm").read_text().split()[0])

    def start(request: dict[str, Any], control: int, fds: list[int]) -> int:
        if problem:
            raise RuntimeError(problem)
        limits = {**request["limits"], "base_pages": base_pages}
        return isolate.enter(_RUN[request["run"]], fds, control, limits, packages.shown())

    _serve(start)


def _serve(start: Callable[[dict[str, Any], int, list[int]], int]) -> None:
    """Serve fd 0 until it is closed."""
    requests = socket.socket(fileno=0)
    wake, write = os.pipe()  # readable when a child ends
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    children: dict[int, _Child] = {}  # by the fd of the control socket
    while True:
        ready = _ready([0, wake, *children], min((c.deadline for c in children.values()), default=math.inf))
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready:
            message, fds, *_ = socket.recv_fds(requests, 1 << 16, 8)  # of one request: its fds end it
            if not message:
                break
            request, control = json.loads(message), socket.socket(fileno=fds[0])
            try:
                pid, now = start(request, fds[0], fds[1:]), time.monotonic()
                children[fds[0]] = _Child(pid, control, now, now + request["limits"]["wall_s"])
            except Exception as error:
                _report(control, {"error": f"{type(error).__name__}: {error}"})
            for fd in fds[1:]:
                os.close(fd)
        for fd, child in list(children.items()):
            if _ended(child, hung_up=fd in ready):
                del children[fd]
    for child in children.values():
        os.kill(child.pid, signal.SIGKILL)


def _ready(fds: list[int], deadline: float) -> set[int]:
    """The fds that can be read, as soon as there is one or the deadline has passed."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    milliseconds = None if deadline == math.inf else max(0.0, (deadline - time.monotonic()) * 1e3 + 1)
    return {fd for fd, _ in poll.poll(milliseconds)}


def _ended(child: _Child, *, hung_up: bool) -> bool:
    """Whether a child has ended; kill it if it has to end. Its end is reported."""
    pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    reason = "exit"
    if not pid and (hung_up or child.deadline <= time.monotonic()):
        os.kill(child.pid, signal.SIGKILL)
        pid, status, usage = os.wait4(child.pid, 0)
        reason = "cancelled" if hung_up else "timeout"
    if pid:
        code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        wall_s = time.monotonic() - child.started
        _report(child.control, {"reason": reason, "code": code, "wall_s": wall_s, "cpu_s": cpu_s})
    return bool(pid)


def _report(control: socket.socket, message: dict[str, Any]) -> None:
    """The last message on a control socket."""
    with control, suppress(OSError):  # the other end may be closed
        control.send(json.dumps(message).encode() + b"\n")
