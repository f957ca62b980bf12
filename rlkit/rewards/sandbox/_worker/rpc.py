"""Inside two sandboxes: a solution, and tests that call it. Fd 3 holds the source, fd 4 is the socket to the other."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import codec, peer, program

_NAME = "tests"
_GONE = "the solution's process ended"
_ARITHMETIC = re.compile(rb"[\d\s+*/%()\[\].,<>=&|^~-]*")  # no name can be written with it


def run_solution() -> None:
    """Run the solution, offer its functions and classes, and serve calls until the tests end. Does not return."""
    source = program.read_all(3)
    program.open_streams()
    end = peer.Peer(4, lambda _object, _name: True)
    module = program.fresh_module("solution")
    code, problem = program.execute(source, module)
    try:
        offered = {name: value for name, value in vars(module).items() if name[:2] != "__" and callable(value)}
        end.send([problem, {name: end.encode(value) for name, value in offered.items()}])
        end.serve()
    except peer.Gone:
        program.leave(code)


def run_tests() -> None:
    """Run tests, in their order and in one namespace. Does not return.

    They are JSON on fd 3: `{"tests": [source, ...], "own": {name: place}, "asked": {name: the solution's name}}`.
    One JSON line `[index, reason]` per test goes to fd 1 as soon as the test is done; the reason is empty if it passed.
    """
    task = json.loads(program.read_all(3))
    report = os.dup(1)
    os.dup2(2, 1)
    program.open_streams()
    end = peer.Peer(4, _may)
    module = sys.modules["__main__"] = program.fresh_module(_NAME)  # where `unittest.main` looks
    problem = _take_names(end, module, task["asked"])
    for name, target in task["own"].items():
        with suppress(ImportError, AttributeError):
            setattr(module, name, pkgutil.resolve_name(target))
    sys.addaudithook(_only_own_code(task["tests"]))
    for index, source in enumerate(task["tests"]):
        reason = problem or _reason(source, module)
        os.write(report, json.dumps([index, reason]).encode() + b"\n")
    os._exit(0)


def _take_names(end: peer.Peer, module: Any, asked: dict[str, str]) -> str:
    """Put the names that the tests need from the solution into their module. Returns the problem, if any."""
    try:
        problem, offered = end.receive()
        values = {name: end.decode(offered[theirs]) for name, theirs in asked.items() if theirs in offered}
    except peer.Gone:
        return _GONE
    except Exception as error:
        return f"the solution does not answer as it should ({type(error).__name__})"
    if problem:
        return f"the solution fails before any test: {str(problem)[:300]}"
    vars(module).update((name, value) for name, value in values.items() if callable(value))
    return ""


def _only_own_code(sources: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: tests may run code that is a literal in them, and arithmetic, but no code from a result."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    literals = {_bytes(node.value) for node in nodes if isinstance(node.value, str | bytes)}
    copied = {(kind.__module__, kind.__name__) for kind in codec.COPIED}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile" and isinstance(arguments[0], str | bytes):
            caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
            source = _bytes(arguments[0])
            if caller in (_NAME, "unittest") and source not in literals and not _ARITHMETIC.fullmatch(source):
                raise PermissionError(f"the tests may not run code that a result brings: {source[:80]!r}")
        if event == "pickle.find_class" and arguments not in copied:
            raise PermissionError(f"the tests may not unpickle {arguments[0]}.{arguments[1]}")

    return hook


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _reason(source: str, module: Any) -> str:
    """Why a test fails; empty if it does not."""
    try:
        exec(compile(source, _NAME, "exec", dont_inherit=True), vars(module))
    except peer.Gone:
        return _GONE
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # of `unittest.main`; a solution's arrives as `Remote`
            return ""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _NAME]
        lines = source.splitlines()
        line = lines[frames[-1].lineno - 1].strip() if frames and frames[-1].lineno else ""
        return f"{type(error).__name__}: {_text(error)[:200]} at {line[:200]}"
    return ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # a number too long for the limit on digits
        return f"({type(problem).__name__})"


def _may(value: Any, name: str) -> bool:
    """The solution may only use public attributes of objects whose class the tests define."""
    return type(value).__module__ == _NAME and not name.startswith("_")
