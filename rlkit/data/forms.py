"""What a form of row is, the cells of its columns, and what its reader gives.

`rlkit.data.turns` has the forms of rlkit's own rows, each with its reader; `rlkit.data.rows` checks rows.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

from rlkit.data import columns
from rlkit.data.images import Image
from rlkit.data.load import Row, column_error
from rlkit.data.messages import Converted, mappings
from rlkit.data.schema import HOLDS, LABEL, MESSAGES, PAIRED, PROMPTS, RESPONSES, STRING
from rlkit.data.template import Template

_KINDS: dict[str, Callable[[Any], bool]] = {
    STRING: lambda value: isinstance(value, str),
    MESSAGES: lambda value: isinstance(value, list | tuple) and len(value) > 0,
    LABEL: lambda value: columns.truth(value) is not None,
}
LABELLED_ANSWERS = (*RESPONSES, "messages")
_READ = "rlkit.compat.rows.read(rows) reads rows of other systems"
RENAME = "; a column under another name is renamed with --rename"


class Turn(NamedTuple):
    """The text of a context up to the generation prompt (`prompt`), and the same with the assistant's turn (`whole`).

    A `literal` turn still lacks its end-of-turn token, and any turn its `end`. `blocks` are the tokens with the mask of
    the template's `{% generation %}`. `empty`: the turn (of a prompt: the prompt) has neither text nor a tool call.
    `begun`: the text with which a prompt begins the answer. `untrained`: another assistant message of the row is
    context, though the row does not exclude it from the loss. `unanswered`: messages follow the last one.
    """

    place: str
    prompt: str
    whole: str = ""
    empty: bool = False
    label: bool | None = None
    literal: bool = True
    blocks: list[tuple[int, int]] | None = None
    untrained: bool = False
    images: tuple[Image, ...] = ()
    begun: str = ""
    unanswered: bool = False
    end: int | None = None


class Form(NamedTuple):
    """A form of row. An entry of `columns` holds the names that one required column may have.

    `optional` names columns that its reader may need too, `question` those that may be part of the prompt (None: those
    of the first entry). `hint` says which script reads the form, and `read` renders a row; None: the form of another
    system, whose rows are converted first.
    """

    name: str
    columns: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    hint: str = ""
    question: tuple[str, ...] | None = None
    read: Callable[[Converted, str, Template], list[Turn]] | None = None

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
        return ("history", *(self.columns[0] if self.question is None else self.question))

    def used(self, row: Row) -> set[str]:
        """The columns of the row that are read: of several names of one column the first that is not null."""
        there = (next((name for name in names if row.get(name) is not None), "") for names in self.columns)
        return {*there, *self.optional}


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
        fault = f"column {own_name(row, name)!r} must be {' or '.join(kinds)}{note}, got {repr(value)[:80]}"
        raise column_error(place, fault, row)
    texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if texts and name in ("prompt", *RESPONSES, *PAIRED):
        fault = f"column {own_name(row, name)!r} is a list of texts, got {repr(value)[:80]}"
        raise column_error(place, fault, row, "; write one row for each of them")
    if name == "prompt" and not plain and is_list_text(value):
        fault = f"column {own_name(row, name)!r} is the text of a list of texts, got {value[:80]!r}"
        fix = "; write the text alone, or a list that is meant as [{'role': 'user', 'content': ...}]"
        raise column_error(place, fault, row, fix)
    return name, value


def is_list_text(value: Any) -> bool:
    """Whether a value is the text of a list of strings, as Python or JSON write it, and of nothing else."""
    text = value.strip() if isinstance(value, str) else ""
    if (text[:2], text[-2:]) not in product(("['", '["'), ("']", '"]')):
        return False
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return all(isinstance(item, str) for item in literal_eval(text))
    return False


def numbered(row: Converted, name: str, value: Any, place: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The messages in a column, each with its place: "messages[0]". ValueError for one without a role.

    A system message that a column `system` gave has the number -1.
    """
    messages = value if isinstance(value, list | tuple) else []
    system = row.get("system") if row.source else None
    start = -1 if system and [m.get("content") is system for m in mappings(messages[:1])] == [True] else 0
    placed = [(f"{place}: {own_name(row, name)}[{number}]", message) for number, message in enumerate(messages, start)]
    for at, message in placed:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            bare = isinstance(message, Mapping) and message.get("role") is None
            more = " or {'from': 'human', 'value': '...'}" if bare and isinstance(message.get("from", ""), str) else ""
            raise ValueError(
                f"{at} must be an object like {{'role': 'user', 'content': '...'}}{more}, got {repr(message)[:80]}"
            )
    return placed


def own_name(row: Converted, name: str) -> str:
    """The name in the file of a column of the converted row: of a prompt that of the first column it is made of."""
    raw = row.own
    if row.get(name) is None or row[name] is raw.get(name):
        return name
    same = [column for column in raw if raw[column] is row[name]]
    made_of = row.source.of_prompt if row.source and name in PROMPTS else ()
    same += sorted((column for column in made_of if column in raw), key=lambda column: columns.is_empty(raw[column]))
    return same[0] if same and name not in raw else name
