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
from functools import partial, wraps
from itertools import count, islice, pairwise
from typing import Any

from rlkit.data.load import place_of
from rlkit.data.prompts import prompt_messages, row_given
from rlkit.data.schema import GOLD, PROMPTS
from rlkit.rewards.call import Reward, RewardError, Sample, check_signature, needs_of, run_reward_each
from rlkit.rewards.failures import ALARM, is_ours, name_of, unwrapped
from rlkit.rewards.text import final_answer, first_value, gold_answer
from rlkit.rollout.calling import is_async, report_once

_SHOWN = 60  # characters of an answer
_LONGEST = 1000  # characters of an answer that is tried in other forms
_AMONG = 1000  # rows of which others are tried
_FORMS = (  # in which rewards look for an answer
    "{}", r"\boxed{{{}}}", "<answer>{}</answer>", "<think>\n1\n</think>\n<answer>{}</answer>", "#### {}",
    "The answer is {}.", "The answer is {}", "Answer: {}", "**{}**", "({})", '{{"answer": "{}"}}', "```python\n{}\n```",
    "<think>\n1\n</think>\n\\boxed{{{}}}", "<think>\n1\n</think>\n<answer>\\boxed{{{}}}</answer>",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What a reward function gave: texts with the words for what they are, and the result of each.

    `place` is the row's, and `note` says that the gold answer gets no more than the others, also that of another row
    only, that a text's reward depends on its place in the batch, or that two calls give it two (empty: none of these,
    or the function does not compare with the gold answer). `values` are all rewards that it gave.
    """

    place: str
    tried: Sequence[tuple[str, str, Reward | RewardError]]
    note: str = ""
    values: Set[float] = frozenset()

    @property
    def failures(self) -> list[tuple[str, RewardError]]:
        """What the function failed on, in words, and the error."""
        return [(label, result) for _, label, result in self.tried if isinstance(result, RewardError)]


async def try_reward(
    function: Callable[..., Any],
    rows: Sequence[dict[str, Any]],
    *,
    timeout_s: float,
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
    those of a few other rows are tried (`_elsewhere`).

    `alone`: no other function adds to the reward, so that None is an error, and one number for all texts is told.
    `stop` after the first text that the function fails on.
    """
    if str(getattr(unwrapped(function), "__module__", "")) == "rlkit.rewards.judge":
        return None
    index = next((i for i, row in enumerate(rows) if gold_answer(row) is not None), 0)
    row, seen, values = row_given(rows[index]), set[str](), set[float]()
    called, gold, other = _with_alarms_named(function), _text(gold_answer(row)) or None, _other(rows, index)

    async def call(batch: Sequence[str], *, stop: bool = False, at: int = index) -> list[Reward | RewardError]:
        batch = [text[:1] + text[1:] for text in batch]  # another object than the row's: `is` is no comparison
        given = row if at == index else row_given(rows[at])
        samples = [Sample(text, given, at, _extra(given, text, one_turn=one_turn), seen) for text in batch]
        missing = None if alone else math.nan
        scored = await run_reward_each(called, samples, timeout_s=timeout_s, missing=missing, stop=stop)
        values.update(map(_number, scored))
        return scored

    available = {"index", *_extra(row, "", one_turn=one_turn)}
    try:
        batched = check_signature(function, available)[0] == "completions"
    except TypeError:
        if one_turn:
            raise
        return None
    results = await call([*(texts := _texts(gold, other))], stop=stop)
    tried = [(text, label, result) for (text, label), result in zip(texts.items(), results)]
    trial, blind = Trial(place_of(rows, index), tried, values=values), not one_turn and _has_more(function, available)
    if blind and trial.failures:
        return None
    if not trial.failures and not is_ours(function):
        trial = replace(trial, note=await _random(function, partial(call, [*texts]), tried))
    steady = not (trial.failures or trial.note)
    if batched and steady and (moved := await _moved(call, texts, [*map(_number, results)], gold)):
        return replace(trial, note=f"{name_of(function)} {moved}")
    if gold is None and steady and seen - {*PROMPTS}:
        return replace(trial, note=_note_of_empty(function, {text: _number(result) for text, _, result in tried}))
    if gold is None or trial.failures:
        return trial
    reads = _reads_gold(function, seen)
    return await _of_gold(function, call, rows, index, trial, other=other, reads=reads, blind=blind, alone=alone)


async def _of_gold(
    function: Callable[..., Any], call: Callable[..., Any], rows: Sequence[dict[str, Any]], index: int, trial: Trial,
    *, other: str | None, reads: bool, blind: bool, alone: bool,
) -> Trial:  # fmt: skip
    """The trial with what is to be told of gold answers, and the form of this row's that gets more than the others."""
    (gold, *_), form, tried = trial.tried[0], "{}", trial.tried
    numbers = {text: _number(result) for text, _, result in tried}
    if not numbers.pop(gold) > max(numbers.values(), default=-math.inf):
        if not (written := await _written(call, gold, other, numbers[""])):
            same = alone and not is_ours(function) and len(trial.values) == 1
            said = (same or reads) and not blind
            return replace(trial, note=_note(function, rows[index], tried, reads)) if said else trial
        form, text, result = written
        trial = replace(trial, tried=[(text, f"its gold answer as {_shown(text)}", result), *tried])
    if trial.note or blind or not reads:
        return trial
    return replace(trial, note=await _elsewhere(function, call, rows, index, form))


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


async def _random(function: Callable[..., Any], call: Callable[[], Any], tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives one text two rewards; empty for none.

    Differences below 1e-3 of the largest are noise, unless the rewards of all texts go one way over four calls.
    """
    runs = [[_number(result) for *_, result in tried], [*map(_number, await call())]]
    size = 1e-3 * max((abs(x) for x in runs[0] if not math.isnan(x)), default=0.0)
    places = [i for i, (a, b) in enumerate(zip(*runs)) if abs(a - b) > size]
    if not places and _one_way(runs):
        runs += [[*map(_number, await call())] for _ in range(2)]
        places = [0] * _one_way(runs)
    if not places:
        return ""
    change = f"{runs[0][places[0]]:.8g} and {runs[-1][places[0]]:.8g} to {tried[places[0]][1]}"
    return f"{name_of(function)} gives {change} in two calls: is it random, or does it remember earlier calls?"


def _one_way(runs: Sequence[Sequence[float]]) -> bool:
    """Whether each run has larger numbers than the one before, or each smaller ones."""
    pairs = [pair for one in zip(*runs) for pair in pairwise(one)]
    return all(a < b for a, b in pairs) or all(a > b for a, b in pairs)


async def _moved(call: Callable[..., Any], texts: Mapping[str, str], first: Sequence[float], gold: str | None) -> str:
    """How a batch in another order changes a text's reward; empty if it does not, or if rewards are random.

    Where all `texts` have one reward, they are tried with the gold answer in other forms.
    """
    batch = [*texts]
    if len({*first}) == 1 and gold is not None and len(gold) < _LONGEST:
        batch = [*dict.fromkeys([*batch, *(form.format(gold) for form in _FORMS)])]
        first = [*map(_number, await call(batch))]
    if len({*first}) == 1:
        return ""
    order = [*range(1, len(batch)), 0]

    async def turned() -> list[float]:
        return [*map(_number, (last := await call([batch[i] for i in order]))[-1:] + last[:-1])]

    second = await turned()
    size = 0.01 * max(map(abs, first))
    moved = [i for i, (x, y) in enumerate(zip(first, second)) if abs(x - y) > size]
    for _ in range(2 if moved else 0):  # a judge at random seldom repeats both
        if [*map(_number, await call(batch))] != first or await turned() != second:
            return ""
    if not moved:
        return ""
    change = f"{first[moved[0]]:g} and {second[moved[0]]:g} to {_shown(batch[moved[0]])}"
    return f"gives {change} in two orders of the same batch: are its rewards in the order of the completions?"


def _texts(gold: str | None, other: str | None) -> dict[str, str]:
    """The texts to try, with the words for what they are."""
    texts = {} if gold is None else {gold: f"its gold answer {_shown(gold)}"}
    texts |= {"": "an empty completion"} | ({other: f"another row's answer {_shown(other)}"} if other else {})
    if gold is None:
        texts |= {text: f"the completion {_shown(text)}" for text in ("7", "The answer is 7.")}
    return texts


def _answers(gold: str) -> list[str]:
    """What a policy may write for a gold answer: itself first, and what it says at its end."""
    marked = gold.rpartition("####")[2].strip()
    short = [marked, marked.replace(",", ""), marked.removesuffix(".0"), final_answer(gold) or gold]
    return [*dict.fromkeys([gold, *short, gold.strip().lower()])]


async def _elsewhere(
    function: Callable[..., Any], call: Callable[..., Any], rows: Sequence[dict[str, Any]], index: int, form: str
) -> str:
    """The line about a function for which the gold answer of another row gets no more than "", in whatever form.

    `form` is the one that passes on row `index`. The others are up to four that differ: the longest answer, and the
    first with a capital letter, a comma, and another sign or a blank; and a whole number of this row that is a float,
    as a policy writes it.
    """
    golds = {i: text for i, row in enumerate(islice(rows, _AMONG)) if i != index and (text := _text(gold_answer(row)))}
    differing = [next((i for i, text in golds.items() if re.search(x, text)), None) for x in ("[A-Z]", ",", r"[^\w,]")]
    chosen = {i: golds[i] for i in [*sorted(golds, key=lambda i: -len(golds[i]))[:1], *differing] if i is not None}
    gold = gold_answer(rows[index])
    if isinstance(gold, float) and gold.is_integer():
        chosen[index] = f"{gold:.0f}"

    async def fails(at: int, gold: str) -> str:
        texts = [form.format(text) for text in _answers(gold)]
        *results, nothing = await call([*texts, ""], at=at)
        empty = nothing.reward if isinstance(nothing, Reward) else -math.inf
        if any(isinstance(x, Reward) and (x.reward > empty or math.isnan(x.reward)) for x in results):
            return ""  # not a number: of several functions, this one is not for this row
        if at != index and await _written(partial(call, at=at), gold, None, empty):
            return ""
        given = f"{_number(results[0]):g}" if isinstance(results[0], Reward) else f"an error ({results[0].cause})"
        whose = f"of {place_of(rows, at, with_source=False)}" if at != index else "as a policy writes it"
        return f"{given} to {_shown(texts[0])}, the gold answer {whose}"

    said = [line for line in await asyncio.gather(*(fails(*one) for one in chosen.items())) if line]
    if not said:
        return ""
    return (
        f"{name_of(function)} gives this row's gold answer more than an empty completion, but {said[0]}: "
        "compare how the function reads an answer with how the data writes it"
    )


def _note_of_empty(function: Callable[..., Any], numbers: Mapping[str, float]) -> str:
    """The line about a function that reads a column and gives an empty completion more than any other; else empty."""
    others = {value for text, value in numbers.items() if text}
    if len(others) != 1 or not numbers[""] > max(others):  # others that differ: it may want short ones
        return ""
    given = f"{numbers['']:g} to an empty completion and {max(others):g} to others"
    return f"{name_of(function)} gives {given}: does it look for the completion in the answer? '' is in every text"


async def _written(
    call: Callable[..., Any], gold: str, other: str | None, nothing: float
) -> tuple[str, str, Reward] | None:
    """The form in which the gold answer gets more than `nothing` and than another answer, its text, and its reward."""
    forms = [(form, text) for text in _answers(gold) if len(text) < _LONGEST for form in _FORMS][1:]
    results = [*zip(forms, await call([form.format(text) for form, text in forms]))]
    better = [(form, result) for form, result in results if isinstance(result, Reward) and result.reward > nothing]
    if not better:
        return None
    (form, text), best = max(better, key=lambda one: one[1].reward)
    same_form = await call([form.format(other)]) if other is not None else []
    if any(best.reward <= _number(result) for result in same_form):
        return None
    return form, form.format(text), best


def _note(
    function: Callable[..., Any], row: Mapping[str, Any], tried: Sequence[tuple[str, str, Any]], reads: bool
) -> str:
    """The line about a function that gives the gold answer no more than other texts, and perhaps never `reads` it."""
    (_, gold, best), *others = tried
    gold = gold.replace("its gold", "the row's own")
    to_others = " and ".join(f"{_number(result):g} to {label}" for _, label, result in others)
    kind = type(gold_answer(row)).__name__
    why = "" if kind == "str" else f"; the row's answer is {_article(kind)} and a completion is a text"
    return (
        f"{name_of(function)} gives {_number(best):g} to {gold}, {to_others}{why}: "
        f"{'' if reads else 'right if it judges the form alone; else '}"
        "compare how the function reads an answer with how the data writes it"
    )


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _reads_gold(function: Callable[..., Any], seen: set[str]) -> bool:
    """Whether the function reads a gold answer: of the row, or as an argument (of another system)."""
    named = {name for need in needs_of(function) for name in ((need,) if isinstance(need, str) else need)}
    return bool((seen | named | {*inspect.signature(unwrapped(function)).parameters}) & {*GOLD})


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


def _other(rows: Sequence[dict[str, Any]], index: int) -> str | None:
    """The gold answer of the first row that has another one."""
    gold = _text(gold_answer(rows[index]))
    return next((text for row in rows if (text := _text(first_value(row, *GOLD))) not in (None, gold, "")), None)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _number(result: Reward | RewardError) -> float:
    return math.nan if isinstance(result, RewardError) else result.reward + 0.0  # no -0
