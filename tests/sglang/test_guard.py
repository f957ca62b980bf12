"""The guard of a server; a stand-in maps a file as SGLang does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlkit.rollout.engines.servers import guard

SERVER = """
import mmap, multiprocessing, subprocess, sys
multiprocessing.set_start_method("spawn")  # so that the semaphore keeps its name
lock = multiprocessing.Lock()
file = open(sys.argv[1], "w+b")
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(worker.pid, flush=True)
worker.wait()
"""


@pytest.mark.slow
def test_workers_and_shared_files_go_with_the_server() -> None:
    shared = Path(guard.SHARED) / f"sglang_test_{os.getpid()}"
    command = [sys.executable, guard.__file__, str(os.getpid()), sys.executable, "-c", SERVER, str(shared)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        worker = psutil.Process(int(process.stdout.readline()))
        files = guard.shared_files(process.pid)
        semaphore = Path(*files - {str(shared)})
        assert (len(files), semaphore.name[:7]) == (2, "sem.mp-")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == -signal.SIGKILL
        worker.wait(120)
        assert not shared.exists()
        assert not semaphore.exists()
    finally:
        shared.unlink(missing_ok=True)
