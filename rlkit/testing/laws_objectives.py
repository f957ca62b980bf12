"""Laws of objectives that combine several rewards."""

from __future__ import annotations

import torch

from rlkit.testing.cases import Case, replaced
from rlkit.testing.law import Law, law
from rlkit.testing.subject import Subject, tensors

__all__ = ["monotone"]


def monotone(*, name: str = "rewards") -> Law:
    """The law that raising entries of the stream `name` does not lower any result."""

    @law()
    def monotone(s: Subject, case: Case) -> None:
        """A larger reward never lowers the result: it respects Pareto dominance."""
        x = case.streams[name]
        more = torch.randint(0, 3, x.shape, generator=case.random()).double()
        better, worse = tensors(s(replaced(case, **{name: x + more}))), tensors(s(case))
        for high, low in zip(better, worse, strict=True):
            if not (high >= low - 1e-9).all():
                raise AssertionError(f"the result fell by {(low - high).max().item():.6g} as {name} rose")

    return monotone
