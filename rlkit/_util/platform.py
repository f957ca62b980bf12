"""What the system of this process has."""

from __future__ import annotations

import os
import sys


def refuse_windows(feature: str) -> None:
    """Raise ImportError on Windows; `feature` needs POSIX file locks, sockets and signals."""
    if sys.platform == "win32":
        raise ImportError(
            f"{feature} does not run on Windows itself: run it in WSL (https://learn.microsoft.com/windows/wsl)"
        )


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
