"""A prompt that is made of several columns of its row, by a format string.

    filled("{question}\\n{choices}", {"question": "2+2?", "choices": ["3", "4"]})        "2+2?\\nA. 3\\nB. 4"

Only the template is expanded: braces in the text of a column are text. What a column becomes:

- a text is written as it is, null and an empty list as nothing;
- a list of texts, and an object of `text` and `label` (ARC), a line each: "A. 3", with the labels of the object;
- anything else (numbers, a list of numbers, objects) as JSON.

Where the rows' `answer` is a number, the place in the only list of texts, it becomes that letter (`letter_of`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from string import Formatter, ascii_uppercase
from typing import Any

from rlkit.data.columns import is_empty


def columns_in(template: str, *, flag: str = "prompt") -> list[str]:
    """The columns that a template names; ValueError for one that names none, or is malformed."""
    try:
        places = [*Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"`{flag}` {template!r}: {error}; braces are written {{{{ and }}}}") from None
    names = [(name, spec, conversion) for _, name, spec, conversion in places if name is not None]
    if not names or any(not name or spec or conversion for name, spec, conversion in names):
        raise ValueError(f"`{flag}` {template!r}: a column is written {{name}}, as in '{{context}}\\n\\n{{question}}'")
    return [*dict.fromkeys(name for name, *_ in names)]


def filled(template: str, row: Mapping[str, Any]) -> str:
    """The template with the values of a row in the places of its columns.

    >>> filled("{q} {{}} {n}", {"q": "{n}", "n": [1, 2]})
    '{n} {} [1, 2]'
    """
    return "".join(
        text + ("" if name is None else _written(name, row[name])) for text, name, *_ in Formatter().parse(template)
    )


def _written(name: str, value: Any) -> str:
    """What a column becomes; ValueError for messages and for more texts than letters."""
    if isinstance(value, str):
        return value
    if is_empty(value):
        return ""
    if is_texts(value):
        if len(value) > len(ascii_uppercase):
            raise ValueError(f"column {name!r} has {len(value)} texts, and there are {len(ascii_uppercase)} letters")
        value = {"label": ascii_uppercase[: len(value)], "text": value}
    if isinstance(value, Mapping) and {*value} == {"label", "text"} and len(value["label"]) == len(value["text"]):
        return "\n".join(f"{label}. {text}" for label, text in zip(value["label"], value["text"], strict=True))
    if isinstance(value, list) and any(isinstance(item, Mapping) and "role" in item for item in value):
        raise ValueError(f"column {name!r} holds messages, which only the chat template writes")
    return json.dumps(value, ensure_ascii=False, default=str)


def is_texts(value: Any) -> bool:
    """Whether a value is a list of texts, which are written with letters."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, str) for item in value)


def letter_of(template: str, row: Mapping[str, Any]) -> str | None:
    """The letter of the row's `answer`, where that is the place of a text in the only list of texts; else None."""
    answer, num = _answer_of(template, row)
    return ascii_uppercase[answer] if 0 <= answer < num else None


def count_from_1(template: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows' `answer` is 1 to the number of texts in their only list of texts, and both ends occur."""
    first = last = False
    for row in rows:
        answer, num = _answer_of(template, row)
        if not 1 <= answer <= num:
            return False
        first, last = first or answer == 1, last or 1 < answer == num
    return first and last


def _answer_of(template: str, row: Mapping[str, Any]) -> tuple[int, int]:
    """The row's `answer` and the number of texts in the only list of texts; (0, 0) where it is no number of these."""
    lists, answer = [row[x] for x in columns_in(template) if is_texts(row.get(x))], row.get("answer")
    return (answer, len(lists[0])) if len(lists) == 1 and type(answer) is int else (0, 0)
