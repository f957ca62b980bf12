"""Threads of a run on CPU cores that it shares with other processes (Linux; elsewhere torch's number of threads stays).

An operator of torch on n threads ends with a barrier, so it takes as long as its slowest thread. A thread whose core
runs another process holds up all others: a step of a small model, with a thousand barriers, then takes 4 to 50 times
as long. One thread per idle core takes at most the time of one thread (benchmarks/contention.py).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlkit._util.platform import num_cores
from rlkit._util.ranks import launched

SPINS = "10000"  # of a waiting OpenMP thread before it sleeps; 100,000 outlast a scheduler's time slice
_WINDOW_S = 20.0
_WAITING = 0.3  # seconds per second that the run's threads wait for a core, from which on the user is told


class Usage(NamedTuple):
    """Seconds at one moment: the clock, CPU time of all processes on this process's cores, and of this process."""

    clock: float
    everyone: float
    process: float


def usage() -> Usage:
    """The CPU time used so far; `everyone` is 0 where the system does not tell."""
    ticks = 0
    with suppress(OSError, ValueError, AttributeError):  # macOS has neither
        mine = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in mine:
                user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
                ticks += user + nice + system + irq + softirq
    return Usage(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


_STARTED = usage()


def busy_cores(since: Usage, now: Usage) -> float:
    """Cores that other processes used on average between two moments."""
    elapsed = now.clock - since.clock
    others = (now.everyone - since.everyone) - (now.process - since.process)
    return max(0.0, others / elapsed) if elapsed > 0 else 0.0


def choose_threads(*, num_threads: int | None = None) -> tuple[int, str]:
    """Set torch's number of threads to the number of idle cores; returns it with a line for the screen, or "".

    `num_threads` is the number of a run that is resumed, whose sums must round as before. OMP_NUM_THREADS and
    MKL_NUM_THREADS, and torchrun's ranks, keep what they have. Cores count as idle by their use since the process
    began.
    """
    import torch

    threads = torch.get_num_threads()
    if launched() or {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return threads, ""
    if num_threads is not None:
        torch.set_num_threads(min(num_threads, num_cores()))
        return torch.get_num_threads(), ""
    busy = busy_cores(_STARTED, usage())
    idle = max(1, int(num_cores() - busy + 0.5))
    if idle >= threads:
        return threads, ""
    torch.set_num_threads(idle)
    plural = "thread" if idle == 1 else "threads"
    line = f"{idle} {plural}: other processes use {busy:.1f} of {num_cores()} cores"
    return idle, f"{line} (OMP_NUM_THREADS={threads} overrides)"


class Waiting:
    """Reports once when the run's threads wait for cores that other processes use."""

    def __init__(self) -> None:
        self._usage, self._waited = usage(), _seconds_waited()
        self._done = False

    def report(self) -> str:
        """A line for the screen, or "". Call it after each step; it looks every 20 s."""
        if self._done or time.monotonic() < self._usage.clock + _WINDOW_S:
            return ""
        now, waited = usage(), _seconds_waited()
        elapsed = now.clock - self._usage.clock
        share, busy = (waited - self._waited) / elapsed, busy_cores(self._usage, now)
        self._usage, self._waited = now, waited
        threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1
        if threads == 1 or share < _WAITING or busy < 0.5:
            return ""
        self._done = True
        return (
            f"slow: other processes use {busy:.1f} of {num_cores()} cores, and this run's {threads} threads wait\n"
            "  for each other; faster: stop (Ctrl-C) and resume with OMP_NUM_THREADS=1"
        )


def _seconds_waited() -> float:
    """Seconds that this process's threads were ready but had no core, summed; 0 where the system does not tell."""
    nanoseconds = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended
            nanoseconds += int(task.read_text().split()[1])
    return nanoseconds / 1e9
