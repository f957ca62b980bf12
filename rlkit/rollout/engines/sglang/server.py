"""Start an SGLang server, wait until it is healthy, and stop it with the process that started it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlkit.rollout.engines.sglang.checks import config_of

CPU_ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--sleep-on-idle", "--grammar-backend", "none"),
)
CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_MMAP_MAX_": "0",  # glibc keeps freed pages: fresh ones for every bucket of weights cost as much as the copy
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}
# Set by torchrun. With them the server's processes would connect to the trainer's store, and hang.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LOST_PORT = "error while attempting to bind on address"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A server process that `launch` started: `url`, `log`, `pid` (of its process group), `wait` and `close`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.url, self.log, self.pid = url, log, process.pid
        self._process = process
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
            RuntimeError: it exited. TimeoutError: `timeout` seconds have passed; it was stopped. Both show the end of
            the log.
        """
        end = time.monotonic() + timeout
        while not _healthy(self.url):
            if not self.alive or _LOST_PORT in self._tail():  # then it would wait for itself for minutes
                self.close()
                raise RuntimeError(f"the SGLang server exited at its start; its log {self.log} ends:\n{self._tail()}")
            if time.monotonic() > end:
                self.close()
                raise TimeoutError(f"no SGLang server at {self.url} after {timeout} s; its log ends:\n{self._tail()}")
            time.sleep(0.25)
        return self

    def close(self) -> None:
        """End the server's process group; may be repeated."""
        self._stop()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def launch(
    model_path: str | os.PathLike[str],
    *,
    device: str = "cuda",
    dtype: str | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    python: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    log: str | os.PathLike[str] | None = None,
    wait: bool = True,
) -> Server:
    """Start an SGLang server in a process group of its own.

        with launch("Qwen/Qwen3-4B", args=["--tp", "2"]) as server, ...

    The group ends with `close`, with the `with` block, at exit, and when this process dies in any way.
    Initial weights have version 0. SGLang uses the seed of a request only if it is started with
    `args=["--enable-deterministic-inference"]`, which it refuses on a CPU.

    Args:
        model_path: of a checkpoint in Hugging Face's layout, or its name on the hub.
        device: "cuda", or "cpu" for a server without a GPU (see `make sglang-cpu`).
        dtype: of weights and activations; by default the one in a local checkpoint's config.json, else SGLang's choice
            (which turns a float32 checkpoint into float16).
        args: more command-line arguments of `sglang.launch_server`; later ones win.
        env: more environment variables, beside those of this process (without those of torchrun).
        python: the interpreter that has SGLang; by default $RLKIT_SGLANG_PYTHON, else the running one.
        host, port: where to listen; by default on this machine only, at a free port.
        log: file for the server's output; by default in a new folder of the temporary one.
        wait: whether to return only when the server is healthy (half a minute and more). To start several at once,
            pass False and call `Server.wait`.

    Raises:
        RuntimeError: this is not Linux. ValueError: `port` is taken. RuntimeError, TimeoutError: see `Server.wait`.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            f"SGLang servers run on Linux, this is {sys.platform}: start one there and give its address (--engine-urls)"
        )
    if port is not None and not _is_free(host, port):
        raise ValueError(f"port {port} of {host} is taken: pass another port, or omit it")
    port = _free_port(host) if port is None else port
    own = config_of(str(model_path)) if Path(model_path).is_dir() else {}
    dtype = dtype or own.get("dtype") or own.get("torch_dtype")
    python = python or os.environ.get("RLKIT_SGLANG_PYTHON") or sys.executable
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model_path), "--host", host]
    command += ["--port", str(port), "--weight-version", "0"]
    command += [*(CPU_ARGS if device == "cpu" else ()), *(("--dtype", dtype) if dtype else ()), *args]
    path = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix=f"rlkit-sglang-{port}-"), "server.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith("TORCHELASTIC_")}
    with open(path, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), str(os.getpid()), *command],
            env={**ours, **(CPU_ENV if device == "cpu" else {}), **(env or {})},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    server = Server(process, f"http://{host}:{port}", path)
    return server.wait() if wait else server


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
