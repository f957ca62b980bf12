"""`--profile-steps FIRST LAST`: a trace of torch.profiler over some steps of a run, and a table of their phases.

    profile/steps_10_12.json.gz      for https://ui.perfetto.dev or chrome://tracing
    profile/steps_10_12.txt          seconds of each phase on the clock, in CPU operators and on the GPU; the longest

Rank 0 is profiled, in all its threads. Other processes (engines, reward workers) are not.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

_MARK, _TOP = "rlkit phase: ", 8


def mark_phase(name: str) -> None:
    """Mark the end of a phase of a step in the trace."""
    with torch.profiler.record_function(_MARK + name):
        pass


class Profile:
    """The profiler of one run; `Run.log` calls `reached`."""

    def __init__(self, folder: Path, first: int, last: int, *, start: int) -> None:
        self._folder, self._first, self._last = folder, first, last
        self._profiler: Any = None
        if start == first - 1:
            self._start()

    def reached(self, step: int) -> str:
        """Start before the first step, write the files after the last; returns what was written, else ""."""
        if step == self._first - 1 and self._profiler is None:
            self._start()
        return self.close() if step == self._last else ""

    def close(self) -> str:
        """Stop a running profiler, and write the files: the text for the screen, or ""."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return ""
        mark_phase("between steps")
        profiler.stop()
        path = self._folder / f"steps_{self._first}_{self._last}.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
            path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table(profiler.events()))
        except OSError as error:
            return f"no profile, training goes on: {error}"
        return f"profiled steps {self._first} to {self._last}: {path} (for ui.perfetto.dev), and a table beside it"

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # a line at each start and stop; of a GPU, its errors, too
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=every)
        self._profiler.start()


class _Phase(NamedTuple):
    wall: float
    cpu: dict[str, float]
    gpu: dict[str, float]


def table(events: Iterable[Any]) -> str:
    """Seconds of each phase, its longest operators and its longest kernels, by where they start."""
    ordered = sorted(events, key=lambda event: event.time_range.start)
    marks = [event for event in ordered if event.name.startswith(_MARK) and event.device_type == DeviceType.CPU]
    ends, names = [mark.time_range.start for mark in marks], [mark.name.removeprefix(_MARK) for mark in marks]
    wall: dict[str, float] = defaultdict(float)
    for name, begin, end in zip(names, [ordered[0].time_range.start if ordered else 0.0, *ends], ends):
        wall[name] += end - begin
    phases = {name: _Phase(us, defaultdict(float), defaultdict(float)) for name, us in wall.items()}
    for event in ordered:
        at = bisect_left(ends, event.time_range.start)
        if at == len(ends) or event.name.startswith(_MARK):
            continue
        if event.device_type == DeviceType.CPU:
            phases[names[at]].cpu[event.name] += event.self_cpu_time_total
        elif not event.is_user_annotation:
            phases[names[at]].gpu[event.name] += event.time_range.elapsed_us()
    lines = [f"{'phase':16}{'clock s':>10}{'CPU s':>10}{'GPU s':>10}"]
    for name, phase in phases.items():
        times = (phase.wall, sum(phase.cpu.values()), sum(phase.gpu.values()))
        lines.append(f"{name:16}" + "".join(f"{us / 1e6:10.3f}" for us in times))
    for name, phase in phases.items():
        for where, of in (("CPU", phase.cpu), ("GPU", phase.gpu)):
            longest = sorted(of.items(), key=lambda item: -item[1])[:_TOP]
            lines += ["", f"{name}: longest on the {where}"] if longest else []
            lines += [f"{us / 1e6:10.3f} s  {operator}" for operator, us in longest]
    return "\n".join(lines) + "\n"
