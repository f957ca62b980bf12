"""The client of `_worker/forkd.py`: a server per kind and process, started on first use, restarted when it is gone."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_RUN = (  # not as a script: files next to it must not hide modules of the standard library
    "import sys; sys.path.insert(0, {folder!r}); import _worker; del sys.path[0]; from _worker import {module}; "
    "{module}.main()"
)


class ServerError(RuntimeError):
    """A server could not be started, could not start a child, or is gone. It says nothing about what was to be run."""


class Server:
    """A server module of `_worker`. Thread-safe; a forked process starts a server of its own."""

    def __init__(
        self, module: str, *, flags: tuple[str, ...], environment: dict[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        self._name = module
        code = _RUN.format(folder=str(_FOLDER), module=module)
        self._command = [sys.executable, *flags, "-c", code, *arguments]
        self._environment = environment
        self._reset()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # a new one: at a fork another thread may hold it
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def begin(self, request: dict[str, Any], fds: list[int]) -> socket.socket:
        """Start a child. The socket that comes back reports its end; closing it kills the child."""
        mine, theirs = socket.socketpair()
        message = json.dumps(request).encode()
        try:
            with self._lock:
                for attempt in (1, 2):  # it may have died since the last request
                    try:
                        socket.send_fds(self._connected(), [message], [theirs.fileno(), *fds])
                        break
                    except (BrokenPipeError, ConnectionResetError) as error:
                        self.close()
                        if attempt == 2:
                            raise ServerError(f"the server {self._name} dies as soon as it starts") from error
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        return mine

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=self._environment, cwd="/",
                start_new_session=True,  # Ctrl-C is for this process; the server ends when this one has ended
            )  # fmt: skip
            theirs.close()
        return self._socket

    def close(self) -> None:
        """End the server and all its children. The next request starts it again."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self._socket = self._process = None


def readable(sockets: Sequence[socket.socket], timeout_s: float) -> bool:
    """Whether one of these can be read before the time is up, of whatever number its fd is (`select` knows 1024)."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def next_line(stream: socket.socket) -> bytes:
    """What was written as one line, at once; empty at the end."""
    return stream.recv(stream.recv(1 << 16, socket.MSG_PEEK).find(b"\n") + 1)


def end_of(control: socket.socket, timeout_s: float) -> dict[str, Any]:
    """How a child ended, as its server tells; a `ServerError` where it could not begin or the server is gone."""
    if not readable([control], timeout_s):
        raise ServerError("the server does not say how the child ended")
    message = next_line(control)
    if not message:
        raise ServerError("the server died while the child was running")
    end: dict[str, Any] = json.loads(message)
    if "error" in end:
        raise ServerError(end["error"])
    return end
