"""The server of `rlkit.rewards.math`: forks workers from a process that has loaded math-verify (1 s, once).

A worker reads `{"gold", "answer", "search"}` from its socket, says `{"gold": bool}` when it has parsed the gold answer,
and then `{"equal": bool, "parsed": bool}`. It has no clock: whoever asks kills it when it takes too long.
"""

from __future__ import annotations

import json
import os
import resource
import socket
from contextlib import suppress
from typing import Any

from . import forkd, isolate


def main() -> None:
    """Load, and serve until fd 0 is closed."""
    try:
        import math_verify
    except ImportError as error:
        forkd.serve(forkd.refuse(f"{error}; install the extra `math`: pip install 'rlkit-lm[math]'"))
        return
    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    _equal(_gold("1"), "2", False)  # the first use loads more
    forkd.serve(_start)


def _start(request: dict[str, Any], fds: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            isolate.only_these([fds[1], 1, 2])
            with suppress(ValueError):  # macOS has no such limit
                isolate.set_limit(resource.RLIMIT_AS, request["memory_bytes"])
            _work(socket.socket(fileno=0))
        finally:
            os._exit(0)
    return pid


def _work(requests: socket.socket) -> None:
    for line in requests.makefile("rb"):
        request = json.loads(line)
        gold = _gold(request["gold"])
        _reply(requests, {"gold": bool(gold)})
        if gold:
            _reply(requests, _equal(gold, request["answer"], request["search"]))


def _reply(requests: socket.socket, message: dict[str, bool]) -> None:
    requests.send(json.dumps(message).encode() + b"\n")


def _gold(text: str) -> list[Any]:
    with suppress(Exception):
        return _parse(rf"\boxed{{{text}}}") or _parse(text)
    return []


def _equal(gold: list[Any], answer: str, search: bool) -> dict[str, bool]:
    import math_verify

    answers = _parse(answer) if search else _parse(rf"\boxed{{{answer}}}") or _parse(answer)
    equal = bool(answers) and math_verify.verify(gold, answers, timeout_seconds=None)
    return {"equal": bool(equal), "parsed": bool(answers)}


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    found: list[Any] = parse(text, config, parsing_timeout=None)
    return found
