"""One check and one reader of rlkit's own rows.

Every reader of rows (`rl_prompts`, `sft_examples`, `preference_pairs`, `labelled_examples`) checks and renders its rows
with `read_rows`: `rlkit.data.forms` says what a row may be, `rlkit.data.turns` renders it. `rlkit.compat.rows.read`
makes such rows of other systems' rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlkit.data import columns
from rlkit.data import messages as of_row
from rlkit.data.forms import Form, Turn, cell, numbered, own_name
from rlkit.data.images import COLUMNS as IMAGE_COLUMNS
from rlkit.data.images import MARK, PLACE, Image, ImageReader, gathered, marks
from rlkit.data.load import Row, column_error, place_of
from rlkit.data.markup import markup_of
from rlkit.data.messages import Converted, decoded, mappings
from rlkit.data.odd_texts import odd_texts
from rlkit.data.oddities import name_oddities, name_ready_made, name_repeats, name_two_golds
from rlkit.data.schema import FOR_REWARDS, IN_SFT, LABELS, OF_TEMPLATE, PAIRED, PROMPTS, RESPONSES
from rlkit.data.template import NO_PROMPT, RESULTS, Template
from rlkit.data.turns import (
    CONVERSATION,
    LABELLED,
    PAIR,
    PROMPT,
    RESPONSE,
    TEXT,
    is_text,
    joined_contents,
    no_answer,
    opened_once,
)

_log, _progress = logging.getLogger("rlkit.data"), logging.getLogger("rlkit.data.progress")


def read_rows(
    rows: Sequence[Row], template: Template, *forms: Form, also: Collection[str] = (), **limit: int
) -> list[list[Turn]]:
    """The turns of each row, by the first of `forms` whose columns it has. `limit`: the token limit, to be checked.
    `also`: columns that the caller reads.

    Raises ValueError, with the row (see `place_of`), for a row that fits none of them or holds a bad value.
    """
    ((name, value),) = limit.items()
    turns, odd = [], []
    converted = check_columns(rows, *forms, apply_chat_template=template.apply)
    if not converted:
        raise ValueError("rows is empty: there is nothing to train on")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    unused, told = columns.Unused(rows), template.system_prompt
    if template.apply:
        markup_of(template.tokenizer).report()
        told = told and markup_of(template.tokenizer).plain(told)
    for index, (form, row) in enumerate(converted):
        assert form.read is not None
        place = place_of(rows, index)
        of_row = template.of_row(row, place) if template.apply else template
        turns.append(_with_images(form.read(row, place, of_row), row, rows, template, place))
        if all(turn.empty and turn.label is not False for turn in (turns[-1][:1] if form is PAIR else turns[-1])):
            of_row.lost.pop(NO_PROMPT, None)  # the row is dropped
        told = None if told and any(told.strip() in turn.prompt for turn in turns[-1]) else told
        turns[-1] = [opened_once(turn, template) for turn in turns[-1]] if template.apply else turns[-1]
        used = _used(row, form, plain=not template.apply)
        asked, answers, results = _said(row, form)
        cells = used - FOR_REWARDS if form is PROMPT else used
        odd.append(odd_texts(row, cells, asked, asked if form is TEXT else answers))
        used |= {*also, *(IMAGE_COLUMNS if row.get("images") else ())}
        if form is PROMPT:
            used |= {*FOR_REWARDS, "seed"}  # an environment reads that one
        unused.add(index, row, used, [x.replace(PLACE, MARK) for x in (*asked, *results)], answers, of_row.lost)
        if len(turns) % 1000 == 0:
            _progress.info("rendering: %d of %d rows", len(turns), len(rows))
    where = {PROMPT: "the prompt (rewards see all columns)", TEXT: "the text"}.get(form, "the prompt or the response")
    if told:
        _log.warning("the system prompt %r is in no row: each has a system message of its own", told[:60])
    unused.report(template.not_read, where=where)
    name_oddities(rows, converted, odd)
    (name_two_golds if form is PROMPT else name_repeats)(rows, converted, turns)
    if form is TEXT or not template.apply:
        name_ready_made(rows, [turn for turn, *_ in turns], None if template.apply else markup_of(template.tokenizer))
    markup_of(template.tokenizer).report_opened(turns[0][0].prompt if form is PROMPT else "")
    return turns


def _with_images(turns: list[Turn], row: Converted, rows: Sequence[Row], template: Template, place: str) -> list[Turn]:
    """The turns of a row with its images in the places that `gathered` found."""
    if columns.is_empty(row.get("images")):
        if template.images is not None and template.images.marked and (num := marks(row)):
            raise column_error(place, f"has {num} places for images ({MARK}) and no images", row)
        return [t if template.images is None else _placed(t, (), template.images, place) for t in turns]
    reader = template.images
    if reader is None:
        column = next((name for name in IMAGE_COLUMNS if not columns.is_empty(row.own.get(name))), None)
        fault = "its messages show images" if column is None else f"column {column!r} holds images"
        fix = "drop the row" if column is None else f"train on its text with --rename {column} OTHER"
        fix = f"; take a model that reads images (docs/models.md), or {fix}"
        raise column_error(place, f"{fault}, and the model reads text only", row, fix)
    images = reader.read(row, rows, place)
    placed = [_placed(t, images, reader, place) for t in turns]
    if (num := max(len(t.images) for t in placed)) < len(images):
        raise column_error(place, f"{len(images)} images, of which the text that is read shows {num}", row)
    return placed


def _placed(turn: Turn, images: tuple[Image, ...], reader: ImageReader, place: str) -> Turn:
    """The turn with placeholders for the first of the images, and those that it shows."""
    prompt, whole = (reader.placed(text, images, place) for text in (turn.prompt, turn.whole))
    pictures = images[: (turn.whole or turn.prompt).count(PLACE)]
    return turn._replace(prompt=prompt, whole=whole, images=pictures, blocks=None if pictures else turn.blocks)


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
    for index, raw in enumerate(rows):
        place = place_at(index)
        row = _decoded(raw, place)
        row = _in_plain_text(row, forms, place) if plain else row
        if index == 0:
            forms = _of_one_file(forms, row, plain)
        form = next((form for form in forms if not form.missing(row)), forms[-1])
        form = _without_conflict(row, form, forms, place)
        cells = [cell(row, names, place, form=form, plain=plain, first=first) for names in form.columns]
        for name, value in cells:
            numbered(row, name, value, place)
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
        new["prompt"] = joined_contents(messages, row, place)
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
        other = rows if isinstance(rows, str) else next(row for row in rows if not isinstance(row, Mapping))
        fix = "load_rows(path) reads a file; of strings give [{'prompt': text} for text in texts]"
        raise TypeError(f"rows must be dicts, got {repr(other)[:80]}: {fix}")


def _used(row: Converted, form: Form, *, plain: bool) -> set[str]:
    """The columns of the file of which a row's text is made, and its label."""
    raw, used = row.own, form.used(row.own)
    if row.source:
        used = (used - IN_SFT if row.source.names & IN_SFT else used) | row.source.used(raw)
    used -= ({*IN_SFT} if form is PAIR else {*PAIRED}) | {*LABELS}
    if form is LABELLED:
        used |= {name for name in LABELS if columns.truth(raw.get(name)) is not None}
    return used | ({*OF_TEMPLATE, *PROMPTS} if not plain and form is not TEXT else set())


def _said(row: Row, form: Form) -> tuple[list[str], list[str], list[str]]:
    """The texts of a row that are context, those that are answers, and the results of tools."""
    asked, answers, results = list[str](), list[str](), list[str]()
    names = {TEXT: ("text",), PROMPT: (), PAIR: PAIRED}.get(form, RESPONSES)
    for name in names if form is TEXT else (*PROMPTS, *names):
        value, is_answer = row.get(name), name not in (*PROMPTS, "text")
        turns = mappings(value) if not isinstance(value, str) else [{"content": value}]
        for number, turn in enumerate(turns, 1):
            content = turn.get("content")
            parts = [content] if isinstance(content, str) else [p.get("text") for p in mappings(content)]
            trained = number == len(turns) if is_answer else turn.get("role") == "assistant"
            texts = answers if trained and (is_answer or form in (CONVERSATION, LABELLED)) else asked
            texts = results if texts is asked and turn.get("role") in RESULTS else texts
            texts.extend(str(part) for part in parts if part)
    return asked, answers, results


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
    fault = f"columns {both} hold different texts ({CONVERSATION.title} and {form.title})"
    raise column_error(place, fault, row, f"; rename the one that is not meant, e.g. --rename {name} OTHER")


def _refuse_two(row: Converted, form: Form, place: str) -> None:
    """ValueError for a row with two responses, or two labels, that differ."""
    raw = row.own
    responses = {name: raw[name] for name in RESPONSES if not columns.is_empty(raw.get(name))}
    responses = {**responses, **decoded(responses)}
    made = {name: row[name] for name in RESPONSES if row.get(name) is not None} if row.source else {}
    read = [(next((name for name in raw if raw[name] is value), made), value) for made, value in made.items()]
    labels = [(name, columns.truth(raw.get(name))) for name in LABELS if form is LABELLED]
    for noun, values in (
        ("texts", [(name, _answer_text(value)) for name, value in [*read, *responses.items()]]),
        ("labels", [(name, value) for name, value in labels if value is not None]),
    ):
        if other := next((name for name, value in values if value != values[0][1]), None):
            fault = f"columns {values[0][0]!r} and {other!r} hold different {noun}"
            raise column_error(place, fault, row, f"; rename the one that is not meant, e.g. --rename {other} OTHER")


def _answer_text(value: Any) -> str:
    """The text of an answer: a string, or the content of the last of its messages."""
    last = (mappings(value) or [{"content": value}])[-1].get("content")
    parts = [str(part.get("text")) for part in mappings(last)]
    return ("".join(parts) if parts else str(last)).strip()


def _check_content(row: Converted, form: Form, first: tuple[str, Any], place: str, *, plain: bool) -> None:
    """ValueError for a row that has the columns of its form, and content that the form cannot have.

    `first`: the name and the value of the first column of the form.
    """
    name, value = first
    if form is CONVERSATION:
        roles = ["user"] if isinstance(value, str) else [message["role"] for message in value]
        if not {"assistant", *of_row.CALLS} & {*roles}:
            raise no_answer(row, place, roles)
    for label in LABELS[::-1] if form in (CONVERSATION, RESPONSE) else ():
        if columns.truth(row.get(label)) is not None:
            kind = "a conversation with a label" if form is CONVERSATION else "a labelled response"
            fault = f"is {kind} (column {label!r} is {row[label]}), and sft trains on every row"
            raise column_error(place, fault, row, f"; rlkit kto reads it, or --rename {label} OTHER trains all of them")
    for side in PAIRED if form is PAIR else ():
        if isinstance(row[side], str) and row[side] in {*row.own} - {*PAIRED}:
            fault = f"column {own_name(row, side)!r} holds {row[side]!r}, the name of another column"
            raise column_error(place, fault, row, "; write the text of that column there")
    if form is PAIR and isinstance(value, str) and not any(name in row for name in PROMPTS):
        lacks = "no column 'prompt'" if plain else "neither 'messages' nor 'prompt' is there"
        fix = (
            "; give the prompt as 'prompt', or train on the two as plain text, as TRL does: --no-chat-template, where "
            "their common beginning is the prompt"
        )
        raise column_error(place, lacks, row, "; chosen and rejected share no beginning" if plain else fix)
    if form is LABELLED and name != "messages" and isinstance(value, str):
        cell(row, PROMPTS, place, form=LABELLED, plain=plain)
