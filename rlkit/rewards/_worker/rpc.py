"""Inside two sandboxes: a solution, and tests that call it. Each has its text on fd 3 and the other process on fd 4."""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
from typing import Any

from . import peer, program

_NAME = "tests"
_GONE = "the solution's process ended"
_COMPARING = ("math", "cmath", "statistics", "operator", "unittest")  # by these names tests mean the real modules


def run_solution() -> None:
    """Run the solution's text, tell its names, and answer calls until the other side ends. Does not return."""
    source = program.read_all(3)
    program.open_streams()
    end = peer.Peer(4, lambda _object, _name: True)
    module = program.fresh_module("solution")
    code, problem = program.execute(source, module)
    try:
        end.send([problem, {name: end.encode(x) for name, x in vars(module).items() if not name.startswith("__")}])
        end.serve()
    except peer.Gone:
        program.leave(code)


def run_tests() -> None:
    """Run the tests, a JSON list of texts, in their order and in one namespace. Does not return.

    One JSON line per test goes to fd 1 as soon as the test is done: null if it passed, otherwise the reason.
    """
    tests = json.loads(program.read_all(3))
    report = os.dup(1)
    os.dup2(2, 1)
    program.open_streams()
    end = peer.Peer(4, _may)
    module = sys.modules["__main__"] = program.fresh_module(_NAME)  # where `unittest.main` looks
    problem = _take_names(end, module)
    for source in tests:
        reason = problem or _reason(source, module)
        os.write(report, json.dumps(reason).encode() + b"\n")
    os._exit(0)


def _take_names(end: peer.Peer, module: Any) -> str | None:
    """Put the solution's names into the module, but for those that tests mean otherwise; why there are none."""
    try:
        problem, names = end.receive()
        found = {str(name): end.decode(value) for name, value in names.items()}
    except peer.Gone:
        return _GONE
    except Exception as error:
        return f"the solution does not answer as it should ({type(error).__name__})"
    if problem:
        return f"the solution fails before any test: {str(problem)[:300]}"
    for name, value in found.items():
        own = name in _COMPARING and isinstance(value, peer.Proxy)
        if not hasattr(builtins, name) and not own and not name.startswith("__"):
            setattr(module, name, value)
    return None


def _reason(source: str, module: Any) -> str | None:
    try:
        exec(compile(source, _NAME, "exec", dont_inherit=True), vars(module))
    except peer.Gone:
        return _GONE
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # of `unittest.main`; a solution's arrives as `Remote`
            return None
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _NAME]
        lines = source.splitlines()
        line = lines[frames[-1].lineno - 1].strip() if frames and frames[-1].lineno else ""
        return f"{type(error).__name__}: {str(error)[:200]} at {line[:200]}"
    return None


def _may(value: Any, name: str) -> bool:
    """The solution may use public attributes of objects whose class the tests define, and nothing else of the tests."""
    return type(value).__module__ == _NAME and not name.startswith("_")
