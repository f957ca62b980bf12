"""Entropy tools against direct sums and torch.quantile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import entropy_from_logits, entropy_quantile, top_entropy_mask

NAN = float("nan")


def test_entropy_from_logits() -> None:
    probs = [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [1 / 3] * 3]
    logits = torch.tensor(probs, dtype=torch.float64).log() + 2
    expected = [-sum(p * math.log(p) for p in row if p) for row in probs]
    torch.testing.assert_close(entropy_from_logits(logits), torch.tensor(expected, dtype=torch.float64))
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy_from_logits, (x,))
    hidden = torch.stack([logits[0], logits[0] * NAN]).requires_grad_()
    masked = entropy_from_logits(hidden, mask=torch.tensor([True, False]))
    assert masked[1] == 0
    assert torch.autograd.grad(masked.sum(), hidden)[0].isfinite().all()


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), min_size=1, max_size=9), st.floats(0, 1))
def test_quantile_is_torchs(rows: list[tuple[float, bool]], top: float) -> None:
    entropy = torch.tensor([e if m else NAN for e, m in rows], dtype=torch.float64)
    mask = torch.tensor([m for _, m in rows])
    got = entropy_quantile(entropy, top=top, mask=mask)
    if not mask.any():
        assert got == -torch.inf
    else:
        assert got.item() == pytest.approx(torch.quantile(entropy[mask], 1 - top).item(), abs=1e-9)


def test_mask_keeps_the_fifth_of_highest_entropy() -> None:
    entropy = torch.tensor([[0.1, 3.0, 0.2, 0.3, NAN], [0.4, 0.5, 2.0, 0.6, 0.7]])
    mask = entropy.isfinite()
    kept = top_entropy_mask(entropy, mask=mask)
    assert kept.dtype == torch.bool
    assert kept.nonzero().tolist() == [[0, 1], [1, 2]]
    threshold = entropy_quantile(entropy, top=0.2, mask=mask)
    rows = [top_entropy_mask(e, threshold=threshold, mask=m) for e, m in zip(entropy, mask, strict=True)]
    assert torch.equal(torch.stack(rows), kept)
    assert torch.equal(top_entropy_mask(entropy, top=1.0, mask=mask), mask)
    assert not top_entropy_mask(entropy, mask=mask & False).any()
    assert top_entropy_mask(entropy[:0]).shape == (0, 5)
    with pytest.raises(ValueError, match="top must be in"):
        entropy_quantile(entropy, top=1.2)
