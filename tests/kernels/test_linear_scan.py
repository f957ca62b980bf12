"""linear_scan against a loop over Python floats, closed forms, and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit.kernels.linear_scan import blocked, linear_scan, ops, which_impl


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def by_hand(a: Tensor, b: Tensor, lens: list[int], x_end: Tensor | None, reverse: bool) -> list[float]:
    """Segment by segment, token by token."""
    out: list[float] = []
    first = 0
    for n, length in enumerate(lens):
        places = list(range(first, first + length))
        x = 0.0 if x_end is None else x_end[n].item()
        got = {}
        for t in reversed(places) if reverse else places:
            x = b[t].item() + (a[t].item() * x if a[t].item() != 0 else 0.0)
            got[t] = x
        out += [got[t] for t in places]
        first += length
    return out


def cumulative(lens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.long).cumsum(0).tolist()])


def problem(lens: list[int], seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(sum(lens), generator=g, dtype=torch.float64) * 2 - 1
    a[torch.rand(sum(lens), generator=g) < 0.1] = 0
    b = torch.randn(sum(lens), generator=g, dtype=torch.float64)
    return a.to(dtype), b.to(dtype), torch.randn(len(lens), generator=g, dtype=torch.float64).to(dtype)


@pytest.fixture(params=["reference", "blocked", "many blocks"])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "many blocks":
        monkeypatch.setattr(blocked, "BLOCK", 3)
    if request.param != "reference":
        monkeypatch.setattr(blocked, "LOOP_TOKENS", 0)
    return request.param.replace("many blocks", "blocked")


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("lens", [[0], [1], [5], [0, 3, 0, 0, 16, 1, 17, 0], [97, 3, 200]])
def test_equals_the_loop(impl: str, lens: list[int], reverse: bool) -> None:
    a, b, x_end = problem(lens, 0)
    cu = cumulative(lens)
    for end in (None, x_end):
        got = linear_scan(a, b, cu_seqlens=cu, x_end=end, reverse=reverse, impl=impl)
        torch.testing.assert_close(got.tolist(), by_hand(a, b, lens, end, reverse), rtol=1e-13, atol=1e-13)


@given(lens=st.lists(st.integers(0, 400), min_size=1, max_size=8), seed=st.integers(0, 99), reverse=st.booleans())
def test_equals_the_loop_at_any_shape(lens: list[int], seed: int, reverse: bool) -> None:
    a, b, x_end = problem(lens, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "LOOP_TOKENS", 7)
        got = linear_scan(a, b, cu_seqlens=cumulative(lens), x_end=x_end, reverse=reverse, impl="blocked")
    torch.testing.assert_close(got.tolist(), by_hand(a, b, lens, x_end, reverse), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reverse", [True, False])
def test_gradients_by_finite_differences(impl: str, reverse: bool) -> None:
    a, b, x_end = (x.requires_grad_() for x in problem([4, 0, 7, 1], 1))
    cu = cumulative([4, 0, 7, 1])
    torch.autograd.gradcheck(
        lambda a, b, e: linear_scan(a, b, cu_seqlens=cu, x_end=e, reverse=reverse, impl=impl), (a, b, x_end)
    )


def test_a_nan_stays_in_its_segment_and_behind_a_zero(impl: str) -> None:
    """Values and gradients, both directions: the packed neighbours and the tokens behind a = 0 stay exact."""
    lens = [20, 20, 20]
    a, b, _ = problem(lens, 2)
    a[a == 0] = 0.5
    clean, b_nan = b.clone(), b.clone()
    a[25] = 0.0
    b_nan[30] = math.nan
    for bad, ok in ((b_nan, slice(0, 26)), (b_nan, slice(40, 60))):
        leaves = [x.clone().requires_grad_() for x in (a, bad)]
        got = linear_scan(*leaves, cu_seqlens=cumulative(lens), impl=impl)
        want = linear_scan(a, clean, cu_seqlens=cumulative(lens), impl="reference")
        assert got[26:31].isnan().all()
        torch.testing.assert_close(got[ok], want[ok], rtol=1e-13, atol=1e-13)
        keep = torch.ones(60, dtype=torch.bool)
        keep[26:40] = False
        d_a, d_b = torch.autograd.grad(got[keep].sum(), leaves)
        assert d_b.isfinite().all()
        assert d_a[keep].isfinite().all()


def test_limits(impl: str) -> None:
    """a = 1 is a reverse cumulative sum, a = 0 is b, and (1, 0) passes the next value on."""
    _, b, _ = problem([50], 3)
    one = torch.ones_like(b)
    torch.testing.assert_close(linear_scan(one, b, impl=impl), b.flip(0).cumsum(0).flip(0), rtol=1e-13, atol=1e-13)
    assert torch.equal(linear_scan(one * 0, b, impl=impl), b)
    gap = torch.zeros_like(b)
    gap[-1] = 3.0
    assert torch.equal(linear_scan(one, gap, impl=impl), 3 * one)


def test_lambda_one_telescopes(impl: str) -> None:
    """sum of gamma^k delta_{t+k}, delta = r + gamma V' - V, is the discounted return with one bootstrap, less V."""
    g = torch.Generator().manual_seed(4)
    r, v = torch.randn(2, 40, generator=g, dtype=torch.float64)
    gamma, bootstrap = 0.9, 1.7
    following = torch.cat([v[1:], torch.tensor([bootstrap], dtype=torch.float64)])
    coef = torch.full_like(r, gamma)
    traces = linear_scan(coef, r + gamma * following - v, impl=impl)
    returns = [
        sum(gamma**k * r[t + k].item() for k in range(40 - t)) + gamma ** (40 - t) * bootstrap for t in range(40)
    ]
    torch.testing.assert_close(traces + v, torch.tensor(returns, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_coefficients_above_one_take_the_loop() -> None:
    """Products of a overflow fp32 inside 2000 tokens although x stays finite: the blocked path must not be used."""
    a = torch.full((4000,), 1.5)
    a[::10] = 1e-8
    b = torch.ones(4000)
    want = by_hand(a.double(), b.double(), [4000], None, True)
    got = linear_scan(a, b, impl="blocked")
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)


def test_many_tokens_in_single_precision() -> None:
    a, b, x_end = problem([30_000, 1, 20_000], 5, torch.float32)
    got = linear_scan(a, b, cu_seqlens=cumulative([30_000, 1, 20_000]), x_end=x_end)
    want = by_hand(a.double(), b.double(), [30_000, 1, 20_000], x_end.double(), True)
    assert which_impl(a) == "blocked"
    assert (got.double() - torch.tensor(want, dtype=torch.float64)).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    a, b, _ = problem([30], 6, dtype)
    got = linear_scan(a, b)
    assert got.dtype == torch.float32
    want = by_hand(a.double(), b.double(), [30], None, True)
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_operators_and_compilation() -> None:
    a, b, x_end = (x.requires_grad_() for x in problem([6, 0, 9], 7))
    cu = cumulative([6, 0, 9])
    for impl in ("reference", "blocked"):
        torch.library.opcheck(ops.scan_op, (a, b, cu, x_end, True, impl))
        torch.library.opcheck(ops.scan_op, (a, b, cu, None, True, impl))
    compiled = torch.compile(
        lambda a, b, e: linear_scan(a, b, cu_seqlens=cu, x_end=e, reverse=False), backend="aot_eager", fullgraph=True
    )
    want = torch.tensor(by_hand(a, b, [6, 0, 9], x_end, False), dtype=torch.float64)
    torch.testing.assert_close(compiled(a, b, x_end), want, rtol=1e-13, atol=1e-13)
    grads = torch.autograd.grad(compiled(a, b, x_end).square().sum(), (a, b, x_end))
    eager = linear_scan(a, b, cu_seqlens=cu, x_end=x_end, reverse=False).square().sum()
    for x, y in zip(grads, torch.autograd.grad(eager, (a, b, x_end)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("lens", [[0], [1], [0, 3, 0, 0, 16, 1, 17, 0]])
def test_torch_func_has_values_and_gradients_of_the_operator(lens: list[int], reverse: bool) -> None:
    """By doubling: beside NaN in another segment, at an x_end that is not read, at zeros inside, behind a zero."""
    a, b, x_end = problem(lens, 8)
    cu, upstream = cumulative(lens), torch.randn(sum(lens), dtype=torch.float64)
    if len(lens) > 1:
        a[12], b[2], x_end[2] = 0.0, math.nan, math.nan
        upstream[:3] = 0.0

    def total(a: Tensor, b: Tensor, x_end: Tensor) -> tuple[Tensor, Tensor]:
        x = linear_scan(a, b, cu_seqlens=cu, x_end=x_end, reverse=reverse)
        return (x * upstream).sum(), x

    grads, x = torch.func.grad(total, argnums=(0, 1, 2), has_aux=True)(a, b, x_end)
    leaves = [y.clone().requires_grad_() for y in (a, b, x_end)]
    want = linear_scan(*leaves[:2], cu_seqlens=cu, x_end=leaves[2], reverse=reverse)
    torch.testing.assert_close(x, want.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    for got, expected in zip(grads, torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    infinite = b.where(torch.arange(len(b)) != 13, math.inf)
    want = linear_scan(a, infinite, cu_seqlens=cu, x_end=x_end, reverse=reverse)
    _, x = torch.func.grad(total, has_aux=True)(a, infinite, x_end)
    torch.testing.assert_close(x, want, equal_nan=True)


def test_meta_gradients_have_a_second_derivative() -> None:
    """sum_k k c^(k-1) and sum_k k (k-1) c^(k-2) of x_0 = sum_k c^k, by torch.func."""
    at_zero = lambda c: linear_scan(c.expand(6), torch.ones(6, dtype=torch.float64))[0]
    c = torch.tensor(0.7, dtype=torch.float64)
    first, second = torch.func.grad(at_zero), torch.func.grad(torch.func.grad(at_zero))
    assert first(c).item() == pytest.approx(sum(k * 0.7 ** (k - 1) for k in range(6)))
    assert second(c).item() == pytest.approx(sum(k * (k - 1) * 0.7 ** (k - 2) for k in range(6)))


def test_errors_name_the_argument() -> None:
    a = torch.ones(4)
    with pytest.raises(ValueError, match="x_end must have one entry per segment"):
        linear_scan(a, a, cu_seqlens=torch.tensor([0, 2, 4]), x_end=a)
    with pytest.raises(ValueError, match="b must have the shape of a"):
        linear_scan(a, a[1:])
    with pytest.raises(ValueError, match="from_padded"):
        linear_scan(a[None], a[None])
    with pytest.raises(ValueError, match="impl must be one of"):
        linear_scan(a, a, impl="fast")
