"""What rlkit cannot do on a system, in one sentence."""

from __future__ import annotations

import sys


def refuse_windows(what: str) -> None:
    """Raise ImportError where this is Windows; `what` needs POSIX file locks, sockets and signals."""
    if sys.platform == "win32":
        raise ImportError(
            f"{what} does not run on Windows itself: run it in WSL (https://learn.microsoft.com/windows/wsl)"
        )
