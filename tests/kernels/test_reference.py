"""The references, against which every kernel is tested, against the formula in Python's own numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlkit.kernels.linear_logp import linear_logp
from rlkit.kernels.logits_logp import logits_logp


def by_hand(logits: list[float], target: int, temperature: float = 1.0, softcap: float | None = None) -> list[float]:
    """The log-prob of the target, and the entropy."""
    capped = logits if softcap is None else [softcap * math.tanh(z / softcap) for z in logits]
    total = math.fsum(math.exp(z / temperature) for z in capped)
    p = [math.exp(z / temperature) / total for z in capped]
    return [math.log(p[target]), -math.fsum(x * math.log(x) for x in p)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"softcap": 1.5}, {"softcap": 2.0, "temperature": 1.4}])
def test_references_are_the_formula(options: dict[str, Any], bias: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    hidden, weight, added = (torch.randn(size, generator=draw).double() for size in ((5, 4), (9, 4), (9,)))
    targets, mask = torch.tensor([0, 8, 3, 3, 5]), torch.tensor([True, True, False, True, True])
    logits = [
        [
            math.fsum(a * b for a, b in zip(h, w, strict=True)) + bias * c
            for w, c in zip(weight.tolist(), added.tolist())
        ]
        for h in hidden.tolist()
    ]
    rows = zip(logits, targets.tolist(), mask.tolist(), strict=True)
    true = torch.tensor([by_hand(z, t, **options) if m else [0.0, 0.0] for z, t, m in rows], dtype=torch.float64)
    given = {"bias": added} if bias else {}
    found = linear_logp(hidden, weight, targets, impl="reference", mask=mask, **given, **options)
    torch.testing.assert_close(torch.stack(found, 1), true, rtol=1e-12, atol=1e-12)
    found = logits_logp(torch.tensor(logits, dtype=torch.float64), targets, impl="reference", mask=mask, **options)
    torch.testing.assert_close(torch.stack(found, 1), true, rtol=1e-12, atol=1e-12)
