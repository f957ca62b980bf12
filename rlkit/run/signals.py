"""Graceful shutdown: the first Ctrl-C ends the run after its step, the second aborts, the third kills the process."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any

from rlkit._util.ranks import is_first, launched, local_world_size
from rlkit._util.text import masked

Handler = Callable[[int, Any], Any]
_NUMBERS = (signal.SIGINT, signal.SIGTERM)

_MESSAGES = (
    b"stopping after this step, then saving (Ctrl-C again: without saving)\n",
    b"aborting, nothing more is saved (Ctrl-C again: without waiting for what computes)\n",
)
_handling: list[Handler] = []  # of the `handled_by` blocks that this process is in
_forwarded: ContextVar[list[Handler] | None] = ContextVar("forwarded", default=None)  # see `forward_signals`


class Stop:
    """A stop request: `requested` becomes True at the first Ctrl-C or SIGTERM; `number` is the signal."""

    requested = False
    number = int(signal.SIGINT)


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Inside the block the first Ctrl-C (or SIGTERM) only sets `stop.requested`.

        with stop_on_interrupt() as stop:
            for step in ...:
                ...
                if stop.requested:
                    save; print(resume_command("--resume")); break

    The second raises KeyboardInterrupt: engines and files are closed, after an optimizer step that runs in a thread has
    ended (Python cannot stop a thread). In a coroutine, while other tasks run, the block's own task is cancelled
    instead: the exception in another task would end the event loop, and with it a notebook's kernel. The third ends the
    process by the signal's default action. None of them loses anything on disk: a half-written checkpoint is ignored on
    resume.

    Outside the main thread, signals are caught only inside `forward_signals` (which `run_sync` uses in a notebook).

    A process that a reward or an environment forks inside the block (`multiprocessing`, `os.fork`) ignores the first
    Ctrl-C, so that the step can end. The next one ends it, and so does SIGTERM, by which `multiprocessing` ends it.

    Ranks of torchrun get a Ctrl-C twice, from terminal and torchrun, so two within two seconds are one; 30 s later
    (`--shutdown-timeout`) torchrun kills them.
    """
    stop, count, asked, task = Stop(), 0, -math.inf, _task_here()

    def on_signal(number: int, _frame: Any) -> None:
        nonlocal count, asked
        if launched() and time.monotonic() < asked + 2:
            return
        if count == 2:
            _tell(b"")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.number = number
        stop.requested, count, asked = True, count + 1, time.monotonic()  # set first: the next signal may arrive now
        if is_first():
            _tell(_MESSAGES[count - 1])
        if count == 2:
            if task is None or task is _task_here():
                raise KeyboardInterrupt
            task.get_loop().call_soon_threadsafe(task.cancel)

    in_main = threading.current_thread() is threading.main_thread()
    try:
        with handled_by(on_signal) if in_main else _forwarded_to(on_signal):
            yield stop
    except asyncio.CancelledError:
        if count < 2:
            raise
        raise KeyboardInterrupt from None


def _task_here() -> asyncio.Task[Any] | None:
    """The task that runs in this thread now, if any."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@contextmanager
def _forwarded_to(handler: Handler) -> Iterator[None]:
    """Inside the block, a main thread that waits for this thread in `forward_signals` calls `handler`."""
    handlers = _forwarded.get()
    handlers = [] if handlers is None else handlers
    handlers.append(handler)
    try:
        yield
    finally:
        handlers.remove(handler)


@contextmanager
def forward_signals(interrupt: Callable[[], object]) -> Iterator[None]:
    """Inside the block the main thread, which waits for another thread, runs the handlers of its `stop_on_interrupt`.

    Python runs signal handlers in the main thread only. The other thread runs in a copy of this context. While it is
    not inside `stop_on_interrupt`, SIGINT calls `interrupt` and SIGTERM keeps its previous handler. Outside the main
    thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: list[Handler] = []
    old = _handlers_now()

    def on_signal(number: int, frame: Any) -> None:
        if handlers:
            handlers[-1](number, frame)
        elif not callable(old[number]):
            signal.signal(number, old[number])
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:  # the event loop's own handler would only cancel a task of the waiting loop
            interrupt()  # it must not raise at an unknown place of the waiting thread
        else:
            old[number](number, frame)

    token = _forwarded.set(handlers)
    try:
        with handled_by(on_signal):
            yield
    finally:
        _forwarded.reset(token)


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by `handler` inside the block."""
    old = _handlers_now()
    for number in old:
        signal.signal(number, handler)
    _handling.append(handler)
    try:
        yield
    finally:
        keep_interrupt()
        _handling.remove(handler)
        for number, before in old.items():
            signal.signal(number, before)


@cache  # a block after another asks once
def keep_interrupt() -> None:
    """Let a KeyboardInterrupt that nobody catches end the process by SIGINT, also where tabulate is installed.

    torch._dynamo imports it at exit, and its named tuples evaluate code: Python then forgets the interrupt, and the
    status is 1.
    """
    with suppress(ImportError):
        import_module("tabulate")


def _handlers_now() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _NUMBERS}


def _hold_signals() -> None:
    """Before a fork: Python drops signals that reach the child before its hooks have run, so they have to wait."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _reset_in_child() -> None:
    """The handlers of this module are for the process of the run: they would keep a forked worker alive."""
    if _handling:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_DFL))
        _handling.clear()
    _release_signals()


if hasattr(os, "register_at_fork"):
    _held = threading.local()
    os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_reset_in_child)


def _tell(text: bytes) -> None:
    """Write to stderr from a signal handler, where `print` may not be re-entered; on a terminal, over the bar's line.

    Errors are ignored: after `2>&1 | tee`, the same Ctrl-C has ended tee, and nobody reads it.
    """
    terminal = os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb"
    with suppress(OSError):
        os.write(2, (b"\r\x1b[2K" if terminal else b"\n") + text)


def resume_command(*flags: str) -> str:
    """The command line of this process, with missing `flags` added: the command that resumes the run.

    In an interactive session (a notebook), a text that names `resume=True` instead. Of a rank of torchrun, its command
    on one node, or a text that names the flags.
    """
    if hasattr(sys, "ps1"):
        return "the same call with resume=True"
    typed = sys.orig_argv
    if "TORCHELASTIC_RUN_ID" in os.environ and typed[1:2] == ["-u"]:  # torchrun starts `python -u [-m] ...`
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            return " ".join(["the same torchrun command on each node, with", *flags])
        typed = ["torchrun", "--nproc-per-node", str(local_world_size()), *typed[2:]]
    if len(typed) > 1 and typed[1] == shutil.which(name := os.path.basename(typed[1])):  # a command: rlkit grpo ...
        typed = [name, *typed[2:]]
    return shlex.join([*map(masked, typed), *(flag for flag in flags if flag not in typed)])
