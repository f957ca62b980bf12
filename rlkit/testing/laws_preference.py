"""Laws of pairwise losses: they prefer the chosen response, and may depend on the margin only."""

from __future__ import annotations

import torch

from rlkit.testing.cases import Case, replaced
from rlkit.testing.law import law, near
from rlkit.testing.subject import Subject, run, tensors

__all__ = ["margin_only", "prefers_chosen"]


@law()
def prefers_chosen(s: Subject, case: Case) -> None:
    """A likelier chosen response never raises the loss, and a likelier rejected one never lowers it."""
    ones = [torch.ones_like(x) for x in tensors(s(case))]
    for name, g in run(s, case, upstream=ones).grads.items():
        direction = {"chosen": -1, "rejected": 1}.get(name.split("_")[0], 0)
        if (g * direction < -1e-12).any():
            i = int((g * direction < -1e-12).int().argmax())
            raise AssertionError(f"the gradient w.r.t. {name} at pair {i} is {g[i]:.6g}: it prefers the rejected")


@law()
def margin_only(s: Subject, case: Case) -> None:
    """Only the difference of the two responses counts: adding a constant to both changes nothing."""
    both = {name: x + 1.25 for name, x in case.tokens.items() if name.split("_")[0] in ("chosen", "rejected")}
    for x, y in zip(tensors(s(replaced(case, **both))), tensors(s(case)), strict=True):
        near(x, y, "the loss with 1.25 added to chosen and rejected")
