r"""Rewards for mathematics: the answer equals the row's gold answer, as decided by math-verify.

math-verify runs in worker processes (`pebble.ProcessPool`): its own timeout is an alarm signal, which fails outside the
main thread (verl issue 3407), and symbolic algebra on a model's output can hang or use up all memory. Such a worker is
killed and replaced, and the sample gets 0 with the metric `undecided` and the note `reason`. A gold answer that cannot
be parsed is an error, because it is the data that is wrong.

There are as many workers as cores, at most 16; each may use 2 GiB. They start on first use, never import torch or the
user's script, and end with this process. Needs the extra `math`, and Linux or macOS.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import resource
import signal
import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from decimal import Decimal
from fcntl import F_SETFL, F_SETOWN, fcntl
from importlib.util import find_spec
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NamedTuple

from rlkit._util.extras import missing, optional
from rlkit._util.platform import num_cores
from rlkit.data.schema import GOLD
from rlkit.rewards.call import needing
from rlkit.rewards.text import gold_answer, last_boxed, last_tag, no_gold_answer
from rlkit.rewards.timeouts import off_the_clock, time_left_s, turn

_WHY = "rewards for mathematics need"
if find_spec("math_verify") is None:
    optional("math_verify", "math", _WHY)
pebble = optional("pebble", "math", _WHY)
_pool: Any  # see `_new_pool`
_NUM_WORKERS = min(num_cores(), 16)
_MEMORY_BYTES = 2 << 30
_MAX_CHARACTERS = 100_000
_SEARCHED = 12_000  # characters at the end of a text
_COLOR = re.compile(r"\\(?:text)?color\{\w+\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?)0*(\d{1,2})(?!\w|\.\d)")
_WHEN = re.compile(r"(?<![\d:-])(?:\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}(?::\d{2})?)(?![\d:-])")  # a date, or a clock time
_BLANKS = re.compile(r"(?:[ ,;:!]?\\|~|\s)*")  # TeX's, matched backwards: that takes linear time
_SIGNS = re.compile(r"(?<!\w)[€£¥₹] ?(?=\d)|(?<=\d) ?[€£¥₹]|(?<=[\w})]) ?°(?: ?[CF])?(?!\w)")  # as $ and ^\circ
_MIXED = re.compile(r"(?<![\w.,/^\\])(\d{1,9})(?: |~|\\[ ,;:!])+(\d{1,9})/(\d{1,9})(?![\w/^]|\.\d)")  # 3 1/2


def _columns(column: str | None) -> tuple[str, ...]:
    return (column,) if column else GOLD


class Verdict(NamedTuple):
    """Whether an answer is right; `decided` is False where it took too long or broke the worker; `reason` if not."""

    equal: bool
    decided: bool
    reason: str


@needing(_columns)
async def boxed(
    completion: str, row: dict[str, Any], *, column: str | None = None, timeout_s: float = 10.0
) -> dict[str, Any]:
    r"""1 if the content of the completion's last `\boxed{...}` equals the gold answer as mathematics, else 0.

    No box is no answer: 0. The gold answer is `row[column]`, or without `column` what `rlkit.rewards.text.gold_answer`
    finds: a text, or a list of one. It may be bare (`1/2`), in dollars, a solution whose last box counts (MATH), or end
    with `#### 72` (GSM8K). `3.2e-4` is a number, `75°` is 75, `€5` is 5 and `3 1/2` is 3.5, in both. A date
    (`2024-01-05`) or clock time (`12:30`) is compared as a text.

    Differs: TRL's `accuracy_reward` and verl's `math_verify` look for an answer in the whole text (`anywhere`).
    """
    return await _judged(last_boxed(completion), row, column, timeout_s, r"no closed \boxed{}")


@needing(_columns)
async def answer_tag(
    completion: str, row: dict[str, Any], *, column: str | None = None, timeout_s: float = 10.0
) -> dict[str, Any]:
    """1 if the content of the completion's last `<answer>...</answer>` equals the gold answer as mathematics, else 0.

    The gold answer is found as by `boxed`. A box inside the tag is opened. See `rlkit.rewards.text.think_answer_tags`
    for a reward for the form alone.
    """
    tagged = last_tag(completion, tag="answer")
    answer = tagged if tagged is None else last_boxed(tagged) or tagged
    return await _judged(answer, row, column, timeout_s, "no <answer></answer>")


@needing(_columns)
async def anywhere(
    completion: str, row: dict[str, Any], *, column: str | None = None, timeout_s: float = 10.0
) -> dict[str, Any]:
    """1 if what math-verify takes for the answer of the text after the last `</think>` equals the gold answer, else 0.

    The gold answer is found as by `boxed`. math-verify prefers a box, then "the answer is ...", then the last formula
    or number: lenient, for models without a format. Of a long text the last 12 000 characters are read.

    Differs: TRL's `accuracy_reward` and verl's `math_verify` read the thinking, too.
    """
    return await _judged(completion.rpartition("</think>")[2], row, column, timeout_s, "empty", search=True)


async def equal(gold: str, answer: str, *, search: bool = False, timeout_s: float = 10.0) -> Verdict:
    """Whether two answers are the same mathematics. With `search`, the answer is looked for at the end of a text.

    `timeout_s` bounds this comparison, and so does the deadline of the reward that calls this: either way, an answer
    that hangs is undecided. The wait for a free worker does not count.

    Raises ValueError if the gold answer cannot be parsed, MissingExtra if math-verify cannot be imported.

    Limits: identical texts are equal without a comparison. Not symmetric (a gold `x = 5` equals 5), and letters are
    variables: `ab` equals `ba`. Floats are rounded to 6 decimals, to more for a gold answer such as `3.2e-7`. `2e-3`
    may be 0.002 or 2e - 3 with Euler's number; in a text that is searched it is 0.002. An answer that contains no clock
    time is compared with a gold `1:16` as mathematics: it may be a ratio.
    """
    gold, answer = _plain(_bare(gold)), _plain(answer[-_SEARCHED:] if search else _bare(answer))
    if not search and gold and gold == answer:
        return Verdict(True, True, "")
    if _WHEN.fullmatch(gold):
        times = [text.lstrip("0") for text in _WHEN.findall(_bare(answer)) if (":" in text) == (":" in gold)]
        if times or ":" not in gold:
            same = times[-1:] == [gold.lstrip("0")]
            return Verdict(same, True, "" if same else "a wrong answer")
    if (size := len(gold) + len(answer)) > _MAX_CHARACTERS:
        return Verdict(False, True, f"too long to compare: {size} characters")
    async with turn("compare mathematics", _NUM_WORKERS), off_the_clock():
        each_s = min(timeout_s, max(time_left_s(), 0.0) / 2)  # of two questions, where the first hangs
        try:
            gold_parsed, parsed, same = await _ask(gold, answer, search, timeout_s=each_s)
        except _Undecided as why:
            try:
                gold_parsed, *_ = await _ask(gold, None, search, timeout_s=each_s)
            except _Undecided as unreadable:
                raise ValueError(f"math-verify cannot parse the gold answer {gold[:200]!r}: {unreadable}") from None
            if gold_parsed:
                return Verdict(False, False, str(why))
    if not gold_parsed:
        raise ValueError(f"math-verify cannot parse the gold answer {gold[:200]!r}: it contains no mathematics")
    return Verdict(same, True, "" if same else "a wrong answer" if parsed else "math-verify finds no answer")


async def _judged(
    answer: str | None, row: dict[str, Any], column: str | None, timeout_s: float, missing: str, *, search: bool = False
) -> dict[str, Any]:
    if (gold := gold_answer(row) if column is None else row.get(column)) is None:
        raise no_gold_answer(row, column)
    if isinstance(gold, list | tuple):
        if len(gold) != 1:  # alternatives, or all of them
            raise ValueError(
                f"the gold answer has {len(gold)} entries, {gold!r:.200}: give one text, as '1, -1' for both"
            )
        (gold,) = gold
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


def _plain(text: str) -> str:
    """A text without the signs of currencies and degrees, whose mixed numbers (`3 1/2`) are fractions (`7/2`)."""

    def fraction(match: re.Match[str]) -> str:
        whole, above, below = map(int, match.groups())
        return f"{whole * below + above}/{below}" if above < below else match[0]

    return _MIXED.sub(fraction, _SIGNS.sub("", text))


class _Undecided(Exception):
    """No verdict; the text says why."""


class _Process(SpawnProcess):
    """A process that does not import the user's script, which multiprocessing would do to find its functions."""

    def start(self) -> None:
        self.daemon = True  # pebble says no; then a command would be said to wait for what ends with it
        main = sys.modules["__main__"]
        spec, file = main.__spec__, vars(main).pop("__file__", None)
        main.__spec__ = None
        try:
            super().start()
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


class _Context(SpawnContext):
    Process = _Process


def _new_pool() -> None:
    global _pool
    _pool = pebble.ProcessPool(_NUM_WORKERS, initializer=_prepare_worker, initargs=[_MEMORY_BYTES], context=_Context())


async def _ask(gold: str, answer: str | None, search: bool, *, timeout_s: float) -> tuple[bool, bool, bool]:
    """The result of `_compare` in a worker."""
    for _ in range(3):
        pool = _pool
        try:
            return await _compare_in(pool, (gold, answer, search, timeout_s + 5), timeout_s)
        except BrokenProcessPool:  # a pool of pebble's breaks where an idle worker is killed
            if _pool is pool:
                _new_pool()
                pool.join()
        except TimeoutError:
            raise _Undecided(f"timeout: undecided after {timeout_s:g} s") from None
        except pebble.ProcessExpired as error:
            limit = f"limit {_MEMORY_BYTES >> 20} MiB"
            raise _Undecided(f"the worker died (exit code {error.exitcode}, {limit})") from None
        except ImportError as error:
            raise missing(error, "math_verify", "math", _WHY) from None
        except Exception as error:
            raise _Undecided(f"{type(error).__name__}: {error}"[:300]) from None
    raise RuntimeError(f"the workers for math-verify end as soon as they start (limit {_MEMORY_BYTES >> 20} MiB)")


async def _compare_in(pool: Any, question: tuple[Any, ...], timeout_s: float) -> tuple[bool, bool, bool]:
    try:
        future = asyncio.wrap_future(pool.schedule(_compare, args=question, timeout=max(timeout_s, 1e-3)))
    except RuntimeError as error:
        raise BrokenProcessPool from error
    try:
        while not future.done():
            await asyncio.wait([future], timeout=1.0)
            if not future.done() and not pool.active:  # it lost the question when it broke
                raise BrokenProcessPool
        verdict: tuple[bool, bool, bool] = future.result()
        return verdict
    finally:
        future.cancel()


# What follows runs in the workers.


def _prepare_worker(memory_bytes: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for the end of a long operation in C
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(OSError):
        fcntl(parent.sentinel, F_SETOWN, os.getpid())
        fcntl(parent.sentinel, F_SETFL, os.O_ASYNC)  # the end of the parent is a SIGIO, which kills (on macOS: nothing)
    with suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with suppress(ImportError):  # `_compare` reports it
        import math_verify

        math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True
        _compare("1", "2", False, 60.0)  # the first use loads more


def _power(number: re.Match[str]) -> str:
    """3.2e-4 as `3.2*10^{-4}`."""
    return f"{number.group(1)}*10^{{{int(number.group(2) + number.group(3))}}}"


def _decimal(number: re.Match[str]) -> str:
    """3.2e-4 as `0.00032`."""
    return format(Decimal(number.group()), "f")


def _compare(gold: str, answer: str | None, search: bool, alarm_s: float) -> tuple[bool, bool, bool]:
    """Whether math-verify can parse the gold answer, can parse the answer, and finds them equal."""
    import math_verify

    def parse(text: str) -> list[Any]:
        config = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
        parsed: list[Any] = math_verify.parse(text, config, parsing_timeout=None)
        return parsed

    def read(text: str) -> list[Any]:
        numbers = [*_SCIENTIFIC.finditer(text)]
        texts = [_SCIENTIFIC.sub(form, text) for form in (_power, _decimal)] if numbers else []
        if all(number.group(2) for number in numbers):  # else 2e3 would be e * 6, as 3e2
            texts.insert(0, text)
        return [one for text in texts for one in parse(rf"\boxed{{{text}}}")] or parse(texts[-1])

    signal.setitimer(signal.ITIMER_REAL, alarm_s)  # kills a worker whose parent has ended, on macOS
    golds: list[Any] = []
    with suppress(Exception):
        golds = read(gold)
    answers: list[Any] = []
    if golds and answer is not None:
        answers = parse(_SCIENTIFIC.sub(_decimal, answer)) if search else read(answer)
    decimals = 6 + max((int(n.group(3)) for n in _SCIENTIFIC.finditer(gold) if n.group(2) == "-"), default=0)
    equal = bool(answers) and math_verify.verify(golds, answers, float_rounding=decimals, timeout_seconds=None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return bool(golds), bool(answers), bool(equal)


_new_pool()
os.register_at_fork(after_in_child=_new_pool)
