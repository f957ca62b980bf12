"""Interleaved timing of several variants in one process, peak memory of each in its own process, and the machine."""

from __future__ import annotations

import json
import math
import multiprocessing
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

SILENCE, _said = 5.0, [time.monotonic()]  # seconds without a line, and when the last one was written
Variants = dict[str, Callable[[], Any]]


def say(text: str) -> None:
    """Progress on stderr: a line every five seconds at most."""
    if time.monotonic() - _said[0] > SILENCE:
        print(text, file=sys.stderr, flush=True)
        _said[0] = time.monotonic()


def interleaved(variants: Variants, *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each variant: one untimed round, then round by round, so drift affects all equally.

    On one thread it is processor time, which other processes disturb less; otherwise wall time.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(repeats + 1):
        for name, run in variants.items():
            say(f"round {number}/{repeats}: {name}")
            start = clock()
            run()
            if number:
                times[name].append(clock() - start)
    return times


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median that order statistics give, whatever the distribution."""
    ordered, n = sorted(values), len(values)
    tail, k = 0.0, 0
    while k < n // 2 and tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    return ordered[max(0, k - 1)], ordered[n - max(1, k)]


def peak_megabytes(make: Callable[[], Variants], name: str) -> float:
    """Growth of the resident set while one variant runs once, in a fresh process that has made its inputs."""
    say(f"memory: {name}")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(make, name, sender))
    child.start()
    result = receiver.recv()
    child.join()
    return result


def _measure(make: Callable[[], Variants], name: str, sender: Any) -> None:
    run = make()[name]
    before = _peak_kilobytes(reset=True)
    run()
    sender.send((_peak_kilobytes() - before) / 1024)


def _peak_kilobytes(*, reset: bool = False) -> float:
    """The peak resident set, on Linux since the last reset."""
    clear = Path("/proc/self/clear_refs")
    if reset and clear.exists():
        clear.write_text("5")
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return float(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if platform.system() == "Darwin" else 1)


def file_name(device: str) -> str:
    """A device's name as part of a file's: `NVIDIA H200` is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def machine() -> dict[str, Any]:
    """Processor and GPU, versions and commit, for the record."""
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip()
    except OSError:  # no git
        commit = ""
    gpu = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return gpu | {
        "cpu": names[0] if names else platform.processor(),
        "cores": torch.multiprocessing.cpu_count(),
        "threads": torch.get_num_threads(),
        "time": "processor" if torch.get_num_threads() == 1 else "wall",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit or "unknown",
    }


def report(
    times: dict[str, list[float]], *, baseline: str, sizes: dict[str, Any], memory: dict[str, float], out: Path | None
) -> None:
    """Print a table (median, spread, ratio to the baseline of the same round) and write it as JSON."""
    rows = []
    for name, seconds in times.items():
        ratios = [x / y for x, y in zip(seconds, times[baseline], strict=True)]
        row = {
            "name": name,
            "median_ms": 1e3 * statistics.median(seconds),
            "fastest_ms": 1e3 * min(seconds),
            "slowest_ms": 1e3 * max(seconds),
            "ratio": statistics.median(ratios),
        }
        if name in memory:
            row["peak_mb"] = memory[name]
        rows.append(row)
    print(f"{'':44}{'median ms':>11}{'fastest':>10}{'slowest':>10}{'ratio':>8}{'peak MB':>9}")
    for row in rows:
        peak = f"{row['peak_mb']:9.0f}" if "peak_mb" in row else ""
        cells = f"{row['median_ms']:11.2f}{row['fastest_ms']:10.2f}{row['slowest_ms']:10.2f}{row['ratio']:8.2f}{peak}"
        print(f"{row['name']:44}{cells}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine(), "sizes": sizes, "baseline": baseline, "rows": rows}
        out.write_text(json.dumps(result, indent=1) + "\n")
