"""Rows that are dropped, cut, or kept although seldom meant: each kind is logged in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from rlkit.data.forms import Turn
from rlkit.data.load import Row, Rows, place_of
from rlkit.data.turns import FINISHED, ends_with_answer

X = TypeVar("X")
_log = logging.getLogger("rlkit.data")
_COLUMN_FIX = "check which columns hold the texts: one under another name is renamed with --rename"
TooLong = Literal["drop", "cut-left", "cut-right", "error"]


class NothingLeft(ValueError):
    """None of the rows is left to train on: each is too long, empty or the like."""


def drop(
    rows: Sequence[Row],
    items: Sequence[tuple[int, X]],
    bad: Callable[[X], object],
    *,
    unit: str,
    why: str,
    fix: str = _COLUMN_FIX,
    keep: bool = False,
    note: Callable[[X], str] = lambda _: "",
) -> list[tuple[int, X]]:
    """`items`, (row index, X), without the `bad` ones, which are logged in one line; ValueError, with `fix`, for all.

    The line has `unit` they are, `why` (a verb and its object), and a `note` on each. With `keep` they are only logged.
    """
    dropped = [(index, item) for index, item in items if bad(item)]
    if not dropped:
        return [*items]
    source = f"{rows.source}: " if isinstance(rows, Rows) and rows.source else ""
    if len(dropped) == len(items) and not keep:
        raise NothingLeft(f"{source}all {len(items)} {unit} {why}; {fix}")
    first = ", ".join(place_of(rows, index, with_source=False) + note(item) for index, item in dropped[:5])
    _log.warning(
        "%s%s %d of %d %s that %s: %s%s",
        source, "kept" if keep else "dropped", len(dropped), len(items), unit, why, first, ", ..." * (len(dropped) > 5),
    )  # fmt: skip
    return [*items] if keep else [(index, item) for index, item in items if not bad(item)]


def shorten(
    rows: Sequence[Row],
    items: Sequence[tuple[int, X]],
    length: Callable[[X], int],
    cut: Callable[[X, int, bool], X | None],
    *,
    unit: str,
    too_long: TooLong,
    lose: str = "their {side} tokens",
    **limit: int,
) -> list[tuple[int, X]]:
    """`drop` the items with more tokens than the limit, or raise ValueError for the first, or cut them.

    `cut(item, limit, left)` returns the item without its first (`left`) or last tokens, None where nothing is left to
    train on: it is dropped. How many are cut is logged.
    """
    ((name, value),) = limit.items()
    long = [(index, item) for index, item in items if length(item) > value]
    if not long or too_long == "drop":
        fix = f"the shortest has {min(length(item) for _, item in items)} tokens: raise it, or give shorter ones"
        return drop(
            rows, items, lambda item: length(item) > value, unit=unit, why=f"are longer than `{name}` {value}", fix=fix,
            note=lambda item: f" ({length(item)} tokens)",
        )  # fmt: skip
    if too_long == "error":
        index, item = long[0]
        fault = f"{len(long)} of {len(items)} {unit} are longer than `{name}` {value}"
        fix = "raise it, or `too_long` drop, cut-left or cut-right"
        raise ValueError(f"{place_of(rows, index)}: {length(item)} tokens; {fault}: {fix}")
    shorter = [(i, cut(item, value, too_long == "cut-left") if length(item) > value else item) for i, item in items]
    side = "first" if too_long == "cut-left" else "last"
    why = f"are longer than `{name}` {value} and lose {lose.format(side=side)}"
    drop(rows, items, lambda item: length(item) > value, unit=unit, why=why, keep=True)
    left = drop(rows, shorter, lambda item: item is None, unit=unit, why="have nothing left to train on")
    return [(index, item) for index, item in left if item is not None]


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
    drop(rows, begun, bool, unit="prompts", why=why, keep=True)
