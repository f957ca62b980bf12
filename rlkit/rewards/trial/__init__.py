"""Try a reward function on a row before a model is loaded: on the row's gold answer, on "" and on another answer.

A mistake in the function is then an error of the command line, and a function that no answer satisfies is told.
"""

from __future__ import annotations

import _signal
import inspect
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import count, islice
from typing import Any

from rlkit.data.load import place_of
from rlkit.data.prompts import prompt_messages, row_given
from rlkit.data.schema import GOLD, PROMPTS
from rlkit.rewards.answers import answers
from rlkit.rewards.call import Reward, RewardError, Sample, check_signature, run_reward_each
from rlkit.rewards.failures import ALARM, is_ours, name_of
from rlkit.rewards.text import first_value, gold_answer
from rlkit.rewards.trial._case import (
    COMPARE,
    RUN,
    Case,
    Trial,
    form_that_counts,
    module_of,
    number,
    reads_gold,
    shown,
    text_of,
)
from rlkit.rewards.trial._doubts import (
    all_the_same,
    always_true,
    before_tests,
    blank_end,
    broken,
    elsewhere,
    for_nothing,
    jumps,
    loose,
    lower_only,
    moved,
    no_more,
    of_empty,
    of_length,
    parsed,
    random,
    runs_text,
    unbounded,
    unpaid,
)
from rlkit.rollout.calling import is_async, report_once


async def try_reward(
    function: Callable[..., Any],
    rows: Sequence[dict[str, Any]],
    *,
    timeout_s: float,
    weight: float | None = None,
    one_turn: bool = True,
    alone: bool = True,
    stop: bool = True,
) -> Trial | None:
    """Call a reward function as for samples of one row, the first that has a gold answer (else the first).

    The texts are its gold answer, "" and another row's answer. Where the gold answer gets no more than these, it is
    tried as rewards often read it too (`\\boxed{7}`, `<answer>7</answer>`, ...). The ids of a text are its bytes, since
    there is no tokenizer yet. None for a function that asks for what only an environment knows (`one_turn` False; if it
    asks by a parameter with a default, None where it fails without), and for a judge of this package, whose calls cost
    something. A function of a batch gets the texts in another order, too (`moved`), and where the gold answer passes,
    those of a few other rows are tried (`elsewhere`), and wrong ones near it (`loose`). A function that reads another
    column, which holds the same answers, is tried with that one (`_column`).

    `alone`: no other function adds to the reward, so that None is an error, and one number for all texts is told.
    `stop` after the first text that the function fails on. Rewards are compared times a negative `weight`.
    """
    if module_of(function) == "rlkit.rewards.judge":
        return None
    index = next((i for i, row in enumerate(rows) if gold_answer(row) is not None), 0)
    row, seen, values = row_given(rows[index]), set[str](), set[float]()
    called, sign = _with_alarms_named(function), min(weight or 1.0, 0.0) or 1.0
    name = name_of(function) + f" at weight {sign:g}" * (sign < 0)

    async def call(batch: Sequence[str], *, stop: bool = False, at: int = index) -> list[Reward | RewardError]:
        batch = [text[:1] + text[1:] for text in batch]  # another object than the row's: `is` is no comparison
        given = row if at == index else row_given(rows[at])
        samples = [Sample(text, given, at, _extra(given, text, one_turn=one_turn), seen) for text in batch]
        missing = None if alone else math.nan
        scored = await run_reward_each(called, samples, timeout_s=timeout_s, missing=missing, stop=stop)
        values.update(map(number, scored))
        return [_times(x, sign) for x in scored]

    available = {"index", *_extra(row, "", one_turn=one_turn)}
    try:
        batched = check_signature(function, available)[0] == "completions"
    except TypeError:
        if one_turn:
            raise
        return None
    case = Case(function, name, call, seen, rows, index)
    trial = await _tried(case, Trial(place_of(rows, index), (), values=values), stop=stop)
    if trial.failures:
        return None if not one_turn and _has_more(function, available) else trial
    if not is_ours(function):
        trial = replace(trial, note=await random(case, trial.tried))
    if batched and not trial.note:
        trial = replace(trial, note=await moved(case, trial.tried))
    if not (trial.note or (not one_turn and _has_more(function, available))):
        trial = await _of_golds(case, trial, alone=alone, stop=stop)
    if sign < 0 and not trial.note and max(trial.values) <= 0 > min(trial.values):
        why = "gives no number above 0, and its negative weight turns this penalty into a reward: is the sign meant?"
        trial = replace(trial, note=f"{name} {why}")
    return replace(trial, tried=[(text, label, _times(x, 1 / sign)) for text, label, x in trial.tried])


async def _tried(case: Case, trial: Trial, *, stop: bool) -> Trial:
    texts = _texts(case.gold, case.other)
    results = await case.call([*texts], stop=stop)
    return replace(trial, tried=[(text, label, result) for (text, label), result in zip(texts.items(), results)])


async def _of_golds(case: Case, trial: Trial, *, alone: bool, stop: bool) -> Trial:
    """The trial with what is to be told of gold answers: those of the row, or of the column that the function reads."""
    if case.gold is not None:
        trial = await _of_gold(case, trial, alone=alone)
    elif case.seen - {*PROMPTS}:
        trial = replace(trial, note=of_empty(case.name, trial.tried))
    if not (trial.note or is_ours(case.function)):
        note = "" if reads_gold(case) else await jumps(case, trial.tried)
        note = note or await for_nothing(case, trial.tried) or await before_tests(case) or always_true(case)
        await runs_text(case)
        note = note or await broken(case) or await unbounded(case)
        note = note or ("" if reads_gold(case) else await of_length(case, trial.tried))
        trial = replace(trial, note=note)
    if trial.note or (column := _column(case)) is None:
        return trial
    case = replace(case, gold_of=lambda row: first_value(row, column), column=column)
    trial = await _tried(case, trial, stop=stop)
    return trial if trial.failures else await _of_gold(case, trial, alone=alone)


async def _of_gold(case: Case, trial: Trial, *, alone: bool) -> Trial:
    """The trial with what is to be told of the gold answer, and the form of it that gets more than the others."""
    gold, tried, early = case.gold or "", trial.tried, reads_gold(case)
    best, *others = (number(result) for *_, result in tried)
    bare, ending, nothing = best > max(others), case.short(gold), others[0]
    written = await form_that_counts(case, answers(ending or gold), nothing) if ending or not bare else None
    if ending and written and bare and written[2].reward <= min(best - 1e-9, others[-1]):
        written = None  # it shares more words with another row's text
    whole = None if written or bare or not ending else await form_that_counts(case, [gold], nothing)
    form, text, result = written or whole or ("{}", gold, tried[0][2])
    if not bare and (written or whole):
        tried = [(text, f"its gold answer as {shown(text)}", result), *tried]
        trial = replace(trial, tried=tried)
    if not (bare or written or whole):
        return replace(trial, note=await no_more(case, trial, early=early, alone=alone))
    if not reads_gold(case):
        return trial
    if ending and not written:
        whole_text = f"{shown(text)}, the row's whole gold answer"
        given = f"{case.name} gives {number(result):g} to {whole_text}, and too little to "
        right = f"{shown(ending)} alone: right if a completion is to repeat that text; else {COMPARE}"
        return replace(trial, note=given + right)
    note = await blank_end(case, form) or await lower_only(case, form) or await elsewhere(case, form)
    note = note or await loose(case, form) or await parsed(case, form) or unpaid(case, trial.tried)
    return replace(trial, note=note or all_the_same(case))


def _with_alarms_named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, whose first call logs alarms and handlers of `signal`, also where it catches their errors:
    they work in the main thread only."""
    if is_ours(function) or is_async(function):
        return function
    if isinstance(function, partial):
        return partial(_with_alarms_named(function.func), *function.args, **function.keywords)
    calls, name = count(), name_of(function)

    def hook(frame: Any, event: str, called: Any) -> None:
        if event == "call" and RUN in frame.f_code.co_names:
            fix = "rlkit.rewards.math compares numbers, and rlkit.rewards.code runs programs in a sandbox"
            report_once(name, "runs the text of a completion by eval or exec", f", whatever it is: {fix}")
        if event == "c_call" and called in (signal.alarm, signal.setitimer, _signal.signal):
            report_once(name, f"uses signal.{called.__name__}", f": {ALARM}")

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        before = sys.getprofile()  # of this thread
        sys.setprofile(before if next(calls) and RUN not in f"{args}{kwargs}" else hook)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(before)

    return named


def _texts(gold: str | None, other: str | None) -> dict[str, str]:
    """The texts to try, with the words for what they are."""
    texts = {} if gold is None else {gold: f"its gold answer {shown(gold)}"}
    texts |= {"": "an empty completion"} | ({other: f"another row's answer {shown(other)}"} if other else {})
    if gold is None:
        texts |= {text: f"the completion {shown(text)}" for text in ("7", "The answer is 7.")}
    return texts


def _column(case: Case) -> str | None:
    """The column, none of those of gold answers, that a function reads and that holds what these end with."""
    columns = () if case.gold is None or case.seen & {*GOLD} else case.seen - {*PROMPTS}
    rows = [(row, answers(text_of(gold_answer(row)) or "")) for row in islice(case.rows, 20)]
    return next((x for x in sorted(columns) if all((text_of(row.get(x)) or "-") in ends for row, ends in rows)), None)


def _has_more(function: Callable[..., Any], available: set[str]) -> bool:
    """Whether the function has a parameter after the first two that is neither known nor an option of the user's."""
    bound = function.keywords if isinstance(function, partial) else ()
    further = [*inspect.signature(function).parameters.values()][2:]
    return any(p.name not in (*available, *bound) and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in further)


def _extra(row: dict[str, Any], text: str, *, one_turn: bool) -> dict[str, Any]:
    """What a sample has beside its text and row."""
    ids = [*text.encode(errors="replace")]
    extra = {"completion_ids": ids, "prompt_ids": [0], "finish_reason": "stop", "truncated": False}
    if one_turn:
        return extra
    return extra | {"num_turns": 1, "messages": [*prompt_messages(row), {"role": "assistant", "content": text}]}


def _times(result: Reward | RewardError, weight: float) -> Reward | RewardError:
    return result if isinstance(result, RewardError) else replace(result, reward=result.reward * weight)
