"""Call a user's reward function, in any of its forms. A failure is an error; it never becomes a reward of 0."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rlkit._util.numbers import show as _show
from rlkit._util.numbers import to_number
from rlkit._util.text import Explained
from rlkit.rewards.failures import fix_of, lost_processes, name_of, place_in, unwrapped
from rlkit.rewards.load import in_packages
from rlkit.rewards.timeouts import AWAIT, TimedOut, run_async, run_in_thread
from rlkit.rollout.calling import Watched, is_async, own_copy, report_absent, report_once

_COMPLETION = {  # words that mean the text of a sample, in the name of the first parameter
    "completion", "completions", "response", "output", "text", "generation", "generated", "prediction", "predicted",
    "pred", "reply", "candidate", "hypothesis", "continuation", "content", "string", "str", "code", "solution",
}  # fmt: skip
_ROW = {  # and the row, in the name of the second
    "row", "rows", "example", "sample", "item", "record", "entry", "datum", "data", "instance", "doc", "document",
    "problem", "dict", "columns", "fields", "line", "case",
}  # fmt: skip
_NEITHER = {  # words that mean something else in either place
    "prompt", "prompts", "query", "queries", "question", "answer", "answers", "label", "labels", "ground", "truth",
    "truths", "gold", "golden", "target", "expected", "reference", "ref", "state", "action", "args", "config", "batch",
    "source", "sources", "messages", "ids", "parser", "info", "metadata", "meta", "extra",
}  # fmt: skip

_log = logging.getLogger("rlkit.rewards")
# what a function may ask for by name beside (completion, row), of an episode of one turn
ONE_TURN = frozenset({"completion_ids", "finish_reason", "index", "prompt_ids", "truncated"})
VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}  # kinds of `*args` and `**kwargs`
RESERVED = ("mean", "std", "failed")  # of `reward/NAME` in metrics.jsonl: no name for one of several functions


@dataclass(frozen=True)
class Sample:
    """One completion to be rewarded: its text, the data row and its index, and what else a function may ask for.

    `read` gets the names of the row's columns that the function reads.
    """

    completion: str
    row: dict[str, Any]
    index: int
    extra: dict[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set, compare=False, repr=False)


@dataclass(frozen=True)
class Reward:
    """The result of a reward function for one sample. `reward` trains; `score`, `metrics` and `notes` are logged."""

    reward: float
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class RewardError(Explained):
    """A reward function gave no usable reward. `index` is the row's index (None: the whole batch), `cause` says why,
    and `fix` what to change."""

    def __init__(self, message: str, *, index: int | None = None, cause: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.index = index
        self.cause = cause
        self.fix = fix


class WrongResult(Exception):
    """A result that cannot be read; the arguments are the cause and the fix of the `RewardError`."""


Need = str | tuple[str, ...]  # a column that must be there, or names of columns of which one must not be null
F = TypeVar("F", bound=Callable[..., Any])


def needing(columns: Callable[[Any], tuple[str, ...]]) -> Callable[[F], F]:
    """Mark a reward function: one of `columns(column)` must not be null in a row; `column` is the function's option."""

    def mark(function: F) -> F:
        vars(function)["needs"] = columns
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> Sequence[Need]:
    """The columns that an adapted or marked function needs, also of a partial that sets its option `column`."""
    needs = getattr(function.func if isinstance(function, partial) else function, "needs", ())
    return [needs(inspect.signature(function).parameters["column"].default)] if callable(needs) else needs


async def run_reward(function: Callable[..., Any], samples: Sequence[Sample], *, timeout_s: float) -> list[Reward]:
    """One `Reward` per sample, in the order of the samples, or a `RewardError`.

    The signature of the function selects how it is called:

        def reward(completion, row): ...             one sample per call
        def reward(completions, rows): ...           all `samples` in one call (by the parameter's name), in training
                                                     those of one prompt; returns a list
        async def reward(completion, row): ...       calls run concurrently (also in the batched form)
        def reward(completion, row, truncated): ...  further parameters are filled by name from `Sample.extra`, and
                                                     `index` from `Sample.index` (lists in the batched form); a
                                                     parameter with a default is optional

    A function gets copies: what it changes in a row or a list stays its own.

    Options of the function are keyword parameters, set by `functools.partial(function, option=...)`.

    A result is a finite number (bool, int, float, or a numpy or torch scalar; at most 3.4e38), or a dict with `reward`,
    optionally `score`, further numbers to log, and texts for the trajectory dump (`reason`). In the batched form the
    list may hold an exception in the place of a sample that failed. An exception, a timeout, None, NaN, infinity,
    another type or a wrong number of results raises `RewardError`, which names the function, the row, the completion,
    the cause and a fix. There is no default reward: the function decides what a failed answer is worth.

    `timeout_s` bounds each call. Sync calls run one after another in a thread, and only one batch per event loop at a
    time, so a function need not be thread-safe and waiting does not count; write slow calls (a judge behind HTTP) as
    `async def`. A thread cannot be stopped: after a timeout the hanging call continues in its daemon thread, which does
    not keep the process alive. An async function that blocks the event loop beyond its deadline fails when it returns;
    one that blocks for 1 s is logged as a warning. The time that an async reward of this package waits for a free
    worker or connection does not count.

    Differs: verl and TRL turn failures of common verifiers into reward 0 (verl issue 3407, TRL pull request 5281).
    """
    results = await _results(function, samples, timeout_s, go_on=False, missing=None)
    for result in results:
        if isinstance(result, RewardError):
            raise result from result.__cause__
    return [result for result in results if isinstance(result, Reward)]


async def run_reward_each(
    function: Callable[..., Any],
    samples: Sequence[Sample],
    *,
    timeout_s: float,
    missing: float | None = None,
    stop: bool = False,
) -> list[Reward | RewardError]:
    """`run_reward`, but a failed sample has its `RewardError` in the list, and the others are still rewarded.

    A sync function is called for every sample even if each call times out: the whole may take `timeout_s` per sample.
    With `stop` the list ends with the first sample of such a function that fails. `missing` is the reward of a sample
    for which the function returns None; without it, None is an error.
    """
    return await _results(function, samples, timeout_s, go_on=not stop, missing=missing)


async def _results(
    function: Callable[..., Any], samples: Sequence[Sample], timeout_s: float, *, go_on: bool, missing: float | None
) -> list[Reward | RewardError]:
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    if not samples:
        return []
    offered = [{"index": sample.index, **sample.extra} for sample in samples]
    leading, names = check_signature(function, set(offered[0]).intersection(*offered))
    batched = leading == "completions"
    absent, here = set[str](), os.getcwd()
    rows = [Watched(sample.row, absent, sample.read) for sample in samples]
    if batched:
        extra = {name: own_copy([sample[name] for sample in offered]) for name in names}
        calls = [partial(function, [s.completion for s in samples], rows, **extra)]
    else:
        arguments = [{name: own_copy(sample[name]) for name in names} for sample in offered]
        calls = [partial(function, s.completion, row, **extra) for s, row, extra in zip(samples, rows, arguments)]
    if is_async(function):
        said = name_of(function), "is async and ran without an await"
        on_block = lambda seconds: report_once(*said, f" for {seconds:.1f} s: {AWAIT}")  # noqa: E731
        values = await run_async(calls, timeout_s, go_on=go_on, on_block=on_block)
    else:
        values = await run_in_thread(calls, timeout_s, go_on=go_on)
    if os.getcwd() != here:
        os.chdir(here)  # of the whole process, which writes the run folder below it
        report_once(name_of(function), "changes the working folder", ", which is changed back: use absolute paths")
    absent -= {str(error.args[0]) for error in values if isinstance(error, KeyError) and error.args}  # an error says it
    report_absent(name_of(function), absent, set[str]().union(*(sample.row for sample in samples)))
    if batched:
        values = _one_each(function, values[0], len(samples))
    return [_reward(function, value, sample, missing) for value, sample in zip(values, samples)]


def check_signature(function: Callable[..., Any], available: set[str] | None = None) -> tuple[str, list[str]]:
    """The name of a reward function's first parameter, and which of the `available` names it asks for.

    The names of the first two parameters must mean a text and a row (`completion`, `model_output`, `text`; `row`,
    `example`, `data_row`), or say nothing (one letter, `_`), or be annotated with `str` and a kind of dict.

    Errors: TypeError for a function that cannot take (completion, row), whose first two parameters have other names
    (another library's form, or the two swapped), or that asks for a name that is not available (None:
    names are not checked). A function without a signature (some written in C) asks for nothing.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "", []
    kinds = {p.kind for p in parameters}
    if inspect.isclass(function):
        raise TypeError(_of_class(function, parameters))
    leading = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:2]
    if fault := _not_ours(getattr(unwrapped(function), "__name__", "NAME"), leading, parameters):
        call = f"{{name}}({_given(parameters) or ', '.join(f'{p.name}=...' for p in leading)})"
        raise TypeError(_around(function, call) or f"{name_of(function)} {fault}")
    further = [p for p in parameters if p not in leading and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first = leading[0].name if leading else ""
    if available is None:
        return first, []
    if missing := [p.name for p in further if p.name not in available and p.default is p.empty]:
        lacks = f"{name_of(function)} asks for {missing}, which the samples do not have; after (completion, row)"
        raise TypeError(f"{lacks} it may ask for {sorted(available)}; columns of the data are row['NAME']")
    bound = function.keywords if isinstance(function, partial) else ()  # options of the user's
    names = available.intersection(p.name for p in further if p.name not in bound)
    if inspect.Parameter.VAR_KEYWORD in kinds and any(kind not in VARIABLE for kind in kinds):
        names |= available - {"index"}  # (of *args, **kwargs alone nothing is known: it may be a decorator's)
    return first, sorted(names)


def check_ours(function: Callable[..., Any]) -> None:
    """`check_signature`, with the way to use a function of another system (TypeError)."""
    try:
        check_signature(function)
    except TypeError as error:
        fix = "rlkit.compat.rewards.adapted(function) takes one of TRL, verl, OpenRLHF, slime or RL2"
        raise TypeError(f"{error}; {fix}") from None


def _not_ours(name: str, leading: list[inspect.Parameter], parameters: list[inspect.Parameter]) -> str:
    """Why a function is not one of (completion, row), and what to write; empty if it is one."""
    names = [p.name for p in leading]
    variable = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    hint = ""
    ordinary = [p for p in parameters if p.kind not in VARIABLE]
    if ordinary and all(p.default is not p.empty for p in ordinary):
        hint = f"if it makes the function, write `reward = {name}(...)` in the file and give that as --reward"
    if len(leading) < 2 and not variable:
        signature = inspect.Signature(parameters)  # with the `*` of keyword-only ones
        return f"must take (completion, row) or (completions, rows), got {signature}{'; ' * bool(hint)}{hint}"
    typed = len(leading) == 2 and all(_is_typed(p, kinds) for p, kinds in zip(leading, (_TEXTS, _DICTS)))
    meant = all(_means(p.name, words, typed) for p, words in zip(leading, (_COMPLETION, _ROW)))
    optional = len(leading) == 2 and leading[1].default is not inspect.Parameter.empty and "row" not in names[1]
    if meant and not optional and not _other_letters(names):
        return ""
    fix = hint or "row has all columns of the data"
    return f"would get a completion and its row, and names them {names}: write (completion, row); {fix}"


def _around(function: Any, call: str) -> str:
    """What to write around a function or class of an installed package, with a `call` of it; empty for the user's."""
    inner = unwrapped(function)
    module, name = getattr(inner, "__module__", None) or "", getattr(inner, "__name__", "")
    there = sys.modules.get(module)
    if not in_packages(getattr(there, "__file__", None)) or getattr(there, name, None) is not inner:
        return ""
    lines = f"from {module} import {name}", f"def score(completion, row): return {call.format(name=name)}"
    fix = f"write `{lines[0]}` and `{lines[1]}` in a file of yours, with the completion and columns of the row"
    return f"{module}:{name} is not a function of (completion, row): {fix}, and give --reward FILE.py:score"


def _given(parameters: Sequence[inspect.Parameter]) -> str:
    """The arguments that a call needs, each as `name=...`."""
    return ", ".join(f"{p.name}=..." for p in parameters if p.default is p.empty and p.kind not in VARIABLE)


def _other_letters(names: list[str]) -> bool:
    """Whether a name of one letter says prompt or row where a completion comes, or completion or text for the row."""
    if len(names) < 2:
        return False
    first, second = (name.lower().strip("_") for name in names)
    response = first == "r" and len(second) > 1  # (r, row)
    return (first in ("p", "r") and not response) or second in ("c", "t")


def _of_class(kind: type, parameters: list[inspect.Parameter]) -> str:
    """What to write in place of a class."""
    name, call = kind.__name__, inspect.getattr_static(kind, "__call__", None)
    methods = [key for key, value in vars(kind).items() if inspect.isfunction(value) and not key.startswith("_")]
    file = name_of(kind).rpartition(":")[0] or "FILE.py"
    methods.sort(key=lambda method: method not in ("score", "grade", "verify", "evaluate", "compute"))
    made = f"{name}({_given(parameters)})" + (f".{methods[0]}" if methods and not inspect.isfunction(call) else "")
    if fix := _around(kind, f"{made}(...)"):
        return fix
    return f"{name_of(kind)} is a class: write `reward = {made}` in the file, and give --reward {file}:reward"


_TEXTS, _DICTS = ("str",), ("dict", "Dict", "Mapping", "MutableMapping")


def _is_typed(parameter: inspect.Parameter, kinds: Sequence[str]) -> bool:
    """Whether the annotation, a type or its text, is one of these kinds."""
    annotation = parameter.annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return name.partition("[")[0].rpartition(".")[2] in kinds


def _means(name: str, words: set[str], typed: bool) -> bool:
    """Whether the name of a parameter means what the words mean, or, with a fitting type, nothing else."""
    if len(name.strip("_")) <= 1:
        return True
    parts = {*name.lower().strip("_").split("_")}
    plural = name.endswith("s") and name[:-1] in words and name not in words  # a list, where one text is given
    refused = _NEITHER - {"answer"} if len(parts) > 1 else _NEITHER  # answer_text is a text, answer says not whose
    return not plural and not parts & refused and (typed or bool(parts & words))


def _one_each(function: Callable[..., Any], values: Any, num: int) -> list[Any]:
    """The results of a batched call, one per sample. An error of the whole batch is repeated for each sample."""
    fix = f"return a list of {num} numbers or dicts, one for each completion, in their order"
    if isinstance(values, BaseException):
        return [_failed(function, values, None)] * num
    alone = isinstance(values, str | bytes | dict | set | frozenset) or getattr(values, "shape", None) == ()
    if alone or not hasattr(values, "__len__"):
        return [_error(function, f"returned {_show(values)} for a batch", fix, None)] * num
    if len(values) != num:
        return [_error(function, f"returned {len(values)} results for {num} completions", fix, None)] * num
    if hasattr(values, "iloc") and [*values.index] != [*range(num)]:  # of pandas
        sort = "give it .sort_index() (and .reset_index(drop=True) if the index is not the place in the batch)"
        return [_error(function, "returned a Series in another order than the completions", sort, None)] * num
    return list(values)


def _failed(function: Callable[..., Any], error: BaseException, sample: Sample | None) -> RewardError:
    """The `RewardError` of a call that raised `error` or timed out."""
    if isinstance(error, RewardError):
        return error
    if isinstance(error, TimedOut | WrongResult):
        cause, fix = error.args
    else:
        cause = f"{type(error).__name__}: {error}{place_in(function, error)}"
        hint = getattr(function, "hint", None)  # of an adapter
        advice = fix_of(function, error, None if sample is None else sample.row)
        ours = isinstance(error, ValueError) and str(unwrapped(function).__module__).startswith("rlkit.")
        fix = (hint and hint(error)) or advice or (_CORRECT if ours else f"{_HANDLE}; {_ALLOW}")
    fix = lost_processes(function, error) or fix
    failed = _error(function, cause, fix, sample)
    failed.__cause__ = error
    return failed


_CORRECT = "correct the row, or the option of the reward: this is not the answer's fault"
_HANDLE = "handle it in the function: return what such an answer is worth"
_ALLOW = "or allow a share of the samples to fail, as calls to a server may: max_failed (--reward-max-failed)"


def _reward(function: Callable[..., Any], value: Any, sample: Sample, missing: float | None) -> Reward | RewardError:
    """A result as a `Reward`, or an error that names the sample. `missing` is the reward in place of None."""
    if isinstance(value, BaseException):
        return _failed(function, value, sample)
    if missing is not None and (value is None or (isinstance(value, dict) and value.get("reward", 0) is None)):
        others = {k: v for k, v in (value or {}).items() if v is not None}
        result = _reward(function, {**others, "reward": 0.0}, sample, None)
        return replace(result, reward=missing) if isinstance(result, Reward) else result
    try:
        if isinstance(value, Reward):  # of `rlkit.rewards.combine`, which has checked all but the number that trains
            return replace(value, reward=_number(function, value.reward, sample, ""))
        if not isinstance(value, dict):
            return Reward(_number(function, value, sample, ""))
        if "reward" not in value:
            fix = "put the number that trains under 'reward' (in a function of verl or slime: 'score')"
            cause = f"returned a dict without 'reward' (keys: {sorted(map(str, value))})"
            raise _error(function, cause, fix, sample)
        if taken := [key for key in RESERVED if key in value]:
            cause, fix = f"returned the key {taken[0]!r}", f"rename it: reward/{taken[0]} is a metric of every run"
            raise _error(function, cause, fix, sample)
        notes = {str(k): v for k, v in value.items() if isinstance(v, str) and k not in ("reward", "score")}
        numbers = {str(k): _number(function, v, sample, f" under {k!r}") for k, v in value.items() if k not in notes}
    except RewardError as error:
        return error
    return Reward(numbers.pop("reward"), numbers.pop("score", None), numbers, notes)


def _number(function: Callable[..., Any], value: Any, sample: Sample, key: str) -> float:
    try:
        return to_number(value)
    except ValueError as error:
        cause = f"returned {error}{key}"
        fix = "find the division or logarithm that made it, and decide what such an answer is worth (at most 3.4e38)"
    except Exception:  # the conversion of a foreign type may raise anything
        cause = f"returned {_show(value)}{key}"
        fix = "return a finite number, or a dict of finite numbers with the key 'reward'"
        if value is None:
            fix += (
                "; None often comes from a path without `return`. A function that cannot judge every sample needs a "
                "second one that does (--reward takes several), or --reward-max-failed, which leaves samples out"
            )
        if (shape := getattr(value, "shape", ())) and math.prod(shape) == 1:
            fix = "return a finite number: it has a dimension too many, so use .squeeze(-1) on the results, or .item()"
        if inspect.iscoroutine(value):
            value.close()
            fix = "await it" if is_async(function) else "declare the function itself with `async def`"
    raise _error(function, cause, fix, sample)


def _error(function: Callable[..., Any], cause: str, fix: str, sample: Sample | None) -> RewardError:
    where = "a batch" if sample is None else f"row {sample.index + 1}"
    lines = [f"reward function {name_of(function)} failed on {where}: {cause}", f"  fix: {fix}"]
    if sample is not None:
        text = sample.completion
        excerpt = repr(text) if len(text) <= 240 else f"{text[:120]!r} ... {text[-120:]!r}"
        lines.insert(1, f"  completion ({len(text)} characters): {excerpt}")
    return RewardError("\n".join(lines), index=None if sample is None else sample.index, cause=cause, fix=fix)
