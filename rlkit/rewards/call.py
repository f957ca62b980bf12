"""Call a user's reward function, in any of its forms. What goes wrong is said and never becomes a reward of 0."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlkit._numbers import show as _show
from rlkit._numbers import to_number
from rlkit.rewards.timeouts import TimedOut, run_async, run_in_thread


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

    A result is a finite number (bool, int, float, or a numpy or torch scalar; at most 3.4e38), or a dict with `reward`,
    optionally `score`, further numbers to log, and texts that go to the trajectory dump (`reason`). In the batched form
    an exception may stand in the list, for the sample that failed. An exception, a timeout, None, NaN, infinity,
    another type or a wrong number of results raises `RewardError`, which names the function, the row, the completion,
    the cause and a fix: there is no default reward. What a failed answer is worth is decided inside the function.

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
    batched, calls = _calls(function, samples)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    values = await (run_async(calls, timeout_s) if is_async else run_in_thread(calls, timeout_s, go_on=go_on))
    if batched:
        values = _one_each(function, values[0], len(samples))
    return [
        _failed(function, value, sample) if isinstance(value, BaseException) else _reward(function, value, sample)
        for value, sample in zip(values, samples)
    ]


def _calls(function: Callable[..., Any], samples: Sequence[Sample]) -> tuple[bool, list[Callable[[], Any]]]:
    """Whether the function takes all samples at once, and its one call, or its call for each sample."""
    known = [{"index": sample.index, **sample.extra} for sample in samples]
    leading, names = _parameters(function, set(known[0]).intersection(*known))
    if leading == "completions":
        extra = {name: [sample[name] for sample in known] for name in names}
        return True, [partial(function, [s.completion for s in samples], [s.row for s in samples], **extra)]
    return False, [partial(function, s.completion, s.row, **{n: k[n] for n in names}) for s, k in zip(samples, known)]


def leading_parameters(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """The first two parameters of a reward function, and all of them; none where it has no signature.

    Errors: TypeError for a function that cannot take (completion, row).
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return [], []
    leading = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    if len(leading) < 2 and all(p.kind is not p.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            f"{_name(function)} must take (completion, row) or (completions, rows), got {inspect.signature(function)}"
        )
    return leading, parameters


def _parameters(function: Callable[..., Any], available: set[str]) -> tuple[str, list[str]]:
    """The name of the first parameter, and which of the `available` names the function asks for."""
    leading, parameters = leading_parameters(function)
    kinds = {p.kind for p in parameters}
    further = [p for p in parameters if p not in leading and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in further if p.name not in available and p.default is p.empty]
    if missing:
        raise TypeError(
            f"{_name(function)} asks for {missing}, which the samples do not have; after (completion, row) it may ask "
            f"for {sorted(available)}; columns of the data are in `row`"
        )
    names = available.intersection(p.name for p in further)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        names |= available - {"index"}
    return leading[0].name if leading else "", sorted(names)


def _one_each(function: Callable[..., Any], values: Any, num: int) -> list[Any]:
    """The results of a batched call, as many as there are samples; what concerns the whole batch, for each."""
    fix = f"return a list of {num} numbers or dicts, one for each completion, in their order"
    if isinstance(values, BaseException):
        return [_failed(function, values, None)] * num
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
        return [_error(function, f"returned {_show(values)} for a batch", fix, None)] * num
    if len(values) != num:
        return [_error(function, f"returned {len(values)} results for {num} completions", fix, None)] * num
    return list(values)


def _failed(function: Callable[..., Any], error: BaseException, sample: Sample | None) -> RewardError:
    if isinstance(error, RewardError):
        return error
    cause, fix = _explain(error)
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
    try:
        return to_number(value)
    except ValueError as error:
        cause = f"returned {error}{place}"
        fix = "find the division or logarithm that made it, and decide what such an answer is worth (at most 3.4e38)"
    except Exception:  # whatever the conversion of a foreign type raises
        cause = f"returned {_show(value)}{place}"
        fix = "return a finite number, or a dict of finite numbers with the key 'reward'"
        if value is None:
            fix += "; None often comes from a path without `return`"
        if inspect.iscoroutine(value):
            value.close()
            fix = "declare the function itself with `async def`"
    raise _error(function, cause, fix, sample)


def _explain(error: BaseException) -> tuple[str, str]:
    """Cause and fix of a call that did not return."""
    if isinstance(error, TimedOut):
        return error.args[0], error.args[1]
    cause = f"{type(error).__name__}: {error}"
    if frames := traceback.extract_tb(error.__traceback__):
        cause += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    if "signal only works in main thread" in str(error):
        fix = "switch its own alarm off (math_verify: timeout_seconds=None, parsing_timeout=None); timeout_s is there"
        return cause, fix
    return cause, (
        "handle it in the function: return what such an answer is worth; or let a share of the samples fail, as a "
        "server may: max_failed (--reward-max-failed)"
    )


def _error(function: Callable[..., Any], cause: str, fix: str, sample: Sample | None) -> RewardError:
    place = "a batch" if sample is None else f"row {sample.index + 1}"
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
