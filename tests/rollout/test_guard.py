"""The guard ends a whole process tree: with the server, and with the process that launched it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import rlkit.rollout

GUARD = Path(rlkit.rollout.__path__[0]) / "engines" / "servers" / "guard.py"
TREE = "sleep 1000 & sleep 1001 & wait"  # a server and workers of it


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def tree(process: psutil.Process) -> list[psutil.Process]:
    eventually(lambda: len(process.children(recursive=True)) >= 3)
    return process.children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(alive, processes))


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_tree_goes_with_the_server_or_when_asked(number: int) -> None:
    command = [sys.executable, "-S", "-E", str(GUARD), str(os.getpid()), "sh", "-c", TREE]
    guard = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    processes = tree(psutil.Process(guard.pid))
    if number == signal.SIGTERM:
        os.kill(guard.pid, number)
    else:
        processes[0].kill()
    guard.wait(120)
    eventually(lambda: gone(processes))


def test_the_tree_goes_when_the_launching_process_is_killed() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-S', '-E', {str(GUARD)!r}, str(os.getpid()), 'sh', '-c', {TREE!r}],"
        " start_new_session=True, stderr=subprocess.DEVNULL)\n"
        "time.sleep(1000)"
    )
    launcher = subprocess.Popen([sys.executable, "-S", "-E", "-c", code])
    eventually(lambda: len(psutil.Process(launcher.pid).children(recursive=True)) >= 4)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    eventually(lambda: gone(processes))
