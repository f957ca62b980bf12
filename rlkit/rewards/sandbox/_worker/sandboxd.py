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
import sys
import sysconfig
from pathlib import Path
from typing import Any

from . import forkd, isolate, program, rpc

_RUN = {"program": program.run, "solution": rpc.run_solution, "tests": rpc.run_tests}
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


def _start(places: dict[str, str]) -> forkd.Start:
    """Load the packages; and how a process is started that may use them."""
    packages = _Packages(places)
    sys.meta_path.append(packages)
    try:
        packages.load()
    except ImportError as error:
        return forkd.refuse(f"nothing was run: {error}")
    gc.collect()
    gc.freeze()
    base_pages = int(Path("/proc/self/statm").read_text().split()[0])

    def start(request: dict[str, Any], fds: list[int]) -> int:
        control, *fds = fds
        limits = {**request["limits"], "base_pages": base_pages}
        return isolate.enter(_RUN[request["run"]], fds, control, limits, packages.shown())

    return start


def main() -> None:
    """Load, and serve until fd 0 is closed. The argument is JSON: names and places of packages for the programs."""
    sys.dont_write_bytecode = True
    os.umask(0o077)
    _preload()
    forkd.serve(_start(json.loads(sys.argv[1])))
