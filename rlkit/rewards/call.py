"""Call a user's reward function, in any of its forms. What goes wrong is said and never becomes a reward of 0."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.rewards._run import TimedOut, run_async, run_in_thread


@dataclass(frozen=True)
class Sample:
    """One completion to be judged: its text, the data row, the row's index, and what else a function may ask for."""

    completion: str
    row: dict[str, Any]
    index: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """What a reward function said of one sample: `reward` trains, `score`, `metrics` and `notes` are only logged."""

    reward: float
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class RewardError(RuntimeError):
    """A reward function gave no usable reward. `index` is the row's index (None: the whole batch), `cause` says why."""

    def __init__(self, message: str, *, index: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.cause = cause


async def score(function: Callable[..., Any], samples: Sequence[Sample], *, timeout_s: float) -> list[Reward]:
    """One `Reward` per sample, in the order of the samples, or a `RewardError`.

    The function declares its form by how it is written:

        def score(completion, row): ...             one sample per call
        def score(completions, rows): ...           a first parameter of this name: all samples in one call, a list back
        async def score(completion, row): ...       all calls (or the one for all samples) run concurrently
        def score(completion, row, truncated): ...  further parameters are filled by name from `Sample.extra`, `index`
                                                    from `Sample.index` (as lists in the batched form); one with a
                                                    default may be absent

    Its options are keyword parameters, set by `functools.partial(score, option=...)`.

    A result is a finite number (bool, int, float, or a numpy or torch scalar), or a dict with `reward`, optionally
    `score`, further numbers to log, and texts that go to the trajectory dump (`reason`). In the batched form an
    exception may stand in the list, for the sample that failed. An exception, a timeout, None, NaN, infinity, another
    type or a wrong number of results raises `RewardError`, which names the function, the row, the completion, the cause
    and a fix: there is no default reward. What a failed answer is worth is decided inside the function.

    `timeout_s` bounds each call. Sync calls run one after another in one thread, and of all batches of an event loop
    only one at a time, so that a function need not be thread-safe and time spent waiting does not count; write slow
    calls (a judge behind HTTP) as `async def`. A thread cannot be stopped: after a timeout the hanging call goes on in
    its daemon thread, which does not keep the process alive. An async function that blocks the event loop cannot be
    timed out. Nor does the time count that an async reward of this package waits for a free worker or connection.

    Differs: verl and TRL turn failures of common verifiers into reward 0 (verl issue 3407, TRL pull request 5281).
    """
    results = await _results(function, samples, timeout_s, go_on=False)
    for result in results:
        if isinstance(result, RewardError):
            raise result from result.__cause__
    return [result for result in results if isinstance(result, Reward)]


async def score_each(
    function: Callable[..., Any], samples: Sequence[Sample], *, timeout_s: float
) -> list[Reward | RewardError]:
    """`score`, but a sample that could not be judged has its `RewardError` in its place, and the others are judged.

    A sync function is called for every sample even if each call times out: the whole may take `timeout_s` per sample.
    """
    return await _results(function, samples, timeout_s, go_on=True)


async def _results(
    function: Callable[..., Any], samples: Sequence[Sample], timeout_s: float, *, go_on: bool
) -> list[Reward | RewardError]:
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    if not samples:
        return []
    form = _form(function, samples)
    calls = _calls(function, form, samples)
    values = await (run_async(calls, timeout_s) if form.is_async else run_in_thread(calls, timeout_s, go_on=go_on))
    if form.batched:
        values = _one_each(function, values[0], samples, timeout_s, form.is_async)
    return [
        _failed(function, value, sample, timeout_s, form.is_async)
        if isinstance(value, BaseException)
        else _reward(function, value, sample)
        for value, sample in zip(values, samples)
    ]


class _Form(NamedTuple):
    batched: bool
    is_async: bool
    extra: tuple[str, ...]


def _form(function: Callable[..., Any], samples: Sequence[Sample]) -> _Form:
    """How the function is to be called, from its signature."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return _Form(False, is_async, ())
    leading = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    if len(leading) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            f"{_name(function)} must take (completion, row) or (completions, rows), got {inspect.signature(function)}"
        )
    available = {"index"}.union(set(samples[0].extra).intersection(*(s.extra for s in samples)))
    further = [p for p in parameters if p not in leading and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in further if p.name not in available and p.default is p.empty]
    if missing:
        raise TypeError(
            f"{_name(function)} asks for {missing}, which the samples do not have; after (completion, row) it may ask "
            f"for {sorted(available)}; columns of the data are in `row`"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    extra = [p.name for p in further if p.name in available]
    if takes_all:
        extra = sorted({*extra, *available} - ({"index"} - set(extra)))
    return _Form(bool(leading) and leading[0].name == "completions", is_async, tuple(extra))


def _calls(function: Callable[..., Any], form: _Form, samples: Sequence[Sample]) -> list[Callable[[], Any]]:
    if form.batched:
        extra = {name: [_extra(s, name) for s in samples] for name in form.extra}
        return [partial(function, [s.completion for s in samples], [s.row for s in samples], **extra)]
    return [partial(function, s.completion, s.row, **{name: _extra(s, name) for name in form.extra}) for s in samples]


def _extra(sample: Sample, name: str) -> Any:
    return sample.extra.get(name, sample.index)


def _one_each(
    function: Callable[..., Any], values: Any, samples: Sequence[Sample], timeout_s: float, is_async: bool
) -> list[Any]:
    """The results of a batched call, as many as there are samples; what concerns the whole batch, for each."""
    num = len(samples)
    fix = f"return a list of {num} numbers or dicts, one for each completion, in their order"
    if isinstance(values, BaseException):
        return [_failed(function, values, None, timeout_s, is_async)] * num
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
        return [_error(function, f"returned {_show(values)} for a batch", fix, None)] * num
    if len(values) != num:
        return [_error(function, f"returned {len(values)} results for {num} completions", fix, None)] * num
    return list(values)


def _failed(
    function: Callable[..., Any], error: BaseException, sample: Sample | None, timeout_s: float, is_async: bool
) -> RewardError:
    if isinstance(error, RewardError):
        return error
    cause, fix = _explain(error, timeout_s, is_async)
    failed = _error(function, cause, fix, sample)
    failed.__cause__ = error
    return failed


def _reward(function: Callable[..., Any], value: Any, sample: Sample) -> Reward | RewardError:
    """A result as a `Reward`, or an error that names the sample."""
    try:
        if not isinstance(value, dict):
            return Reward(_number(function, value, sample, ""))
        if "reward" not in value:
            fix = "put the number that trains under 'reward'"
            cause = f"returned a dict without 'reward' (keys: {sorted(map(str, value))})"
            raise _error(function, cause, fix, sample)
        notes = {str(k): v for k, v in value.items() if isinstance(v, str) and k not in ("reward", "score")}
        numbers = {str(k): _number(function, v, sample, f" under {k!r}") for k, v in value.items() if k not in notes}
    except RewardError as error:
        return error
    return Reward(numbers.pop("reward"), numbers.pop("score", None), numbers, notes)


def _number(function: Callable[..., Any], value: Any, sample: Sample, place: str) -> float:
    if not isinstance(value, Real) and getattr(value, "shape", None) != ():
        fix = "return a finite number, or a dict of finite numbers with the key 'reward'"
        if value is None:
            fix += "; None often comes from a path without `return`"
        if inspect.iscoroutine(value):
            value.close()
            fix = "declare the function itself with `async def`"
        raise _error(function, f"returned {_show(value)}{place}", fix, sample)
    number = float(value)
    if not math.isfinite(number):
        fix = "find the division or logarithm that made it, and decide what such an answer is worth"
        raise _error(function, f"returned {number}{place}", fix, sample)
    return number


def _explain(error: BaseException, timeout_s: float, is_async: bool) -> tuple[str, str]:
    """Cause and fix of a call that did not return."""
    if isinstance(error, TimedOut):
        fix = "make it faster or raise timeout_s (--reward-timeout)"
        if not is_async:
            fix += "; write a function that waits for a server as `async def`. The hanging call goes on in its thread"
        return f"no result after {timeout_s:g} s", fix
    cause = f"{type(error).__name__}: {error}"
    if frames := traceback.extract_tb(error.__traceback__):
        cause += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    if "signal only works in main thread" in str(error):
        return (
            cause,
            "switch its own alarm off (math_verify: timeout_seconds=None, parsing_timeout=None); timeout_s is there",
        )
    return cause, (
        "handle it in the function: return what such an answer is worth; or let a share of the samples fail, as a "
        "server may: max_failed (--reward-max-failed)"
    )


def _error(function: Callable[..., Any], cause: str, fix: str, sample: Sample | None) -> RewardError:
    place = "a batch" if sample is None else f"row {sample.index}"
    lines = [f"reward function {_name(function)} failed on {place}: {cause}", f"  fix: {fix}"]
    if sample is not None:
        text = sample.completion
        shown = repr(text) if len(text) <= 240 else f"{text[:120]!r} ... {text[-120:]!r}"
        lines.insert(1, f"  completion ({len(text)} characters): {shown}")
    return RewardError("\n".join(lines), index=None if sample is None else sample.index, cause=cause)


def _name(function: Callable[..., Any]) -> str:
    """`my_rewards.py:score` where the source is known."""
    inner = inspect.unwrap(function.func if isinstance(function, partial) else function)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    code = getattr(inner, "__code__", None)
    return f"{Path(code.co_filename).name}:{name}" if code else name


def _show(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
