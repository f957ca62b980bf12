"""Errors for unsupported platforms."""

from __future__ import annotations

import sys


def refuse_windows(what: str) -> None:
    """Raise ImportError on Windows; `what` needs POSIX file locks, sockets and signals."""
    if sys.platform == "win32":
        raise ImportError(
            f"{what} does not run on Windows itself: run it in WSL (https://learn.microsoft.com/windows/wsl)"
        )
