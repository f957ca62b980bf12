"""The three-pass scan against a loop over Python floats, in fp32, with blocks of a few tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.kernels.linear_scan import linear_scan, ops, triton


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "BLOCK", 16)
    monkeypatch.setattr(triton, "CARRIES", 4)
    monkeypatch.setattr(triton, "BOUNDS", 4)


def cumulative(lens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.long).cumsum(0).tolist()])


def problem(lens: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(sum(lens), generator=g) * 2 - 1
    a[torch.rand(sum(lens), generator=g) < 0.1] = 0
    return a, torch.randn(sum(lens), generator=g), torch.randn(len(lens), generator=g)


def by_loop(a: Tensor, b: Tensor, lens: list[int], x_end: Tensor | None, reverse: bool) -> Tensor:
    """Differentiable, segment by segment, token by token, in the dtype of its inputs (fp64 here)."""
    out: list[Tensor] = [torch.zeros((), dtype=b.dtype)] * sum(lens)
    first = 0
    for n, length in enumerate(lens):
        places = range(first, first + length)
        x = torch.zeros((), dtype=b.dtype) if x_end is None else x_end[n]
        for t in reversed(places) if reverse else places:
            x = out[t] = b[t] if a[t] == 0 and not x.isfinite() else a[t] * x + b[t]
        first += length
    return torch.stack(out) if out else b * 1


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=3e-6, atol=3e-6)


@settings(max_examples=settings.default.max_examples // 3)
@given(
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    reverse=st.booleans(),
    with_end=st.booleans(),
)
def test_values_and_gradients_equal_the_loops(lens: list[int], seed: int, reverse: bool, with_end: bool) -> None:
    a, b, x_end = problem(lens, seed)
    leaves = [a, b, x_end] if with_end else [a, b]
    ours = [x.clone().requires_grad_() for x in leaves]
    true = [x.double().requires_grad_() for x in leaves]
    end = ours[2] if with_end else None
    got = linear_scan(*ours[:2], cu_seqlens=cumulative(lens), x_end=end, reverse=reverse, impl="triton")
    want = by_loop(*true[:2], lens, true[2] if with_end else None, reverse)
    close(got, want)
    g = torch.randn(sum(lens), generator=torch.Generator().manual_seed(seed))
    grads = torch.autograd.grad(got, ours, g)
    for x, y in zip(grads, torch.autograd.grad(want, true, g.double(), allow_unused=True), strict=True):
        close(x, torch.zeros_like(x) if y is None else y)


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("lens", [[16], [64], [65], [1] * 20, [150], [0, 0, 128, 0, 1, 0], [15, 17, 16]])
def test_sizes_at_the_edges_of_blocks(lens: list[int], reverse: bool) -> None:
    a, b, x_end = problem(lens, 1)
    got = linear_scan(a, b, cu_seqlens=cumulative(lens).int(), x_end=x_end, reverse=reverse, impl="triton")
    close(got, by_loop(a.double(), b.double(), lens, x_end.double(), reverse))


@pytest.mark.parametrize("reverse", [True, False])
def test_a_nan_stays_in_its_segment_and_behind_a_zero(reverse: bool) -> None:
    """Values and gradients: the packed neighbours and the tokens behind a = 0 have the bits of a run without it."""
    lens = [20, 20, 20]
    a, clean, _ = problem(lens, 2)
    a[a == 0] = 0.5
    wall = 25 if reverse else 35  # x_wall reads nothing
    a[wall] = 0.0
    bad = clean.clone()
    bad[30] = math.nan
    behind = slice(26, 31) if reverse else slice(30, 35)
    whole = torch.ones(60, dtype=torch.bool)
    whole[behind] = False
    runs = []
    for b in (bad, clean):
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        x = linear_scan(*leaves, cu_seqlens=cumulative(lens), reverse=reverse, impl="triton")
        keep = torch.ones(60, dtype=torch.bool)
        keep[20:40] = False
        runs.append((x, *torch.autograd.grad(x[keep].sum(), leaves)))
    assert runs[0][0][behind].isnan().all()
    assert torch.equal(runs[0][0][whole], runs[1][0][whole])
    assert torch.equal(runs[0][2], runs[1][2])
    assert torch.equal(runs[0][1][whole], runs[1][1][whole])


def test_a_nan_coefficient_or_end_value_stays_too() -> None:
    a, b, x_end = problem([20, 20, 20], 3)
    want = linear_scan(a, b, cu_seqlens=cumulative([20, 20, 20]), x_end=x_end, impl="triton")
    a, x_end = a.clone(), x_end.clone()
    a[30], x_end[2] = math.nan, math.nan
    a[59] = 0.0
    want[40:] = linear_scan(a[40:], b[40:], impl="triton")
    got = linear_scan(a, b, cu_seqlens=cumulative([20, 20, 20]), x_end=x_end, impl="triton")
    assert torch.equal(got[:20], want[:20])
    assert torch.equal(got[31:40], want[31:40])
    torch.testing.assert_close(got[40:], want[40:])
    assert got[30].isnan()


def test_closed_forms() -> None:
    b = torch.randn(50)
    one = torch.ones(50)
    close(linear_scan(one, b, impl="triton"), b.double().flip(0).cumsum(0).flip(0))
    close(linear_scan(one, b, reverse=False, impl="triton"), b.double().cumsum(0))
    assert torch.equal(linear_scan(one * 0, b, impl="triton"), b)
    assert linear_scan(b[:0], b[:0], impl="triton").shape == (0,)


@pytest.mark.slow
def test_halves_and_operators() -> None:
    a, b, x_end = problem([6, 0, 9], 4)
    cu = cumulative([6, 0, 9])
    for dtype in (torch.bfloat16, torch.float16):
        half = [x.to(dtype) for x in (a, b, x_end)]
        got = linear_scan(*half[:2], cu_seqlens=cu, x_end=half[2], impl="triton")
        assert got.dtype == torch.float32
        close(got, by_loop(half[0].double(), half[1].double(), [6, 0, 9], half[2].double(), True))
    leaves = [x.requires_grad_() for x in (a, b, x_end)]
    for reverse in (True, False):
        torch.library.opcheck(ops.scan_op, (*leaves[:2], cu, leaves[2], reverse, "triton"))
    torch.library.opcheck(ops.scan_op, (*leaves[:2], cu, None, True, "triton"))
    run = lambda a, b, e: linear_scan(a, b, cu_seqlens=cu, x_end=e, reverse=False, impl="triton")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for x, y in zip(
        torch.autograd.grad(compiled(*leaves).square().sum(), leaves),
        torch.autograd.grad(run(*leaves).square().sum(), leaves),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_fp64_is_refused() -> None:
    with pytest.raises(TypeError, match="fp32, bf16 and fp16"):
        linear_scan(torch.ones(3).double(), torch.ones(3).double(), impl="triton")
