"""Rows that are dropped, cut, or trained as they are although seldom meant: each kind is logged in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Literal, TypeVar

from rlkit.data import columns
from rlkit.data.forms import Form, Turn
from rlkit.data.load import Row, Rows, place_of
from rlkit.data.messages import Converted, mappings
from rlkit.data.schema import ANSWERS, PAIRED, RESPONSES
from rlkit.data.turns import CONVERSATION, FINISHED, LABELLED, PAIR, RESPONSE, ends_with_answer

X = TypeVar("X")
_log = logging.getLogger("rlkit.data")
_REPEATED = 12  # characters: a response may begin with a shorter prompt by chance ("hi")
_COLUMN_FIX = "check which columns hold the texts: one under another name is renamed with --rename"
TooLong = Literal["drop", "cut-left", "cut-right", "error"]


class NothingLeft(ValueError):
    """None of the rows is left to train on: each is too long, empty or the like."""


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


def name_oddities(rows: Sequence[Row], found: Sequence[tuple[Form, Converted]]) -> None:
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
