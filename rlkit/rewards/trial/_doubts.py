"""The lines about a reward function that seems to be another one than is meant; each is empty where it does not."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

from rlkit.data.load import place_of
from rlkit.data.markup import STOP
from rlkit.data.schema import PROMPTS
from rlkit.rewards.answers import DECIMAL_COMMA, LONGEST, answers, lowered, near
from rlkit.rewards.call import Reward
from rlkit.rewards.failures import is_ours
from rlkit.rewards.source import codes, constant_operand, names_in, texts_in
from rlkit.rewards.trial._case import (
    AMONG,
    COMPARE,
    RUN,
    Case,
    Trial,
    form_that_counts,
    module_of,
    number,
    reads_gold,
    shown,
)

_SAME = 10  # rows: fewer may have one gold answer by chance
_LONG = 8000  # characters of a completion of 2,000 tokens
_LENGTH = 1000  # characters
_COPIED = 4  # words of a prompt
_RIVALS = 20  # gold answers of other rows
_WORDS = 8  # that a function names
_SHAPES = 4  # of gold answers that have wrong ones near them: a number, one with a sign, a word, words
_END = "raise SystemExit"  # as exit(), which closes the standard input, too
_OF_WORDS = "it compares mathematics and multiplies letters; rlkit.rewards.text:exact_match compares words"
_OF_CACHE = "it is another row's answer, and with a blank it gets less: does a cache forget the row?"
_XML = {"fromstring", "XML", "parseString"}  # of xml.etree and minidom
_TESTS = {"test", "tests", "test_code", "test_list", "test_cases", "unit_tests", "public_tests"}  # columns


async def random(case: Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives one text two rewards; empty for none.

    Differences below 1e-3 of the largest are noise, unless the rewards of all texts go one way over four calls.
    """
    texts = [text for text, *_ in tried]
    runs = [[number(result) for *_, result in tried], await case.numbers(texts)]
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


async def moved(case: Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives a text another reward in a batch of another order; empty if it does not, or
    if rewards are random.

    Where all texts have one reward, they are tried with the gold answer in other forms.
    """
    batch, first = [text for text, *_ in tried], [number(result) for *_, result in tried]
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
    change = f"{first[moved[0]]:g} and {second[moved[0]]:g} to {shown(batch[moved[0]])}"
    asked = "are its rewards in the order of the completions?"
    return f"{case.name} gives {change} in two orders of the same batch: {asked}"


async def jumps(case: Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function whose reward goes up and down with the number of blanks after a text; else empty."""
    text, given = case.gold or "7", [number(result) for *_, result in tried]
    numbers = await case.numbers([text + " " * num for num in range(16)]) if len({*given}) > 1 else given
    steps = [b - a for a, b in pairwise(numbers) if a != b]
    wide = max(numbers) - min(numbers) >= 0.5 * (max(given) - min(given))
    if sum(a * b < 0 for a, b in pairwise(steps)) < 3 or not wide:
        return ""
    some = ", ".join(f"{x:g}" for x in numbers[:6])
    return f"{case.name} gives {some} to {shown(text)} with 0 to 5 blanks after it: is it a hash, or odd and even?"


async def for_nothing(case: Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives more to "" on a row where a column that it reads is empty; else empty."""
    nothing = {text: number(result) for text, _, result in tried}.get("", math.nan)
    for column in sorted(case.seen - {*PROMPTS}):
        cells = enumerate(row.get(column) for row in islice(case.rows, AMONG))
        at = next((i for i, cell in cells if isinstance(cell, str | list | dict) and not cell), case.index)
        if at != case.index and (given := (await case.numbers([""], at=at))[0]) > nothing:
            where = f"{place_of(case.rows, at, with_source=False)}, whose {column} is empty"
            return f"{case.name} gives {given:g} to an empty completion for {where}, and {nothing:g} for another row"
    return ""


async def before_tests(case: Case) -> str:
    """The line about a function that gives more to a program that ends before its tests than to ""; else empty."""
    if not case.seen & _TESTS:
        return ""
    ends, nothing = await case.numbers([_END, ""])
    fix = "a program that ends before its tests passes; rlkit.rewards.code runs them apart"
    return f"{case.name} gives {ends:g} to {_END!r}: {fix}" if ends > nothing else ""


async def runs_text(case: Case) -> None:
    """Call a function that names `eval` or `exec` on a name that no program has: the call tells where it is run."""
    if any({"eval", "exec"} & {*names_in(code)} for code in codes(case.function)):
        await case.call([form.format(RUN) for form in case.forms])


async def broken(case: Case) -> str:
    """The line about a function that takes the form of its own pattern, and not with a line break in it; else empty."""
    places = re.compile(r"(?<=>)1(?=<)|(?<=>)\{0?\}(?=<.*\{)", re.DOTALL)  # a tag before the answer's, or round a blank
    forms = [form for form in case.forms if places.search(form)]
    texts = [places.sub(x, form, count=1).format(case.answer) for form in forms for x in ("1 2", "1\n2")]
    *numbers, nothing = await case.numbers([*texts, ""]) if texts else [math.nan]
    at = next((i for i in range(0, len(texts), 2) if numbers[i] > nothing >= numbers[i + 1]), None)
    if at is None or any(x >= numbers[at] for x in numbers[1::2]):
        return ""
    given = (
        f"{case.name} gives {numbers[at]:g} to {shown(texts[at])}, and {numbers[at + 1]:g} to {shown(texts[at + 1])}"
    )
    return f"{given}: a point in a regular expression takes a line break with re.DOTALL only"


async def unbounded(case: Case) -> str:
    """The line about a function that gives more for each further one of the tags, or of a word, that it names, and not
    for other letters; else empty."""
    sources = [str(getattr(text, "pattern", text)) for text in texts_in(case.function)]
    names = dict.fromkeys(name for text in sources for name in re.findall(r"</?([a-z_]+)>", text))
    words = [text for text in sources if text not in case.seen and re.fullmatch(r"\W*[^\W\d_]{3,20}\W*", text)]
    blocks = ["".join(f"<{name}>1</{name}>" for name in names)] * bool(names)
    for block in [*blocks, *(f"{word} " for word in dict.fromkeys(words) if "<" not in word)][:_WORDS]:
        long = re.sub(r"[A-Z]", "X", re.sub(r"[a-z]", "x", block)) if block not in blocks else "x" * len(block)
        few, more, many, further, other = await case.numbers([*(block * num for num in (1, 5, 50, 100)), long * 50])
        if further > many > more > few and many > other:
            given = f"{few:g} to {shown(block.rstrip())}, {more:g} to 5 of it and {many:g} to 50"
            kind = "tags" if block in blocks else "words"
            return f"{case.name} gives {given}: a count of {kind} without a bound is won by {kind} alone"
    return ""


async def of_length(case: Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that gives more for each further word, whatever it is, or the most to the row's own
    prompt; else empty."""
    given = [number(result) for *_, result in tried]
    half, whole, twice = await case.numbers(["word " * (_LENGTH * num // 10) for num in (1, 2, 4)])
    if twice > whole > half > max(given):
        many = f"{half:g} to 'word word ...', {_LENGTH // 2} characters, and {whole:g} to {_LENGTH}"
        return f"{case.name} gives {many}: is the sign of a length in it meant? without a bound it is won by length"
    prompt = case.rows[case.index].get("prompt")
    if not isinstance(prompt, str) or not case.seen & {*PROMPTS} or len(prompt.split()) < _COPIED:
        return ""
    (copied,) = await case.numbers([prompt])
    if not copied > max(given):
        return ""
    most = f"{case.name} gives {copied:g} to the row's own prompt, the most of all texts that were tried"
    return f"{most}: is it won by a copy?"


def always_true(case: Case) -> str:
    """The line about a function with a text alone beside `and` or `or`; empty for none."""
    text = constant_operand(case.function)
    alone = f"{case.name} has {text!r} alone as an operand of `and` or `or`, where it is always true"
    return f"{alone}: write {text!r} in completion" if text else ""


def of_empty(name: str, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function that reads a column and gives an empty completion more than any other, or as much; else
    empty."""
    numbers = {text: number(result) for text, _, result in tried}
    others = {value for text, value in numbers.items() if text}
    empty, other = numbers[""], max(others) if len(others) == 1 else math.nan  # that differ: it may want short ones
    if 0 < empty == other:
        given = f"{empty:g} to an empty completion, as much as to others"
        return f"{name} gives {given}: is it to be paid for nothing?"
    given = f"{name} gives {empty:g} to an empty completion and {other:g} to others"
    why = "does it look for the completion in the answer? '' is in every text"
    return f"{given}: {why}" if empty > other else ""


async def blank_end(case: Case, form: str) -> str:
    """The line about a function that takes an answer with white space, or a stop token, at its end, and not without;
    else empty."""
    bare = STOP.sub("", form).rstrip()
    if form == bare:
        return ""
    text, end = form.format(case.answer), form[len(bare) :].strip()
    taken, plain, nothing = await case.numbers([text, bare.format(case.answer), ""])
    what = f"{end!r} at its end, which no completion has: drop it" if end else "the white space at its end, which"
    why = what if end else f"{what} a model seldom writes: take both, as \\s*$ does"
    given = f"{case.name} gives {taken:g} to {shown(text)} and {plain:g} without {why}"
    return given if taken > nothing >= plain else ""


async def parsed(case: Case, form: str) -> str:
    """The line about a function that names a parser of XML and takes an answer after a sentence, and not after one with
    < or &; else empty."""
    if not any(_XML & {*names_in(code)} for code in codes(case.function)):
        return ""
    text = form.format(case.answer)
    words, signs = (f"One {x} two {y} three, so {text}" for x, y in (("and", "or"), ("<", "&")))
    taken, lost, nothing = await case.numbers([words, signs, ""])
    given = f"{case.name} gives {taken:g} to {shown(words)} and {lost:g} to {shown(signs)}"
    return f"{given}: does a parser of XML read the whole text?" if taken > nothing >= lost else ""


async def lower_only(case: Case, form: str) -> str:
    """The line about a function that takes a gold answer in lower case, and not as it is written; else empty."""
    golds = {case.index: case.gold or "", **case.golds}
    short = ((i, case.short(text) or text) for i, text in golds.items())
    at, gold = next(((i, text) for i, text in short if lowered(text)), (case.index, ""))
    if is_ours(case.function) or not gold:
        return ""
    lower, written = lowered(gold), [text for text in answers(gold) if text != lowered(gold)]
    given, *others, nothing = await case.numbers([form.format(text) for text in (lower, *written)] + [""], at=at)
    if not given > nothing >= max(others) or await form_that_counts(case, written, nothing, at=at):
        return ""
    whose = f"the gold answer of {place_of(case.rows, at, with_source=False)}"
    numbers = f"{given:g} to {shown(form.format(lower))} and {others[0]:g} to {shown(form.format(gold))}"
    return f"{case.name} gives {numbers}, {whose}: right if a completion is to be in lower case; else {COMPARE}"


async def elsewhere(case: Case, form: str) -> str:
    """The line about a function for which the gold answer of another row gets no more than "", in whatever form.

    `form` is the one that passes on the row. The others are up to five that differ: the longest answer, and the first
    with a capital letter, a comma, another sign or a blank, and another kind of end (`short`); each of up to three
    different ones; and a whole number of this row that is a float, or the text of one in all rows, as a policy writes
    it.
    """
    golds = {i: text for i, text in case.golds.items() if i != case.index}
    differing = [next((i for i, text in golds.items() if re.search(x, text)), None) for x in ("[A-Z]", ",", r"[^\w,]")]
    ends = bool(case.short(case.gold or ""))
    differing.append(next((i for i, text in golds.items() if bool(case.short(text)) != ends), None))
    first = {text: i for i, text in reversed(golds.items())}
    differing += [*first.values()] * (len(first) < _SHAPES)
    chosen = {i: golds[i] for i in [*sorted(golds, key=lambda i: -len(golds[i]))[:1], *differing] if i is not None}
    whole = isinstance(case.gold_of(case.rows[case.index]), float) and (case.gold or "").endswith(".0")
    if whole or all(text.endswith(".0") for text in case.golds.values()):
        chosen[case.index] = (case.gold or "").removesuffix(".0")

    async def fails(at: int, gold: str) -> str:
        texts = [form.format(text) for text in answers(gold)]
        *results, nothing = await case.call([*texts, ""], at=at)
        empty = nothing.reward if isinstance(nothing, Reward) else -math.inf
        if any(isinstance(x, Reward) and (x.reward > empty or math.isnan(x.reward)) for x in results):
            return ""  # not a number: of several functions, this one is not for this row
        if at != case.index and await form_that_counts(case, answers(gold), empty, at=at):
            return ""
        given = f"{number(results[0]):g}" if isinstance(results[0], Reward) else f"an error ({results[0].cause})"
        whose = f"of {place_of(case.rows, at, with_source=False)}" if at != case.index else "as a policy writes it"
        as_empty = f" ({empty:g} to an empty one there)" * (empty not in (0, -math.inf))
        return f"{given} to {shown(texts[0])}, the gold answer {whose}{as_empty}"

    if not (said := [line for line in await asyncio.gather(*(fails(*one) for one in chosen.items())) if line]):
        return ""
    return f"{case.name} gives this row's gold answer more than an empty completion, but {said[0]}: {COMPARE}"


async def loose(case: Case, form: str) -> str:
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
    ends = {i: case.answer_of(i) for i in case.golds}
    whole = sorted((abs(int(end)), i) for i, end in ends.items() if re.fullmatch(r"-?\d{1,9}", end))
    least = [(i, case.golds[i], near(ends[i])) for _, i in whole[:1]]  # of which 1 is a large part
    for one in (*shapes.values(), *least, (case.index, case.gold or "", _rivals(case))):
        if line := await _as_much(case, form, *one):
            return line
    if is_ours(case.function):
        return ""
    note = await _first_number(case) or await _one_side(case, form) or await _any_of(case, form)
    return note or await _nearly(case, form, whole) or await _greedy(case, form) or await _longer(case)


async def _nearly(case: Case, form: str, whole: Sequence[tuple[int, int]]) -> str:
    """The line about a function that takes what is nearly one, or one, from the smallest of the `whole` golds, and what
    is as far of a large one by its size not: no relative tolerance. Else empty."""
    (least, at), (most, last) = (whole[0], whole[-1]) if whole else ((0, 0), (0, 0))
    if not 4 * least <= most or not least:
        return ""
    sign = "-" * (case.answer_of(at)[0] == "-")
    close = [form.format(f"{sign}{text}") for text in (f"{least}.9", str(least + 1))]
    plain, unread = form.format(case.answer_of(at)), form.format(f"{sign}{least}.x9")  # of which digits alone are read
    right, *numbers, words, nothing = await case.numbers([plain, *close, unread, ""], at=at)
    sign = "-" * (case.answer_of(last)[0] == "-")
    far = [form.format(f"{sign}{text}") for text in (f"{most + 0.8 * most / least:.1f}", str(most + most // least))]
    taken = await case.numbers(far, at=last)
    found = [text for text, x, y in zip(close, numbers, taken) if x >= right > max(nothing, y)]
    if not found or (words >= right and found == close[:1]):
        return ""
    whose = f"the gold answer of {place_of(case.rows, at, with_source=False)}"
    given = f"{case.name} gives {right:g} to {shown(found[0])}, as much as to {shown(plain)}, {whose}"
    return f"{given}: does a tolerance, or int(), take a wrong one for a whole number?"


async def _greedy(case: Case, form: str) -> str:
    """The line about a function that takes an answer in a box, and not before other braces; else empty."""
    if "\\boxed" not in form:
        return ""
    texts = [form.format(case.answer) + more for more in (" since 1/2", r" since \frac{1}{2}")]
    plain, braces, nothing = await case.numbers([*texts, ""])
    given = f"{case.name} gives {plain:g} to {shown(texts[0])} and {braces:g} to {shown(texts[1])}"
    fix = "does a greedy .* run to the last }? .*? ends at the first, and rlkit.rewards.math:boxed at the right one"
    return f"{given}: {fix}" if plain > nothing >= braces else ""


async def _first_number(case: Case) -> str:
    """The line about a function for which a number before the answer takes the answer's place; else empty."""
    if not re.fullmatch(r"-?\d+", gold := case.answer):
        return ""
    texts = [f"{start}\nThe answer is {gold}." for start in ("Step one.", "Step 4." if gold == "3" else "Step 3.")]
    words, early, nothing = await case.numbers([*texts, ""])
    if not words > nothing >= early:
        return ""
    given = f"{words:g} to {shown(texts[0])} and {early:g} to {shown(texts[1])}"
    return f"{case.name} gives {given}, for the gold answer {shown(gold)}: does it take the first number of a text?"


async def _one_side(case: Case, form: str) -> str:
    """The line on a function that takes a number that begins (or ends) with the answer, and not both; else empty."""
    if not re.fullmatch(r"\d+", gold := case.answer):
        return ""
    texts = [form.format(text) for text in (gold, f"{gold}1", f"2{gold}", "")]
    right, *numbers, nothing = await case.numbers(texts)
    taken = [text for text, x in zip(texts[1:], numbers) if x >= right > nothing]
    given = f"{case.name} gives {right:g} to {shown(taken[0])}, as much as to {shown(texts[0])}" if taken else ""
    return f"{given}: does it look at one end of the text alone?" if len(taken) == 1 else ""


async def _any_of(case: Case, form: str) -> str:
    """The line about a function that takes a list of numbers with the answer among them; else empty."""
    if not re.fullmatch(r"\d{1,9}", gold := case.answer):
        return ""
    start = max(0, int(gold) - 50)
    numbers = [str(x) for x in range(start, start + 101)]
    right, many, nothing = await case.numbers([form.format(gold), ", ".join(map(form.format, numbers)), ""])
    given = (
        f"{case.name} gives {many:g} to {shown(', '.join(map(form.format, numbers[:2])))}, ..., 101 numbers, as much as"
    )
    return f"{given} to {shown(form.format(gold))}: does any number of a text count?" if many == right > nothing else ""


async def _longer(case: Case) -> str:
    """The line about a function that gives more to a long text than to the gold answer; else empty."""
    best = max(await case.numbers(answers(case.gold or "")), default=math.nan)
    (long,) = await case.numbers(["word " * (_LONG // 5)])
    given = f"{case.name} gives {long:g} to 'word word ...', {_LONG} characters, and {best:g} to the gold answer"
    return f"{given}: is the sign of a length in it meant?" if long > best else ""


async def _as_much(case: Case, form: str, at: int, gold: str, wrong: Sequence[str]) -> str:
    """The line about a function that gives one of the `wrong` answers as much as the gold answer of a row."""
    right = answers(gold)
    texts = [form.format(text) for text in (*right, "", *wrong)]
    *numbers, nothing = await case.numbers([*texts, ""], at=at)
    best = max((x for x in numbers[: len(right)] if not math.isnan(x)), default=-math.inf)
    if not best > nothing:
        return ""
    if not (same := [text for text, x in zip(texts[len(right) :], numbers[len(right) :]) if x >= best]):
        return ""
    words = module_of(case.function) == "rlkit.rewards.math" and not re.search(r"\d", gold)
    why = _OF_WORDS if words else COMPARE
    if not words and same[0] in {form.format(case.answer_of(i)) for i in case.golds if i != at}:
        blank, own = await case.numbers([f"{same[0]} ", f"{texts[numbers.index(best)]} "], at=at)  # no cache has these
        why = _OF_CACHE if blank < own == best else why
    whose = f"the gold answer of {place_of(case.rows, at, with_source=False)}"
    return f"{case.name} gives {best:g} to {shown(same[0])}, as much as to {shown(gold)}, {whose}: {why}"


def _rivals(case: Case) -> list[str]:
    """Gold answers of other rows that are wrong for the row: other whole numbers where its own is one, or words.

    Before them, a longer word that holds a short one ("know"), and for a letter a text that names three.
    """
    kinds = (r"-?\d+", lambda text: str(int(text))), (r"[^\W\d_]+", str.casefold)
    if is_ours(case.function) or isinstance(case.gold_of(case.rows[case.index]), list | tuple):  # another may be in it
        return []
    mine, texts = case.answer, [case.short(text) or text for text in case.golds.values()]
    pattern, value = next(((x, value) for x, value in kinds if re.fullmatch(x, mine)), ("", str))
    others = {value(x): x for x in texts if re.fullmatch(pattern, x) and value(x) != value(mine)}
    held = [f"x{mine}x"] * (mine.isalpha() and 1 < len(mine) < 4)
    choices = [x for x in others.values() if len(x) == 1] if len(mine) == 1 and mine.isalpha() else []
    held += [f"{choices[0]}, {mine} or {choices[1]}"] if len(choices) > 1 else []
    labels = [mine, *others.values()]
    named = mine.isalpha() and len(mine) > 1 and len(texts) > len(labels) > 1  # some are the label of several rows
    held += [", ".join(labels)] * (named and len(labels) <= _SAME)
    return [*held, *others.values()][:_RIVALS]


def unpaid(case: Case, tried: Sequence[tuple[str, str, Any]]) -> str:
    """The line about a function for which a wrong answer costs far more than a right one wins; else empty."""
    best, nothing, other = ([number(result) for *_, result in tried] + [math.nan] * 3)[:3]
    if not nothing - other > 5 * (best - nothing) > 0:
        return ""
    given = f"{case.name} gives {best:g} to the gold answer, {nothing:g} to an empty completion"
    why = "a wrong answer costs far more than a right one wins, so that none may pay best"
    return f"{given} and {other:g} to another's: {why}"


def all_the_same(case: Case) -> str:
    """The line about rows that all have one gold answer; empty for few."""
    same = f"{case.name} is tried on rows that all have the gold answer {shown(case.gold or '')}"
    few = case.other is not None or len(case.golds) < _SAME
    return "" if few else f"{same}: check which column holds the answers"


async def no_more(case: Case, trial: Trial, *, early: bool, alone: bool) -> str:
    """The line about a function that gives the gold answer no more than other texts; empty if it may judge the form.

    `early`: it reads the gold answer of any text, and else perhaps only of those in a form.
    """
    told, inverted, numbers = trial.tried, early, [number(result) for *_, result in trial.tried]
    plain = early and len({*numbers}) > 1
    if not plain and reads_gold(case) and (in_form := await _in_a_form(case, numbers[1])):
        told, (mine, other) = [in_form[0], trial.tried[1], in_form[1]], (number(result) for *_, result in in_form)
        inverted = early or other - mine > 0.5 * max(abs(mine), abs(other))
    elif not early and (not alone or is_ours(case.function) or len(trial.values) > 1):
        return ""
    (_, gold, best), *others = told
    gold = gold.replace("its gold", "the row's own")
    to_others = " and ".join(f"{number(result):g} to {label}" for _, label, result in others)
    kind = type(case.gold_of(case.rows[case.index])).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    why = "" if kind == "str" else f"; the row's answer is {article} {kind} and a completion is a text"
    form = "" if inverted else "right if it judges the form alone; else "
    return f"{case.name} gives {number(best):g} to {gold}, {to_others}{why}: {form}{COMPARE}"


async def _in_a_form(case: Case, nothing: float) -> Sequence[tuple[str, str, Any]]:
    """The gold answer and that of another row in the form in which the other gets most more; empty if none counts."""
    golds = [case.short(text) or text for text in (case.gold, case.other) if text and len(text) < LONGEST]
    forms = [form for form in case.forms if not {'"', "`"} & {*form}]  # in code and JSON something else may be asked
    if len(golds) < 2:
        return ()
    texts = [form.format(gold) for form in forms for gold in golds]
    results = await case.call(texts, at=case.index)
    numbers = [*map(number, results)]
    pairs = enumerate(zip(numbers[::2], numbers[1::2]))
    found = [(b - a, abs(a - nothing), -2 * i) for i, (a, b) in pairs if b >= a and not a == b == nothing]
    places = [(whose, k - max(found)[2]) for k, whose in enumerate(("its gold", "another row's"))] if found else []
    return [(texts[i], f"{whose} answer as {shown(texts[i])}", results[i]) for whose, i in places]
