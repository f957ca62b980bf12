"""rlkit's own rows: their forms, and one check and one reader of each.

    prompt                  prompt, or messages                                  reinforcement learning
    conversation            messages                                             sft
    prompt with a response  prompt or messages; response or completion           sft
    preference pair         prompt or messages; chosen, rejected                 dpo, kto, reward_model
    labelled response       prompt or messages; response or completion; label    kto
    text                    text                                                 sft

Every reader of rows (`rl_prompts`, `sft_examples`, `preference_pairs`, `labelled_examples`) checks and renders its rows
with `read_rows`. `rlkit.compat.rows.read` makes such rows of other systems' rows. docs/data.md has the table for users.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple, TypeVar

from rlkit.data import columns
from rlkit.data import messages as of_row
from rlkit.data.chat import TURN_TEXTS, Message
from rlkit.data.images import COLUMNS as IMAGE_COLUMNS
from rlkit.data.images import MARK, PLACE, Image, ImageReader, gathered, marks
from rlkit.data.load import Row, Rows, column_error, place_of
from rlkit.data.markup import REASONING, markup_of, opened_by, without_opened
from rlkit.data.messages import Converted, decoded, mappings, messages_of
from rlkit.data.schema import (
    ANSWERS,
    FOR_REWARDS,
    HOLDS,
    IN_SFT,
    LABEL,
    LABELS,
    MESSAGES,
    OF_TEMPLATE,
    PAIRED,
    PROMPTS,
    RESPONSES,
    STRING,
)
from rlkit.data.template import NO_PROMPT, ROLES, Template, role_fix

X = TypeVar("X")
_log, _progress = logging.getLogger("rlkit.data"), logging.getLogger("rlkit.data.progress")
_SYSTEM = ("system", "developer")
_KINDS: dict[str, Callable[[Any], bool]] = {
    STRING: lambda value: isinstance(value, str),
    MESSAGES: lambda value: isinstance(value, list | tuple) and len(value) > 0,
    LABEL: lambda value: columns.truth(value) is not None,
}
_LABELLED = (*RESPONSES, "messages")
_REPEATED = 12  # characters: a response may begin with a shorter prompt by chance ("hi")
_READ = "rlkit.compat.rows.read(rows) reads rows of other systems"
RENAME = "; a column under another name is renamed with --rename"
FINISHED = "drop that message (a known answer belongs in a column of its own)"
_COLUMN_FIX = "check which columns hold the texts: one under another name is renamed with --rename"


class Turn(NamedTuple):
    """The text of a context up to the generation prompt (`prompt`), and the same with the assistant's turn (`whole`).

    A `literal` turn still lacks its end-of-turn token, and any turn its `end`. `blocks` is the mask of the template's
    `{% generation %}`. `empty`: the turn (of a prompt: the prompt) has neither text nor a tool call. `begun`: the text
    with which a prompt begins the answer. `untrained`: another assistant message of the row is context, though the row
    does not exclude it from the loss. `unanswered`: messages follow the last one.
    """

    place: str
    prompt: str
    whole: str = ""
    empty: bool = False
    label: bool | None = None
    literal: bool = True
    blocks: list[int] | None = None
    untrained: bool = False
    images: tuple[Image, ...] = ()
    begun: str = ""
    unanswered: bool = False
    end: int | None = None


class Form(NamedTuple):
    """A form of row. An entry of `columns` holds the names that one required column may have; `read` renders a row.

    `optional` names columns that `read` may need too. `hint` says which script reads the form.
    """

    name: str
    columns: tuple[tuple[str, ...], ...]
    read: Callable[[Converted, str, Template], list[Turn]]
    optional: tuple[str, ...] = ()
    hint: str = ""

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

    @property
    def names(self) -> set[str]:
        """All of its columns."""
        return {name for names in (self.optional, *self.columns) for name in names}

    @property
    def of_prompt(self) -> tuple[str, ...]:
        """The columns of a form of another system that may be part of the prompt."""
        return ("history", *(self.optional if self.read is _pair else self.columns[0]))

    def used(self, row: Row) -> set[str]:
        """The columns of the row that are read: of several names of one column the first that is not null."""
        there = (next((name for name in names if row.get(name) is not None), "") for names in self.columns)
        return {*there, *self.optional}


class NothingLeft(ValueError):
    """None of the rows is left to train on: each is too long, empty or the like."""


class LacksColumn(ValueError):
    """A row lacks a column of the form that it is read as, which looks most like the form `near`.

    `first` says what the first row of the file is, in an error of another one.
    """

    def __init__(
        self, place: str, problem: str, row: Row, form: Form, *, near: Form, fix: str, first: str = ""
    ) -> None:
        super().__init__(f"{column_error(place, problem, row, fix)}; {_READ}")
        self.place, self.problem, self.row = place, problem, row
        self.form, self.near, self.fix, self.first = form, near, fix, first


def read_rows(rows: Sequence[Row], template: Template, *forms: Form, **limit: int) -> list[list[Turn]]:
    """The turns of each row, by the first of `forms` whose columns it has. `limit`: the token limit, to be checked.

    Raises ValueError, with the row (see `place_of`), for a row that fits none of them or holds a bad value.
    """
    ((name, value),) = limit.items()
    turns = []
    found = check_columns(rows, *forms, apply_chat_template=template.apply)
    if not found:
        raise ValueError("rows is empty: there is nothing to train on")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    unused, told = columns.Unused(rows), template.system_prompt
    if template.apply:
        markup_of(template.tokenizer).report()
        told = told and markup_of(template.tokenizer).plain(told)
    for index, (form, row) in enumerate(found):
        place = place_of(rows, index)
        own = template.of_row(row, place) if template.apply else template
        turns.append(_with_images(form.read(row, place, own), row, rows, template, place))
        told = None if told and any(told.strip() in turn.prompt for turn in turns[-1]) else told
        turns[-1] = [_opened_once(turn, template) for turn in turns[-1]] if template.apply else turns[-1]
        used = _used(row, form, plain=not template.apply)
        used |= {*IMAGE_COLUMNS} if row.get("images") else set()
        if form is PROMPT:
            used |= {*FOR_REWARDS}
        unused.add(index, row, used, *_said(row, form), own.lost)
        if len(turns) % 1000 == 0:
            _progress.info("rendering: %d of %d rows", len(turns), len(rows))
    where = {PROMPT: "the prompt (rewards see all columns)", TEXT: "the text"}.get(form, "the prompt or the response")
    if told:
        _log.warning("the system prompt %r is in no row: each has a system message of its own", told[:60])
    unused.report(template.not_read, where=where)
    _name_oddities(rows, found)
    markup_of(template.tokenizer).report_opened(turns[0][0].prompt if form is PROMPT else "")
    return turns


def _opened_once(turn: Turn, template: Template) -> Turn:
    """An answer after a prompt that has opened its reasoning; taken literally, without a second tag at its start.

    One that never closes it is named, once.
    """
    opened = opened_by(turn.prompt) if turn.whole.startswith(turn.prompt) else ""
    tag, answer = opened.strip(), turn.whole.removeprefix(turn.prompt)
    if not re.fullmatch(r"<\w+>|\[\w+\]|◁\w+▷", tag):
        return turn
    answer = without_opened(answer, tag, opened[len(tag) :]) if turn.literal else answer
    closing, told = f"{tag[0]}/{tag[1:]}", markup_of(template.tokenizer).told
    if closing not in answer and closing not in told:
        told.add(closing)
        _log.warning(
            "%s: the chat template opens %s, which the answer %r never closes, so that the answer is trained within "
            "the reasoning: write the reasoning and %s before it, or, where the template has it, --template-args "
            "'{\"enable_thinking\": false}'", turn.place, tag, answer.strip()[:40], closing,
        )  # fmt: skip
    return turn._replace(whole=turn.prompt + answer)


def _with_images(turns: list[Turn], row: Converted, rows: Sequence[Row], template: Template, place: str) -> list[Turn]:
    """The turns of a row with its images in the places that `gathered` found."""
    if columns.is_empty(row.get("images")):
        if template.images is not None and template.images.marked and (num := marks(row)):
            raise column_error(place, f"has {num} places for images ({MARK}) and no images", row)
        return [t if template.images is None else _placed(t, (), template.images, place) for t in turns]
    reader = template.images
    if reader is None:
        column = next((name for name in IMAGE_COLUMNS if not columns.is_empty(row.own.get(name))), None)
        found = "its messages show images" if column is None else f"column {column!r} holds images"
        fix = "drop the row" if column is None else f"train on its text with --rename {column} OTHER"
        fix = f"; take a model that reads images (docs/models.md), or {fix}"
        raise column_error(place, f"{found}, and the model reads text only", row, fix)
    images = reader.read(row, rows, place)
    shown = [_placed(t, images, reader, place) for t in turns]
    if (num := max(len(t.images) for t in shown)) < len(images):
        raise column_error(place, f"{len(images)} images, of which the text that is read shows {num}", row)
    return shown


def _placed(turn: Turn, images: tuple[Image, ...], reader: ImageReader, place: str) -> Turn:
    """The turn with placeholders for the first of the images, and those that it shows."""
    prompt, whole = (reader.placed(text, images, place) for text in (turn.prompt, turn.whole))
    shown = images[: (turn.whole or turn.prompt).count(PLACE)]
    return turn._replace(prompt=prompt, whole=whole, images=shown, blocks=None if shown else turn.blocks)


def _name_oddities(rows: Sequence[Row], found: Sequence[tuple[Form, Converted]]) -> None:
    """Log, in a line each, what is trained as it is and seldom meant."""
    again = "repeat the prompt at the beginning of"
    for forms, what, bad, why in (
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
        items = [(index, row) for index, (form, row) in enumerate(found) if form in forms or not forms]
        drop(rows, items, bad, what=what, why=why, keep=True)
    texts = [(index, _missing_values(form, row)) for index, (form, row) in enumerate(found)]
    why = "have a text that is a missing value, as pandas writes it"
    drop(rows, texts, bool, what="rows", why=why, keep=True, note=lambda found: f" ({', '.join(found)})")


def check_columns(rows: Sequence[Row], *forms: Form, apply_chat_template: bool = True) -> list[tuple[Form, Converted]]:
    """The form of each row, the first of `forms` whose columns it has, and the row decoded; needs no tokenizer.

    Raises ValueError, with the row (see `place_of`), for a row in another form than the first, for one that lacks a
    column of the last form (`LacksColumn`), or holds a value of the wrong type in one, and for one that is in two forms
    with different content.
    """
    check_dicts(rows)
    return [*checked(rows, partial(place_of, rows), forms, plain=not apply_chat_template)]


def checked(
    rows: Iterable[Row], place_at: Callable[[int], str], forms: Sequence[Form], *, plain: bool
) -> Iterator[tuple[Form, Converted]]:
    """`check_columns`, row by row. `plain`: without a chat template."""
    first = ""
    for index, given in enumerate(rows):
        place = place_at(index)
        row = _decoded(given, place)
        row = _in_plain_text(row, forms, place) if plain else row
        if index == 0:
            forms = _of_one_file(forms, row, plain)
        form = next((form for form in forms if not form.missing(row)), forms[-1])
        form = _without_conflict(row, form, forms, place)
        cells = [cell(row, names, place, form=form, plain=plain, first=first) for names in form.columns]
        for name, value in cells:
            _numbered(row, name, value, place)
        _check_content(row, form, cells[0], place, plain=plain)
        if form not in (PROMPT, TEXT, PAIR):
            _refuse_two(row, form, place)
        columns.refuse_media(row.own, place)
        if form is not PROMPT:
            columns.refuse_flags(row.own, place)
        for name in _used(row, form, plain=plain) & {*row.own}:
            columns.refuse_surrogates(row.own[name], place, name)
        first = first or f"{place} is {(row.source or form).title}"
        yield form, row


def _decoded(row: Row, place: str) -> Converted:
    """The row with lists of messages for their JSON text, for one message, and for turns of `from` and `value`."""
    try:
        new = decoded(row)
        new |= gathered({**row, **new}, place)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if str(error).startswith(place):
            raise
        raise column_error(place, f"cannot be read: {error}", row) from None
    return Converted(row, new)


def _in_plain_text(row: Converted, forms: Sequence[Form], place: str) -> Converted:
    """The row with its prompt as one text: the contents of its messages, joined, or the common beginning of a pair."""
    new: Row = {}
    made = None if row.get("messages") is row.own.get("messages") else row["messages"]
    messages = made or row.get("prompt") or row.get("messages")
    if PROMPT in forms and messages and isinstance(messages, list | tuple):
        turns = prompt_messages({"messages": messages}, place=place)
        if lost := [key for turn in turns for key in ("tool_calls", *TURN_TEXTS[1:]) if turn.get(key)]:
            found = f"a message holds {lost[0]!r}, and --no-chat-template joins the contents of messages only"
            raise column_error(place, found, row, "; write it into the content, or use a chat template")
        new["prompt"] = "".join(turn["content"] for turn in turns)
    if PAIR in forms:
        new |= of_row.common_prompt(row)
    return Converted(row, new)


def check_dicts(rows: Any) -> None:
    """TypeError for what is no sequence of dicts, such as a path, one row or a list of strings."""
    if isinstance(rows, Mapping):
        raise TypeError(f"rows must be a list of dicts, got one dict: give [row]; its keys are {sorted(rows)[:8]}")
    if not isinstance(rows, str) and not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise TypeError(f"rows must be a list of dicts, got {repr(rows)[:80]}: of a generator give list(rows)")
    if hasattr(rows, "columns") and hasattr(rows, "dtypes"):
        raise TypeError("rows must be a list of dicts, got a DataFrame: give rows.to_dict('records')")
    if isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        wrong = rows if isinstance(rows, str) else next(row for row in rows if not isinstance(row, Mapping))
        fix = "load_rows(path) reads a file; of strings give [{'prompt': text} for text in texts]"
        raise TypeError(f"rows must be dicts, got {repr(wrong)[:80]}: {fix}")


def _used(row: Converted, form: Form, *, plain: bool) -> set[str]:
    """The columns of the file of which a row's text is made, and its label."""
    own, used = row.own, form.used(row.own)
    if row.source:
        used = (used - IN_SFT if row.source.names & IN_SFT else used) | row.source.used(own)
    used -= ({*IN_SFT} if form is PAIR else {*PAIRED}) | {*LABELS}
    if form is LABELLED:
        used |= {name for name in LABELS if columns.truth(own.get(name)) is not None}
    return used | ({*OF_TEMPLATE, *PROMPTS} if not plain and form is not TEXT else set())


def _said(row: Row, form: Form) -> tuple[list[str], list[str]]:
    """The texts of a row that are context, and those that are answers."""
    asked, answers = list[str](), list[str]()
    names = {TEXT: ("text",), PROMPT: (), PAIR: PAIRED}.get(form, RESPONSES)
    for name in names if form is TEXT else (*PROMPTS, *names):
        value, is_answer = row.get(name), name not in (*PROMPTS, "text")
        turns = mappings(value) if not isinstance(value, str) else [{"content": value}]
        for number, turn in enumerate(turns, 1):
            content = turn.get("content")
            parts = [content] if isinstance(content, str) else [p.get("text") for p in mappings(content)]
            trained = number == len(turns) if is_answer else turn.get("role") == "assistant"
            texts = answers if trained and (is_answer or form in (CONVERSATION, LABELLED)) else asked
            texts.extend(str(part) for part in parts if part)
    return asked, answers


def is_text(row: Row) -> bool:
    """Whether a row is a text without a prompt."""
    return not TEXT.missing(row) and not any(row.get(name) is not None for name in PROMPTS)


def _of_one_file(forms: Sequence[Form], row: Row, plain: bool) -> tuple[Form, ...]:
    """Forms that the rows of a file may have after its first row `row`."""
    if TEXT in forms and is_text(row):
        return (TEXT,)
    if PAIR in forms and not PAIR.missing(row):
        return (PAIR,)
    others = (TEXT, PAIR, CONVERSATION) if plain else (TEXT, PAIR)
    return tuple(form for form in forms if form not in others) or tuple(forms)


def _without_conflict(row: Converted, form: Form, forms: Sequence[Form], place: str) -> Form:
    """The form, or `CONVERSATION` where that holds the response too; ValueError for two forms of different content."""
    prompt, messages = row.get("prompt"), mappings(row.get("messages"))
    said = [str(message.get("content")) for message in messages]
    asked = [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in mappings(prompt)]
    name = "prompt"
    if not said or all(text.strip() in "".join(said) for text in asked):
        if form is not RESPONSE or CONVERSATION not in forms or not said or messages[-1].get("role") != "assistant":
            return form
        name, response = cell(row, RESPONSES, place, form=RESPONSE)
        if response in (said[-1], [messages[-1]]):
            return CONVERSATION
    name = own_name(row, name)
    both = f"{own_name(row, 'messages')!r} and {name!r}"
    found = f"columns {both} hold different texts ({CONVERSATION.title} and {form.title})"
    raise column_error(place, found, row, f"; rename the one that is not meant, e.g. --rename {name} OTHER")


def _refuse_two(row: Converted, form: Form, place: str) -> None:
    """ValueError for a row with two responses, or two labels, that differ."""
    own = row.own
    given = {name: own[name] for name in RESPONSES if not columns.is_empty(own.get(name))}
    given = {**given, **decoded(given)}
    made = {name: row[name] for name in RESPONSES if row.get(name) is not None} if row.source else {}
    read = [(next((name for name in own if own[name] is value), made), value) for made, value in made.items()]
    labels = [(name, columns.truth(own.get(name))) for name in LABELS if form is LABELLED]
    for what, values in (
        ("texts", [(name, _answer_text(value)) for name, value in [*read, *given.items()]]),
        ("labels", [(name, value) for name, value in labels if value is not None]),
    ):
        if other := next((name for name, value in values if value != values[0][1]), None):
            found = f"columns {values[0][0]!r} and {other!r} hold different {what}"
            raise column_error(place, found, row, f"; rename the one that is not meant, e.g. --rename {other} OTHER")


def _answer_text(value: Any) -> str:
    """The text of an answer: a string, or the content of the last of its messages."""
    last = (mappings(value) or [{"content": value}])[-1].get("content")
    parts = [str(part.get("text")) for part in mappings(last)]
    return ("".join(parts) if parts else str(last)).strip()


def cell(
    row: Converted, names: Sequence[str], place: str, *, form: Form, plain: bool = False, first: str = ""
) -> tuple[str, Any]:
    """(name, value) of the first column of `names` that a row has, the empty ones and then the null ones last.

    A column holds a string or messages, `messages` only messages, `label` true or false; in a `plain` row (without a
    chat template) all but the label are strings. ValueError, with the columns of the row, for a row without any of
    `names` (`LacksColumn`), or with a value of another type. `first` says what the first row is.
    """
    names = [name for name in names if not (plain and name == "messages")]
    there = [name for name in names if name in row]
    if not there:
        lacks = f"no column {names[0]!r}" if len(names) == 1 else f"neither {' nor '.join(map(repr, names))} is there"
        if plain and row.get("messages") is not None:
            fix = "; messages need a chat template: drop --no-chat-template, or give --chat-template FILE"
            raise column_error(place, lacks, row, fix)
        raise LacksColumn(place, lacks, row, form, near=form, fix=f"; {form}{RENAME}", first=first)
    name = min(there, key=lambda name: (row[name] is None, columns.is_empty(row[name])))
    value = row[name]
    kinds = [kind for kind in HOLDS.get(name, (STRING, MESSAGES)) if not (plain and kind == MESSAGES)]
    if not any(_KINDS[kind](value) for kind in kinds):
        note = " (messages need a chat template)" if plain and isinstance(value, list) else ""
        found = f"column {own_name(row, name)!r} must be {' or '.join(kinds)}{note}, got {repr(value)[:80]}"
        raise column_error(place, found, row)
    texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if texts and name in ("prompt", *RESPONSES, *PAIRED):
        found = f"column {own_name(row, name)!r} is a list of texts, got {repr(value)[:80]}"
        raise column_error(place, found, row, "; write one row for each of them")
    return name, value


def _numbered(row: Converted, name: str, value: Any, place: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The messages in a column, each with its place: "messages[0]". ValueError for one without a role.

    A system message that a column `system` gave has the number -1.
    """
    messages = value if isinstance(value, list | tuple) else []
    system = row.get("system") if row.source else None
    start = -1 if system and [m.get("content") is system for m in mappings(messages[:1])] == [True] else 0
    found = [(f"{place}: {own_name(row, name)}[{number}]", message) for number, message in enumerate(messages, start)]
    for at, message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            bare = isinstance(message, Mapping) and message.get("role") is None
            more = " or {'from': 'human', 'value': '...'}" if bare and isinstance(message.get("from", ""), str) else ""
            raise ValueError(
                f"{at} must be an object like {{'role': 'user', 'content': '...'}}{more}, got {repr(message)[:80]}"
            )
    return found


def own_name(row: Converted, name: str) -> str:
    """The name in the file of a column of the converted row: of a prompt that of the first column it is made of."""
    own = row.own
    if row.get(name) is None or row[name] is own.get(name):
        return name
    same = [column for column in own if own[column] is row[name]]
    made_of = row.source.of_prompt if row.source and name in PROMPTS else ()
    same += sorted((column for column in made_of if column in own), key=lambda column: columns.is_empty(own[column]))
    return same[0] if same and name not in own else name


def prompt_messages(row: Row, *, system_prompt: str | None = None, place: str = "the row") -> list[dict[str, Any]]:
    """The conversation of a row: its `messages`, or its `prompt` (a string is one user message), after `system_prompt`.

    The row's own `system` or `system_prompt` comes before the argument.

    A conversation that begins with a system message keeps that one. The content of a message is text: parts
    `{"type": "text", "text": ...}` are joined without a separator, as chat templates join them, and an assistant
    message with neither content nor tool calls holds "". `place` names the row in errors.

    Raises ValueError for a row without `messages` and `prompt`, for a malformed message, and for any other content:
    null, a number, or a part that is not text, such as an image.
    """
    row = row if isinstance(row, Converted) else Converted(row, decoded(row))
    name, value = cell(row, PROMPTS, place, form=PROMPT)
    value = [{"role": "user", "content": value}] if isinstance(value, str) else messages_of(value)
    given = _numbered(row, name, value, place)
    for at, message in given:
        texts = {message.get(key) for key in ("content", "value") if isinstance(message.get(key), str)} - {""}
        if len(texts) > 1:
            raise ValueError(f"{at} has two texts, under 'content' and under 'value': drop one")
        if "content" not in message and isinstance(message.get("value"), str):
            raise ValueError(
                f"{at} has its text under the key 'value': beside 'role' the key is 'content', and 'value' goes with "
                "'from'"
            )
    try:
        turns = of_row.turns([message for _, message in given])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    messages = [_with_text(message, at) for message, (at, _) in zip(turns, given)]
    own, first = of_row.system_of(row, place), messages[0] if messages[0]["role"] in _SYSTEM else {}
    if own is not None and first and first["content"] != own:
        name = "system" if row.get("system") == own else "system_prompt"
        found = f"the messages begin with another system message than that of column {name!r}"
        raise column_error(place, found, row, f"; rename the one that is not meant, e.g. --rename {name} OTHER")
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
        raise NothingLeft(f"{source}all {len(items)} {what} {why}; {fix}")
    first = ", ".join(place_of(rows, index, with_source=False) + note(item) for index, item in found[:5])
    _log.warning(
        "%s%s %d of %d %s that %s: %s%s",
        source, "kept" if keep else "dropped", len(found), len(items), what, why, first, ", ..." * (len(found) > 5),
    )  # fmt: skip
    return [*items] if keep else [(index, item) for index, item in items if not bad(item)]


TooLong = Literal["drop", "cut-left", "cut-right", "error"]


def shorten(
    rows: Sequence[Row],
    items: Sequence[tuple[int, X]],
    length: Callable[[X], int],
    cut: Callable[[X, int, bool], X | None],
    *,
    what: str,
    too_long: TooLong,
    lose: str = "their {side} tokens",
    **limit: int,
) -> list[tuple[int, X]]:
    """`drop` the items with more tokens than the limit, or raise ValueError for the first, or cut them.

    `cut(item, limit, left)` returns the item without its first (`left`) or last tokens, None where nothing is left to
    train on: it is dropped. How many are cut is logged.
    """
    ((name, value),) = limit.items()
    wrong = [(index, item) for index, item in items if length(item) > value]
    if not wrong or too_long == "drop":
        fix = f"the shortest has {min(length(item) for _, item in items)} tokens: raise it, or give shorter ones"
        return drop(
            rows, items, lambda item: length(item) > value, what=what, why=f"are longer than `{name}` {value}", fix=fix,
            note=lambda item: f" ({length(item)} tokens)",
        )  # fmt: skip
    if too_long == "error":
        index, item = wrong[0]
        found = f"{len(wrong)} of {len(items)} {what} are longer than `{name}` {value}"
        fix = "raise it, or `too_long` drop, cut-left or cut-right"
        raise ValueError(f"{place_of(rows, index)}: {length(item)} tokens; {found}: {fix}")
    shorter = [(i, cut(item, value, too_long == "cut-left") if length(item) > value else item) for i, item in items]
    side = "first" if too_long == "cut-left" else "last"
    why = f"are longer than `{name}` {value} and lose {lose.format(side=side)}"
    drop(rows, items, lambda item: length(item) > value, what=what, why=why, keep=True)
    kept = drop(rows, shorter, lambda item: item is None, what=what, why="have nothing left to train on")
    return [(index, item) for index, item in kept if item is not None]


def _with_text(message: Message, place: str) -> dict[str, Any]:
    """The message with text as its content. A template would write anything else as Python does: "None", "[{...}]"."""
    content = message.get("content")
    for name in (*IMAGE_COLUMNS, *columns.MEDIA):
        if not columns.is_empty(message.get(name)):
            raise ValueError(f"{place} holds {name!r}, which is not read: images go into a column 'images' of the row")
    if isinstance(content, str):
        return dict(message)
    if content is None and message["role"] == "assistant":
        return dict(message) if message.get("tool_calls") else {**message, "content": ""}
    if not isinstance(content, list | tuple) or not content:
        keys = ", ".join(message) if "content" not in message and len(message) > 1 else ""
        fix = f"; its keys are {keys}: the text is to be under 'content'" if keys else ""
        raise ValueError(f"{place}.content must be a string, got {repr(content)[:80]}{fix}")
    return {**message, "content": columns.joined_parts(content, f"{place}.content")}


def _is_empty(message: Message) -> bool:
    """Whether a message of `prompt_messages` holds no text, white space aside, and no tool call."""
    return not message.get("tool_calls") and not any(str(message.get(key) or "").strip() for key in TURN_TEXTS)


def _context(row: Converted, place: str, template: Template, *, check: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """A row's prompt as text, up to the generation prompt, and its messages (none without a chat template)."""
    if not template.apply:
        return cell(row, ("prompt",), place, form=PROMPT, plain=True)[1], []
    messages = prompt_messages(row, system_prompt=template.system_prompt, place=place)
    begun = template.continue_answer and begins_answer(messages)
    if check:
        template.refuse_unwritten(messages[:-1] if begun else messages, place)
    return template.begun_text(messages, place) if begun else template.text(messages, place, opened=True), messages


def prompt_text(row: Row, place: str, template: Template) -> str:
    """The text of a row that was read, up to where the answer goes on, without its checks."""
    template = replace(template.of_row(row, place) if template.apply else template, continue_answer=True)
    return _context(Converted(row, decoded(row)), place, template, check=False)[0]


def begins_answer(messages: Sequence[Message]) -> bool:
    """Whether the last message of a prompt is the beginning of the answer."""
    return len(messages) > 1 and messages[-1].get("role") == "assistant"


def _prompt(row: Converted, place: str, template: Template) -> list[Turn]:
    text, messages = _context(row, place, replace(template, continue_answer=True))
    if messages and messages[-1]["role"] == "assistant" and len(messages) == 1:
        raise ends_with_answer(place, FINISHED)
    begun = str(messages[-1].get("content") or "") if begins_answer(messages) else ""
    empty = all(map(_is_empty, messages)) if messages else not text.strip()
    template.lost.pop(NO_PROMPT if empty else None, None)  # it is dropped
    return [Turn(place, text, empty=empty, begun=begun)]


def check_begun(rows: Sequence[Row], turns: Sequence[Turn], *, continue_answer: bool) -> None:
    """Log prompts that begin the answer. ValueError for those that may be finished answers: not all rows begin alike.

    With `continue_answer` they are continued whatever they are.
    """
    begun = [(index, turn.begun) for index, turn in enumerate(turns) if turn.begun]
    alike = len(begun) == len(turns) > 1 and len({text for _, text in begun}) == 1
    if begun and not (alike or continue_answer):
        fix = f"{FINISHED}, or --continue-answer samples on after it"
        raise ends_with_answer(place_of(rows, begun[0][0]), fix)
    why = f"end with the beginning of the answer, after which sampling goes on: {(begun or [(0, '')])[0][1][-60:]!r}"
    drop(rows, begun, bool, what="prompts", why=why, keep=True)


def ends_with_answer(place: str, fix: str) -> ValueError:
    """The error of a prompt whose last message is the assistant's."""
    return ValueError(f"{place}: the conversation ends with an assistant message, so there is nothing to answer; {fix}")


def question_messages(row: Row) -> list[dict[str, Any]]:
    """`prompt_messages` without a last assistant message, which begins the answer."""
    messages = prompt_messages(row)
    return messages[:-1] if begins_answer(messages) else messages


def _no_answer(row: Converted, place: str, roles: Sequence[Any]) -> ValueError:
    if "assistant" in roles:
        return column_error(place, f"needs an assistant message with a message before it, got roles {roles}", row)
    if unknown := [role for role in roles if role not in (*ROLES, *_SYSTEM)]:
        fix = role_fix(roles)
        return ValueError(
            f"{place}: unknown role {unknown[0]!r}, and no message of the role 'assistant' to train on{fix}"
        )
    lacks = "no response to train on: needs the column 'completion' or 'response', or an assistant message"
    lacks += "".join(f" (column {name!r} is null)" for name in RESPONSES if name in row and row[name] is None)
    return LacksColumn(place, lacks, row, RESPONSE, near=CONVERSATION, fix=RENAME)


def _check_content(row: Converted, form: Form, first: tuple[str, Any], place: str, *, plain: bool) -> None:
    """ValueError for a row that has the columns of its form, and content that the form cannot have.

    `first`: the name and the value of the first column of the form.
    """
    name, value = first
    if form is CONVERSATION:
        roles = ["user"] if isinstance(value, str) else [message["role"] for message in value]
        if not {"assistant", *of_row.CALLS} & {*roles}:
            raise _no_answer(row, place, roles)
    for label in LABELS[::-1] if form in (CONVERSATION, RESPONSE) else ():
        if columns.truth(row.get(label)) is not None:
            what = "a conversation with a label" if form is CONVERSATION else "a labelled response"
            found = f"is {what} (column {label!r} is {row[label]}), and sft trains on every row"
            raise column_error(place, found, row, f"; rlkit kto reads it, or --rename {label} OTHER trains all of them")
    for side in PAIRED if form is PAIR else ():
        if isinstance(row[side], str) and row[side] in {*row.own} - {*PAIRED}:
            found = f"column {own_name(row, side)!r} holds {row[side]!r}, the name of another column"
            raise column_error(place, found, row, "; write the text of that column there")
    if form is PAIR and isinstance(value, str) and not any(name in row for name in PROMPTS):
        lacks = "no column 'prompt'" if plain else "neither 'messages' nor 'prompt' is there"
        fix = (
            "; give the prompt as 'prompt', or train on the two as plain text, as TRL does: --no-chat-template, where "
            "their common beginning is the prompt"
        )
        raise column_error(place, lacks, row, "; chosen and rejected share no beginning" if plain else fix)
    if form is LABELLED and name != "messages" and isinstance(value, str):
        cell(row, PROMPTS, place, form=LABELLED, plain=plain)


def _conversation(row: Converted, place: str, template: Template) -> list[Turn]:
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
        turn = _turn(messages, end, place, template)
        if turn.blocks is None and not turn.whole.startswith(turn.prompt):
            raise template.reopened(messages, end, place)
        written = turn.whole.removeprefix(turn.prompt)
        if template.writes(messages[end], written, place):
            template.name_trimmed(messages[end], written, place)
        first, unanswered = messages[0]["role"] == "assistant", ends[-1] + 1 < len(messages)
        turns.append(turn._replace(untrained=first, unanswered=unanswered))
    if not turns:
        raise ValueError(f"{place}: every assistant message is excluded from the loss: drop the row")
    return turns


def _turn(messages: list[dict[str, Any]], end: int, place: str, template: Template) -> Turn:
    """The turn of the assistant's message `end`, as the template writes it."""
    (prompt, whole), blocks = template.turn(messages, end, place), template.blocks(messages[: end + 1])
    markup, said = markup_of(template.tokenizer), str(messages[end].get("content") or "")
    if (stop := template.end_after(whole, messages, end, place)) is not None:
        whole = whole.removesuffix(markup.closing)
    empty = _is_empty({**messages[end], "content": markup.without_stop(said)})
    return Turn(place, prompt, whole, empty, literal=False, blocks=blocks, end=stop)


def _answered(messages: list[dict[str, Any]], response: str, place: str, template: Template) -> Turn | None:
    """The turn of a response as the template writes it in a conversation.

    None, for a literal turn, where the template does not go on from its generation prompt, changes the text, or adds
    reasoning to that of the response.
    """
    message = {"role": "assistant", "content": response}
    try:
        turn = _turn([*messages, message], len(messages), place, template)
    except ValueError:
        return None
    written = turn.whole.removeprefix(turn.prompt)
    tags, opened = REASONING.findall(response), REASONING.findall(opened_by(turn.prompt))
    as_said = tags in ([], REASONING.findall(written), opened + REASONING.findall(written))
    same = template.writes(message, written, place, literal=True) and turn.whole.startswith(turn.prompt)
    if not (same and as_said):
        return None
    template.name_trimmed(message, written, place)
    return turn


def _response(row: Converted, place: str, template: Template, *, names: Sequence[str] = RESPONSES) -> list[Turn]:
    """A response (a string, or the last of a list of messages) after the row's prompt or its own earlier messages.

    Of a `completion` in sft, every assistant message is a turn.
    """
    column, response = cell(row, names, place, form=RESPONSE, plain=not template.apply)
    name, label = own_name(row, column), columns.truth(row["label"]) if names is _LABELLED else None
    if not template.apply:
        prompt, _ = _context(row, place, template)
        return [Turn(place, prompt, prompt + response, empty=not response.strip(), label=label)]
    messages = [{"role": "assistant", "content": response}]
    if not isinstance(response, str):
        messages = prompt_messages(Converted({name: response}, {"messages": response}), place=place)
    ends = [end for end, message in enumerate(messages) if message["role"] == "assistant"]
    several = names is RESPONSES and len(ends) > 1
    response = "" if several else _last(messages, name, place)["content"]
    before = [] if column == "messages" else _before(row, column, messages, place, template.continue_answer)
    row = Converted(row, {"prompt": None, "messages": before + messages})
    if several:
        context = prompt_messages(row, system_prompt=template.system_prompt, place=place)
        start = len(context) - len(messages)
        return _turns(context, [start + end for end in ends if start + end], place, template)
    unknown = [key for key, value in messages[-1].items() if columns.is_unknown_key(key, value)]
    template.lost.update({("message key", key, "response"): None for key in unknown})
    prompt, asked = _context(Converted(row, {"messages": row["messages"][:-1]}), place, template)
    template.refuse_markup(response, f"{place}: a response")
    turn = None if begins_answer(asked) else _answered(asked, response, place, template)
    markup = markup_of(template.tokenizer)
    turn = turn or Turn(place, prompt, prompt + markup.stopped(response))
    empty = not markup.without_stop(response).strip()
    blocks = turn.blocks if names is RESPONSES else None  # of a pair and a label all after the prompt is the response
    more = names is _LABELLED and any(columns.is_trained(messages[end], place) for end in ends[:-1])
    return [turn._replace(empty=empty, label=label, untrained=more, blocks=blocks)]


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


def _before(
    row: Converted, column: str, response: Sequence[Message], place: str, continue_answer: bool
) -> list[dict[str, Any]]:
    """The messages of the row's prompt that stand before a response; none where the response repeats them.

    An assistant message that ends the prompt is left out where it is the response too (of a pair: `chosen`). A prompt
    that ends otherwise than with a user's message is continued by a response that begins with one, as in TRL. With
    `continue_answer` the response goes on after an assistant message that ends the prompt.
    """
    name = next((name for name in PROMPTS if row.get(name) is not None), "")
    begins = response[0]["role"] in (*_SYSTEM, "user")
    if begins and not name:
        return []
    prompt = prompt_messages(row, place=place)
    chosen = row.get("chosen")
    first = [{"content": chosen}] if isinstance(chosen, str) else mappings(messages_of(chosen))
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
        name, column = own_name(row, name), own_name(row, column)
        found = f"{column!r} begins with a {response[0]['role']} message, and column {name!r} is not part of it"
        fix = f"; --rename {name} system for a system prompt, --rename {name} OTHER to leave it out, or write it into "
        raise column_error(place, found, row, f"{fix}{column!r}")
    if prompt[-1]["role"] != "assistant" or response[0]["role"] != "assistant":
        return prompt
    if continue_answer and len(response) == 1:
        return prompt
    raise ValueError(
        f"{place}: column {own_name(row, name)!r} ends with an assistant message, and {own_name(row, column)!r} is "
        "another answer; drop one of them, or --continue-answer, where the response goes on after the prompt's"
    )


def _pair(row: Converted, place: str, template: Template) -> list[Turn]:
    """The chosen and the rejected response."""
    chosen, rejected = (_response(row, place, template, names=[name])[0] for name in ("chosen", "rejected"))
    if chosen.prompt != rejected.prompt:
        raise ValueError(
            f"{place}: chosen and rejected differ before their last message; a pair answers one prompt twice"
        )
    return [chosen, rejected]


def _was_text(row: Converted) -> bool:
    """Whether the messages of a response stand in the file as JSON text, beside a prompt that is text."""
    read = [name for name in ANSWERS if isinstance(row.own.get(name), str) and isinstance(row.get(name), list)]
    return bool(read) and isinstance(row.get("prompt"), str)


def _repeats_prompt(row: Converted, *names: str) -> bool:
    """Whether the columns `names`, all of them text, begin with the prompt; by default a response, a longer one."""
    of_row = names or [name for name in RESPONSES[::-1] if row.get(name) is not None][:1]
    texts = [row.get(name) for name in ("prompt", *of_row)]
    prompt, *responses = (text.strip() if isinstance(text, str) else "" for text in texts)
    end = r"\b" if prompt[-1:].isalnum() else ""
    begins = [bool(re.match(re.escape(prompt) + end, response)) for response in responses]
    return len(prompt) >= (1 if names else _REPEATED) and all(begins) and bool(begins)


def _missing_values(form: Form, row: Row) -> list[str]:
    """What stands alone as a text of the row, other than a tool's, where a missing value has become text."""
    values = [row.get(name) for names in (form.optional, *form.columns) for name in names]
    said = [m.get("content") for value in values for m in mappings(value) if m.get("role") != "tool"]
    found = (text for text in (*values, *said) if isinstance(text, str) and text in ("nan", "NaN", "None"))
    return [*map(repr, dict.fromkeys(found))]


def _scored_less(row: Row) -> bool:
    """Whether a pair's own columns of scores, as numbers or their text, contradict its choice."""
    whats, forms = ("score", "rating", "reward", "avg_rating"), ("{}_{}", "{}-{}", "{1}_{0}")
    for form, what in product(forms, whats):
        with suppress(ValueError):
            chosen, rejected = (float(str(row.get(form.format(side, what)))) for side in PAIRED)
            return chosen < rejected
    with suppress(ValueError):
        return float(str(row.get("margin"))) < 0
    return False


def _answers_twice(row: Row) -> bool:
    """Whether two assistant messages of text follow each other after the first message, and the row trains both."""
    said = mappings(row.get("messages") or row.get("prompt"))[1:]
    text = [m.get("role") == "assistant" and not m.get("tool_calls") and columns.is_trained(m, "") for m in said]
    return any(a and b for a, b in pairwise(text))


def _text(row: Converted, place: str, _template: Template) -> list[Turn]:
    """A text whose tokens all train."""
    return [Turn(place, "", row["text"], empty=not row["text"].strip())]


_SFT, _PAIRS = "rlkit sft reads it", "rlkit dpo, kto and reward_model read it"
PROMPT = Form("prompt", (PROMPTS,), _prompt, (), "rlkit grpo and ppo read it")
CONVERSATION = Form("conversation", (PROMPTS,), _conversation, (), _SFT)
RESPONSE = Form("prompt with a response", (PROMPTS, RESPONSES), _response, (), _SFT)
PAIR = Form("preference pair", (("chosen",), ("rejected",)), _pair, PROMPTS, _PAIRS)
LABELLED = Form(
    "labelled response", (_LABELLED, ("label",)), partial(_response, names=_LABELLED), PROMPTS, "rlkit kto reads it"
)
TEXT = Form("text", (("text",),), _text, (), _SFT)
SFT = (RESPONSE, CONVERSATION, TEXT)
