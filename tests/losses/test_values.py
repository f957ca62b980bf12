"""Value losses against plain formulas; HL-Gauss against numerical integration of the Gaussian."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import hl_gauss, hl_gauss_target, hl_gauss_value, value_clip, value_mse

numbers = st.floats(-5, 5)
RANGE = {"low": -2.0, "high": 3.0}


def scalars(*xs: float) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float64) for x in xs]


@given(v=numbers, old=numbers, r=numbers, clip=st.floats(0, 3))
def test_formulas(v: float, old: float, r: float, clip: float) -> None:
    assert value_mse(*scalars(v, r)).item() == pytest.approx((v - r) ** 2 / 2)
    clipped = min(max(v, old - clip), old + clip)
    want = max((v - r) ** 2, (clipped - r) ** 2) / 2
    assert value_clip(*scalars(v, old, r), clip=clip).item() == pytest.approx(want)


@pytest.mark.parametrize(
    ("v", "old", "r", "grad"),
    [
        (1.3, 1.0, 2.0, -0.7),  # inside the clip
        (1.9, 1.0, 2.0, 0.0),  # moved towards the return by more than 0.5: no more gradient
        (0.2, 1.0, 2.0, -1.8),  # moved away from it: full gradient
        (2.4, 1.0, 2.0, 0.0),  # overshot, yet nearer to the return than the border of the clip
        (4.0, 1.0, 2.0, 2.0),  # overshot further than that
    ],
)
def test_gradient_of_the_clip(v: float, old: float, r: float, grad: float) -> None:
    value, old_value, ret = (x.requires_grad_() for x in scalars(v, old, r))
    value_clip(value, old_value, ret, clip=0.5).backward()
    assert value.grad.item() == pytest.approx(grad)
    assert old_value.grad is None


def test_no_clip_is_mse_and_targets_get_no_gradient() -> None:
    v, old, r = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(value_clip(v, old, r, clip=float("inf")), value_mse(v, r))
    returns = torch.randn(6, dtype=torch.float64, requires_grad=True)
    value_mse(v, returns).sum().backward()
    assert returns.grad is None
    assert torch.autograd.gradcheck(lambda v: value_mse(v, r.detach()), v.detach().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda v: value_clip(v, old.detach(), r.detach(), clip=0.3), v.detach().requires_grad_()
    )


@given(r=st.floats(-3, 4), bins=st.integers(1, 40), sigma=st.floats(0.02, 3))
def test_hl_gauss_target_is_the_binned_gaussian(r: float, bins: int, sigma: float) -> None:
    got = hl_gauss_target(scalars(r)[0], num_bins=bins, sigma=sigma, **RANGE)
    gauss = NormalDist(min(max(r, RANGE["low"]), RANGE["high"]), sigma)
    edges = [RANGE["low"] + i * 5 / bins for i in range(bins + 1)]
    mass = [gauss.cdf(b) - gauss.cdf(a) for a, b in pairwise(edges)]
    assert got.tolist() == pytest.approx([m / sum(mass) for m in mass], abs=1e-9)


def test_hl_gauss_warns_of_returns_that_it_clamps() -> None:
    logits, told = torch.zeros(3, 5), r"clamps returns to \[0, 1\], and they reach from -0.5 to 4"
    with pytest.warns(UserWarning, match=told):
        loss = hl_gauss(logits, torch.tensor([-0.5, 4.0, 0.5]), low=0.0, high=1.0)
    inside = torch.tensor([0.0, 1.0, 0.5])
    with warnings.catch_warnings(action="error"):
        assert torch.equal(loss, hl_gauss(logits, inside, low=0.0, high=1.0))
        hl_gauss(logits, torch.tensor([9.0, 1.0, 0.5]), low=0.0, high=1.0, mask=torch.tensor([False, True, True]))


def test_hl_gauss_default_sigma_is_three_quarters_of_a_bin() -> None:
    returns = torch.linspace(-2, 3, 9, dtype=torch.float64)
    default = hl_gauss_target(returns, num_bins=20, **RANGE)
    torch.testing.assert_close(default, hl_gauss_target(returns, num_bins=20, sigma=0.75 * 0.25, **RANGE))


def test_hl_gauss_round_trip_and_narrow_limit() -> None:
    returns = torch.linspace(-1.33, 2.37, 50, dtype=torch.float64)  # 4 sigma inside the range, on no edge
    target = hl_gauss_target(returns, num_bins=25, **RANGE)
    torch.testing.assert_close(hl_gauss_value(target.log(), **RANGE), returns, rtol=0, atol=2e-3)
    narrow = hl_gauss_target(returns, num_bins=25, sigma=1e-5, **RANGE)
    bin_of = ((returns + 2) / 0.2).floor().long()
    torch.testing.assert_close(narrow, torch.nn.functional.one_hot(bin_of, 25).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hl_gauss_of_the_smallest_sigma_is_one_hot_also_at_the_edges(dtype: torch.dtype) -> None:
    returns = torch.tensor([-2.0, -1.5, -1.0, 0.0, 1.9, 2.0], dtype=dtype, requires_grad=True)
    target = hl_gauss_target(returns, num_bins=4, low=-2.0, high=2.0, sigma=1e-300)
    want = [[1, 0, 0, 0], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    torch.testing.assert_close(target, torch.tensor(want, dtype=dtype), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(target[0].sum(), returns)
    assert not grad.isnan().any()


def test_hl_gauss_loss_is_the_cross_entropy_with_its_minimum_at_the_target() -> None:
    returns = torch.tensor([-1.0, 0.3, 7.0], dtype=torch.float64)
    logits = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    target = hl_gauss_target(returns, num_bins=12, **RANGE)
    loss = hl_gauss(logits, returns, **RANGE)
    for i in range(3):
        z = logits[i].tolist()
        lse = math.log(sum(math.exp(v) for v in z))
        assert loss[i].item() == pytest.approx(-sum(p * (v - lse) for p, v in zip(target[i].tolist(), z)))
    best = target.clamp(min=1e-300).log().requires_grad_()
    (grad,) = torch.autograd.grad(hl_gauss(best, returns, **RANGE).sum(), best)
    assert grad.abs().max() < 1e-12
    assert torch.autograd.gradcheck(lambda z: hl_gauss(z, returns, **RANGE), logits)


def test_finite_for_huge_values_and_returns_far_outside_the_range() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]] * 2, requires_grad=True)
    loss = hl_gauss(logits, torch.tensor([1e4, -1e4]), **RANGE)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logits.grad).all()


def test_masked_places_are_zero_and_isolated() -> None:
    mask = torch.tensor([True, False, True])
    bad = torch.tensor([1.0, float("nan"), 2.0])
    v = bad.clone().requires_grad_()
    logits = torch.where(mask[:, None], torch.randn(3, 5), float("nan")).requires_grad_()
    losses = (
        value_mse(v, bad, mask=mask),
        value_clip(v, bad, bad, clip=0.2, mask=mask),
        hl_gauss(logits, bad, mask=mask, **RANGE),
    )
    sum(x.sum() for x in losses).backward()
    assert all(x[1] == 0 and torch.isfinite(x).all() for x in losses)
    assert losses[2][0] > 0
    for grad in (v.grad, logits.grad):
        assert torch.isfinite(grad).all()
        assert (grad[1] == 0).all()


def test_low_precision_is_computed_in_fp32() -> None:
    v = torch.randn(4).bfloat16()
    assert value_mse(v, v).dtype == torch.float32
    assert hl_gauss(torch.randn(4, 8).half(), v, **RANGE).dtype == torch.float32
    assert hl_gauss_value(torch.randn(4, 8).bfloat16(), **RANGE).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda v: value_mse(v, v[:1]), "returns must have the shape of values"),
        (lambda v: value_clip(v, v, v, clip=-0.1), "clip"),
        (lambda v: hl_gauss(v, v, **RANGE), "logits must have shape"),
        (lambda v: hl_gauss(v[:, None], v, low=1.0, high=1.0), "low must be below high"),
        (lambda v: hl_gauss(v[:, None], v, sigma=0.0, **RANGE), "sigma"),
        (lambda v: hl_gauss_target(v, num_bins=4, sigma=float("inf"), **RANGE), "sigma must be positive and finite"),
        (lambda v: hl_gauss_target(v, num_bins=0, **RANGE), "num_bins"),
    ],
)
def test_errors_name_the_argument(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(torch.zeros(3))
