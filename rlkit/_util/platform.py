"""Errors for unsupported platforms."""

from __future__ import annotations

import sys


def refuse_windows(feature: str) -> None:
    """Raise ImportError on Windows; `feature` needs POSIX file locks, sockets and signals."""
    if sys.platform == "win32":
        raise ImportError(
            f"{feature} does not run on Windows itself: run it in WSL (https://learn.microsoft.com/windows/wsl)"
        )
