"""Ctrl-C: the first ends the run after its step, the second at once, the third whatever it does; and how to go on."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SAID = (
    b"\nstopping after this step, then saving (Ctrl-C again: without saving)\n",
    b"\naborting, nothing more is saved (Ctrl-C again: without waiting for what computes)\n",
)


class Stop:
    """Whether somebody asked the run to end. `requested` turns True at the first Ctrl-C or SIGTERM."""

    requested = False


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Inside the block the first Ctrl-C (or SIGTERM) only sets `stop.requested`.

        with stop_on_interrupt() as stop:
            for step in ...:
                ...
                if stop.requested:
                    save; print(resume_command("--resume")); break

    The second raises KeyboardInterrupt. Engines and files are closed then, and an optimizer step that runs in a thread
    ends first: Python cannot end a thread. The third ends the process as the signal does by default. Nothing on the
    disk is lost by either, and a checkpoint that was being written is none.

    Outside the main thread signals cannot be caught, and nothing changes. Ranks of torchrun get a Ctrl-C twice, from
    terminal and torchrun, so two within two seconds are one; 30 s later (`--shutdown-timeout`) torchrun kills them.
    """
    stop, count, asked = Stop(), 0, -math.inf
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, _frame: Any) -> None:
        nonlocal count, asked
        if "RANK" in os.environ and time.monotonic() < asked + 2:
            return
        if count == 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.requested, count, asked = True, count + 1, time.monotonic()  # first: the next signal may be here already
        if os.environ.get("RANK", "0") == "0":
            os.write(2, _SAID[count - 1])  # print may not be called again while the interrupted code is inside it
        if count == 2:
            raise KeyboardInterrupt

    old: dict[int, Any] = {}
    for caught in (signal.SIGINT, signal.SIGTERM):
        old[caught] = signal.signal(caught, on_signal)
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def resume_command(*flags: str) -> str:
    """The command line of this process with `flags` added where they are missing: what to type to go on."""
    return shlex.join([*sys.orig_argv, *(flag for flag in flags if flag not in sys.orig_argv)])
