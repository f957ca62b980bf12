"""Run one command, keep its log, and end it with everything that it started. A script of the standard library.

    python -I -S supervise.py FILE        {"argv": [...], "folder": ..., "log": ..., "seconds": ..., "memory": ...}

It prints one JSON object at the end: `code` (negative: a signal), `reason` (why it ended the command; "" if that ended
by itself) and `left` (processes that the command left, which are killed). Standard input is a life line: when it
closes, because the caller stopped or died, the command is killed, and the folder that its own is in is removed,
with the one around it if that is empty then. A byte "-" stops the clock of `seconds`, and "+" has it go on.

On Linux the process adopts what the command leaves behind (PR_SET_CHILD_SUBREAPER), also daemons in sessions of their
own. Elsewhere it kills the command's process group, and memory is not limited.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # without `typing` and `shutil`, which take as long to import as the rest
if TYPE_CHECKING:
    from typing import BinaryIO

LINUX = sys.platform == "linux"
LOG_BYTES = 1 << 20  # of the output that is kept
MAX_PROCESSES = 1000
POLL_S = 0.1
_PDEATHSIG, _SUBREAPER = 1, 36  # options of prctl


def main() -> None:
    """Run the command of the file `argv[1]` and report its end."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    prctl(_SUBREAPER, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        start(spec, writer)
    os.close(writer)
    with open(spec["log"], "ab") as log:
        run = Run(child, reader, log)
        try:
            reason = run.watch(spec["seconds"], spec["memory"])
        finally:
            left = end(child)
            run.drain()
    if reason == "stopped":
        import shutil

        home = os.path.dirname(spec["folder"])
        shutil.rmtree(home, ignore_errors=True)
        if not os.listdir(os.path.dirname(home)):  # that of all episodes, of which this was the last
            os.rmdir(os.path.dirname(home))
    sys.stdout.write(json.dumps({"code": run.code, "reason": reason, "left": left}))


def start(spec: dict, writer: int) -> None:
    """Become the command; never returns."""
    try:
        os.setsid()
        prctl(_PDEATHSIG, signal.SIGKILL)
        os.chdir(spec["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.closerange(3, 256)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(spec["argv"][0], spec["argv"])
    except BaseException as error:
        os.write(2, f"{spec['argv'][0]}: {error}\n".encode(errors="replace"))
    os._exit(127)


class Run:
    """The running command: its exit code, and its output on the way into the log."""

    def __init__(self, child: int, reader: int, log: BinaryIO) -> None:
        self.code: int | None = None
        self._child, self._reader, self._log = child, reader, log
        self._room, self._open = LOG_BYTES, True

    def watch(self, seconds: float, memory: int | None) -> str:
        """Wait for the end of the command; the reason if it must be ended."""
        deadline, look, stood = time.monotonic() + seconds, 0.0, 0.0  # stood: since when the clock has; 0: it goes
        while True:
            ready, _, _ = select.select([0, self._reader] if self._open else [0], [], [], POLL_S)
            if 0 in ready:
                if not (told := os.read(0, 1)):
                    return "stopped"
                deadline += time.monotonic() - stood if stood else 0.0
                stood = time.monotonic() if told == b"-" else 0.0
            if self._reader in ready:
                self._read()
            if self._reap():
                return ""
            now = time.monotonic()
            if now > deadline and not stood:
                return f"it had not ended after {seconds:g} s"
            if LINUX and now > look:
                look = now + POLL_S
                pids = descendants()
                if len(pids) > MAX_PROCESSES:
                    return f"it had more than {MAX_PROCESSES} processes"
                if memory is not None and sum(map(resident, pids)) > memory:
                    return f"it had more than {memory / 2**30:g} GiB of memory"

    def drain(self) -> None:
        """Read what is left of the output; everything that could write more is dead."""
        while self._open and select.select([self._reader], [], [], 0)[0]:
            self._read()

    def _read(self) -> None:
        data = os.read(self._reader, 1 << 16)
        self._open = bool(data)
        if data and self._room > 0:
            self._log.write(data[: self._room])
            self._room -= len(data)
            if self._room <= 0:
                self._log.write(f"\n... (more than {LOG_BYTES >> 20} MiB)\n".encode())
            self._log.flush()

    def _reap(self) -> bool:
        """Whether the command has ended. Waits for adopted processes too, so that none stays a zombie."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return False
            if pid == self._child:
                self.code = os.waitstatus_to_exitcode(status)
                return True


def end(child: int) -> int:
    """Kill the command and all that it started; the number of processes that were alive beside it."""
    if not LINUX:
        try:
            os.killpg(child, signal.SIGKILL)
        except OSError:
            return 0
        return 0
    alive = {pid for pid in descendants() if pid != child and state(pid) != "Z"}
    while pids := descendants():
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: they could fork faster than they are killed
            for pid in pids:
                try:
                    os.kill(pid, number)
                except OSError:
                    continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(0.002)
    return len(alive)


def descendants() -> list[int]:
    """The ids of all processes below this one."""
    pids: list[int] = []
    level = [os.getpid()]
    while level:
        level = [child for pid in level for child in children(pid)]
        pids += level
    return pids


def children(pid: int) -> list[int]:
    """The ids of a process's children."""
    pids: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                pids += map(int, file.read().split())
    except OSError:
        return pids
    return pids


def resident(pid: int) -> int:
    """Bytes in memory that are not shared with files."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, all_pages, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return (all_pages - shared) * os.sysconf("SC_PAGE_SIZE")


def state(pid: int) -> str:
    """The state of a process, such as R, S or Z."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, on Linux."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
