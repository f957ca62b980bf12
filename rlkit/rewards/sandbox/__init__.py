"""Run untrusted Python in isolated processes: Linux namespaces, resource limits and a system call filter.

`run` runs a program, `run_tests` runs tests that call a solution. See README.md in this folder for the isolation, the
threat model and its limits. Needs Linux on x86-64 or ARM64, as root or where unprivileged user namespaces are allowed.
Elsewhere nothing is run and `SandboxError` names what is missing; or a SandboxFusion server runs the programs (`url`,
RLKIT_SANDBOX_URL).

A run takes about as long as starting `python -S` (benchmarks/rewards.py), because it forks a warm interpreter.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fcntl import fcntl
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlkit.rewards.http import HttpError, post_json
from rlkit.rewards.timeouts import run_on_a_core

_ADD_SEALS, _ALL_SEALS = 1033, 0xF
_STDERR_BYTES = 1 << 16
_NOT_ISOLATED = "isolation failed"  # the prefix of these errors, see `_worker/isolate.py`
_GONE = "the solution's process ended"  # the reason in `_worker/rpc.py`
_MAIN = (  # not as a script: files next to it must not hide modules of the standard library
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import _worker; del sys.path[0]; "
    "from _worker import sandboxd; sandboxd.main()"
)
_REMOTE = "start a SandboxFusion server and set RLKIT_SANDBOX_URL to its address (stdin tests only)"


class SandboxError(RuntimeError):
    """The sandbox cannot be set up on this system, or it broke. The program is not the cause."""


@dataclass(frozen=True)
class Limits:
    """The resources of one run. `memory_bytes` is on top of the interpreter, `output_bytes` is the size of stdout, and
    `processes` is the number of further processes (0: the program cannot fork). 16 threads are always allowed.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    scratch_bytes: int = 64 << 20
    processes: int = 0
    open_files: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > (-1 if name == "processes" else 0):
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class Execution:
    """How a program ended. `reason` is empty if it exited with code 0, otherwise it says what happened. `cpu_s` is nan
    for a remote sandbox.
    """

    reason: str
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float


async def run(
    source: str, *, stdin: str = "", limits: Limits = Limits(), packages: Sequence[str] = (), url: str | None = None
) -> Execution:
    """Run a Python program as `python solution.py` does, with `stdin` as its input.

    At most as many programs run at once as there are cores; the wait for a core does not count against a reward's
    deadline. A cancelled run is killed. Runs are reproducible: PYTHONHASHSEED is 0, and so is the seed of `random`.

    `packages` are the import names of installed packages that the program can import; no other installed package is
    visible. Dependencies have to be named as well: `("numpy",)` gives numpy alone. Packages are loaded before the
    program starts, with one thread each.

    With a `url` (default: the environment variable RLKIT_SANDBOX_URL) a SandboxFusion server runs the program. Then the
    server decides which packages are installed, and of the limits `wall_s`, `memory_bytes` and `output_bytes` apply.

    Raises SandboxError if the sandbox cannot be set up, a package cannot be imported in it, or the server fails.
    """
    if url := url or os.environ.get("RLKIT_SANDBOX_URL"):
        return await _run_remotely(url, source, stdin, limits)
    child = Child("program", [stdin, None, None, source], limits, packages)
    return await run_on_a_core(child.wait, cancel=child.cancel)


async def run_tests(
    source: str,
    tests: Sequence[str],
    *,
    imports: dict[str, str],
    asked: dict[str, str],
    limits: Limits,
    packages: Sequence[str] = (),
) -> list[str]:
    """Run a solution, and tests that call it, in two sandboxes joined by a socket. A reason per test, empty if passed.

    `imports` maps names of the tests to modules or functions (`"math:isclose"`), `asked` to names in the solution.
    Values are copied between the two; any other object is a handle whose public attributes the tests can use.
    """
    task = {"tests": tests, "own": imports, "asked": asked}
    solution = Child("solution", ["", -1, -1, source], limits, packages)
    testing = Child("tests", ["", None, None, json.dumps(task)], limits, packages)

    def work() -> tuple[Execution, Execution]:
        ends = socket.socketpair()
        with ends[0], ends[1]:
            solution.start(ends[0].fileno())
            testing.start(ends[1].fileno())
        try:
            tested = testing.wait()
        finally:
            solution.cancel()  # if it has not ended yet
            ran = solution.wait()
        return tested, ran

    def cancel() -> None:
        solution.cancel()
        testing.cancel()

    tested, ran = await run_on_a_core(work, cancel=cancel)
    reasons = _reported(tested.stdout, len(tests))
    if _GONE in reasons and ran.reason not in ("", "cancelled"):
        reasons[reasons.index(_GONE)] = ran.reason
    timeout = tested.reason.startswith("timeout")
    rest = tested.reason if timeout else f"the tests ended early: {tested.reason}" if tested.reason else "not reached"
    return [*reasons, *[rest] * (len(tests) - len(reasons))]


def _reported(text: str, num_tests: int) -> list[str]:
    """The reasons of the first tests as their process reported them: whole lines, in the order of the tests."""
    reasons: list[str] = []
    for line in text.split("\n")[:-1][:num_tests]:
        try:
            index, reason = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            break
        if index != len(reasons) or not isinstance(reason, str):
            break
        reasons.append(reason.encode("utf-8", "replace").decode())
    return reasons


class Server:
    """The process that forks sandboxes with these packages loaded (`_worker/sandboxd.py`), started on first use and
    restarted if it died. Thread-safe; a forked process starts a server of its own."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        needed = ("LD_LIBRARY_PATH", "PYTHONHOME")  # by some Pythons
        self._environment = {name: os.environ[name] for name in needed if name in os.environ} | {"PYTHONHASHSEED": "0"}
        if packages:
            self._environment |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        places = json.dumps({name: _place(name) for name in packages})
        self._command = [sys.executable, "-S", "-s", "-c", _MAIN, places]
        self._reset()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # a new one: at a fork another thread may hold it
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def begin(self, request: dict[str, Any], fds: list[int]) -> socket.socket:
        """Start a child. The returned socket reports its end; closing it kills the child."""
        mine, theirs = socket.socketpair()
        message = json.dumps(request).encode()
        with theirs, self._lock:
            for _ in range(2):  # it may have died since the last request
                try:
                    socket.send_fds(self._connected(), [message], [theirs.fileno(), *fds])
                    return mine
                except (BrokenPipeError, ConnectionResetError):
                    self.close()
        mine.close()
        raise SandboxError("the server of the sandbox dies as soon as it starts")

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


_server = cache(Server)


def _place(package: str) -> str:
    """The folder or file of an installed package."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    place = folders[0] if folders else (spec and spec.origin) or ""
    if not os.path.exists(place):
        raise ValueError(f"packages must be names of installed top-level packages, {package!r} is not one here")
    return os.path.realpath(place)


class Child:
    """A process in the sandbox. `fds` are its fds 0, 1, ...: a text is a file, None a pipe that `wait` reads (both
    stdout and stderr, or neither), -1 is /dev/null; nothing is opened before `start`."""

    def __init__(
        self, run: str, fds: Sequence[str | Literal[-1] | None], limits: Limits, packages: Sequence[str] = ()
    ) -> None:
        system, machine = platform.system(), platform.machine()
        if system != "Linux" or machine not in ("x86_64", "aarch64"):
            fault = f"the sandbox needs Linux on x86_64 or aarch64, this is {system} on {machine}"
            raise SandboxError(f"{fault}: run this on Linux, or {_REMOTE}")
        self._run, self._limits, self._fds = run, limits, fds
        self._server = _server(tuple(sorted({*packages})))
        self._control: socket.socket | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Kill it, now or as soon as it is started. Thread-safe."""
        self._cancelled = True
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)

    def start(self, *shared: int) -> None:
        """Have it started. `shared` are further fds for it, which stay the caller's."""
        self._pipes: list[int] = []
        mine: list[int] = []
        try:
            for fd in self._fds:
                if fd is None:
                    read, write = os.pipe()
                    self._pipes.append(read)
                    mine.append(write)
                else:
                    mine.append(_file(fd) if isinstance(fd, str) else os.open(os.devnull, os.O_WRONLY))
            self._control = self._server.begin({"run": self._run, "limits": asdict(self._limits)}, [*mine, *shared])
        except BaseException:  # also too many open files
            _close(self._pipes)
            raise
        finally:
            _close(mine)
        if self._cancelled:
            self.cancel()

    def wait(self) -> Execution:
        """Start it if need be, read what it writes, and return how it ended."""
        if self._control is None:
            self.start()
        assert self._control is not None
        with self._control as control:
            try:
                out, err, flooded = self._read(control)
                end = self._end(control)
            finally:
                _close(self._pipes)
        if error := end.get("error"):
            raise SandboxError(f"{error}{_ways_out() if _NOT_ISOLATED in error else ''}")
        if "reason" not in end:
            raise SandboxError("the server died while the child was running")
        if "began" not in end and end["reason"] == "exit":
            raise SandboxError(f"the process ended before it was isolated: {err.strip()[:300]}")
        return Execution(self._reason(end, err, flooded), out, err, end["wall_s"], end["cpu_s"])

    def _end(self, control: socket.socket) -> dict[str, Any]:
        """What the child and the server report about it."""
        control.settimeout(self._limits.wall_s + 60)
        end: dict[str, Any] = {}
        try:
            with control.makefile("rb") as lines:
                for line in lines:
                    end |= json.loads(line)
        except TimeoutError:
            raise SandboxError("the server does not report how the child ended") from None
        return end

    def _read(self, control: socket.socket) -> tuple[str, str, bool]:
        """Read both pipes until they are closed, or until the child has ended and they are empty (another process may
        hold them open). Kill a child that writes too much to stdout; stderr is cut."""
        texts, most = (bytearray(), bytearray()), (self._limits.output_bytes, _STDERR_BYTES)
        waiting = select.poll()
        waiting.register(control, 0)  # says when its other end is closed: after the child's end
        for fd in self._pipes:
            waiting.register(fd, select.POLLIN)
        num_open, flooded = len(self._pipes), False
        while num_open:
            if not (ready := [fd for fd, _ in waiting.poll() if fd in self._pipes]):
                break
            for fd in ready:
                if not (data := os.read(fd, 1 << 16)):
                    waiting.unregister(fd)
                    num_open -= 1
                which = self._pipes.index(fd)
                texts[which].extend(data)
                if len(texts[which]) > most[which]:
                    del texts[which][most[which] :]
                    if which == 0 and not flooded:
                        flooded = True
                        self.cancel()
        out, err = (text.decode("utf-8", "replace") for text in texts)
        return out, err, flooded

    def _reason(self, end: dict[str, Any], err: str, flooded: bool) -> str:
        code = end["code"]
        if flooded:
            return f"more than {self._limits.output_bytes} bytes of output"
        if end["reason"] == "timeout":
            return f"timeout: no end after {self._limits.wall_s:.3g} s"
        if end["reason"] == "cancelled":
            return "cancelled"
        if code == -signal.SIGKILL and end["cpu_s"] >= 0.75 * self._limits.cpu_s:  # for a limit whole ticks are counted
            return f"timeout: more than {self._limits.cpu_s:g} s of processor time"
        return _ended(code, err, self._limits)


def _ended(code: int, stderr: str, limits: Limits) -> str:
    """Why a process with this exit code (negative: killed by that signal) has failed; empty if it has not."""
    if code < 0:  # Python has no name for the realtime signals
        return f"killed by {next((s.name for s in signal.Signals if s == -code), f'signal {-code}')}"
    last = stderr.strip().rsplit("\n", 1)[-1]
    if code and last.startswith("MemoryError"):
        return f"memory: more than {limits.memory_bytes} bytes"
    return (f"exit code {code}" + (f": {last[:300]}" if last else "")) if code else ""


def _ways_out() -> str:
    """What allows namespaces, how this system is set, and what can be done without them."""
    kernel = ("kernel.unprivileged_userns_clone", "kernel.apparmor_restrict_unprivileged_userns")
    names = ("user.max_user_namespaces", *kernel)
    files = {name: Path("/proc/sys", *name.split(".")) for name in names}
    here = ", ".join(f"{name} = {file.read_text().strip()}" for name, file in files.items() if file.exists())
    return (
        f". Nothing was run. The system allows user namespaces where, as far as they exist, {names[0]} is positive, "
        f"{names[1]} is 1 and {names[2]} is 0 (here: {here}); change them by `sudo sysctl -w NAME=VALUE`. A container "
        f"needs `--security-opt seccomp=unconfined` or `--cap-add SYS_ADMIN`. Or {_REMOTE}"
    )


async def _run_remotely(url: str, source: str, stdin: str, limits: Limits) -> Execution:
    """Have a SandboxFusion server run a program: https://bytedance.github.io/SandboxFusion, `POST /run_code`."""
    sent, typed = (text.encode("utf-8", "replace").decode() for text in (source, stdin))  # JSON has no lone surrogates
    request = {"language": "python", "code": sent, "stdin": typed, "compile_timeout": 10, "run_timeout": limits.wall_s}
    request |= {"memory_limit_MB": max(1, limits.memory_bytes >> 20), "files": {}, "fetch_files": []}
    try:
        url = f"{url.rstrip('/').removesuffix('/run_code')}/run_code"
        answer = await post_json(url, request, timeout_s=limits.wall_s + 60)
    except HttpError as error:
        raise SandboxError(f"the remote sandbox does not run programs: {error}") from error
    ran = (answer.get("run_result") if isinstance(answer, dict) else None) or {}
    code, stdout, stderr = ran.get("return_code"), ran.get("stdout") or "", ran.get("stderr") or ""
    if ran.get("status") == "TimeLimitExceeded":
        reason = f"timeout: no end after {limits.wall_s:.3g} s"
    elif ran.get("status") != "Finished" or not isinstance(code, int):
        raise SandboxError(f"the remote sandbox {url} failed: {str(answer)[:300]}")
    elif len(stdout) > limits.output_bytes:
        reason = f"more than {limits.output_bytes} bytes of output"
    else:
        reason = _ended(code, stderr, limits)
    wall_s = float(ran.get("execution_time") or 0.0)
    return Execution(reason, stdout[: limits.output_bytes], stderr[:_STDERR_BYTES], wall_s, math.nan)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _file(text: str) -> int:
    """A sealed file in memory: nobody can change it."""
    fd = os.memfd_create("rlkit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = memoryview(text.encode("utf-8", "surrogatepass"))  # a lone surrogate: the program reads invalid UTF-8
    while data:
        data = data[os.write(fd, data) :]
    fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
