"""The forms of row that rlkit reads, and one check of a row against a form.

A form is a row of `FORMS`: its name, its columns, and how it is rendered as text. Every reader of rows
(`rl_prompts`, `sft_examples`, `preference_pairs`, `labelled_examples`) checks and renders its rows with `read_rows`.
A row of another library's form is read as `rlkit.data.convert` makes it. docs/data.md has the table for users.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from rlkit.data import columns, convert
from rlkit.data.chat import TURN_TEXTS, Message
from rlkit.data.convert import Converted
from rlkit.data.load import PythonText, Row, Rows, column_error, place_of
from rlkit.data.template import ROLES, Template

X = TypeVar("X")
_log, _progress = logging.getLogger("rlkit.data"), logging.getLogger("rlkit.data.progress")
_SYSTEM = ("system", "developer")
_STRING, _MESSAGES, _LABEL = "a string", "a list of at least one message", "true or false"
_KINDS: dict[str, Callable[[Any], bool]] = {
    _STRING: lambda value: isinstance(value, str),
    _MESSAGES: lambda value: isinstance(value, list | tuple) and len(value) > 0,
    _LABEL: lambda value: columns.truth(value) is not None,
}
_COLUMNS = {"messages": (_MESSAGES,), "label": (_LABEL,)}  # what a column may hold; other columns: a string or messages
_PROMPT, _RESPONSE, _LABELLED = (
    ("messages", "prompt"),
    ("response", "completion"),
    ("completion", "response", "messages"),
)
_PAIR_COLUMNS = ("chosen", "rejected")
_ALL_ANSWERS = (*_RESPONSE, *_PAIR_COLUMNS)
_REPEATED = 12  # characters: a response may begin with a shorter prompt by chance ("hi")
_ANSWERS = {"output", "response", "completion", "answer", "solution"}
_RESPONSE_LIKE = re.compile("respon|reject|chosen|prefer")
_QUESTIONS = ("question", "problem", "instruction")
_NOT_IN_SFT = {*_PAIR_COLUMNS, "label", "kto_tag", "input", "history"}  # of rows that lack a column
_CHOICE = re.compile(r"(response|answer|completion|output|human_ref)_?(\d|[ab])", re.IGNORECASE)
_UNREAD = {
    "input_ids": "tokens, which are not read: give the text or the messages, and rlkit tokenizes them",
    "segments": "axolotl's segments with a label each, which are not read: give a prompt and a response",
    "contents": "the turns of Gemini, which are not read: write them as 'messages' of 'role' and 'content'",
}
_RENAME = "; a column under another name is renamed with --rename"
_COLUMN_FIX = "check which columns hold the texts: one under another name is renamed with --rename"


class Turn(NamedTuple):
    """The text of a context up to the generation prompt (`prompt`), and the same with the assistant's turn (`whole`).

    A `literal` turn still lacks its end-of-turn token. `blocks` is the mask of the template's `{% generation %}`.
    `empty`: the turn (of a prompt: the prompt) has neither text nor a tool call. `untrained`: another assistant message
    of the row is context, though the row does not exclude it from the loss.
    """

    place: str
    prompt: str
    whole: str = ""
    empty: bool = False
    label: bool | None = None
    literal: bool = True
    blocks: list[int] | None = None
    untrained: bool = False


class Form(NamedTuple):
    """A form of row. An entry of `columns` holds the names that one required column may have; `read` renders a row.

    `optional` names columns that `read` may need too. `hint` says which script reads the form. `check` raises for a
    row whose columns are there and do not fit. `convert` returns the columns of another library's form under rlkit's
    names. `fits`: whether the values are those of the form, where the names alone do not tell.
    """

    name: str
    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Row, str, Template], list[Turn]]
    optional: tuple[str, ...] = ()
    hint: str = ""
    check: Callable[[Row, str, bool], None] | None = None
    convert: Callable[[Row], Row] = dict
    fits: Callable[[Row], bool] = bool

    @property
    def title(self) -> str:
        """The name with its article."""
        return f"{'an' if self.name[0] in 'aeiouA' else 'a'} {self.name}"

    def __str__(self) -> str:
        columns = ", ".join(" or ".join(names) for names in (self.optional, *self.columns) if names)
        return f"{self.title} has {{{columns}}}"

    def missing(self, row: Row) -> list[tuple[str, ...]]:
        """The columns that a row lacks. Null is absent: a table fills the columns of other rows with it."""
        return [names for names in self.columns if all(row.get(name) is None for name in names)]

    def known(self, row: Row) -> set[str]:
        """The columns of the row that are the form's."""
        return {name for names in (self.optional, *self.columns) for name in names} & {*row}

    def used(self, row: Row) -> set[str]:
        """The columns of the row that are read: of several names of one column the first that is not null."""
        there = (next((name for name in names if row.get(name) is not None), "") for names in self.columns)
        return {*there, *self.optional}

    def likeness(self, row: Row) -> tuple[int, int]:
        """How many columns of the row are the form's, and, among equals, how few of the form's are missing."""
        return len(self.known(row)), -len(self.missing(row))


def read_rows(rows: Sequence[Row], template: Template, *forms: Form, **limit: int) -> list[list[Turn]]:
    """The turns of each row, by the first of `forms` whose columns it has. `limit`: the token limit, to be checked.

    Raises ValueError, with the row (see `place_of`), for a row that fits none of them or holds a bad value.
    """
    ((name, value),) = limit.items()
    if len(rows) == 0:
        raise ValueError("rows is empty: there is nothing to train on")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    turns = []
    found = check_columns(rows, *forms, apply_chat_template=template.apply)
    unused, told = columns.Unused(rows), template.system_prompt
    for index, (form, row) in enumerate(found):
        place = place_of(rows, index)
        own = template.of_row(row, place) if template.apply else template
        turns.append(form.read(row, place, own))
        told = None if told and any(told.strip() in turn.prompt for turn in turns[-1]) else told
        for turn in turns[-1] if template.apply else ():
            if turn.whole and turn.literal:
                own.refuse_markup(turn.whole.removeprefix(turn.prompt), f"{place}: a response")
        used = _used(row, form, plain=not template.apply)
        if form is PROMPT:
            used |= {*columns.FOR_REWARDS}
        unused.add(index, row, used, *_said(row, form), own.lost)
        if len(turns) % 1000 == 0:
            _progress.info("rendering: %d of %d rows", len(turns), len(rows))
    where = {PROMPT: "the prompt (rewards see all columns)", TEXT: "the text"}.get(form, "the prompt or the response")
    if told:
        _log.warning("the system prompt %r is in no row: each has a system message of its own", told[:60])
    unused.report(template.not_read, where=where)
    _name_oddities(rows, found)
    return turns


def _name_oddities(rows: Sequence[Row], found: Sequence[tuple[Form, Row]]) -> None:
    """Log, in a line each, what is trained as it is and seldom meant."""
    twice = "so that it stands twice"
    for forms, what, bad, why in (
        ((PAIR,), "pairs", _repeats_prompt, f"repeat the prompt at the beginning of both responses, {twice}"),
        (
            (RESPONSE, LABELLED), "rows", _response_repeats_prompt,
            f"repeat the prompt at the beginning of the response, {twice}",
        ),
        ((PAIR,), "pairs", _scored_less, "have a lower score for the chosen response than for the rejected one"),
        ((CONVERSATION,), "conversations", _answers_twice, "have two assistant turns in a row, both trained"),
    ):  # fmt: skip
        items = [(index, row) for index, (form, row) in enumerate(found) if form in forms]
        drop(rows, items, bad, what=what, why=why, keep=True)
    read = [(index, row) for index, (_, row) in enumerate(found) if any(map(partial(_was_text, row), _ALL_ANSWERS))]
    why = "have a response that is the JSON text of messages, and train on their contents"
    drop(rows, read, bool, what="rows", why=why, keep=True)
    texts = [(index, _missing_values(form, row)) for index, (form, row) in enumerate(found)]
    why = "have a text that is a missing value, as pandas writes it"
    drop(rows, texts, bool, what="rows", why=why, keep=True, note=lambda found: f" ({', '.join(found)})")


def check_columns(rows: Sequence[Row], *forms: Form, apply_chat_template: bool = True) -> list[tuple[Form, Row]]:
    """The form of each row, the first of `forms` whose columns it has, and the row in rlkit's columns.

    The first row decides which library's columns are read. Needs no tokenizer. Raises ValueError, with the row (see
    `place_of`), for a row in another form than the first, for one that lacks a column of the last form, or holds a
    value of the wrong type in one, and for one that is in two forms with different content.
    """
    found: list[tuple[Form, Row]] = []
    plain = not apply_chat_template
    check_dicts(rows)
    for index, row in enumerate(rows):
        place = place_of(rows, index)
        if index == 0:
            source, start = source_of(_without_null_columns(row, rows), place), place
        row = _in_our_columns(row, source, forms, place, start, plain)
        if index == 0:
            forms = _of_one_file(forms, row, plain)
        form = next((form for form in forms if not form.missing(row)), forms[-1])
        form = _without_conflict(row, form, forms, place)
        first = f"{start} is {(source or found[0][0]).title}" if index else ""
        for names in form.columns:
            cell(row, names, place, form=form, plain=plain, first=first)
        if form.check:
            form.check(row, place, plain)
        _check_values(row, form, place, plain)
        found.append((form, row))
    return found


def check_dicts(rows: Any) -> None:
    """TypeError for what is no sequence of dicts, such as a path, one row or a list of strings."""
    if isinstance(rows, Mapping):
        raise TypeError(f"rows must be a list of dicts, got one dict: give [row]; its keys are {sorted(rows)[:8]}")
    if isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        wrong = rows if isinstance(rows, str) else next(row for row in rows if not isinstance(row, Mapping))
        fix = "load_rows(path) reads a file; of strings give [{'prompt': text} for text in texts]"
        raise TypeError(f"rows must be dicts, got {repr(wrong)[:80]}: {fix}")


def _without_null_columns(row: Row, rows: Sequence[Row]) -> Row:
    """The row with the first value that another row has in each column where its own is null."""
    found = dict(row)
    for name in [name for name, value in row.items() if value is None]:
        found[name] = next((other[name] for other in rows if other.get(name) is not None), None)
    return found


def _used(row: Row, form: Form, *, plain: bool) -> set[str]:
    """The columns of which a row's text is made, and its label."""
    own: Row = getattr(row, "own", row)
    source, used = getattr(row, "source", None), form.used(own)
    if source:
        if {name for names in (source.optional, *source.columns) for name in names} & _ANSWERS:
            used -= _ANSWERS
        used |= source.used(own)
    used -= ({*_ANSWERS} if form is PAIR else {*_PAIR_COLUMNS}) | {"label", "kto_tag"}
    if form is LABELLED:
        used.add("kto_tag" if source and "kto_tag" in source.optional and own.get("kto_tag") is not None else "label")
    return used | ({*columns.ROW_ARGS, *_PROMPT} if not plain and form is not TEXT else set())


def _said(row: Row, form: Form) -> tuple[list[str], list[str]]:
    """The texts of a row that are context, and those that are answers."""
    asked, answers = list[str](), list[str]()
    names = {TEXT: ("text",), PROMPT: (), PAIR: _PAIR_COLUMNS}.get(form, _RESPONSE)
    for name in names if form is TEXT else (*_PROMPT, *names):
        value, is_answer = row.get(name), name not in (*_PROMPT, "text")
        turns = convert.mappings(value) if not isinstance(value, str) else [{"content": value}]
        for number, turn in enumerate(turns, 1):
            content = turn.get("content")
            parts = [content] if isinstance(content, str) else [p.get("text") for p in convert.mappings(content)]
            trained = number == len(turns) if is_answer else turn.get("role") == "assistant"
            texts = answers if trained and (is_answer or form in (CONVERSATION, LABELLED)) else asked
            texts.extend(str(part) for part in parts if part)
    return asked, answers


def _check_values(row: Row, form: Form, place: str, plain: bool) -> None:
    """ValueError for a row with images, or with text that cannot be tokenized."""
    own = getattr(row, "own", row)
    columns.refuse_media(own, place)
    if form is not PROMPT:
        columns.refuse_flags(own, place)
    for name in _used(row, form, plain=plain) & {*own}:
        columns.refuse_surrogates(own[name], place, name)


def source_of(row: Row, place: str) -> Form | None:
    """The form of another library that a row is in; None for a row with a prompt in rlkit's columns.

    Raises ValueError, with `place`, for a row in two forms of different content, and for Python's text of messages.
    """
    try:
        return _source_of(row, place)
    except PythonText as error:
        raise column_error(place, f"cannot be read: {error}", row) from None


def _source_of(row: Row, place: str) -> Form | None:
    there = {name: value for name, value in row.items() if value is not None}
    fits = [form for form in THEIRS if not form.missing(there) and form.fits(there)]
    if there.keys() & {*_PROMPT}:
        return next((form for form in fits if form.columns[0][0] == "prompt"), None)
    fits = [form for form in fits if not any(form.known(there) < other.known(there) for other in fits)]
    said = [str(turn.get("content")) for turn in convert.mappings(convert.messages_of(row.get("conversations")))]
    if said:  # a question that is also a turn of the conversation
        fits = [f for f in fits if not any(str(row.get(f.columns[0][0])) in text for text in said)] or fits
    if len({repr(row.get(form.columns[0][0])) for form in fits}) > 1:
        names = " and ".join(f"{form.title} ({', '.join(sorted(form.known(there)))})" for form in fits)
        raise column_error(
            place, f"is both {names}", row, f"; rename what is not meant, e.g. --rename {fits[-1].columns[0][0]} OTHER"
        )
    return fits[0] if fits else None


def with_prompt(row: Row, place: str = "the row") -> Row:
    """The row unchanged, with its prompt as `prompt` or `messages` where it has neither, or has JSON text there."""
    source = source_of(row, place)
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    try:
        new = source.convert(row) if source else convert.one_message(texts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise column_error(place, f"cannot be read{f' as {source.title}' if source else ''}: {error}", row) from None
    return {**row, **{name: new[name] for name in _PROMPT if name in new}} if new else row


def rl_row(row: Row, place: str = "the row") -> Row:
    """`with_prompt` without the answer that ends `messages`, where another column holds that, or the question alone.

    Such rows have `prompt` or `problem` beside a whole conversation, or are an Alpaca row with its history.
    """
    new = with_prompt(row, place)
    messages = convert.mappings(new.get("messages"))
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        others = {name: value for name, value in row.items() if name != "messages"}
        asked = with_prompt(others, place).get("prompt")
        known = messages[-1].get("content") in [row[name] for name in (*_OUTPUT, *_ANSWERS) if row.get(name)]
        if known or [asked] == [message.get("content") for message in messages if message.get("role") == "user"]:
            return {**new, "messages": messages[:-1]}
    return new


def is_text(row: Row) -> bool:
    """Whether a row of `with_prompt` is a text without a prompt."""
    return not TEXT.missing(row) and not any(row.get(name) is not None for name in _PROMPT)


def is_pair(row: Row, place: str) -> bool:
    """Whether a row is a preference pair."""
    source = source_of(row, place)
    return "chosen" in row or (source is not None and source.read is _pair)


def _in_our_columns(row: Row, source: Form | None, forms: Sequence[Form], place: str, start: str, plain: bool) -> Row:
    """The row with rlkit's columns beside its own, where they differ.

    In a `plain` row the prompt is the contents of its messages, joined, or the common beginning of a pair.
    """
    others = {*_PROMPT} - {*(source.columns[0] if source else ())}
    lacks = source and not all(any(name in row for name in names) for names in source.columns)
    there = {name: value for name, value in row.items() if value is not None}
    wider = source and any(
        source.known(there) < form.known(there) and form.fits(there) for form in THEIRS if not form.missing(there)
    )
    if source and (lacks or wider or any(row.get(name) is not None for name in others)):
        absent = [" or ".join(map(repr, names)) for names in source.columns if not any(name in row for name in names)]
        fix = (
            f"; {' and '.join(absent)} may be null or empty, but must be there"
            if absent and {*source.columns[0]} & {*row}
            else ""
        )
        raise column_error(place, f"is not {source.title}, as {start} is", row, f"; write all rows in one form{fix}")
    try:
        new = convert.one_message(row)
        answers = {name: new[name] for name in (*_RESPONSE, *_PAIR_COLUMNS) if name in new}
        new |= source.convert({**row, **answers}) if source else {}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise column_error(place, f"cannot be read{f' as {source.title}' if source else ''}: {error}", row) from None
    if PROMPT in forms and new.get("messages", row.get("messages")):
        answer = rl_row({**row, **new}, place)
        new |= {"messages": answer["messages"]}
    _check_roles(Converted(row, new, source), place)
    messages = new.get("messages") or row.get("prompt") or row.get("messages")
    if plain and PROMPT in forms and messages and isinstance(messages, list | tuple):
        turns = prompt_messages({"messages": messages}, place=place)
        if lost := [key for turn in turns for key in ("tool_calls", *TURN_TEXTS[1:]) if turn.get(key)]:
            found = f"a message holds {lost[0]!r}, and --no-chat-template joins the contents of messages only"
            raise column_error(place, found, row, "; write it into the content, or use a chat template")
        new["prompt"] = "".join(turn["content"] for turn in turns)
    elif plain and source and "messages" in new and row.get("prompt") is not None:
        more = [name for name in source.optional if not columns.is_empty(row.get(name)) and name != "rejected"]
        found = f"{' and '.join(map(repr, more))} beside 'prompt' make a conversation, which needs a chat template"
        fix = "; drop --no-chat-template, give --chat-template FILE, or write all of it into 'prompt'"
        raise column_error(place, found, row, fix)
    if plain and PAIR in forms:
        new |= convert.common_prompt(row)
    return Converted(row, new, source)


def _check_roles(row: Row, place: str) -> None:
    """ValueError for a message whose role is no text, such as an object of lists of different lengths."""
    for name in (*_PROMPT, *_RESPONSE, *_PAIR_COLUMNS):
        for number, message in enumerate(convert.mappings(row.get(name))):
            if isinstance(message.get("role", message.get("from")), list | tuple | Mapping):
                raise ValueError(
                    f"{place}: {_own_name(row, name)}[{number}] must be an object like {{'role': 'user', 'content': "
                    f"'...'}}, got {repr(message)[:80]}"
                )


def _of_one_file(forms: Sequence[Form], row: Row, plain: bool) -> tuple[Form, ...]:
    """Forms that the rows of a file may have after its first row `row`."""
    if TEXT in forms and is_text(row):
        return (TEXT,)
    if PAIR in forms and not PAIR.missing(row):
        return (PAIR,)
    others = (TEXT, PAIR, CONVERSATION) if plain else (TEXT, PAIR)
    return tuple(form for form in forms if form not in others) or tuple(forms)


def _without_conflict(row: Row, form: Form, forms: Sequence[Form], place: str) -> Form:
    """The form, or `CONVERSATION` where that holds the response too; ValueError for two forms of different content."""
    prompt, messages = row.get("prompt"), convert.mappings(row.get("messages"))
    said = [str(message.get("content")) for message in messages]
    asked = [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in convert.mappings(prompt)]
    name = "prompt"
    if not said or all(text.strip() in "".join(said) for text in asked):
        if form is not RESPONSE or CONVERSATION not in forms or not said or messages[-1].get("role") != "assistant":
            return form
        name, response = cell(row, _RESPONSE, place, form=RESPONSE)
        if response in (said[-1], [messages[-1]]):
            return CONVERSATION
    name = _own_name(row, name)
    both = f"{_own_name(row, 'messages')!r} and {name!r}"
    found = f"columns {both} hold different texts ({CONVERSATION.title} and {form.title})"
    raise column_error(place, found, row, f"; rename the one that is not meant, e.g. --rename {name} OTHER")


def cell(
    row: Row, names: Sequence[str], place: str, *, form: Form, plain: bool = False, first: str = ""
) -> tuple[str, Any]:
    """(name, value) of the first column of `names` that a row has, null last.

    A column holds a string or messages, `messages` only messages, `label` true or false; in a `plain` row (without a
    chat template) all but the label are strings. ValueError, with the columns of the row and the form that it looks
    most like, for a row without any of `names`, or with a value of another type. `first` says what the first row is.
    """
    names = [name for name in names if not (plain and name == "messages")]
    there = [name for name in names if name in row]
    if not there:
        lacks = f"no column {names[0]!r}" if len(names) == 1 else f"neither {' nor '.join(map(repr, names))} is there"
        fix = _hint(row, form, first)
        if plain and row.get("messages") is not None:
            fix = "; messages need a chat template: drop --no-chat-template, or give --chat-template FILE"
        raise column_error(place, lacks, row, fix)
    name = next((name for name in there if row[name] is not None), there[0])
    value = row[name]
    kinds = [kind for kind in _COLUMNS.get(name, (_STRING, _MESSAGES)) if not (plain and kind == _MESSAGES)]
    if not any(_KINDS[kind](value) for kind in kinds):
        note = " (messages need a chat template)" if plain and isinstance(value, list) else ""
        found = f"column {_own_name(row, name)!r} must be {' or '.join(kinds)}{note}, got {repr(value)[:80]}"
        raise column_error(place, found, row)
    texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if texts and name in ("prompt", *_RESPONSE, *_PAIR_COLUMNS):
        found = f"column {_own_name(row, name)!r} is a list of texts, got {repr(value)[:80]}"
        raise column_error(place, found, row, "; write one row for each of them")
    return name, value


def _own_name(row: Row, name: str) -> str:
    """The name in the file of a column of the converted row: of a prompt that of the first column it is made of."""
    own, source = getattr(row, "own", row), getattr(row, "source", None)
    if row.get(name) is None or row[name] is own.get(name):
        return name
    made = ("history", *(source.optional if source.read is _pair else source.columns[0])) if source else ()
    same = [column for column in own if own[column] is row[name]]
    same += [column for column in made if name in _PROMPT and not columns.is_empty(own.get(column))]
    return same[0] if same and name not in own else name


def _hint(row: Row, form: Form, first: str = "") -> str:
    """The first that applies: the form of the first row, what to do about the columns, or what reads the row."""
    instead = "" if first and _looks(row, form, first) else _instead(row, form)
    return instead or _looks(row, form, first) or f"; {form}{_RENAME}"


def _looks(row: Row, form: Form, first: str = "") -> str:
    """What a row looks like that is not in the `form`, and what reads it; of a form only with all of its columns."""
    own = getattr(row, "own", row)
    half = {*_PAIR_COLUMNS} if not {*_PAIR_COLUMNS} <= {*own} else {}
    rest = {name: value for name, value in own.items() if name not in half}
    whole = [known for known in FORMS if not known.missing(rest) and known.fits(rest)]
    near = max(whole, key=lambda known: known.likeness(own), default=form)
    answered = near is PROMPT and any(_RESPONSE_LIKE.search(name) for name in own)
    if near.columns == form.columns or (answered and not first):
        return ""
    hint = f"{first}, and all rows must be in one form" if first else near.hint.replace(form.hint or "-", "")
    return f"; the row looks most like {near.title}; {hint}" if hint else ""


def _instead(row: Row, form: Form) -> str:
    """What to do about a row without the columns of `form`, if the columns that it has tell; else ""."""
    own = getattr(row, "own", row)
    for name, fix in _UNREAD.items():
        if name in own:
            return f"; column {name!r} holds {fix}"
    if form is PAIR and {"messages", "rejected_response"} <= {*own}:  # of ms-swift
        return "; write the last assistant message of 'messages' as 'chosen', and 'rejected_response' as 'rejected'"
    every = {name for known in FORMS for names in (known.optional, *known.columns) for name in names}
    pairs = {name: name.lower() for name in own if name not in every and name.lower() in every}
    if form is PAIR and {"messages", "rejected_messages"} <= {*own}:  # of ms-swift
        pairs |= {"messages": "chosen", "rejected_messages": "rejected"}
    if form is PAIR and {"response", "rejected_response"} <= {*own}:  # of ms-swift
        swift = {"response": "chosen", "rejected_response": "rejected", "query": "prompt"}
        pairs |= {old: new for old, new in swift.items() if old in own}
    for asked, answered in () if form is PAIR or {*_PROMPT} & {*own} else (("user", "assistant"), ("source", "target")):
        if {asked, answered} <= {*own}:
            pairs |= {asked: "prompt"} | ({} if form is PROMPT else {answered: "response"})
    fix = ""
    read = {name: value for name, value in own.items() if name not in _NOT_IN_SFT}
    theirs = [known for known in THEIRS if known.known(read) and len(known.missing(own)) == 1]
    near = max(theirs, key=lambda known: known.likeness(read), default=None)
    sft = form in SFT and form.missing(own)[:1] == [_PROMPT] and not (pairs or _looks(row, form))
    part, lacks = near if sft else None, []
    if part:
        has, lacks = sorted(part.known(read)), [name for name in part.missing(own)[0] if name not in _NOT_IN_SFT]
        fix = f"; of {part.title} it has {', '.join(map(repr, has))} and lacks {' or '.join(map(repr, lacks))}{_RENAME}"
    wanted = [*(name for names in form.missing(own) for name in names), *lacks]
    labels = [name for name in own if columns.truth(own[name]) is not None]
    if form is LABELLED and "label" in wanted and len(labels) == 1:
        pairs[labels[0]] = "label"
    for name in wanted:
        found = [c for c in own if c != name and re.fullmatch(f"{name}(_.*|Key)|.*_{name}", c) and not pairs.get(c)]
        pairs |= {found[0]: name} if len(found) == 1 and name not in pairs.values() else {}
    questions = [name for name in ("query", *(() if part else _QUESTIONS)) if name in own]
    if "prompt" in wanted and questions and not pairs:
        pairs[questions[0]] = "prompt"
    answers = [name for name in own if name in _ANSWERS and own[name] is not None]
    if "response" in wanted and answers and not pairs:
        pairs[answers[0]] = "response"
    choices = [name for name in own if _CHOICE.fullmatch(name)]
    if form is PAIR and len(choices) > 1 and not pairs:
        return f"; write the better of {', '.join(choices)} as 'chosen' and the worse as 'rejected'"
    if any(not re.match(r"[^\W\d]|$", name) or name.endswith(("?", ".")) for name in own):
        fix = f"{_RENAME} (line 1 of a CSV file is its header)"
    return "; rename columns, e.g. --rename " + " ".join(f"{old} {new}" for old, new in pairs.items()) if pairs else fix


def prompt_messages(row: Row, *, system_prompt: str | None = None, place: str = "the row") -> list[dict[str, Any]]:
    """The conversation of a row: its `messages`, or its `prompt` (a string is one user message), after `system_prompt`.

    A row of another library's form is read as `rlkit.data.convert` makes it. The row's own `system` or `system_prompt`
    comes before the argument.

    A conversation that begins with a system message keeps that one. The content of a message is text: parts
    `{"type": "text", "text": ...}` are joined without a separator, as chat templates join them, and an assistant
    message with neither content nor tool calls holds "". `place` names the row in errors.

    Raises ValueError for a row without `messages` and `prompt`, for a malformed message, and for any other content:
    null, a number, or a part that is not text, such as an image.
    """
    given = row
    if not isinstance(row, Converted):  # as `check_columns` gives them
        row = with_prompt(Converted(row, convert.one_message(row)))
    column, value = cell(row, _PROMPT, place, form=PROMPT)
    column = _own_name(given, column)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else convert.messages_of(value)
    system = given.get("system") if isinstance(given, Converted) else None  # stands before them in the converted row
    start = -1 if system and convert.mappings(messages[:1]) and messages[0].get("content") is system else 0
    for number, message in enumerate(messages, start):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{place}: {column}[{number}] must be an object like {{'role': 'user', 'content': '...'}}, "
                f"got {repr(message)[:80]}"
            )
        if "content" not in message and isinstance(message.get("value"), str):
            raise ValueError(
                f"{place}: {column}[{number}] has its text under the key 'value': beside 'role' the key is 'content', "
                "and 'value' goes with 'from'"
            )
    try:
        messages = convert.turns(messages)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    messages = [_with_text(message, f"{place}: {column}[{number}]") for number, message in enumerate(messages, start)]
    own, first = convert.system_of(row, place), messages[0] if messages[0]["role"] in _SYSTEM else {}
    if own is not None and first and first["content"] != own:
        found = "the messages begin with another system message than that of column 'system'"
        raise column_error(place, found, row, "; rename the one that is not meant, e.g. --rename system OTHER")
    if not first and (system_prompt if own is None else own) is not None:
        return [{"role": "system", "content": system_prompt if own is None else own}, *messages]
    return messages


def drop(
    rows: Sequence[Row],
    items: Sequence[tuple[int, X]],
    bad: Callable[[X], object],
    *,
    what: str,
    why: str,
    fix: str = _COLUMN_FIX,
    keep: bool = False,
    note: Callable[[X], str] = lambda _: "",
) -> list[tuple[int, X]]:
    """`items`, (row index, X), without the `bad` ones, which are logged in one line; ValueError, with `fix`, for all.

    The line has `what` they are, `why` (a verb and its object), and a `note` on each. With `keep` they are only logged.
    """
    found = [(index, item) for index, item in items if bad(item)]
    if not found:
        return [*items]
    source = f"{rows.source}: " if isinstance(rows, Rows) and rows.source else ""
    if len(found) == len(items) and not keep:
        raise ValueError(f"{source}all {len(items)} {what} {why}; {fix}")
    first = ", ".join(place_of(rows, index, with_source=False) + note(item) for index, item in found[:5])
    _log.warning(
        "%s%s %d of %d %s that %s: %s%s",
        source, "kept" if keep else "dropped", len(found), len(items), what, why, first, ", ..." * (len(found) > 5),
    )  # fmt: skip
    return [*items] if keep else [(index, item) for index, item in items if not bad(item)]


def drop_long(
    rows: Sequence[Row], items: Sequence[tuple[int, X]], length: Callable[[X], int], *, what: str, **limit: int
) -> list[tuple[int, X]]:
    """`drop` of the items with more tokens than the limit."""
    ((name, value),) = limit.items()
    fix = f"the shortest has {min(length(item) for _, item in items)} tokens: raise it, or give shorter ones"
    return drop(
        rows, items, lambda item: length(item) > value, what=what, why=f"are longer than `{name}` {value}", fix=fix,
        note=lambda item: f" ({length(item)} tokens)",
    )  # fmt: skip


def _with_text(message: Message, place: str) -> dict[str, Any]:
    """The message with text as its content. A template would write anything else as Python does: "None", "[{...}]"."""
    content = message.get("content")
    for name in columns.MEDIA:
        if not columns.is_empty(message.get(name)):
            raise ValueError(f"{place} holds {name!r}, and rlkit trains on text only: drop the row or the key")
    if isinstance(content, str):
        return dict(message)
    if content is None and message["role"] == "assistant":
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    if not isinstance(content, list | tuple) or not content:
        raise ValueError(f"{place}.content must be a string, got {repr(content)[:80]}")
    return {**message, "content": columns.joined_parts(content, f"{place}.content")}


def _is_empty(message: Message) -> bool:
    """Whether a message of `prompt_messages` holds no text, white space aside, and no tool call."""
    return not message.get("tool_calls") and not any(str(message.get(key) or "").strip() for key in TURN_TEXTS)


def _context(row: Row, place: str, template: Template) -> tuple[str, list[dict[str, Any]]]:
    """A row's prompt as text, up to the generation prompt, and its messages (none without a chat template)."""
    if not template.apply:
        return cell(row, ("prompt",), place, form=PROMPT, plain=True)[1], []
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    template.refuse_unwritten(messages, place)
    return template.text(messages, place, opened=True), messages


def _prompt(row: Row, place: str, template: Template) -> list[Turn]:
    text, messages = _context(row, place, template)
    if messages and messages[-1]["role"] == "assistant":
        fix = "drop that message (a known answer belongs in a column of its own)"
        own = getattr(row, "own", row)
        others = {name: value for name, value in own.items() if name != "messages"}
        if "messages" in own and any(name in with_prompt(others) for name in _PROMPT):
            fix = "drop that message, or read the prompt from the other columns with --rename messages OTHER"
        raise ValueError(
            f"{place}: the conversation ends with an assistant message, so there is nothing to answer; {fix}"
        )
    return [Turn(place, text, empty=all(map(_is_empty, messages)) if messages else not text.strip())]


def _no_answer(row: Row, place: str, roles: Sequence[Any]) -> ValueError:
    if "assistant" in roles:
        return column_error(place, f"needs an assistant message with a message before it, got roles {roles}", row)
    if unknown := [role for role in roles if role not in (*ROLES, *_SYSTEM)]:
        return ValueError(f"{place}: unknown role {unknown[0]!r}, and no message of the role 'assistant' to train on")
    lacks = "no response to train on: needs the column 'completion' or 'response', or an assistant message"
    lacks += "".join(f" (column {name!r} is null)" for name in _RESPONSE if name in row and row[name] is None)
    return column_error(place, lacks, row, _looks(row, CONVERSATION) or _instead(row, RESPONSE) or _RENAME)


def _check_conversation(row: Row, place: str, _plain: bool) -> None:
    _, value = cell(row, _PROMPT, place, form=CONVERSATION)
    messages = [] if isinstance(value, str) else convert.mappings(value)
    roles = ["user"] if isinstance(value, str) else [m.get("role") for m in messages]
    for number, message in enumerate(messages):
        if message.get("role") is None:
            shown = f"{place}: {_own_name(row, 'messages')}[{number}]"
            forms = "{'role': 'user', 'content': '...'} or {'from': 'human', 'value': '...'}"
            raise ValueError(f"{shown} must be an object like {forms}, got {repr(message)[:80]}")
    if roles and not {"assistant", *convert.CALLS} & {*roles}:
        raise _no_answer(row, place, roles)
    _refuse_label(row, place, "a conversation with a label")


def _refuse_label(row: Row, place: str, what: str) -> None:
    """ValueError for a row with a label of KTO: true or false, 1 or 0, or their text."""
    for name in ("kto_tag", "label"):
        if columns.truth(row.get(name)) is not None:
            found = f"is {what} (column {name!r} is {row[name]}), and sft trains on every row"
            raise column_error(place, found, row, f"; rlkit kto reads it, or --rename {name} OTHER trains all of them")


def _conversation(row: Row, place: str, template: Template) -> list[Turn]:
    """One turn per assistant message, but for those that the row excludes from the loss."""
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    ends = [end for end, message in enumerate(messages) if message["role"] == "assistant" and end > 0]
    if not ends:
        raise _no_answer(row, place, [m["role"] for m in messages])
    return _turns(messages, ends, place, template)


def _turns(messages: list[dict[str, Any]], ends: Sequence[int], place: str, template: Template) -> list[Turn]:
    """The turns of the assistant messages at `ends`, each after all messages before it."""
    template.refuse_unwritten(messages[: ends[-1] + 1], place)
    turns = []
    for end in ends:
        if not columns.is_trained(messages[end], place):
            continue
        prompt = template.text(messages[:end], place, opened=True)
        whole, blocks = template.text(messages[: end + 1], place, opened=False), template.blocks(messages[: end + 1])
        empty, untrained = _is_empty(messages[end]), messages[0]["role"] == "assistant"
        turns.append(Turn(place, prompt, whole, empty=empty, literal=False, blocks=blocks, untrained=untrained))
    if not turns:
        raise ValueError(f"{place}: every assistant message is excluded from the loss: drop the row")
    return turns


def _check_response(row: Row, place: str, _plain: bool) -> None:
    _refuse_label(row, place, "a labelled response")


def _response(
    row: Row, place: str, template: Template, *, names: Sequence[str] = _RESPONSE, label: bool | None = None
) -> list[Turn]:
    """A response (a string, or the last of a list of messages) after the row's prompt or its own earlier messages.

    Of a `completion` in sft, every assistant message is a turn.
    """
    column, response = cell(row, names, place, form=RESPONSE, plain=not template.apply)
    text = isinstance(response, str)
    if text and not template.apply:
        prompt, _ = _context(row, place, template)
        return [Turn(place, prompt, prompt + response, empty=not response.strip(), label=label)]
    messages = [{"role": "assistant", "content": response}]
    name = _own_name(row, column)
    if not text:
        messages = prompt_messages(Converted({name: response}, {"messages": response}), place=place)
    ends = [end for end, message in enumerate(messages) if message["role"] == "assistant"]
    several = names is _RESPONSE and len(ends) > 1
    response = "" if several else _last(messages, name, place)["content"]
    before = [] if column == "messages" else _before(row, column, messages, place)
    row = Converted(row, {"prompt": None, "messages": before + messages})
    if several:
        context = prompt_messages(row, system_prompt=template.system_prompt, place=place)
        start = len(context) - len(messages)
        return _turns(context, [start + end for end in ends if start + end], place, template)
    unknown = [key for key, value in messages[-1].items() if columns.is_unknown_key(key, value)]
    template.lost.update({("message key", key, "response"): None for key in unknown})
    prompt, _ = _context(Converted(row, {"messages": row["messages"][:-1]}), place, template)
    more = names is _LABELLED and any(columns.is_trained(messages[end], place) for end in ends[:-1])
    return [Turn(place, prompt, prompt + response, empty=not response.strip(), label=label, untrained=more)]


def _last(messages: Sequence[Message], column: str, place: str) -> Message:
    """The last of the messages, which is a response of text."""
    last = messages[-1]
    if last["role"] != "assistant" or (column == "messages" and len(messages) == 1):
        raise ValueError(
            f"{place}: {column!r} must end with an assistant message of text that answers another message, got "
            f"{repr(last)[:80]}"
        )
    if more := [key for key in (*TURN_TEXTS, "tool_calls") if key != "content" and last.get(key)]:
        raise ValueError(
            f"{place}: the last message of {column!r} holds {' and '.join(more)} beside its content, and a "
            "response is text: write all of it into 'content' as the model would"
        )
    if not columns.is_trained(last, place):
        raise ValueError(f"{place}: the last message of {column!r} is excluded from the loss: drop the row")
    return last


def _before(row: Row, column: str, response: Sequence[Message], place: str) -> list[dict[str, Any]]:
    """The messages of the row's prompt that stand before a response; none where the response repeats them.

    An assistant message that ends the prompt is left out where it is the response too (of a pair: `chosen`). A prompt
    that ends otherwise than with a user's message is continued by a response that begins with one, as in TRL.
    """
    name = next((name for name in _PROMPT if row.get(name) is not None), "")
    begins = response[0]["role"] in (*_SYSTEM, "user")
    if begins and not name:
        return []
    prompt = prompt_messages(row, place=place)
    chosen = row.get("chosen")
    first = [{"content": chosen}] if isinstance(chosen, str) else convert.mappings(convert.messages_of(chosen))
    pairs = [response, first or response]
    answers = [messages[-1 if begins else 0].get("content") for messages in pairs]
    closes = prompt[-1]["role"] == "assistant" and len(prompt) > 1 and not prompt[-1].get("tool_calls")
    if closes and prompt[-1]["content"] in answers and response[0]["role"] != "tool":
        prompt = prompt[:-1]
    if begins:
        said = [str(message["content"]) for message in response[:-1]]
        asked = [str(message["content"]) for message in prompt]
        if all(text.strip() in "".join(said) for text in asked):
            return []
        if response[0]["role"] == "user" and prompt[-1]["role"] in ("assistant", *_SYSTEM) and said[0] not in asked:
            return prompt
        name, column = _own_name(row, name), _own_name(row, column)
        found = f"{column!r} begins with a {response[0]['role']} message, and column {name!r} is not part of it"
        fix = f"; --rename {name} system for a system prompt, --rename {name} OTHER to leave it out, or write it into "
        raise column_error(place, found, row, f"{fix}{column!r}")
    if prompt[-1]["role"] != "assistant" or response[0]["role"] != "assistant":
        return prompt
    raise ValueError(
        f"{place}: column {_own_name(row, name)!r} ends with an assistant message, and {_own_name(row, column)!r} is "
        "another answer; drop one of them (rlkit does not continue an answer that is begun in the prompt)"
    )


def _pair(row: Row, place: str, template: Template) -> list[Turn]:
    """The chosen and the rejected response."""
    chosen, rejected = (_response(row, place, template, names=[name])[0] for name in ("chosen", "rejected"))
    if chosen.prompt != rejected.prompt:
        raise ValueError(
            f"{place}: chosen and rejected differ before their last message; a pair answers one prompt twice"
        )
    return [chosen, rejected]


def _response_repeats_prompt(row: Row) -> bool:
    """Whether the response begins with the words of a prompt of some length, both as text."""
    name = next((name for name in _RESPONSE[::-1] if row.get(name) is not None), "")
    return len(str(row.get("prompt")).strip()) >= _REPEATED and _repeats_prompt(row, (name,))


def _was_text(row: Row, name: str) -> bool:
    """Whether the messages of a column stand in the file as JSON text, beside a prompt that is text."""
    own = getattr(row, "own", row)
    return isinstance(own.get(name), str) and isinstance(row.get(name), list) and isinstance(row.get("prompt"), str)


def _repeats_prompt(row: Row, names: Sequence[str] = _PAIR_COLUMNS) -> bool:
    """Whether all responses, by default of a pair, begin with the words of the prompt, all of them as text."""
    texts = [row.get(name) for name in ("prompt", *names)]
    prompt, *responses = (text.strip() if isinstance(text, str) else "" for text in texts)
    end = r"\b" if prompt[-1:].isalnum() else ""
    return bool(prompt) and all(re.match(re.escape(prompt) + end, response) for response in responses)


def _missing_values(form: Form, row: Row) -> list[str]:
    """What stands alone as a text of the row, other than a tool's, where a missing value has become text."""
    values = [row.get(name) for names in (form.optional, *form.columns) for name in names]
    said = [m.get("content") for value in values for m in convert.mappings(value) if m.get("role") != "tool"]
    found = (text for text in (*values, *said) if isinstance(text, str) and text in ("nan", "NaN", "None"))
    return [*map(repr, dict.fromkeys(found))]


def _scored_less(row: Row) -> bool:
    """Whether a pair's own columns of scores, as numbers or their text, contradict its choice."""
    for what in ("score", "rating", "reward"):
        for names in ((f"chosen_{what}", f"rejected_{what}"), (f"{what}_chosen", f"{what}_rejected")):
            with suppress(TypeError, ValueError):
                chosen, rejected = (float(str(row.get(name))) for name in names)
                return chosen < rejected
    return False


def _answers_twice(row: Row) -> bool:
    """Whether two assistant messages of text follow each other after the first message, and the row trains both."""
    said = convert.mappings(row.get("messages") or row.get("prompt"))[1:]
    text = [m.get("role") == "assistant" and not m.get("tool_calls") and columns.is_trained(m, "") for m in said]
    return any(a and b for a, b in pairwise(text))


def _check_pair(row: Row, place: str, plain: bool) -> None:
    own = getattr(row, "own", row)
    for name in _PAIR_COLUMNS:
        if isinstance(row[name], str) and row[name] in {*own} - {*_PAIR_COLUMNS}:
            found = f"column {_own_name(row, name)!r} holds {row[name]!r}, the name of another column"
            raise column_error(place, found, row, "; write the text of that column there")
    if isinstance(row["chosen"], str) and not any(name in row for name in _PROMPT):
        lacks = "no column 'prompt'" if plain else "neither 'messages' nor 'prompt' is there"
        fix = (
            "; give the prompt as 'prompt', or train on the two as plain text, as TRL does: --no-chat-template, where "
            "their common beginning is the prompt"
        )
        raise column_error(place, lacks, row, "; chosen and rejected share no beginning" if plain else fix)


def _check_labelled(row: Row, place: str, plain: bool) -> None:
    name, value = cell(row, _LABELLED, place, form=LABELLED, plain=plain)
    if name != "messages" and isinstance(value, str):
        cell(row, _PROMPT, place, form=LABELLED, plain=plain)


def _labelled(row: Row, place: str, template: Template) -> list[Turn]:
    return _response(row, place, template, names=_LABELLED, label=columns.truth(row["label"]))


def _text(row: Row, place: str, template: Template) -> list[Turn]:
    """A text whose tokens all train. A bos that the tokenizer would add again is dropped."""
    tokenizer, text = template.tokenizer, row["text"]
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        text = text.removeprefix(bos)
    return [Turn(place, "", text, empty=not text.strip())]


_SFT, _RL_SFT, _PAIRS = (
    "rlkit sft reads it",
    "rlkit grpo, ppo and sft read it",
    "rlkit dpo, kto and reward_model read it",
)
_NONE = "no rlkit script trains on labels of steps, and reward_model learns one reward per response"
PROMPT = Form(
    "prompt", (_PROMPT,), _prompt, (), "rlkit grpo and ppo read it",
    fits=lambda row: [m.get("role") for m in convert.mappings(row.get("messages"))][-1:] != ["assistant"],
)  # fmt: skip
CONVERSATION = Form("conversation", (_PROMPT,), _conversation, (), _SFT, _check_conversation)
RESPONSE = Form("prompt with a response", (_PROMPT, _RESPONSE), _response, (), _SFT, _check_response)
PAIR = Form("preference pair", (("chosen",), ("rejected",)), _pair, _PROMPT, _PAIRS, _check_pair)
LABELLED = Form("labelled response", (_LABELLED, ("label",)), _labelled, _PROMPT, "rlkit kto reads it", _check_labelled)
TEXT = Form("text", (("text",),), _text, (), _SFT)
SFT = (RESPONSE, CONVERSATION, TEXT)
_OUTPUT = ("output", "response", "completion", "chosen")
_MORE = ("system", "kto_tag", "label", "history", "rejected")
_ANSWER = (*_OUTPUT[1:3], "answer", "chosen")
_PAIRED = ("preferred_output",), ("non_preferred_output",)
THEIRS = (
    # LLaMA-Factory data/README.md; TRL trl/data_utils.py, maybe_convert_to_chatml
    Form("ShareGPT conversation", (("conversations",),), _conversation, _MORE[:2], _SFT, None, convert.sharegpt),
    # LLaMA-Factory data/README.md; databricks/databricks-dolly-15k
    Form(
        "Alpaca row", (("instruction",), (*_OUTPUT, "input")), _response, ("input", "context", *_MORE), "", None,
        convert.alpaca,
    ),
    # LLaMA-Factory data/README.md, with the names of its own columns: prompt, query, response
    Form(
        "row of LLaMA-Factory", (("prompt",), ("query", "history"), ("response", "chosen")), _response,
        ("query", *_MORE), _SFT, None, convert.llama_factory, lambda row: isinstance(row["prompt"], str),
    ),
    # hub data sets openai/gsm8k, Open-Orca/OpenOrca and Intel/orca_dpo_pairs
    Form("question with an answer", (("question",), _ANSWER), _response, (), _RL_SFT, None, convert.question),
    # hub data set HuggingFaceH4/MATH-500
    Form(
        "problem with a solution", (("problem",), (*_OUTPUT[1:3], "solution", *_ANSWER[2:])), _response, (),
        _RL_SFT, None, convert.problem,
    ),
    # OpenRLHF openrlhf/cli/train_*.py, --data.input_key; slime slime/utils/arguments.py, --input-key
    Form(
        "row of OpenRLHF or slime", (("input",),), _response, ("output", "label"), _RL_SFT, None, convert.openrlhf,
        lambda row: not isinstance(row["input"], dict),
    ),
    # ColossalAI applications/ColossalChat/examples/data_preparation_scripts; OpenRLHF openrlhf/datasets
    Form(
        "row with a context of messages", (("context_messages", "context"),), _response, (), _PAIRS, None,
        convert.context, lambda row: bool(convert.mappings(convert.context(row)["messages"])),
    ),
    # hub data sets LDJnr/Capybara (input and output of each turn) and lmsys/lmsys-chat-1m (messages)
    Form(
        "row with a conversation", (("conversation",),), _conversation, ("system", "kto_tag"), _SFT, None,
        convert.conversation, lambda row: bool(convert.mappings(convert.messages_of(row["conversation"]))),
    ),
    # OpenAI's preference fine-tuning
    Form(
        "preference row of OpenAI", _PAIRED, _pair, ("input",), _PAIRS, None, convert.openai_pair,
        lambda row: isinstance(row.get("input"), dict),
    ),
)  # fmt: skip
_STEPWISE = Form("row of stepwise supervision", (_PROMPT, ("completions",), ("labels",)), _prompt, (), _NONE)
FORMS = (PROMPT, CONVERSATION, RESPONSE, PAIR, LABELLED, TEXT, _STEPWISE, *THEIRS)
