"""`subprocess.run` and `Popen` for Python commands, without the seconds that importing torch takes.

A server imports torch, transformers and rlkit once per pytest process and forks a child for each command. The child has
the arguments, folder, environment, descriptors, session and terminal that the test gives, and it ends as an interpreter
ends: after its threads and exit functions, with its own status or signal. What depends on the import itself (its time,
its environment variables, signals meanwhile, a missing extra, a hash seed of its own) and on the modules' end is tested
with `subprocess`. Where forking after the import is not safe (macOS), and for commands other than `python FILE`,
`python -m MODULE` and `python -c CODE`, this is `subprocess`.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import select
import socket
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("warm_server.py")
STATUS = struct.Struct("i")
PARAMETERS = inspect.signature(subprocess.Popen._execute_child)


def run(command, *, input=None, check=False, timeout: float | None = None, capture_output=False, **options: Any):
    """`subprocess.run` of these options."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Popen(subprocess.Popen):
    """`subprocess.Popen`. With `terminal`, stdin is a terminal and becomes the one that controls the process.

    With `spawns`, the first process that the command starts by `multiprocessing`'s "spawn" is forked, too. Without
    `plots`, a forked command runs as where matplotlib is not installed: its picture takes as long as a short run.
    """

    def __init__(
        self, command, *, terminal: bool = False, spawns: bool = False, plots: bool = True, **options: Any
    ) -> None:
        command = [*map(str, command)]
        forks = sys.platform == "linux" and command[0] == sys.executable
        self._forks = forks and (not command[1].startswith("-") or command[1] in ("-c", "-m"))
        self._terminal, self._spawns, self._plots = terminal, spawns, plots
        if terminal and not self._forks:
            options["preexec_fn"] = _take_terminal
        super().__init__(command, **options)

    def _execute_child(self, *given):
        if not self._forks:
            return super()._execute_child(*given)
        option = PARAMETERS.bind(self, *given).arguments
        assert option["preexec_fn"] is None, "a forked command takes no preexec_fn"
        standard = (option["p2cread"], option["c2pwrite"], option["errwrite"])
        numbers = [0, 1, 2, *option["pass_fds"]]
        job = {
            "argv": option["args"], "cwd": str(option["cwd"] or os.getcwd()), "env": dict(option["env"] or os.environ),
            "numbers": numbers, "session": option["start_new_session"], "terminal": self._terminal,
            "spawns": self._spawns, "plots": self._plots,
        }  # fmt: skip
        self._status, side = os.pipe()
        fds = [side, *(n if fd == -1 else fd for n, fd in enumerate(standard)), *option["pass_fds"]]
        socket.send_fds(_server(), [json.dumps(job).encode()], fds)
        os.close(side)
        self.pid = self._read_status()
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(option[name] for name in names))

    def _try_wait(self, wait_flags):
        if not self._forks:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = self._read_status()
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, *given, **named):
        if not self._forks:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _read_status(self) -> int:
        data = os.read(self._status, STATUS.size)
        if not data:
            raise RuntimeError("the server of warm.py has ended; its traceback stands above")
        return STATUS.unpack(data)[0]


def _take_terminal() -> None:
    os.login_tty(0)


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SERVER), str(theirs.fileno())]
    server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours
