"""A row of the table: a function, how to call it, its laws, and the laws that do not hold, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rlkit._util.tensors import upcast
from rlkit.testing import Case, Subject, laws, subject
from rlkit.testing.check import LOSS, PACKED, SURROGATE, WEIGHT

STATISTIC = (*(x for x in PACKED if x is not laws.shape and x is not laws.masked_is_zero), laws.detached)
STOP_GRADIENT = {"gradcheck": "the ratio is detached by design; the coefficient is checked instead"}
WHOLE_BATCH = {"additive": "it is a statistic of the whole batch, computed before the split"}


class Row(NamedTuple):
    """`fn` is the public function under test; `subject` calls it, possibly through an adapter."""

    fn: Callable[..., Any]
    subject: Any
    laws: Sequence[laws.Law]
    skip: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name in tests and docs: package, function, variant."""
        return f"{self.fn.__module__.split('.')[1]}.{self.subject.name}"


def row(
    fn: Callable[..., Any],
    *more: laws.Law,
    family: Sequence[laws.Law] = LOSS,
    skip: Mapping[str, str] | None = None,
    call: Callable[..., Any] | None = None,
    variant: str = "",
    **how: Any,
) -> Row:
    """The row of `fn`: the laws of its `family` and `more`. `how`: arguments of `subject`; `call`: an adapter."""
    name = fn.__name__ + (f" ({variant})" if variant else "")
    return Row(fn, subject(call or fn, name=name, **how), [*family, *more], skip or {})


def masked_mean(case: Case, name: str) -> torch.Tensor:
    """A statistic: the mean of a stream over the trainable tokens of the whole batch; 0 without any."""
    x = torch.where(case.mask, upcast(case.tokens[name].detach()), 0)
    return x.sum() / case.mask.sum().clamp(min=1)


def num_tokens(case: Case) -> int:
    """Trainable tokens of the whole batch."""
    return int(case.mask.sum())


def num_seqs(case: Case) -> int:
    """Sequences of the whole batch with a trainable token."""
    return sum(bool(case.mask[a:b].any()) for a, b in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:]))


__all__ = [
    "LOSS",
    "PACKED",
    "STATISTIC",
    "STOP_GRADIENT",
    "SURROGATE",
    "WEIGHT",
    "WHOLE_BATCH",
    "Case",
    "Row",
    "Subject",
    "masked_mean",
    "num_seqs",
    "num_tokens",
    "row",
]
