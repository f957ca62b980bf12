"""Rewards for answers in mathematics: equal to the row's answer as mathematics, decided by math-verify.

math-verify runs in worker processes: its own timeout is an alarm signal, which fails outside the main thread (verl
issue 3407), and symbolic algebra on a model's output can hang or eat all memory. A worker that does is killed and
replaced (in milliseconds: it is forked from a loaded one), the sample gets 0, and that it was so is in the metric
`undecided` and in the note `reason`. A gold answer that cannot be read is an error: it is the data that is wrong.

Needs the extra `math`; Linux or macOS. It runs no program of the model and needs no sandbox.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections import deque
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from rlkit._extras import optional
from rlkit.rewards.sandbox.servers import Server, ServerError, end_of, next_line, readable
from rlkit.rewards.text import last_boxed, last_tag
from rlkit.rewards.timeouts import a_core, in_thread, time_left_s

if find_spec("math_verify") is None:
    optional("math_verify", "math", "rewards for mathematics need")
_SERVER = Server("mathd", flags=(), environment=dict(os.environ))
_MEMORY_BYTES = 2 << 30
_MAX_BYTES = 100_000  # of a question
_SEARCHED = 12_000  # characters at the end of a text; they fit into a question in any alphabet
_COLOR = re.compile(r"\\(?:text)?color\{\w+\}")
_BLANKS = re.compile(r"(?:[ ,;:!]?\\|~|\s)*")  # TeX's, read backwards: that takes linear time


class Verdict(NamedTuple):
    """Whether an answer is right; `decided` is False where it took too long or broke the worker; `reason` if not."""

    equal: bool
    decided: bool
    reason: str


async def boxed(
    completion: str, row: dict[str, Any], *, column: str = "answer", timeout_s: float = 10.0
) -> dict[str, Any]:
    r"""1 if the content of the completion's last `\boxed{...}` equals `row[column]` as mathematics, else 0.

    No box is no answer: 0. The gold answer may be bare (`1/2`), in dollars, a solution whose last box counts (MATH),
    or end with `#### 72` (GSM8K).

    Differs: TRL's `accuracy_reward` and verl's `math_verify` look for an answer in the whole text (`anywhere`).
    """
    return await _judged(last_boxed(completion), row, column, timeout_s, r"no closed \boxed{}")


async def answer_tag(
    completion: str, row: dict[str, Any], *, column: str = "answer", timeout_s: float = 10.0
) -> dict[str, Any]:
    """1 if the content of the completion's last `<answer>...</answer>` equals `row[column]` as mathematics, else 0.

    A box inside the tag is opened. See `rlkit.rewards.text.think_answer_tags` for a reward for the form alone.
    """
    found = last_tag(completion, tag="answer")
    answer = found if found is None else last_boxed(found) or found
    return await _judged(answer, row, column, timeout_s, "no <answer></answer>")


async def anywhere(
    completion: str, row: dict[str, Any], *, column: str = "answer", timeout_s: float = 10.0
) -> dict[str, Any]:
    """1 if what math-verify takes for the answer of the text after the last `</think>` equals `row[column]`, else 0.

    It prefers a box, then "the answer is ...", then the last formula or number: lenient, for models without a format.
    Of a long text the last 12 000 characters are read.

    Differs: TRL's `accuracy_reward` and verl's `math_verify` read the thinking, too.
    """
    return await _judged(completion.rpartition("</think>")[2], row, column, timeout_s, "empty", search=True)


async def equal(gold: str, answer: str, *, search: bool = False, timeout_s: float = 10.0) -> Verdict:
    """Whether two answers are the same mathematics. With `search`, `answer` is a text at whose end to look for one.

    `timeout_s` is for this comparison, less where a reward's own deadline comes first (an answer that hangs is
    undecided then, too); the wait for a free worker (there are as many as cores) does not count.
    Raises ValueError if the gold answer cannot be parsed, RuntimeError if math-verify cannot be loaded.

    Limits: equal texts are equal without asking. Not symmetric (a gold `x = 5` equals 5), and letters are variables:
    `ab` equals `ba`. Floats are rounded to 6 decimals.
    """
    gold, answer = _bare(gold), answer[-_SEARCHED:] if search else _bare(answer)
    if not search and gold and gold == answer:
        return Verdict(True, True, "")
    question = json.dumps({"gold": gold, "answer": answer, "search": search}).encode()
    if len(question) > _MAX_BYTES:
        return Verdict(False, True, f"an answer of {len(question)} bytes")
    async with a_core():
        worker = _idle_worker()
        each_s = min(timeout_s, 0.45 * max(time_left_s(), 0.0))  # of two replies, for the gold and for the answer
        verdict = await in_thread(partial(worker.ask, question, gold, each_s), cancel=worker.cancel)
        if verdict.decided:
            _idle.append(worker)
    return verdict


async def _judged(
    answer: str | None, row: dict[str, Any], column: str, timeout_s: float, missing: str, *, search: bool = False
) -> dict[str, Any]:
    gold = row.get(column)
    if gold is None:
        raise ValueError(f"the row has no {column!r}; columns found: {sorted(row)}")
    if not answer:
        return {"reward": 0.0, "answered": 0.0, "undecided": 0.0, "reason": missing}
    verdict = await equal(str(gold), answer, search=search, timeout_s=timeout_s)
    judged = {"reward": float(verdict.equal), "answered": 1.0, "undecided": float(not verdict.decided)}
    return judged if verdict.equal else {**judged, "reason": verdict.reason}


def _bare(text: str) -> str:
    """An answer without what it may be wrapped in."""
    text = text.rpartition("####")[2].strip()
    text = last_boxed(text) or text
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = _COLOR.sub("", text)
    blanks = _BLANKS.match(text[::-1])
    text = text[: len(text) - blanks.end()] if blanks else text
    return text[:-1] if re.fullmatch(r"[\w})\]]\.", text[-2:]) else text


class _NoReply(Exception):
    """A worker does not reply; the text says why."""


class _Worker:
    """A forked process with math-verify loaded."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_BYTES)
        with theirs:
            self._control = _SERVER.begin({"memory_bytes": _MEMORY_BYTES}, [theirs.fileno()])

    def alive(self) -> bool:
        """Whether it may be asked: it has not ended."""
        return not readable([self._control, self._socket], 0)

    def cancel(self) -> None:
        """Have it killed, so that `ask` ends soon. Thread-safe."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End it. Not while it is asked."""
        self._control.close()
        self._socket.close()

    def ask(self, question: bytes, gold: str, timeout_s: float) -> Verdict:
        """Its verdict. It can be asked again if that is decided, and is closed otherwise."""
        try:
            with suppress(ConnectionError):  # what became of it is asked below
                self._socket.sendall(question + b"\n")
            self._read_gold(gold, timeout_s)
            found = self._reply(timeout_s)
        except _NoReply as why:
            self.close()
            return Verdict(False, False, str(why))
        except BaseException:
            self.close()
            raise
        reason = "a wrong answer" if found["parsed"] else "math-verify finds no answer"
        return Verdict(found["equal"], True, "" if found["equal"] else reason)

    def _read_gold(self, gold: str, timeout_s: float) -> None:
        try:
            if not self._reply(timeout_s)["gold"]:
                raise _NoReply("there is no mathematics in it")
        except _NoReply as why:
            raise ValueError(f"math-verify cannot read the gold answer {gold[:200]!r}: {why}") from None

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        if not readable([self._socket], timeout_s):
            raise _NoReply(f"timeout: undecided after {timeout_s:g} s")
        with suppress(ConnectionError):
            if reply := next_line(self._socket):
                answered: dict[str, Any] = json.loads(reply)
                return answered
        try:
            end = end_of(self._control, 60)
        except ServerError as error:
            raise RuntimeError(f"math-verify cannot be used: {error}") from error
        raise _NoReply(f"the worker died (exit code {end['code']}, limit {_MEMORY_BYTES >> 20} MiB)")


_idle: deque[_Worker] = deque()
os.register_at_fork(after_in_child=lambda: _idle.clear())


def _idle_worker() -> _Worker:
    while _idle:
        with suppress(IndexError):  # another thread was faster
            worker = _idle.pop()
            if worker.alive():
                return worker
            worker.close()
    return _Worker()
