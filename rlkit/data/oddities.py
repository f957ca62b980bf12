"""What of rows is trained as it is and seldom meant: each kind is logged in one line."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from rlkit.data import columns
from rlkit.data.chat import TURN_TEXTS
from rlkit.data.drop import drop
from rlkit.data.forms import LABELLED_ANSWERS, Form, Turn
from rlkit.data.load import Row, Rows
from rlkit.data.markup import REASONING, Markup, dialogue_in
from rlkit.data.messages import CALLS, Converted, json_of, mappings, name_of
from rlkit.data.odd_texts import FEW, OF_SHEET, OF_TEXTS, REPEATED, SOME, golds_of
from rlkit.data.schema import ANSWERS, OF_MESSAGES, PAIRED, PROMPTS, RESPONSES
from rlkit.data.template import RESULTS
from rlkit.data.turns import CONVERSATION, LABELLED, PAIR, PROMPT, RESPONSE, SYSTEM

_log = logging.getLogger("rlkit.data")
_LABEL = re.compile(  # that a response begins with: "Chosen: ...", "[BAD] ..."
    rf"[\W_]*(?:({columns.GOOD})|({columns.BAD}))"
    r"(?: (?:response|answer|completion))?[\s*]*[:\])>]",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"\W*(?:question|q|prompt|problem|instruction|input|user|human)\W*:\s*", re.IGNORECASE)
_ASKS_REASONING = re.compile(r"<(think|thinking|thought|reasoning)>[^<\n]{0,40}</\1>")  # <think> ... </think>
_JOINT = 10  # characters on each side
_ALL = 1  # of several rows
_NAMED = r'(?:"name"\s*:\s*"|<function=|<invoke name="){}["\'>]'  # a tool as its call, or schema, has it


def name_oddities(rows: Sequence[Row], read: Sequence[tuple[Form, Converted]], texts: Sequence[Sequence[str]]) -> None:
    """Log, in a line each, what is trained as it is and seldom meant. `texts`: `odd_texts` of each row."""
    for forms, unit, bad, why, least in _OF_ROWS:
        items = [(index, row) for index, (form, row) in enumerate(read) if form in forms or not forms]
        if not least or sum(map(bad, (row for _, row in items))) >= max(least * len(items), FEW * (least == _ALL)):
            drop(rows, items, bad, unit=unit, why=why, keep=True)
    sheet = isinstance(rows, Rows) and any(re.search(r"\.[ct]sv\b", source) for source in rows.sources)
    for (why, narrowed), notes in zip(OF_TEXTS, zip(*texts, strict=True), strict=True):
        noted = [*enumerate(narrowed(notes) if sheet or why != OF_SHEET else [])]
        drop(rows, noted, bool, unit="rows", why=why, keep=True, note=lambda note: f" ({note})")
    _name_reversed_scores(rows, read)


def name_two_golds(
    rows: Sequence[Row], read: Sequence[tuple[Form, Converted]], turns: Sequence[Sequence[Turn]]
) -> None:
    """Log prompts that stand there with another gold answer too, or that all show one image."""
    _name_one_picture(rows, turns)
    asked = [turn.prompt * (not turn.images) for (turn, *_) in turns]
    golds: dict[str, dict[str, str]] = {prompt: {} for prompt, num in Counter(asked).items() if prompt and num > 1}
    for prompt, (_, row) in zip(asked, read):
        if prompt in golds:
            golds[prompt] |= {gold.casefold(): gold[:30] for gold in golds_of(row)[:1]}
    notes = [(index, [*golds.get(prompt, {}).values()]) for index, prompt in enumerate(asked)]
    why = "stand there with another gold answer too"

    def shown(note: Sequence[str]) -> str:
        return f" ({' and '.join(note[:3])}{', ...' * (len(note) > 3)})"

    drop(rows, notes, lambda note: len(note) > 1, unit="prompts", why=why, keep=True, note=shown)


def _name_reversed_scores(rows: Sequence[Row], read: Sequence[tuple[Form, Converted]]) -> None:
    """Log labels of which a column of scores says the reverse throughout."""
    numbers: dict[bool | None, list[tuple[int, float]]] = {True: [], False: [], None: []}
    for index, row in ((index, row) for index, (form, row) in enumerate(read) if form is LABELLED):
        scores = (of.get(name) for of in columns.objects_in(row.own) for name in columns.SCORES)
        score = next((x for x in scores if type(x) in (int, float)), None)
        if score is not None:
            numbers[columns.truth(row.get("label"))].append((index, score))
    good, bad = numbers[True], numbers[False]
    if good and bad and max(x for _, x in good) < min(x for _, x in bad):
        why = "have the label true and a lower score than all that have false"
        drop(rows, good, lambda _: True, unit="rows", why=why, keep=True, note=lambda score: f" ({score:g})")


def name_repeats(rows: Sequence[Row], read: Sequence[tuple[Form, Converted]], turns: Sequence[Sequence[Turn]]) -> None:
    """Log that half of the examples repeat others, that many begin others, or that all have one part the same."""
    _name_one_picture(rows, turns)
    form, _ = read[-1]
    if len(turns) < FEW or any(turn.images for of_row in turns for turn in of_row):
        return
    num = len({hash(tuple((turn.whole, turn.label) for turn in of_row)) for of_row in turns})
    first, same, pairs = turns[0][-1], list[str](), form is PAIR
    if first.prompt and all(of_row[-1].prompt == first.prompt for of_row in turns):  # and all turns before
        same.append("prompt")
    said = [[turn.whole.removeprefix(turn.prompt) for turn in (of_row[:1] if pairs else of_row)] for of_row in turns]
    if all(answers == said[0] for answers in said):  # conversations may end with the same word
        same.append("answer")
    source = _source(rows)
    within = {turn.whole for of_row in turns for turn in of_row[:-1] if not pairs}
    parts = sum(of_row[-1].whole in within for of_row in turns)
    if num <= len(turns) / 2:
        texts = "all the same text" if num == 1 else f"{num} different texts"
        _log.warning("%sthe %d rows are %s: each trains as often as it is there", source, len(turns), texts)
    elif same and len(turns) >= SOME:
        repeated = "the same chosen response" if pairs and same == ["answer"] else f"the same {same[0]}"
        _log.warning("%sall %d rows have %s: check which columns hold the texts", source, len(turns), repeated)
    if parts >= max(FEW, len(turns) / 3):
        fact = "are the beginning of another one, and train its answers again: keep the longest"
        _log.warning("%s%d of the %d conversations %s", source, parts, len(turns), fact)


def _name_one_picture(rows: Sequence[Row], turns: Sequence[Sequence[Turn]]) -> None:
    """Log that all rows show the same images."""
    pictures = {turn.images for of_row in turns for turn in of_row}
    if len(turns) >= SOME and len(pictures) == 1 and (num := len(*pictures)):
        _log.warning("%sall %d rows show the same %s", _source(rows), len(turns), "image" if num == 1 else "images")


def _source(rows: Sequence[Row]) -> str:
    return f"{rows.source}: " if isinstance(rows, Rows) and rows.source else ""


def name_ready_made(rows: Sequence[Row], turns: Sequence[Turn], markup: Markup | None) -> None:
    """Log ready-made texts: dialogues of which every token trains, markup of another model than that of `markup`, and
    responses that follow their prompt's last mark at once. The first and the last where most of them do."""
    notes = [(i, "" if turn.prompt else dialogue_in(turn.whole)) for i, turn in enumerate(turns)]
    if sum(bool(note) for _, note in notes) >= max(FEW, len(turns) / 2):
        why = "hold the turns of a dialogue, of which every token trains, also the question's: give them as messages"
        drop(rows, notes, bool, unit="texts", why=why, keep=True, note=lambda note: f" ({note})")
    if markup is None:
        return
    starts = [(i, markup.foreign_start(turn.whole or turn.prompt)) for i, turn in enumerate(turns)]
    why = "begin with markup of another model, of which this tokenizer has no token: it is read as letters"
    drop(rows, starts, bool, unit="texts", why=why, keep=True, note=lambda start: f" ({start})")
    joints = [(turn.prompt[-_JOINT:], turn.whole[len(turn.prompt) :][:_JOINT]) for turn in turns]
    notes = [(i, f"{a}{b}" if re.search(r"[:.?!]\Z", a) and b[:1].isalnum() else "") for i, (a, b) in enumerate(joints)]
    if sum(bool(note) for _, note in notes) >= max(FEW, 0.9 * len(turns)):
        why = "follow their prompt without a blank or line break, and train so"
        drop(rows, notes, bool, unit="responses", why=why, keep=True, note=lambda note: f" ({note!r})")


def _was_text(row: Converted) -> bool:
    """Whether the messages of a response stand in the file as JSON text, beside a prompt that is text."""
    read = [name for name in ANSWERS if isinstance(row.own.get(name), str) and isinstance(row.get(name), list)]
    return bool(read) and isinstance(row.get("prompt"), str)


def _repeats_prompt(row: Converted, *names: str) -> bool:
    """Whether the columns `names`, all of them text, begin with the prompt; by default a response, a longer one."""
    of_row = names or [name for name in RESPONSES[::-1] if row.get(name) is not None][:1]
    texts = [row.get(name) for name in ("prompt", *of_row)]
    prompt, *responses = (text.strip() if isinstance(text, str) else "" for text in texts)
    responses = [x if x.startswith(prompt) else _QUESTION.sub("", x, count=1) for x in responses]
    within = prompt[-1:].isalnum()  # of a word
    rests = [response[len(prompt) :] for response in responses if response.startswith(prompt)]
    begins = len(rests) == len(responses) and not any(within and re.match(r"\w", rest) for rest in rests)
    return len(prompt) >= (1 if names else REPEATED) and begins and bool(responses)


def _both_repeat_prompt(row: Converted) -> bool:
    return _repeats_prompt(row, *PAIRED)


def _one_repeats_prompt(row: Converted) -> bool:
    """Whether one response of a pair begins with the prompt, which is long, and the other does not."""
    one, other = (_repeats_prompt(row, name) for name in PAIRED)
    return one != other and len(row["prompt"].strip()) >= REPEATED


def _texts_of_pair(row: Converted) -> list[str]:
    """The last texts of both sides of a pair."""
    return [str((mappings(row[name]) or [{"content": row[name]}])[-1].get("content")) for name in PAIRED]


def _blanks_around(row: Converted, side: int) -> bool:
    """Whether the chosen (0) or rejected response alone begins or ends with white space."""
    around = [text.strip() != text for text in _texts_of_pair(row)]
    return around[side] and not around[1 - side]


def _is_cut(row: Converted) -> bool:
    """Whether one response of a pair is the beginning of the other, and ends long before it and within a word."""
    cut, whole = sorted(map(str.rstrip, _texts_of_pair(row)), key=len)
    return (
        min(len(cut), len(whole) - len(cut)) >= REPEATED
        and whole.startswith(cut)
        and whole[len(cut) - 1 :][:2].isalnum()
    )


def _says_label(row: Converted) -> bool:
    """Whether the responses of a pair begin with words for chosen and rejected, or one with the word for its label."""
    names, good = [*PAIRED], [True, False]
    if row.get("chosen") is None:
        names, good = [name for name in LABELLED_ANSWERS if row.get(name)][:1], [columns.truth(row["label"]) is True]
    texts = [str((mappings(row[name]) or [{"content": row[name]}])[-1].get("content")) for name in names]
    found = [match and match[1] is not None for match in map(_LABEL.match, texts)]
    return found == good


def _result_as_user(row: Converted) -> bool:
    """Whether a user's message, no markup, stands between a call and an answer, and no message is a tool's."""

    def kind(message: Mapping[str, Any]) -> str:
        called = message.get("tool_calls") or message.get("function_call") or message.get("role") in CALLS
        marked = str(message.get("content")).lstrip().startswith("<")
        return "call" if called else "" if marked else str(message.get("role"))

    kinds = [*map(kind, mappings(row.get("messages") or row.get("prompt")))]
    due = ["call", "user", "assistant"]
    return not {*kinds} & {*RESULTS} and any(kinds[i : i + 3] == due for i in range(len(kinds)))


def _result_of_no_call(row: Converted) -> bool:
    """Whether a tool's message answers an id that no call has, where calls have ids."""
    said = mappings(row.get("messages") or row.get("prompt"))
    ids = [call.get("id") for message in said for call in mappings(message.get("tool_calls"))]
    answered = [of for message in said if (of := message.get("tool_call_id")) is not None]
    return bool(ids) and None not in ids and not all(of in ids for of in answered)


def _one_id_twice(row: Converted) -> bool:
    """Whether two calls of one message have one id."""
    said = mappings(row.get("messages") or row.get("prompt"))
    ids = [[call["id"] for call in mappings(message.get("tool_calls")) if call.get("id")] for message in said]
    return any(len(of) > len({*map(str, of)}) for of in ids)


def _said_in(row: Converted) -> list[list[Mapping[str, Any]]]:
    """The messages of each column of a row that has messages."""
    return [mappings(row.get(name)) for name in OF_MESSAGES]


def _calls_twice(row: Converted) -> bool:
    """Whether the text of a message has the calls that its `tool_calls` has."""
    made = [(str(m.get("content")), mappings(json_of(m.get("tool_calls")))) for of in _said_in(row) for m in of]
    return any(calls and all(_is_named(call, text) for call in calls) for text, calls in made)


def _tools_twice(row: Converted) -> bool:
    """Whether a system message has the schemas of the row's tools."""
    tools = mappings(json_of(row.get("tools") or row.get("functions")))
    said = [str(m.get("content")) for of in _said_in(row) for m in of if m.get("role") in SYSTEM]
    texts = [*said, *(str(row.get(name)) for name in ("system", "system_prompt"))]
    return bool(tools) and any(all(_is_named(tool, text) for tool in tools) for text in texts)


def _is_named(tool: Mapping[str, Any], text: str) -> bool:
    """Whether a text has the name of this tool as a schema or a call has it."""
    return re.search(_NAMED.format(re.escape(str(name_of(tool)))), text) is not None


def _asks_twice(row: Converted) -> bool:
    """Whether a user's message follows the same one; two may show an image each."""
    asked = [[m.get("content") if m.get("role") == "user" else None for m in of] for of in _said_in(row)]
    return not row.get("images") and any(a and a == b for of in asked for a, b in pairwise(of))


def _system_again(row: Converted) -> bool:
    """Whether a system message is the same as another one, or stands within a message of a user."""
    for said in _said_in(row):
        texts = [(m.get("role"), str(m.get("content")).strip()) for m in said]
        system = [text for role, text in texts if role in SYSTEM and len(text) >= REPEATED]
        asked = [text for role, text in texts if role == "user"]
        if len({*system}) < len(system) or any(a in b for a in system for b in asked):
            return True
    return False


def _only_system(row: Converted) -> bool:
    """Whether all messages of a prompt, which are given as such, are of the system."""
    said = mappings(row.get("messages") or row.get("prompt"))
    return bool(said) and all(message.get("role") in SYSTEM for message in said)


def _no_user(row: Converted) -> bool:
    """Whether only a system speaks before the answers of a conversation."""
    roles = {message.get("role") for of in _said_in(row) for message in of}
    return bool(roles) and roles <= {"assistant", *SYSTEM}


def _escaped_results(row: Converted) -> bool:
    """Whether the result of a tool has letters as \\uXXXX, and another message has such letters."""
    said = [(m.get("role"), str(m.get("content"))) for of in _said_in(row) for m in of]
    escaped = any(role in RESULTS and re.search(r"\\u(?!00[01])[0-9a-f]{4}", text) for role, text in said)
    return escaped and not all(text.isascii() for _, text in said)


def _scores(row: Converted) -> tuple[float, float] | None:
    """What a pair's own columns score the chosen and the rejected response, as numbers or their text; else None."""
    for of in columns.objects_in(row.own):
        for chosen, rejected in columns.OF_PAIRS:
            with suppress(ValueError):
                return float(str(of.get(chosen))), float(str(of.get(rejected)))
    return None


def _scored_less(row: Converted) -> bool:
    """Whether a pair's own columns of scores contradict its choice."""
    if (scores := _scores(row)) is not None:
        return scores[0] < scores[1]
    with suppress(ValueError):
        return float(str(row.get("margin"))) < 0
    return False


def _scored_alike(row: Converted) -> bool:
    """Whether a pair's own columns of scores are equal."""
    scores = _scores(row)
    return scores is not None and scores[0] == scores[1]


def _leaves_out_reasoning(row: Converted) -> bool:
    """Whether a system or user message asks for reasoning in tags, and no answer has any, as text or beside it."""
    texts = [{"role": "user" if name in PROMPTS else "assistant", "content": row.get(name)} for name in OF_MESSAGES]
    said = [*(m for m in texts if isinstance(m["content"], str)), *(m for of in _said_in(row) for m in of)]
    asked = [str(m.get("content")) for m in said if m.get("role") in ("user", *SYSTEM)]
    answers = [str(m.get(key) or "") for m in said if m.get("role") == "assistant" for key in TURN_TEXTS]
    tags = {match[1] for text in asked if (match := _ASKS_REASONING.search(text))}
    beside = any(m.get(key) for m in said for key in TURN_TEXTS[1:])
    return bool(tags and answers) and not beside and not any(map(REASONING.search, answers))


def _ranked_less(row: Row) -> bool:
    """Whether a pair's own ranks, of which 1 is the best, contradict its choice."""
    chosen, rejected = (row.get(f"{side}_rank") for side in PAIRED)
    return isinstance(chosen, int | float) and isinstance(rejected, int | float) and chosen > rejected


def _answers_twice(row: Row) -> bool:
    """Whether two assistant messages of text follow each other after the first message, and the row trains both."""
    said = mappings(row.get("messages") or row.get("prompt"))[1:]
    text = [m.get("role") == "assistant" and not m.get("tool_calls") and columns.is_trained(m, "") for m in said]
    return any(a and b for a, b in pairwise(text))


_BLANKS = "have white space at the beginning or end of the"
_AGAIN = "repeat the prompt at the beginning of"
_OF_ROWS: tuple[tuple[tuple[Form, ...], str, Callable[[Converted], bool], str, float], ...] = (  # the last: in how many
    ((PAIR,), "pairs", _both_repeat_prompt, f"{_AGAIN} both responses, so that it stands twice", 0),
    ((PAIR,), "pairs", _one_repeats_prompt, f"{_AGAIN} one of the responses, and train on this difference", 0.5),
    ((RESPONSE, LABELLED), "rows", _repeats_prompt, f"{_AGAIN} the response, so that it stands twice", 0),
    ((PAIR,), "pairs", partial(_blanks_around, side=0), f"{_BLANKS} chosen response alone, and train on that", _ALL),
    ((PAIR,), "pairs", partial(_blanks_around, side=1), f"{_BLANKS} rejected response alone, and train on that", _ALL),
    ((PAIR,), "pairs", _is_cut, "have a response that is the other one cut within a word, and train on that", 0.3),
    ((PAIR,), "pairs", _scored_less, "have a lower score for the chosen response than for the rejected one", 0),
    ((PAIR,), "pairs", _scored_alike, "have the same score for both responses: which is better is arbitrary", 0.25),
    ((PAIR,), "pairs", _ranked_less, "have a higher rank, of which 1 is the best, for the chosen response", 0.8),
    ((PAIR, LABELLED), "rows", _says_label, "begin a response with the word for its label, and train on that", 0.8),
    ((CONVERSATION,), "conversations", _answers_twice, "have two assistant turns in a row, both trained", 0),
    (
        (CONVERSATION, RESPONSE),
        "rows",
        _leaves_out_reasoning,
        "have a prompt that asks for reasoning in tags, and answers without: that trains",
        0.8,
    ),
    ((), "rows", _result_as_user, "have a user's message where the result of a call is due (role 'tool')", 0.8),
    ((), "rows", _result_of_no_call, "have the result of a tool under a tool_call_id that no call has", 0),
    ((), "rows", _escaped_results, "have letters as \\uXXXX in the result of a tool, as json.dumps writes them", 0.5),
    ((CONVERSATION,), "conversations", _no_user, "have no message of a user: only a system speaks", 0.5),
    ((), "rows", _one_id_twice, "have two calls of one message under one id, to which both results belong", 0),
    ((), "rows", _calls_twice, "have a call in a message's text and in its tool_calls, so that it stands twice", 0),
    ((), "rows", _tools_twice, "have their tools in a system message too: the template writes them again", 0),
    ((), "rows", _asks_twice, "have the same message of a user twice in a row", 0),
    ((), "rows", _system_again, "have their system message a second time, in a user's message or as it is", 0.5),
    ((PROMPT,), "prompts", _only_system, "are a system message alone: the question is to be a user message", 0),
    ((), "rows", _was_text, "have a response that is the JSON text of messages, and train on their contents", 0),
)
