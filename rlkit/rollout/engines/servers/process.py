"""Start an inference server, wait until it is healthy, and stop it with the process that started it."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlkit._util.extras import interpreter
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.servers.checks import config_of

# Set by torchrun. With them the server's processes would connect to the trainer's store, and hang.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LOST_PORT = "error while attempting to bind on address"
RESTARTS = 5  # of each server; one that dies more often has a reason
_log = logging.getLogger("rlkit.rollout")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server process that `launch` started: `url`, `log`, `pid` (of its process group), `wait`, `again`, `close`."""

    def __init__(self, run: Callable[[], subprocess.Popen[bytes]], url: str, log: Path, name: str) -> None:
        self.url, self.log, self.name, self._run = url, log, name, run
        self._begin()

    def _begin(self) -> None:
        self._process = process = self._run()
        self.pid = process.pid
        self._stop = weakref.finalize(self, _stop, process, os.getpid())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process is there. A server that hangs is alive."""
        return self._process.poll() is None

    def wait(self, timeout: float = 900.0) -> Server:
        """Return when the server answers requests.

        Raises:
            EngineError (a RuntimeError): it exited. TimeoutError: `timeout` seconds have passed; it was stopped. Both
            show the end of the log.
        """
        end = time.monotonic() + timeout
        while not _healthy(self.url):
            if not self.alive or _LOST_PORT in self._tail():  # then it would wait for itself for minutes
                self.close()
                fault = f"the {self.name} server exited at its start"
                raise EngineError(f"{fault}; its log {self.log} ends:\n{self._tail()}")
            if time.monotonic() > end:
                self.close()
                problem = f"no {self.name} server at {self.url} after {timeout} s"
                raise TimeoutError(f"{problem}; its log ends:\n{self._tail()}")
            time.sleep(0.25)
        return self

    def again(self) -> None:
        """Start a server that has ended once more, at the same address; its log goes on."""
        self.close()
        self._begin()

    def close(self) -> None:
        """End the server's process group; may be repeated."""
        self._stop()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        of_server = [line for line in lines if not line.startswith("guard: ")]  # of guard.py, after the server's end
        return "\n".join((of_server or lines)[-30:])


def start_server(
    name: str,
    options: Sequence[str],
    model_path: str | os.PathLike[str],
    *,
    args: Sequence[str],
    env: Mapping[str, str],
    dtype: str | None = None,
    python: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    log: str | os.PathLike[str] | None = None,
    wait: bool = True,
) -> Server:
    """What the `launch` functions share, see there: run Python with `options`, address, dtype and `args`.

    The server is in a process group of its own, which ends with `close`, with the `with` block, at exit, and when this
    process dies in any way. `env` is beside the variables of this process, without those of torchrun.
    """
    port = usable_port(host, port, name=name)
    config = config_of(str(model_path)) if Path(model_path).is_dir() else {}
    dtype = dtype or config.get("dtype") or config.get("torch_dtype")
    command = [interpreter(name.lower(), python), *options, "--host", host, "--port", str(port)]
    command += [*(("--dtype", dtype) if dtype else ()), *args]
    path = (
        Path(log) if log is not None else Path(tempfile.mkdtemp(prefix=f"rlkit-{name.lower()}-{port}-"), "server.log")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith("TORCHELASTIC_")}

    def run() -> subprocess.Popen[bytes]:
        with open(path, "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), str(os.getpid()), *command],
                env={**ours, **env},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    server = Server(run, f"http://{host}:{port}", path, name)
    return server.wait() if wait else server


@contextmanager
def kept_running(servers: Sequence[Server]) -> Iterator[None]:
    """Inside the block a server that ends is started again, at most `RESTARTS` times, and logged.

    An engine leaves it out until it answers, and then gives it the weights with the next update.
    """
    ended = threading.Event()

    def watch() -> None:
        left = dict.fromkeys(servers, RESTARTS)
        while not ended.wait(1.0):
            for server in servers:
                if server.alive or left[server] < 0:
                    continue
                left[server] -= 1
                again = "it is started again" if left[server] >= 0 else f"after {RESTARTS} starts it is left alone"
                _log.warning("the %s server %s has ended: %s; log: %s", server.name, server.url, again, server.log)
                if left[server] >= 0:
                    server.again()

    thread = threading.Thread(target=watch, name="rlkit-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def usable_port(host: str, port: int | None, *, name: str) -> int:
    """`port`, or a free one. ValueError if it is taken, RuntimeError where such servers do not run."""
    if sys.platform != "linux":
        fault = f"{name} servers run on Linux, this is {sys.platform}"
        raise RuntimeError(f"{fault}: start one there and give its address (--engine-urls)")
    if port is not None and not _is_free(host, port):
        raise ValueError(f"port {port} of {host} is taken: pass another port, or omit it")
    return _free_port(host) if port is None else port


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked worker that inherited the object
        return
    process.terminate()  # the guard ends the rest
    try:
        process.wait(15.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=60) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):  # refused, reset, 503 while it starts
        return False


def _free_port(host: str) -> int:
    """A free port below the system's ephemeral range, from which another process could be given it before the server
    takes it, seconds later; the server also takes a few ports above it."""
    first = 32768
    with suppress(OSError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(max(2048, first - 16384), first - 2048)
    tried = random.SystemRandom().sample(below, min(100, len(below)))
    with socket.create_server((host, next((port for port in tried if _is_free(host, port)), 0))) as free:
        return int(free.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
