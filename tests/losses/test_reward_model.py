"""Reward-model losses against plain `math`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import bradley_terry, process_bce

numbers = st.floats(-8, 8)


def tensor(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


@given(c=numbers, r=numbers, margin=st.floats(0, 3), coef=st.floats(0, 1))
def test_pairwise_formulas(c: float, r: float, margin: float, coef: float) -> None:
    want = -math.log(1 / (1 + math.exp(-(c - r - margin)))) + coef * (c + r) ** 2
    got = bradley_terry(tensor(c), tensor(r), margin=margin, center_coef=coef)
    assert got.item() == pytest.approx(want, abs=1e-9)
    per_pair = bradley_terry(tensor(c), tensor(r), margin=tensor(margin), center_coef=coef)
    assert per_pair.item() == got.item()


@given(pos=numbers, neg=numbers, y=st.floats(0, 1))
def test_process_formulas(pos: float, neg: float, y: float) -> None:
    p = math.exp(pos) / (math.exp(pos) + math.exp(neg))
    want = -y * math.log(p) - (1 - y) * math.log(1 - p)
    assert process_bce(tensor(pos - neg), tensor(y)).item() == pytest.approx(want, abs=1e-7)


def test_two_tokens_equal_torch_cross_entropy_over_the_two_logits() -> None:
    pos, neg = torch.randn(2, 9, dtype=torch.float64)
    y = torch.rand(9, dtype=torch.float64)
    want = torch.nn.functional.cross_entropy(torch.stack([pos, neg], -1), torch.stack([y, 1 - y], -1), reduction="none")
    torch.testing.assert_close(process_bce(pos - neg, y), want)


def test_gradients() -> None:
    c, r = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin=0.3, center_coef=0.1), (c, r))
    labels = torch.rand(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: process_bce(z, labels), c)
    (grad,) = torch.autograd.grad(bradley_terry(c, r).sum(), c)
    assert (grad < 0).all()
    margin = torch.ones(6, dtype=torch.float64, requires_grad=True)
    bradley_terry(c, r, margin=margin).sum().backward()
    assert margin.grad is None


def test_finite_at_1e4() -> None:
    c, r = torch.tensor([1e4, -1e4], requires_grad=True), torch.tensor([-1e4, 1e4], requires_grad=True)
    y = torch.tensor([0.0, 1.0])
    losses = bradley_terry(c, r, center_coef=0.01), bradley_terry(c, r), process_bce(c, y), process_bce(c - r, y)
    assert losses[1].tolist() == [0, 2e4]
    assert losses[2].tolist() == [1e4, 1e4]
    sum(x.sum() for x in losses).backward()
    assert all(torch.isfinite(x).all() for x in (*losses, c.grad, r.grad))


def test_masked_places_are_zero_and_isolated() -> None:
    mask = torch.tensor([True, False])
    bad = torch.tensor([0.5, float("nan")], requires_grad=True)
    losses = bradley_terry(bad, bad, margin=bad, center_coef=0.1, mask=mask), process_bce(bad, bad, mask=mask)
    sum(x.sum() for x in losses).backward()
    assert all(x[1] == 0 and x[0] > 0 for x in losses)
    assert bad.grad[1] == 0
    assert torch.isfinite(bad.grad).all()


def test_low_precision_is_computed_in_fp32() -> None:
    x = torch.ones(2).bfloat16()
    assert bradley_terry(x, x).dtype == process_bce(x, x).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: bradley_terry(x, x, center_coef=-1.0), "center_coef"),
        (lambda x: bradley_terry(x, x[:1]), "rejected_rewards must have the shape of chosen_rewards"),
        (lambda x: bradley_terry(x, x, margin=x[:1]), "margin must have the shape"),
        (lambda x: process_bce(x, x + 2), "labels must be in"),
        (lambda x: process_bce(x, x * float("nan")), "labels must be in"),
    ],
)
def test_errors_name_the_argument(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(torch.zeros(3))
