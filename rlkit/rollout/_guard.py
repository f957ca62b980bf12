"""`python _guard.py PARENT COMMAND ...`: run the command; end its whole process group with it, or with the parent.

The guard leads the group. So a server never outlives the trainer that launched it, not even one that was killed with
SIGKILL, and none of its workers outlives the server. Standard library only: it starts in milliseconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> None:
    """See the module."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    wanted = True

    def stop(*_: object) -> None:
        nonlocal wanted
        wanted = False

    signal.signal(signal.SIGTERM, stop)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while wanted and server.poll() is None and os.getppid() == parent:
        time.sleep(0.1)
    sys.stderr.write(f"guard: server status {server.poll()}, stop asked: {not wanted}, parent {os.getppid()}\n")
    sys.stderr.flush()
    server.kill()  # its workers follow (SIGTERM would have it drain and diagnose for five seconds)
    time.sleep(0.5)  # multiprocessing's resource tracker then unlinks its semaphores
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
