"""Inside the sandbox: run a program as `python solution.py` does, on fds 0, 1 and 2; its source is read from fd 3."""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import gc
import io
import os
import random
import sys
import threading
import traceback
import types
from contextlib import suppress

SOLUTION = "solution.py"


def run() -> None:
    """Run the program on fd 3. Does not return."""
    source = read_all(3)
    open_streams()
    module = fresh_module("__main__")
    leave(execute(source, module)[0])


def read_all(fd: int) -> bytes:
    """The content of a file, which is then closed."""
    with open(fd, "rb") as file:
        return file.read()


def open_streams() -> None:
    """Open text streams on fds 0, 1, 2 as Python does, and set the environment that a program sees."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - by lines
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")  # as the module site does
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    folder = os.getcwd()
    threads = {name: number for name, number in os.environ.items() if name.endswith("_NUM_THREADS")}
    os.environ.clear()
    os.environ.update(HOME=folder, TMPDIR=folder, PATH="", **threads)
    sys.path.insert(0, folder)
    sys.argv = [SOLUTION]
    random.seed(0)


def fresh_module(name: str) -> types.ModuleType:
    """An empty module, registered under its name."""
    module = sys.modules[name] = types.ModuleType(name)
    return module


def execute(source: bytes, module: types.ModuleType) -> tuple[int, str]:
    """Run a source in a module. Returns the exit code that `python` gives, and the exception in one line."""
    try:
        exec(compile(source, SOLUTION, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF, f"exit code {stop.code or 0}"
        sys.stderr.write(f"{stop.code}\n")
        return 1, str(stop.code)
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)
        return 1, traceback.format_exception_only(error)[-1].strip()
    return 0, ""


def leave(code: int) -> None:
    """End the process as the interpreter does: wait for threads, run exit functions, flush; but skip finalization."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not getattr(stream, "closed", stream is None):
                stream.flush()
    except BaseException:
        code = code or 120
    for each in gc.get_objects():  # other streams on fd 1, which finalization would flush
        if issubclass(type(each), io.IOBase):
            with suppress(BaseException):
                each.flush()
    os._exit(code)
