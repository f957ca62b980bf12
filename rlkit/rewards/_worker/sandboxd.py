"""The server of `rlkit.rewards.sandbox`: forks processes from one that has loaded the standard library; isolates them.

Nothing that belongs to a request passes through the server's memory: programs and inputs are files that only the child
reads. So a child cannot find in its memory what an earlier one was given.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import os
import socket
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

from . import forkd, isolate, program, rpc_solution, rpc_tests

_RUN = {"program": program.run, "solution": rpc_solution.run, "tests": rpc_tests.run}
_PURE = [
    "abc", "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "collections", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "graphlib",
    "hashlib", "heapq", "html", "inspect", "io", "itertools", "json", "keyword", "linecache", "locale",
    "logging", "numbers", "operator", "pickle", "pprint", "queue", "random", "re", "secrets", "shlex", "signal",
    "statistics", "string", "struct", "tempfile", "textwrap", "threading", "time", "timeit", "token",
    "tokenize", "traceback", "types", "typing", "unittest", "uuid", "warnings", "weakref", "zlib",
]  # fmt: skip


def _preload() -> None:
    """Import what solutions import, and every extension module: inside there are no shared libraries to load."""
    folder = Path(sysconfig.get_path("platstdlib"), "lib-dynload")
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    extensions = {p.name.split(".")[0] for p in folder.glob("*") if p.name.endswith(suffixes)}
    for name in [*_PURE, *sorted(n for n in extensions if "test" not in n and n not in ("_tkinter", "readline"))]:
        try:
            importlib.import_module(name)
        except ImportError:  # built without a library that it needs
            continue


def _start(base_pages: int, request: dict[str, Any], fds: list[int]) -> int:
    control, *fds = fds
    limits = {**request["limits"], "base_pages": base_pages}
    return isolate.enter(_RUN[request["run"]], fds, limits, partial(_failed, control))


def _failed(control: int, explanation: str) -> None:
    socket.socket(fileno=control).send(b'{"error": ' + program.quoted(explanation) + b"}")


def main() -> None:
    """Load, and serve until fd 0 is closed."""
    sys.dont_write_bytecode = True
    os.umask(0o077)
    _preload()
    isolate.prepare()
    gc.collect()
    gc.freeze()
    base_pages = int(Path("/proc/self/statm").read_text().split()[0])
    forkd.serve(partial(_start, base_pages))
