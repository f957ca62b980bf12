"""Try a reward function on a row before a model is loaded: on the row's gold answer, on "" and on another answer.

A mistake in the function is then an error of the command line, and a function that no answer satisfies is told.
"""

from __future__ import annotations

import _signal
import asyncio
import inspect
import json
import math
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from itertools import count, islice, pairwise
from typing import Any

from rlkit.data.load import place_of
from rlkit.data.prompts import prompt_messages, row_given
from rlkit.data.schema import GOLD, PROMPTS
from rlkit.rewards.answers import DECIMAL_COMMA, FORMS, LONGEST, answers, forms_of, near, short
from rlkit.rewards.call import Reward, RewardError, Sample, check_signature, needs_of, run_reward_each
from rlkit.rewards.failures import ALARM, is_ours, name_of, unwrapped
from rlkit.rewards.text import first_value, gold_answer
from rlkit.rollout.calling import is_async, report_once

_SHOWN = 60  # characters of an answer
_AMONG = 1000  # rows of which others are tried
_SAME = 10  # rows: fewer may have one gold answer by chance
_RIVALS = 20  # gold answers of other rows
_SHAPES = 4  # of gold answers that have wrong ones near them: a number, one with a sign, a word, words
_COMPARE = "compare how the function reads an answer with how the data writes it"


@dataclass(frozen=True)
class Trial:
    """What a reward function gave: texts with the words for what they are, and the result of each.

    `place` is the row's, and `note` says that the gold answer gets no more than the others, also that of another row
    only, or no more than a wrong answer near it, that a text's reward depends on its place in the batch, or that two
    calls give it two (empty: none of these, or the function does not compare with the gold answer). `values` are all
    rewards that it gave.
    """

    place: str
    tried: Sequence[tuple[str, str, Reward | RewardError]]
    note: str = ""
    values: Set[float] = frozenset()

    @property
    def failures(self) -> list[tuple[str, RewardError]]:
        """What the function failed on, in words, and the error."""
        return [(label, result) for _, label, result in self.tried if isinstance(result, RewardError)]


@dataclass(frozen=True)
class _Case:
    """A function with its name, how to call it on a row's texts, and the columns that it has read; the rows, the place
    of the one that is tried, and how to find gold answers (in which `column`, if in none of `GOLD`)."""

    function: Callable[..., Any]
    name: str
    call: Callable[..., Any]
    seen: set[str]
    rows: Sequence[dict[str, Any]]
    index: int
    gold_of: Callable[[Mapping[str, Any]], Any] = gold_answer
    column: str = ""

    @cached_property
    def gold(self) -> str | None:
        return _text(self.gold_of(self.rows[self.index])) or None

    @cached_property
    def other(self) -> str | None:
        texts = (_text(self.gold_of(row)) for row in self.rows)
        return next((text for text in texts if text not in (None, self.gold, "")), None)

    @cached_property
    def golds(self) -> dict[int, str]:
        """The gold answers of the first rows, by their places."""
        return {i: x for i, row in enumerate(islice(self.rows, _AMONG)) if (x := _text(self.gold_of(row)))}

    @cached_property
    def forms(self) -> list[str]:
        return [*FORMS] if is_ours(self.function) else forms_of(self.function)

    def short(self, gold: str) -> str:
        return short(gold, mathematics=_module(self.function) == "rlkit.rewards.math")

    async def numbers(self, texts: Sequence[str], *, at: int | None = None) -> list[float]:
        return [*map(_number, await self.call(texts, at=self.index if at is None else at))]


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
    something. A function of a batch gets the texts in another order, too (`_moved`), and where the gold answer passes,
    those of a few other rows are tried (`_elsewhere`), and wrong ones near it (`_loose`). A function that reads another
    column, which holds the same answers, is tried with that one (`_column`).

    `alone`: no other function adds to the reward, so that None is an error, and one number for all texts is told.
    `stop` after the first text that the function fails on. Rewards are compared times a negative `weight`.
    """
    if _module(function) == "rlkit.rewards.judge":
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
        values.update(map(_number, scored))
        return [_times(x, sign) for x in scored]

    available = {"index", *_extra(row, "", one_turn=one_turn)}
    try:
        batched = check_signature(function, available)[0] == "completions"
    except TypeError:
        if one_turn:
            raise
        return None
    case = _Case(function, name, call, seen, rows, index)
    trial = await _tried(case, Trial(place_of(rows, index), (), values=values), stop=stop)
    if trial.failures:
        return None if not one_turn and _has_more(function, available) else trial
    if not is_ours(function):
        trial = replace(trial, note=await _random(case, trial.tried))
    if batched and not trial.note:
        trial = replace(trial, note=await _moved(case, trial.tried))
    if not (trial.note or (not one_turn and _has_more(function, available))):
        trial = await _of_golds(case, trial, alone=alone, stop=stop)
    if sign < 0 and not trial.note and max(trial.values) <= 0 > min(trial.values):
        why = "gives no number above 0, and its negative weight turns this penalty into a reward: is the sign meant?"
        trial = replace(trial, note=f"{name} {why}")
    return replace(trial, tried=[(text, label, _times(x, 1 / sign)) for text, label, x in trial.tried])


async def _tried(case: _Case, trial: Trial, *, stop: bool) -> Trial:
    texts = _texts(case.gold, case.other)
    results = await case.call([*texts], stop=stop)
    return replace(trial, tried=[(text, label, result) for (text, label), result in zip(texts.items(), results)])


async def _of_golds(case: _Case, trial: Trial, *, alone: bool, stop: bool) -> Trial:
    """The trial with what is to be told of gold answers: those of the row, or of the column that the function reads."""
    if case.gold is not None:
        trial = await _of_gold(case, trial, alone=alone)
    elif case.seen - {*PROMPTS}:
        trial = replace(trial, note=_note_of_empty(case.name, trial.tried))
    if not (trial.note or is_ours(case.function) or _reads_gold(case)):
        trial = replace(trial, note=await _jumps(case, trial.tried))
    if trial.note or (column := _column(case)) is None:
        return trial
    case = replace(case, gold_of=lambda row: first_value(row, column), column=column)
    trial = await _tried(case, trial, stop=stop)
    return trial if trial.failures else await _of_gold(case, trial, alone=alone)


async def _of_gold(case: _Case, trial: Trial, *, alone: bool) -> Trial:
    """The trial with what is to be told of the gold answer, and the form of it that gets more than the others."""
    gold, tried, early = case.gold or "", trial.tried, _reads_gold(case)
    best, *others = (_number(result) for *_, result in tried)
    bare, ending, nothing = best > max(others), case.short(gold), others[0]
    written = await _written(case, answers(ending or gold), nothing) if ending or not bare else None
    if ending and written and bare and written[2].reward <= min(best - 1e-9, others[-1]):
        written = None  # it shares more words with another row's text
    whole = None if written or bare or not ending else await _written(case, [gold], nothing)
    form, text, result = written or whole or ("{}", gold, tried[0][2])
    if not bare and (written or whole):
        tried = [(text, f"its gold answer as {_shown(text)}", result), *tried]
        trial = replace(trial, tried=tried)
    if not (bare or written or whole):
        return replace(trial, note=await _note(case, trial, early=early, alone=alone))
    if not _reads_gold(case):
        return trial
    if ending and not written:
        whole_text = f"{_shown(text)}, the row's whole gold answer"
        given = f"{case.name} gives {_number(result):g} to {whole_text}, and too little to "
        right = f"{_shown(ending)} alone: right if a completion is to repeat that text; else {_COMPARE}"
        return replace(trial, note=given + right)
    return replace(trial, note=await _elsewhere(case, form) or await _loose(case, form) or _all_the_same(case))


def _with_alarms_named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, whose first call logs alarms and handlers of `signal`, also where it catches their errors:
    they work in the main thread only."""
    if is_ours(function) or is_async(function):
        return function
    if isinstance(function, partial):
        return partial(_with_alarms_named(function.func), *function.args, **function.keywords)
    calls, name = count(), name_of(function)

    def hook(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and called in (signal.alarm, signal.setitimer, _signal.signal):
            report_once(name, f"uses signal.{called.__name__}", f": {ALARM}")

    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        before = sys.getprofile()  # of this thread
        sys.setprofile(before if next(calls) else hook)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(before)

    return named


async def _random(case: _Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives one text two rewards; empty for none.

    Differences below 1e-3 of the largest are noise, unless the rewards of all texts go one way over four calls.
    """
    texts = [text for text, *_ in tried]
    runs = [[_number(result) for *_, result in tried], await case.numbers(texts)]
    size = 1e-3 * max((abs(x) for x in runs[0] if not math.isnan(x)), default=0.0)
    places = [i for i, (a, b) in enumerate(zip(*runs)) if abs(a - b) > size]
    if not places and _one_way(runs):
        runs += [await case.numbers(texts) for _ in range(2)]
        places = [0] * _one_way(runs)
    if not places:
        return ""
    change = f"{runs[0][places[0]]:.8g} and {runs[-1][places[0]]:.8g} to {tried[places[0]][1]}"
    return f"{case.name} gives {change} in two calls: is it random, or does it remember earlier calls?"


def _one_way(runs: Sequence[Sequence[float]]) -> bool:
    """Whether each run has larger numbers than the one before, or each smaller ones."""
    pairs = [pair for one in zip(*runs) for pair in pairwise(one)]
    return all(a < b for a, b in pairs) or all(a > b for a, b in pairs)


async def _moved(case: _Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives a text another reward in a batch of another order; empty if it does not, or
    if rewards are random.

    Where all texts have one reward, they are tried with the gold answer in other forms.
    """
    batch, first = [text for text, *_ in tried], [_number(result) for *_, result in tried]
    if len({*first}) == 1 and case.gold is not None and len(case.gold) < LONGEST:
        batch = [*dict.fromkeys([*batch, *(form.format(case.gold) for form in case.forms)])]
        first = await case.numbers(batch)
    if len({*first}) == 1:
        return ""
    order = [*range(1, len(batch)), 0]

    async def turned() -> list[float]:
        last = await case.numbers([batch[i] for i in order])
        return last[-1:] + last[:-1]

    second = await turned()
    size = 0.01 * max(map(abs, first))
    moved = [i for i, (x, y) in enumerate(zip(first, second)) if abs(x - y) > size]
    for _ in range(2 if moved else 0):  # a judge at random seldom repeats both
        if await case.numbers(batch) != first or await turned() != second:
            return ""
    if not moved:
        return ""
    change = f"{first[moved[0]]:g} and {second[moved[0]]:g} to {_shown(batch[moved[0]])}"
    asked = "are its rewards in the order of the completions?"
    return f"{case.name} gives {change} in two orders of the same batch: {asked}"


def _texts(gold: str | None, other: str | None) -> dict[str, str]:
    """The texts to try, with the words for what they are."""
    texts = {} if gold is None else {gold: f"its gold answer {_shown(gold)}"}
    texts |= {"": "an empty completion"} | ({other: f"another row's answer {_shown(other)}"} if other else {})
    if gold is None:
        texts |= {text: f"the completion {_shown(text)}" for text in ("7", "The answer is 7.")}
    return texts


async def _elsewhere(case: _Case, form: str) -> str:
    """The line about a function for which the gold answer of another row gets no more than "", in whatever form.

    `form` is the one that passes on the row. The others are up to five that differ: the longest answer, and the first
    with a capital letter, a comma, another sign or a blank, and another kind of end (`short`); and a whole number
    of this row that is a float, or the text of one in all rows, as a policy writes it.
    """
    golds = {i: text for i, text in case.golds.items() if i != case.index}
    differing = [next((i for i, text in golds.items() if re.search(x, text)), None) for x in ("[A-Z]", ",", r"[^\w,]")]
    ends = bool(case.short(case.gold or ""))
    differing.append(next((i for i, text in golds.items() if bool(case.short(text)) != ends), None))
    chosen = {i: golds[i] for i in [*sorted(golds, key=lambda i: -len(golds[i]))[:1], *differing] if i is not None}
    number = isinstance(case.gold_of(case.rows[case.index]), float) and (case.gold or "").endswith(".0")
    if number or all(text.endswith(".0") for text in case.golds.values()):
        chosen[case.index] = (case.gold or "").removesuffix(".0")

    async def fails(at: int, gold: str) -> str:
        texts = [form.format(text) for text in answers(gold)]
        *results, nothing = await case.call([*texts, ""], at=at)
        empty = nothing.reward if isinstance(nothing, Reward) else -math.inf
        if any(isinstance(x, Reward) and (x.reward > empty or math.isnan(x.reward)) for x in results):
            return ""  # not a number: of several functions, this one is not for this row
        if at != case.index and await _written(case, answers(gold), empty, at=at):
            return ""
        given = f"{_number(results[0]):g}" if isinstance(results[0], Reward) else f"an error ({results[0].cause})"
        whose = f"of {place_of(case.rows, at, with_source=False)}" if at != case.index else "as a policy writes it"
        return f"{given} to {_shown(texts[0])}, the gold answer {whose}"

    if not (said := [line for line in await asyncio.gather(*(fails(*one) for one in chosen.items())) if line]):
        return ""
    return f"{case.name} gives this row's gold answer more than an empty completion, but {said[0]}: {_COMPARE}"


async def _loose(case: _Case, form: str) -> str:
    """The line about a function that gives a wrong answer as much as a gold answer, or the form without one.

    The wrong answers are those near a gold answer (`near`), the first of a few shapes, and for the row other gold
    answers (`_rivals`).
    """
    comma = all(DECIMAL_COMMA.fullmatch(text) for text in case.golds.values())
    shapes: dict[str, tuple[int, str, Sequence[str]]] = {}
    for i, text in case.golds.items():
        shape = re.sub(r"\w+", lambda word: "0" if word[0].isdecimal() else "w", text)
        new = shape not in shapes and len(shapes) < _SHAPES
        if new and (wrong := near(case.short(text) or text, decimal_comma=comma)):
            shapes[shape] = i, text, wrong
    for one in (*shapes.values(), (case.index, case.gold or "", _rivals(case))):
        if line := await _as_much(case, form, *one):
            return line
    return await _first_number(case) or await _one_side(case, form)


async def _first_number(case: _Case) -> str:
    """The line about a function for which a number before the answer takes the answer's place; else empty."""
    gold = case.short(case.gold or "") or case.gold or ""
    if is_ours(case.function) or not re.fullmatch(r"-?\d+", gold):
        return ""
    texts = [f"{start}\nThe answer is {gold}." for start in ("Step one.", "Step 4." if gold == "3" else "Step 3.")]
    words, number, nothing = await case.numbers([*texts, ""])
    if not words > nothing >= number:
        return ""
    given = f"{words:g} to {_shown(texts[0])} and {number:g} to {_shown(texts[1])}"
    return f"{case.name} gives {given}, for the gold answer {_shown(gold)}: does it take the first number of a text?"


async def _one_side(case: _Case, form: str) -> str:
    """The line on a function that takes a number that begins (or ends) with the answer, and not both; else empty."""
    gold = case.short(case.gold or "") or case.gold or ""
    if is_ours(case.function) or not re.fullmatch(r"\d+", gold):
        return ""
    texts = [form.format(text) for text in (gold, f"{gold}1", f"2{gold}", "")]
    right, *numbers, nothing = await case.numbers(texts)
    taken = [text for text, x in zip(texts[1:], numbers) if x >= right > nothing]
    given = f"{case.name} gives {right:g} to {_shown(taken[0])}, as much as to {_shown(texts[0])}" if taken else ""
    return f"{given}: does it look at one end of the text alone?" if len(taken) == 1 else ""


async def _as_much(case: _Case, form: str, at: int, gold: str, wrong: Sequence[str]) -> str:
    """The line about a function that gives one of the `wrong` answers as much as the gold answer of a row."""
    right = answers(gold)
    texts = [form.format(text) for text in (*right, "", *wrong)]
    *numbers, nothing = await case.numbers([*texts, ""], at=at)
    best = max((x for x in numbers[: len(right)] if not math.isnan(x)), default=-math.inf)
    if not best > nothing:
        return ""
    if not (same := [text for text, x in zip(texts[len(right) :], numbers[len(right) :]) if x >= best]):
        return ""
    words = _module(case.function) == "rlkit.rewards.math" and not re.search(r"\d", gold)
    why = "it multiplies letters, and rlkit.rewards.text:exact_match compares words" if words else _COMPARE
    whose = f"the gold answer of {place_of(case.rows, at, with_source=False)}"
    return f"{case.name} gives {best:g} to {_shown(same[0])}, as much as to {_shown(gold)}, {whose}: {why}"


def _rivals(case: _Case) -> list[str]:
    """Gold answers of other rows that are wrong for the row: other whole numbers where its own is one, or words.

    Before them, a longer word that holds a short one ("know"), and for a letter a text that names three.
    """
    kinds = (r"-?\d+", lambda text: str(int(text))), (r"[^\W\d_]+", str.casefold)
    if is_ours(case.function) or isinstance(case.gold_of(case.rows[case.index]), list | tuple):  # another may be in it
        return []
    mine, *texts = (case.short(text) or text for text in (case.gold or "", *case.golds.values()))
    pattern, value = next(((x, value) for x, value in kinds if re.fullmatch(x, mine)), ("", str))
    others = {value(x): x for x in texts if re.fullmatch(pattern, x) and value(x) != value(mine)}
    held = [f"x{mine}x"] * (mine.isalpha() and 1 < len(mine) < 4)
    choices = [x for x in others.values() if len(x) == 1] if len(mine) == 1 and mine.isalpha() else []
    held += [f"{choices[0]}, {mine} or {choices[1]}"] if len(choices) > 1 else []
    return [*held, *others.values()][:_RIVALS]


async def _jumps(case: _Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function whose reward goes up and down with the number of blanks after a text; else empty."""
    text, given = case.gold or "7", [_number(result) for *_, result in tried]
    numbers = await case.numbers([text + " " * num for num in range(16)]) if len({*given}) > 1 else given
    steps = [b - a for a, b in pairwise(numbers) if a != b]
    wide = max(numbers) - min(numbers) >= 0.5 * (max(given) - min(given))
    if sum(a * b < 0 for a, b in pairwise(steps)) < 3 or not wide:
        return ""
    some = ", ".join(f"{x:g}" for x in numbers[:6])
    return f"{case.name} gives {some} to {_shown(text)} with 0 to 5 blanks after it: is it a hash, or odd and even?"


def _all_the_same(case: _Case) -> str:
    """The line about rows that all have one gold answer; empty for few."""
    same = f"{case.name} is tried on rows that all have the gold answer {_shown(case.gold or '')}"
    few = case.other is not None or len(case.golds) < _SAME
    return "" if few else f"{same}: check which column holds the answers"


def _column(case: _Case) -> str | None:
    """The column, none of those of gold answers, that a function reads and that holds what these end with."""
    columns = () if case.gold is None or case.seen & {*GOLD} else case.seen - {*PROMPTS}
    rows = [(row, answers(_text(gold_answer(row)) or "")) for row in islice(case.rows, 20)]
    return next((x for x in sorted(columns) if all((_text(row.get(x)) or "-") in ends for row, ends in rows)), None)


def _note_of_empty(name: str, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that reads a column and gives an empty completion more than any other; else empty."""
    numbers = {text: _number(result) for text, _, result in tried}
    others = {value for text, value in numbers.items() if text}
    if len(others) != 1 or not numbers[""] > max(others):  # others that differ: it may want short ones
        return ""
    given = f"{numbers['']:g} to an empty completion and {max(others):g} to others"
    return f"{name} gives {given}: does it look for the completion in the answer? '' is in every text"


async def _written(
    case: _Case, texts: Sequence[str], nothing: float, *, at: int | None = None
) -> tuple[str, str, Reward] | None:
    """The form in which one of a gold answer's `texts` gets more than `nothing` and than another answer (not `at`
    another row), its text, and its reward."""
    forms = [(form, text) for text in texts if len(text) < LONGEST for form in case.forms]
    tried = await case.call([form.format(text) for form, text in forms], at=case.index if at is None else at)
    results = [*zip(forms, tried)]
    better = [(form, result) for form, result in results if isinstance(result, Reward) and result.reward > nothing]
    if not better:
        return None
    (form, text), best = max(better, key=lambda one: one[1].reward)
    others = [] if case.other is None or at is not None else [form.format(case.short(case.other) or case.other)]
    if any(best.reward <= x for x in await case.numbers(others)):
        return None
    return form, form.format(text), best


async def _note(case: _Case, trial: Trial, *, early: bool, alone: bool) -> str:
    """The line about a function that gives the gold answer no more than other texts; empty if it may judge the form.

    `early`: it reads the gold answer of any text, and else perhaps only of those in a form.
    """
    told, inverted, numbers = trial.tried, early, [_number(result) for *_, result in trial.tried]
    plain = early and len({*numbers}) > 1
    if not plain and _reads_gold(case) and (in_form := await _in_a_form(case, numbers[1])):
        told, (mine, other) = [in_form[0], trial.tried[1], in_form[1]], (_number(result) for *_, result in in_form)
        inverted = early or other - mine > 0.5 * max(abs(mine), abs(other))
    elif not early and (not alone or is_ours(case.function) or len(trial.values) > 1):
        return ""
    (_, gold, best), *others = told
    gold = gold.replace("its gold", "the row's own")
    to_others = " and ".join(f"{_number(result):g} to {label}" for _, label, result in others)
    kind = type(case.gold_of(case.rows[case.index])).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    why = "" if kind == "str" else f"; the row's answer is {article} {kind} and a completion is a text"
    form = "" if inverted else "right if it judges the form alone; else "
    return f"{case.name} gives {_number(best):g} to {gold}, {to_others}{why}: {form}{_COMPARE}"


async def _in_a_form(case: _Case, nothing: float) -> Sequence[tuple[str, str, Any]]:
    """The gold answer and that of another row in the form in which the other gets most more; empty if none counts."""
    golds = [case.short(text) or text for text in (case.gold, case.other) if text and len(text) < LONGEST]
    forms = [form for form in case.forms if not {'"', "`"} & {*form}]  # in code and JSON something else may be asked
    if len(golds) < 2:
        return ()
    texts = [form.format(gold) for form in forms for gold in golds]
    results = await case.call(texts, at=case.index)
    numbers = [*map(_number, results)]
    pairs = enumerate(zip(numbers[::2], numbers[1::2]))
    found = [(b - a, abs(a - nothing), -2 * i) for i, (a, b) in pairs if b >= a and not a == b == nothing]
    places = [(whose, k - max(found)[2]) for k, whose in enumerate(("its gold", "another row's"))] if found else []
    return [(texts[i], f"{whose} answer as {_shown(texts[i])}", results[i]) for whose, i in places]


def _module(function: Callable[..., Any]) -> str:
    return str(getattr(unwrapped(function), "__module__", ""))


def _reads_gold(case: _Case) -> bool:
    """Whether the function has read a gold answer of a row, or gets it as an argument (of another system)."""
    named = {name for need in needs_of(case.function) for name in ((need,) if isinstance(need, str) else need)}
    parameters = {*inspect.signature(unwrapped(case.function)).parameters}
    return bool(case.column or (case.seen | named | parameters) & {*GOLD})


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


def _text(gold: Any) -> str | None:
    """A gold answer as a policy would write it: of a list its first entry."""
    if isinstance(gold, list | tuple) and gold:
        return _text(gold[0])
    return gold if isinstance(gold, str | None) else str(gold) if not isinstance(gold, dict) else json.dumps(gold)


def _times(result: Reward | RewardError, weight: float) -> Reward | RewardError:
    return result if isinstance(result, RewardError) else replace(result, reward=result.reward * weight)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _number(result: Reward | RewardError) -> float:
    return math.nan if isinstance(result, RewardError) else result.reward + 0.0  # no -0
