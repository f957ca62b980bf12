"""The server of `rlkit.rewards.sandbox`: forks processes from one that has loaded the standard library; isolates them.

Nothing that belongs to a request passes through the server's memory: programs and inputs are files that only the child
reads. So a child cannot find in its memory what an earlier one was given.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import json
import os
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

from . import bubble, forkd, isolate, program, rpc_solution, rpc_tests

_RUN = {"program": program.run, "solution": rpc_solution.run, "tests": rpc_tests.run, "nothing": lambda: None}
_PROBE = {
    "cpu_s": 10, "memory_bytes": 1 << 28, "scratch_bytes": 1 << 20, "processes": 0, "open_files": 64
}  # fmt: skip
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


class _Packages:
    """Finds the packages that programs may import, by their names and places, and nothing that lies beside them."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        """As an import asks for it."""
        folder = os.path.dirname(self._places.get(name, ""))
        return importlib.machinery.PathFinder.find_spec(name, [folder]) if path is None and folder else None

    def shown(self) -> list[str]:
        """What has to be read for them: the packages, and the shared libraries that their wheels brought."""
        libraries = [f"{os.path.dirname(place)}/{name}.libs" for name, place in self._places.items()]
        return [*self._places.values(), *filter(os.path.isdir, libraries)]

    def load(self) -> None:
        """Import them all, which shows what else they need."""
        for name in self._places:
            try:
                importlib.import_module(name)
            except Exception as error:
                raise ImportError(
                    f"package {name!r} cannot be imported in the sandbox ({type(error).__name__}: {error}); name the "
                    "packages that it needs, too"
                ) from error


def _start_forked(packages: _Packages, request: dict[str, Any], fds: list[int]) -> int:
    control, *fds = fds
    return isolate.enter(_RUN[request["run"]], fds, control, request["limits"], packages.shown())


def _start_bubble(packages: _Packages, request: dict[str, Any], fds: list[int]) -> int:
    control, *fds = fds
    return bubble.enter(request, fds, control, packages.shown())


def inside() -> None:
    """The start of a Python of its own, in what bubblewrap made. Does not return."""
    request = json.loads(sys.argv[1])
    sys.dont_write_bytecode = True
    sys.meta_path.append(_Packages(request["places"]))
    bubble.wall_in(request)
    _RUN[request["run"]]()
    os._exit(0)


def _problem(start: forkd.Start, limits: dict[str, Any]) -> str:
    """Why nothing can be isolated so; empty where it can."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.waitpid(start({"run": "nothing", "limits": limits}, [theirs.fileno(), null, null, write]), 0)
    except OSError as error:
        return str(error)
    finally:
        theirs.close()
        os.close(write)
        os.close(null)
    message = json.loads(mine.recv(1 << 16) or "{}")
    said = b"" if "began" in message else os.read(read, 1 << 12)
    mine.close()
    os.close(read)
    return "" if "began" in message else message.get("error") or said.decode("utf-8", "replace").strip()


def _choice(places: dict[str, str]) -> forkd.Start:
    """How programs are started here: forked into namespaces, by bubblewrap, or not at all."""
    packages = _Packages(places)
    sys.meta_path.append(packages)
    try:
        packages.load()
    except ImportError as error:
        return forkd.refuse(str(error))
    gc.collect()
    gc.freeze()
    base_pages = int(Path("/proc/self/statm").read_text().split()[0])
    problems = []
    for name, enter in [("namespaces", _start_forked), ("bubblewrap", _start_bubble)]:

        def start(request: dict[str, Any], fds: list[int], enter: Any = enter) -> int:
            limits = {**request["limits"], "base_pages": base_pages}
            return enter(packages, {**request, "limits": limits, "places": places}, fds)

        problem = _problem(start, _PROBE)
        if not problem:
            return start
        problems.append(f"{name}: {problem}")
    return forkd.refuse("; ".join(problems))


def main() -> None:
    """Load, and serve until fd 0 is closed. The argument is JSON: names and places of packages for the programs."""
    sys.dont_write_bytecode = True
    os.umask(0o077)
    _preload()
    isolate.prepare()
    forkd.serve(_choice(json.loads(sys.argv[1]) if sys.argv[1:] else {}))
