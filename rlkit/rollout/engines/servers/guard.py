"""`python guard.py PARENT COMMAND ...`: run the command, and kill its process group when it or the parent ends.

The guard leads the group, so a server never outlives the trainer that launched it, even if that is killed with SIGKILL,
and no worker outlives its server. The guard also removes the servers' files and semaphores in /dev/shm, which SGLang
never removes, nor vLLM where it is killed. Standard library only: it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

SHARED = "/dev/shm"
NAMES = ("sglang_", "psm_", "sem.mp-")
LOOK_EVERY = 10.0  # seconds; after a sudden death there is no process left to inspect


def main() -> None:
    """See the module."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    wanted = True

    def stop(*_: object) -> None:
        nonlocal wanted
        wanted = False

    signal.signal(signal.SIGTERM, stop)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    files: set[str] = set()
    looked = time.monotonic()
    while wanted and server.poll() is None and os.getppid() == parent:
        time.sleep(0.1)
        if time.monotonic() - looked > LOOK_EVERY:
            files |= shared_files(os.getpgrp())
            looked = time.monotonic()
    files |= shared_files(os.getpgrp())
    sys.stderr.write(f"guard: server status {server.poll()}, stop asked: {not wanted}, parent {os.getppid()}\n")
    sys.stderr.flush()
    server.kill()  # its workers follow; on SIGTERM it would drain and diagnose for five seconds
    for path in files:
        with suppress(FileNotFoundError):
            os.unlink(path)
    os.killpg(0, signal.SIGKILL)


def shared_files(group: int) -> set[str]:
    """Files in /dev/shm that processes of a group have mapped, found by inode: the C library renames semaphores."""
    inodes: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.getpgid(int(pid)) == group:
                with open(f"/proc/{pid}/maps") as maps:
                    inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if SHARED in line}
    with suppress(OSError):
        return {file.path for file in os.scandir(SHARED) if file.name.startswith(NAMES) and file.inode() in inodes}
    return set()


if __name__ == "__main__":
    main()
