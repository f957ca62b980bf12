"""What does not fit together is refused by an error that names an argument, in every public function of the table."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from row import Row
from table import ROWS
from torch import Tensor

from rlkit.testing.cases import cast
from rlkit.testing.laws_numerics import fixed_case
from rlkit.testing.subject import LAYOUT, Subject

# Objectives take any rows of points: there a row less is as good.
DIRECT = [
    row
    for row in ROWS
    if isinstance(row.subject, Subject) and row.subject.fn is row.fn and not row.name.startswith("objectives.")
]


def arguments(row: Row) -> dict[str, Any]:
    case = cast(fixed_case(row.subject), torch.float32)
    layout = {name: getattr(case, name) for name in LAYOUT if row.subject.takes(name)}
    statistics = {name: f(case) for name, f in row.subject.statistics.items()}
    return {**case.streams, **layout, **row.subject.options, **statistics}


def wrong(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Versions of one argument that do not go with the others."""
    if name != "cu_seqlens":
        yield "one entry short", x[:-1]
        yield "one axis more", x.unsqueeze(0)
    if name == "cu_seqlens":
        yield "not from 0", x + 1
        yield "beyond the tokens", torch.cat([x, x[-1:] + 1])
        yield "falling", x.flip(0) - x.flip(0)[0]
        yield "floats", x.float()
    if x.dtype == torch.bool:
        yield "ints", x.long()
    yield "another device", x.to("meta")


@pytest.mark.parametrize("row", DIRECT, ids=[row.name for row in DIRECT])
def test_what_does_not_fit_is_refused_by_name(row: Row) -> None:
    given = arguments(row)
    optional = row.subject.takes("mask") and inspect.signature(row.fn).parameters["mask"].default is None
    for call in (given, {**given, "mask": None}) if optional else (given,):
        tensors = {k: x for k, x in call.items() if isinstance(x, Tensor) and x.ndim}
        for name, x in tensors.items() if len(tensors) > 1 else []:
            for how, bad in wrong(name, x):
                with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
                    row.fn(**{**call, name: bad})
                told = str(error.value)
                by_torch = how == "another device" and "meta" in told
                assert by_torch or any(known in told for known in row.subject.params), f"{name}, {how}: {told}"
