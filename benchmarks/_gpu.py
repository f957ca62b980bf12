"""Timing on a CUDA device, and a description of the machine. Without a device it runs on the CPU, as a rehearsal."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import platform
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FIRST_RUN_SECONDS = 40.0  # of one run, which may compile or tune itself; it is broken off after that
FIRST_RUNS_SECONDS = 90.0  # of all runs at one shape; those that have not begun by then are left out
FLUSH_BYTES = 256 << 20  # several times the largest L2 cache
WITHOUT: set[str] = set()  # runs to skip


class Budget:
    """When this process has to be done; runs that have not begun by then are left out."""

    end = math.inf


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer; at the next Python instruction, not inside a library's call."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"broken off: its first run took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class DeviceLost(Exception):
    """The run of this name left the device unusable for this process."""


def lost() -> bool:
    """Whether nothing works on the device any more (after an illegal access, not after a lack of memory)."""
    try:
        if CUDA:
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


@cache
def flush() -> torch.Tensor:
    """Written before each timing, so that inputs come from memory and the host is ahead when the clock starts."""
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=DEVICE)


def milliseconds(run: Callable[[], Any]) -> float:
    """Milliseconds of one run, by the device's own clock."""
    if not CUDA:
        before = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - before)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush().zero_()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def peak_mb(run: Callable[[], Any]) -> float:
    """Growth of the allocated memory while it runs."""
    gc.collect()
    if not CUDA:
        run()
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def reason(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def time_all(runs: dict[str, Callable[[], Any]], *, seconds: float, rounds: int = 15) -> dict[str, Row]:
    """Milliseconds of each, after one untimed run that also gives its peak memory.

    Failures, and first runs for which there is no time, are rows with an `error`.
    """
    rows: dict[str, Row] = {name: {"name": name, "error": "left out"} for name in runs if name in WITHOUT}
    end = min(time.monotonic() + FIRST_RUNS_SECONDS, Budget.end - seconds)
    for name, run in runs.items():
        left = min(FIRST_RUN_SECONDS, end - time.monotonic())
        if name in WITHOUT:
            continue
        if left <= 0:
            rows[name] = {"name": name, "error": "left out: no time for its first run"}
            continue
        try:
            with at_most(left):
                rows[name] = {"name": name, "peak_mb": round(peak_mb(run), 1), "ms": []}
        except Exception as error:
            rows[name] = failed(name, error)
    end = time.monotonic() + seconds
    for number in range(rounds):
        for name in [n for n, row in rows.items() if "ms" in row]:
            if time.monotonic() > (end if number >= 3 else Budget.end):
                return rows
            try:
                rows[name]["ms"].append(milliseconds(runs[name]))
            except Exception as error:
                rows[name] = failed(name, error)
    return rows


def failed(name: str, error: Exception) -> Row:
    """The row of a run that raised; raises if no further run is possible."""
    if lost():
        raise DeviceLost(name) from error
    return {"name": name, "error": reason(error)}


def median_ms(run: Callable[[], Any], *, seconds: float = 1.0, rounds: int = 15) -> float:
    """Median milliseconds of one function; raises what it raises."""
    run()
    end, found = time.monotonic() + seconds, [milliseconds(run) for _ in range(3)]
    while len(found) < rounds and time.monotonic() < end:
        found.append(milliseconds(run))
    return statistics.median(found)


def machine() -> dict[str, Any]:
    """Device, versions, commit, and a digest of the kernels' sources, in case there is no git."""
    import triton

    sources = sorted((Path(__file__).parents[1] / "rlkit/kernels").rglob("*.py"))
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip()
    except OSError:
        commit = ""
    return {
        "device": torch.cuda.get_device_name() if CUDA else "rehearsal on a CPU",
        "memory_gb": round(torch.cuda.get_device_properties(0).total_memory / 2**30) if CUDA else 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or "unknown",
        "kernels": hashlib.sha1(b"".join(p.read_bytes() for p in sources)).hexdigest()[:10],
    }


def save(path: Path, section: str, name: str, result: dict[str, Any]) -> None:
    """Add one result to the file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found.setdefault(section, {})[name] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
