"""Try a reward function on a row before a model is loaded: on the row's gold answer, on "" and on another answer.

A mistake in the function is then an error of the command line, and a function that no answer satisfies is told.
"""

from __future__ import annotations

import _signal
import inspect
import json
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import count, pairwise
from typing import Any

from rlkit.data.load import place_of
from rlkit.data.prompts import prompt_messages, row_given
from rlkit.data.schema import GOLD
from rlkit.rewards.call import Reward, RewardError, Sample, check_signature, needs_of, run_reward_each
from rlkit.rewards.failures import ALARM, is_ours, name_of, unwrapped
from rlkit.rewards.text import final_answer, first_value, gold_answer
from rlkit.rollout.calling import is_async, report_once

_SHOWN = 60  # characters of an answer
_LONGEST = 1000  # characters of an answer that is tried in other forms
_FORMS = (  # in which rewards look for an answer
    "{}", r"\boxed{{{}}}", "<answer>{}</answer>", "<think>\n1\n</think>\n<answer>{}</answer>", "#### {}",
    "The answer is {}.", "The answer is {}", "Answer: {}", "**{}**", "({})", '{{"answer": "{}"}}', "```python\n{}\n```",
    "<think>\n1\n</think>\n\\boxed{{{}}}", "<think>\n1\n</think>\n<answer>\\boxed{{{}}}</answer>",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What a reward function gave: texts with the words for what they are, and the result of each.

    `place` is the row's, and `note` says that the gold answer gets no more than the others, that a text's reward
    depends on its place in the batch, or that two calls give it two (empty: none of these, or the function does not
    compare with the gold answer).
    """

    place: str
    tried: Sequence[tuple[str, str, Reward | RewardError]]
    note: str = ""

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
    something. A function of a batch gets the texts in another order, too (`_moved`).

    `alone`: no other function adds to the reward, so that None is an error, and one number for all texts is told.
    `stop` after the first text that the function fails on.
    """
    if str(getattr(unwrapped(function), "__module__", "")) == "rlkit.rewards.judge":
        return None
    index = next((i for i, row in enumerate(rows) if gold_answer(row) is not None), 0)
    row, seen, values = row_given(rows[index]), set[str](), set[float]()
    called, gold, other = _with_alarms_named(function), _text(gold_answer(row)) or None, _other(rows, index)

    async def call(batch: Sequence[str], *, stop: bool = False) -> list[Reward | RewardError]:
        batch = [text[:1] + text[1:] for text in batch]  # another object than the row's: `is` is no comparison
        samples = [Sample(text, row, index, _extra(row, text, one_turn=one_turn), seen) for text in batch]
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
    trial, blind = Trial(place_of(rows, index), tried), not one_turn and _has_more(function, available)
    if blind and trial.failures:
        return None
    if not trial.failures and not is_ours(function):
        trial = replace(trial, note=await _random(function, partial(call, [*texts]), tried))
    steady = not (trial.failures or trial.note)
    if batched and steady and (moved := await _moved(call, texts, [*map(_number, results)], gold)):
        return replace(trial, note=f"{name_of(function)} {moved}")
    if gold is None or trial.failures:
        return trial
    numbers = {text: _number(result) for text, _, result in tried}
    if numbers.pop(gold) > max(numbers.values(), default=-math.inf):
        return trial
    if written := await _written(call, gold, other, numbers[""]):
        return replace(trial, tried=[(written[0], f"its gold answer as {_shown(written[0])}", written[1]), *tried])
    if blind:
        return trial
    same, reads = alone and not is_ours(function) and len(values) == 1, _reads_gold(function, seen)
    return replace(trial, note=_note(function, row, tried, reads)) if same or reads else trial


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


async def _written(call: Callable[..., Any], gold: str, other: str | None, nothing: float) -> tuple[str, Reward] | None:
    """The gold answer in a form that gets more than `nothing` and than another answer in that form, and its reward."""
    marked = gold.rpartition("####")[2].strip()
    answers = dict.fromkeys([gold, marked, marked.replace(",", ""), final_answer(gold) or gold, gold.strip().lower()])
    forms = [(form, text) for text in answers if len(text) < _LONGEST for form in _FORMS][1:]
    results = [*zip(forms, await call([form.format(text) for form, text in forms]))]
    better = [(form, result) for form, result in results if isinstance(result, Reward) and result.reward > nothing]
    if not better:
        return None
    (form, text), best = max(better, key=lambda one: one[1].reward)
    same_form = await call([form.format(other)]) if other is not None else []
    if any(best.reward <= _number(result) for result in same_form):
        return None
    return form.format(text), best


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
