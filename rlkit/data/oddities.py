"""What of rows is trained as it is and seldom meant: each kind is logged in one line."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise, product

from rlkit.data import columns
from rlkit.data.drop import drop
from rlkit.data.forms import Form, Turn
from rlkit.data.load import Row, Rows
from rlkit.data.markup import Markup
from rlkit.data.messages import Converted, json_of, mappings, null_arguments
from rlkit.data.schema import ANSWERS, PAIRED, RESPONSES
from rlkit.data.turns import CONVERSATION, LABELLED, PAIR, PROMPT, RESPONSE

_log = logging.getLogger("rlkit.data")
_REPEATED = 12  # characters: a response may begin with a shorter prompt by chance ("hi")
_MOSTLY = 3  # from this place on, a note of `odd_texts` is meant in a few rows, and seldom in half of them
_FEW, _SOME = 4, 10  # rows: fewer may be the same, or have the same prompt or answer, by chance
_MISSING = {  # of pandas, SQL, JSON, JavaScript, spreadsheets, Reddit and Self-Instruct
    "nan", "NaN", "NAN", "None", "NaT", "<NA>", "null", "NULL", "N/A", "n/a", "#N/A", "#REF!", "undefined",
    "[deleted]", "[removed]", "<noinput>", "<nooutput>",
}  # fmt: skip
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|`[^`]*`|(?<!\w)\'[^\']*\'(?!\w)')  # JSON and code escape within quotes
_ESCAPED = re.compile(  # \n is no command of LaTeX
    r"(?<!\\)\\(u[0-9a-fA-F]{4}|n(?!(u|eq?|i|abla|ot(in)?|eg|mid|[lg]eq?|exists|ewline|onumber|atural|[ew]arrow|cong|oindent|"
    r"su[bp]\w*|orm\w*|olimits|parallel|prec\w*|succ\w*|sim|ewcommand|ewpage|less|gtr|(left|right)arrow)(?![a-z])))"
)
_ENTITY = re.compile(r"&(lt|gt|amp|quot|apos|nbsp|#\d{2,5}|#x[0-9a-fA-F]{2,4});")
_PLACE = re.compile(  # not \boxed{answer}, x_{ij}, nor a first token of markup
    r"(?<![\\\w^}])(?:\{\{ ?(\w+) ?\}\}|\{ ?(\w+) ?\}|%\((\w+)\)s|(?!\A<\|\w+\|>\s*\S)<\|(\w+)\|>)"
)
_PLACES = {  # what a template calls a text that is asked, and one that is answered
    "question", "text", "prompt", "input", "context", "instruction", "query", "problem", "passage", "document",
    "article", "content", "sentence", "user_input", "question_text",
}  # fmt: skip
_SAID_PLACES = {"answer", "response", "output", "completion", "solution", "label"}
_VALUE = re.compile(r"\s*(b['\"]|[\[{])")  # Python's text of bytes, a list or an object
_FURTHER = re.compile(
    r"\S\n\n(Human|### Human|### Instruction):.*\n\n(Assistant|### Assistant|### Response):", re.DOTALL
)
_UNSEEN = {"\ufeff": "U+FEFF", "\u200b": "U+200B", "\u2060": "U+2060"}  # at the start of a text
_MISREAD = re.compile(  # UTF-8 that was read as Latin-1 or cp1252: pairs that are seldom text in any language
    "\u00e2\u20ac.?|\u00e2\u0080[\u0080-\u00bf]|\u00f0\u0178|\u00f0\u009f|\u00c2[\u00a3\u00a7\u00a9\u00b0\u00b1\u00b7\u00bd]"
    "|\u00c3[\u00a1-\u00aa\u00ac-\u00ba\u00bc-\u00bf]|\u00d0[\u00b0-\u00ba\u00bc-\u00bf]|\u00d1[\u00b0-\u00ba\u00bc-\u00bf]"
)


def name_oddities(rows: Sequence[Row], read: Sequence[tuple[Form, Converted]], texts: Sequence[Sequence[str]]) -> None:
    """Log, in a line each, what is trained as it is and seldom meant. `texts`: `odd_texts` of each row."""
    again = "repeat the prompt at the beginning of"
    for forms, unit, bad, why in (
        (
            (PAIR,),
            "pairs",
            lambda row: _repeats_prompt(row, *PAIRED),
            f"{again} both responses, so that it stands twice",
        ),
        ((RESPONSE, LABELLED), "rows", _repeats_prompt, f"{again} the response, so that it stands twice"),
        ((PAIR,), "pairs", _scored_less, "have a lower score for the chosen response than for the rejected one"),
        ((CONVERSATION,), "conversations", _answers_twice, "have two assistant turns in a row, both trained"),
        ((), "rows", _was_text, "have a response that is the JSON text of messages, and train on their contents"),
    ):
        items = [(index, row) for index, (form, row) in enumerate(read) if form in forms or not forms]
        drop(rows, items, bad, unit=unit, why=why, keep=True)
    for number, why in enumerate(
        (
            "have a text that stands for a missing value",
            "hold characters that are seldom meant (of a file in another encoding, or written by Windows)",
            "have further turns inside an answer, which train as its text: give them as messages, or cut them off",
            "have an answer that is Python's text of a value, and train on its quotes and brackets",
            "hold the text of escapes and no line break: the text was escaped twice, e.g. by two json.dumps",
            "hold a text that is escaped for HTML, and train on its entities: apply html.unescape",
            "hold calls in JSON text with arguments that are null, as a table fills them: drop those",
            "hold the same placeholder, which nothing has filled",
        )
    ):
        noted = [(index, notes[number]) for index, notes in enumerate(texts)]
        num = sum(bool(note) for _, note in noted)
        if number >= _MOSTLY and num < len(noted) and (num < _FEW or 2 * num < len(noted)):  # code may be a few lists
            continue
        if number == _MOSTLY + 4:
            same = set.intersection(*({*note.split(", ")} for _, note in noted))
            noted = [(index, ", ".join(sorted(same))) for index, _ in noted] if len(noted) > 1 else []
        drop(rows, noted, bool, unit="rows", why=why, keep=True, note=lambda note: f" ({note})")


def odd_texts(row: Converted, used: Iterable[str], asked: Sequence[str], answers: Sequence[str]) -> Sequence[str]:
    """The notes on what is read of a row, its columns `used` and texts: in the order of the lines of
    `name_oddities`. Of a text that is all trained, `answers` is `asked`."""
    cells = [value for name in used if isinstance(value := row.own.get(name), str)]
    texts = dict.fromkeys([*cells, *asked, *answers])
    missing = [repr(text.strip()) for text in texts if len(text) < _REPEATED and text.strip() in _MISSING]
    odd = [note for text in texts for note in _characters(text)]
    odd += ["\\r\\n"] * any("\r\n" in text for text in answers)
    said = [] if answers is asked else answers
    turns = [f"{match[1]}: ... {match[2]}:" for text in said if (match := _FURTHER.search(text))]
    values = [repr(text[:30]) for text in said if _is_value(text)]
    escapes = [match[0] for text in texts if "\\" in text and (match := _escape(text))]
    entities = [match[0] for text in texts if "&" in text and (match := _entity(text))]
    names = {*map(str.lower, row.own)} - _SAID_PLACES | _PLACES
    places = [place for text in asked for place in _places(text, names) if answers is not asked or place[0] != "<"]
    places += [place for text in said for place in _places(text, names | _SAID_PLACES)]
    every = (missing, odd, turns, values, escapes, entities, null_arguments(row), sorted(places))
    return [", ".join(dict.fromkeys(notes)) for notes in every]


def _escape(text: str) -> re.Match[str] | None:
    """The first escape of a line break or character outside quotes, of a text without line breaks."""
    text = text.strip()
    text = text[1:-1] if text[:1] == '"' and isinstance(whole := json_of(text), str) and whole != text else text
    return None if "\n" in text else _ESCAPED.search(_QUOTED.sub("", text))


def _entity(text: str) -> re.Match[str] | None:
    """The first entity of a text that has been escaped for HTML: it has no bare < > or &."""
    return None if re.search("[<>]", text) or "&" in _ENTITY.sub("", text) else _ENTITY.search(text)


def _places(text: str, names: set[str]) -> Iterable[str]:
    """The placeholders of these names, as they stand in a text."""
    for match in _PLACE.finditer(text) if any(x in text for x in ("{", "<|", "%(")) else ():
        if {*map(str.lower, filter(None, match.groups()))} <= names:
            yield match[0]


def _is_value(text: str) -> bool:
    """Whether a text is what Python writes of bytes, an object or a list of one text, and no JSON."""
    if not _VALUE.match(text) or not isinstance(json_of(text), str):
        return False
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text.strip())
        return isinstance(value, bytes | dict) or (isinstance(value, list) and [*map(type, value)] == [str])
    return False


def _characters(text: str) -> Iterable[str]:
    """The characters of a text that are seldom meant."""
    if "\0" in text:
        yield "NUL"
    if text.isascii():
        return
    if "\ufffd" in text:
        yield "U+FFFD"
    if first := _UNSEEN.get(text.lstrip()[:1]):
        yield f"{first} at the start"
    if match := _MISREAD.search(text):
        yield repr(match[0])


def name_repeats(rows: Sequence[Row], turns: Sequence[Sequence[Turn]], form: Form) -> None:
    """Log that at least half of the rows repeat others, or that all have one prompt, or one answer; not of prompts."""
    if form is PROMPT or len(turns) < _FEW or any(turn.images for of_row in turns for turn in of_row):
        return
    num = len({hash(tuple((turn.whole, turn.label) for turn in of_row)) for of_row in turns})
    first, at, same = turns[0][0], 0 if form is PAIR else -1, list[str]()
    if first.prompt and all(of_row[0].prompt == first.prompt for of_row in turns):
        same.append("prompt")
    answer = turns[0][at].whole.removeprefix(turns[0][at].prompt)
    if all(of_row[at].whole.removeprefix(of_row[at].prompt) == answer for of_row in turns):
        same.append("answer")
    source = f"{rows.source}: " if isinstance(rows, Rows) and rows.source else ""
    if num <= len(turns) / 2:
        texts = "all the same text" if num == 1 else f"{num} different texts"
        _log.warning("%sthe %d rows are %s: each trains as often as it is there", source, len(turns), texts)
    elif same and len(turns) >= _SOME:
        repeated = "the same chosen response" if form is PAIR and same == ["answer"] else f"the same {same[0]}"
        _log.warning("%sall %d rows have %s: check which columns hold the texts", source, len(turns), repeated)


def name_foreign(rows: Sequence[Row], texts: Sequence[str], markup: Markup) -> None:
    """Log the ready-made texts with markup of another model."""
    starts = [(index, markup.foreign_start(text)) for index, text in enumerate(texts)]
    why = "begin with markup of another model, of which this tokenizer has no token: it is read as letters"
    drop(rows, starts, bool, unit="texts", why=why, keep=True, note=lambda start: f" ({start})")


def _was_text(row: Converted) -> bool:
    """Whether the messages of a response stand in the file as JSON text, beside a prompt that is text."""
    read = [name for name in ANSWERS if isinstance(row.own.get(name), str) and isinstance(row.get(name), list)]
    return bool(read) and isinstance(row.get("prompt"), str)


def _repeats_prompt(row: Converted, *names: str) -> bool:
    """Whether the columns `names`, all of them text, begin with the prompt; by default a response, a longer one."""
    of_row = names or [name for name in RESPONSES[::-1] if row.get(name) is not None][:1]
    texts = [row.get(name) for name in ("prompt", *of_row)]
    prompt, *responses = (text.strip() if isinstance(text, str) else "" for text in texts)
    within = prompt[-1:].isalnum()  # of a word
    rests = [response[len(prompt) :] for response in responses if response.startswith(prompt)]
    begins = len(rests) == len(responses) and not any(within and re.match(r"\w", rest) for rest in rests)
    return len(prompt) >= (1 if names else _REPEATED) and begins and bool(responses)


def _scored_less(row: Row) -> bool:
    """Whether a pair's own columns of scores, as numbers or their text, contradict its choice."""
    whats, forms = ("score", "rating", "reward", "avg_rating"), ("{}_{}", "{}-{}", "{1}_{0}")
    for form, score in product(forms, whats):
        with suppress(ValueError):
            chosen, rejected = (float(str(row.get(form.format(side, score)))) for side in PAIRED)
            return chosen < rejected
    with suppress(ValueError):
        return float(str(row.get("margin"))) < 0
    return False


def _answers_twice(row: Row) -> bool:
    """Whether two assistant messages of text follow each other after the first message, and the row trains both."""
    said = mappings(row.get("messages") or row.get("prompt"))[1:]
    text = [m.get("role") == "assistant" and not m.get("tool_calls") and columns.is_trained(m, "") for m in said]
    return any(a and b for a, b in pairwise(text))
