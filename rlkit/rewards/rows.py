"""Check a reward function against the rows that it will be called with, before anything is sampled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlkit.data.load import column_error, place_of
from rlkit.rewards.call import ONE_TURN, VARIABLE, needs_of
from rlkit.rewards.failures import is_ours, name_of
from rlkit.rewards.source import names_of_kwargs
from rlkit.rewards.text import first_value, is_blank


def check_rows(function: Callable[..., Any], *parts: Sequence[dict[str, Any]]) -> None:
    """Check that the rows of each part have the columns that a reward function needs, as far as that is known.

    A gold answer or tests of this package's functions must not be empty, under one of their names. A column that an
    adapted function (`rlkit.compat.rewards.adapted`) names must be there, and may be null; its gold answer may be "".

    Raises ValueError for the first row that lacks one, with its place (`rlkit.data.load.place_of`) and its columns, and
    what the adapter's own check raises; TypeError for a function that asks for a column as a parameter.
    """
    for rows in filter(len, parts):
        if check := getattr(function, "check_rows", None):
            check(rows)
        _check_needs(function, rows)
        if not hasattr(function, "needs") and not is_ours(function):  # neither of another library nor of this package
            _refuse_columns(function, set[str]().union(*rows))


def _refuse_columns(function: Callable[..., Any], columns: set[str]) -> None:
    """TypeError for a function of ours that asks for a column as a parameter with a default, or in its `**kwargs`."""
    bound = function.keywords if isinstance(function, partial) else ()
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind not in VARIABLE][2:]
    named = {p.name for p in parameters if p.name not in bound} | names_of_kwargs(function)
    if asked := sorted((named & columns) - {*ONE_TURN, "messages"}):
        fix = f"read row[{asked[0]!r}]" if len(asked) == 1 else f"read row[{asked[0]!r}], row[{asked[1]!r}], ..."
        raise TypeError(
            f"{name_of(function)} asks for {', '.join(asked)}, and columns of the data are in the row: {fix}"
        )


def _check_needs(function: Callable[..., Any], rows: Sequence[dict[str, Any]]) -> None:
    """Check the rows of one part."""
    needs, ours = needs_of(function), is_ours(function)
    for index, row in enumerate(rows):
        for need in needs:
            names = (need,) if isinstance(need, str) else need
            values = [first_value(row, name) for name in names if name in row]
            if values if isinstance(need, str) else not all(is_blank(x) if ours else x is None for x in values):
                continue
            problem = f"{name_of(function)} needs the column {' or '.join(map(repr, names))}"
            if empty := [f"{name}.ground_truth" if name == "reward_model" else name for name in names if name in row]:
                kind = "null" if all(x is None for x in values) else "empty"
                problem += f" with a value ({' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} {kind})"
            fix = "; drop such rows, or rename another column with --rename" if empty else "; rename one with --rename"
            raise column_error(place_of(rows, index), problem, row, fix)
