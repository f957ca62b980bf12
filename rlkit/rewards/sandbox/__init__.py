"""Run untrusted Python where it can do no harm: namespaces, limits, a system call filter.

A run takes about as long as starting a bare `python -S` (benchmarks/rewards.py), because it forks a warm interpreter.

What a program finds: Python's standard library (read only, without site-packages but for the packages that the caller
names), /dev/null, /dev/zero, /dev/urandom and an empty folder in memory that it may write to. No network, no other
file, no environment variable, no other process, no privilege; nothing of it is left when it ends. Linux on x86-64 or
ARM64, as root or as any user where unprivileged user namespaces are allowed. Anywhere else `SandboxError` says what is
missing and nothing is run, or a SandboxFusion server runs the programs (`url`, RLKIT_SANDBOX_URL).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fcntl import fcntl
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlkit.rewards.http import HttpError, post_json
from rlkit.rewards.sandbox.servers import Server, ServerError, end_of
from rlkit.rewards.timeouts import a_core, in_thread

_ADD_SEALS, _ALL_SEALS = 1033, 0xF
_STDERR_BYTES = 1 << 16
_NOT_ISOLATED = "isolation failed"  # the prefix of these errors, see `_worker/isolate.py`
_REMOTE = "start a SandboxFusion server and set RLKIT_SANDBOX_URL to its address (stdin tests only)"


class SandboxError(RuntimeError):
    """The sandbox cannot be set up here, or broke. It says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """What one run may use. `memory_bytes` is on top of the interpreter; `processes` are in addition to the program's
    own one (0: it cannot fork; up to 16 threads are always allowed); `output_bytes` is of stdout.
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
class Ran:
    """How a program ended. `reason` is empty where it ended by itself with exit code 0, and else says what happened.
    A remote sandbox reports no `cpu_s` (nan).
    """

    reason: str
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float


async def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),
    packages: Sequence[str] = (),
    url: str | None = None,
) -> Ran:
    """Run a Python program as `python solution.py` would, with `stdin` as its input.

    As many run at once as there are cores; the wait for a free one does not count against a reward's deadline. A
    cancelled run is killed. Dictionaries and sets of strings iterate in the same order in every run (PYTHONHASHSEED=0),
    and `random` starts from seed 0.

    Of what is installed here, a program can read and import the `packages`, by the names it imports them by: with
    `("numpy",)` it finds numpy, and nothing beside it. What they need themselves has to be named, too. They are loaded
    before the program starts, on one thread each.

    With a `url` (default: the environment variable RLKIT_SANDBOX_URL) a SandboxFusion server runs the program. The
    server decides which packages are installed; `wall_s`, `memory_bytes` and `output_bytes` are the limits it applies.

    Raises SandboxError where the sandbox cannot be set up, or a package cannot be imported in it, or the server fails.
    """
    if url := url or os.environ.get("RLKIT_SANDBOX_URL"):
        return await _run_remotely(url, source, stdin, limits)
    child = Child("program", [stdin, None, None, source], limits, packages)
    async with a_core():
        return await in_thread(child.wait, cancel=child.cancel)


@cache
def _server(packages: tuple[str, ...]) -> Server:
    """A server that has loaded these packages."""
    needed = ("LD_LIBRARY_PATH", "PYTHONHOME")  # by some Pythons
    environment = {"PYTHONHASHSEED": "0", **{name: os.environ[name] for name in needed if name in os.environ}}
    if packages:
        environment |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    places = json.dumps({name: _place(name) for name in packages})
    return Server("sandboxd", flags=("-S", "-s"), environment=environment, arguments=(places,))


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
        self,
        run: str,
        fds: Sequence[str | Literal[-1] | None],
        limits: Limits,
        packages: Sequence[str] = (),
    ) -> None:
        system, machine = platform.system(), platform.machine()
        if system != "Linux" or machine not in ("x86_64", "aarch64"):
            raise SandboxError(
                f"the sandbox needs Linux on x86_64 or aarch64, this is {system} on {machine}: run this on Linux, "
                f"or {_REMOTE}"
            )
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
        for fd in self._fds:
            if fd is None:
                read, write = os.pipe()
                self._pipes.append(read)
                mine.append(write)
            else:
                mine.append(_file(fd) if isinstance(fd, str) else os.open(os.devnull, os.O_WRONLY))
        limits = asdict(self._limits)
        request = {"run": self._run, "limits": limits, "wall_s": self._limits.wall_s}
        try:
            self._control = self._server.begin(request, [*mine, *shared])
        except ServerError as error:
            _close(self._pipes)
            raise SandboxError(str(error)) from error
        finally:
            _close(mine)
        if self._cancelled:
            self.cancel()

    def wait(self) -> Ran:
        """Start it if need be, read what it writes, and say how it ended."""
        if self._control is None:
            self.start()
        assert self._control is not None
        try:
            out, err, flooded = self._read()
            end: dict[str, Any] = {}
            while "reason" not in end:  # what is said from inside comes before
                end |= end_of(self._control, self._limits.wall_s + 60)
        except ServerError as error:
            fix = _ways_out() if _NOT_ISOLATED in str(error) else ""
            raise SandboxError(f"{error}{fix}") from error
        finally:
            _close(self._pipes)
            self._control.close()
        if "began" not in end and end["reason"] == "exit":
            raise SandboxError(f"the process ended before it was isolated: {err.strip()[:300]}")
        return Ran(self._reason(end, err, flooded), out, err, end["wall_s"], end["cpu_s"])

    def _read(self) -> tuple[str, str, bool]:
        """What both pipes give until they are closed, or the child has ended and nothing is left in them (whatever else
        holds them open); kills a child that writes too much (stderr is cut in silence)."""
        assert self._control is not None
        texts, most = (bytearray(), bytearray()), (self._limits.output_bytes, _STDERR_BYTES)
        waiting = select.poll()
        waiting.register(self._control, 0)  # says when its other end is closed: after the child's end
        for fd in self._pipes:
            waiting.register(fd, select.POLLIN)
        num_open, flooded = len(self._pipes), False
        while num_open:
            ready = [fd for fd, _ in waiting.poll() if fd in self._pipes]
            if not ready:
                break
            for fd in ready:
                data = os.read(fd, 1 << 16)
                if not data:
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
    names = (
        "user.max_user_namespaces",
        "kernel.unprivileged_userns_clone",
        "kernel.apparmor_restrict_unprivileged_userns",
    )
    files = {name: Path("/proc/sys", *name.split(".")) for name in names}
    here = ", ".join(f"{name} = {file.read_text().strip()}" for name, file in files.items() if file.exists())
    return (
        f". Nothing was run. The system allows user namespaces where, as far as they exist, {names[0]} is positive, "
        f"{names[1]} is 1 and {names[2]} is 0 (here: {here}); change them by `sudo sysctl -w NAME=VALUE`. A container "
        f"needs `--security-opt seccomp=unconfined` or `--cap-add SYS_ADMIN`. Or {_REMOTE}"
    )


async def _run_remotely(url: str, source: str, stdin: str, limits: Limits) -> Ran:
    """Have a SandboxFusion server run a program: https://bytedance.github.io/SandboxFusion, `POST /run_code`."""
    sent, given = (text.encode("utf-8", "replace").decode() for text in (source, stdin))  # JSON has no lone surrogates
    request = {"language": "python", "code": sent, "stdin": given, "compile_timeout": 10, "run_timeout": limits.wall_s}
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
    return Ran(reason, stdout[: limits.output_bytes], stderr[:_STDERR_BYTES], wall_s, math.nan)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _file(text: str) -> int:
    """A sealed file in memory: nobody can change it."""
    fd = os.memfd_create("rlkit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        data = memoryview(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:  # a lone surrogate: the program sees invalid UTF-8
        data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(fd, data) :]
    fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
