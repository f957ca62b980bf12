"""Every kernel on a CUDA device, in every dtype, against fp64; `make gpu` runs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.kernels.linear_logp import (
    combine,
    fused_loss,
    linear_logp,
    log_kept_mass,
    ops,
    partials,
    shard_logp,
    which_impl,
)
from rlkit.kernels.linear_scan import linear_scan
from rlkit.kernels.linear_scan import ops as scan_ops
from rlkit.kernels.linear_scan import which_impl as which_scan
from rlkit.kernels.logits_logp import logits_logp
from rlkit.kernels.logits_logp import which_impl as which_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: run `make gpu` on a machine that has one"
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}]


@pytest.fixture(autouse=True)
def _seeded_and_poisoned() -> None:
    """What the allocator hands out next holds NaN."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.full((1 << 27,), math.nan, device="cuda")


def problem(rows: int, vocab: int, dim: int = 64, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """[hidden, weight, bias] and targets."""
    shapes = [(rows, dim), (vocab, dim), (vocab,)]
    tensors = [torch.randn(s, device="cuda", dtype=torch.float64) for s in shapes]
    tensors[1] *= 2 / math.sqrt(dim)
    return [x.to(dtype) for x in tensors], torch.randint(vocab, (rows,), device="cuda")


def truth(targets: Tensor, temperature: float = 1.0, softcap: float | None = None) -> Callable[..., Any]:
    """The plain computation, in the dtype of its inputs: from logits, or from hidden, weight and bias."""

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = x if weight is None else x @ weight.T
        z = z if bias is None else z + bias
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        log_p = torch.log_softmax(z / temperature, -1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)

    return run


def with_grads(run: Callable[..., Any], tensors: list[Tensor], upstream: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    logp, entropy = run(*[x * 1 for x in leaves])
    loss = sum((g.to(y.dtype) * y).sum() for g, y in zip(upstream, (logp, entropy)) if g is not None)
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def assert_three_way(ours: Callable[..., Any], plain: Callable[..., Any], tensors: list[Tensor], upstream: Any) -> None:
    """Error against fp64 at most 1.5 times that of the plain computation in the same dtype."""
    want = with_grads(plain, [x.double() for x in tensors], upstream)
    same, got = with_grads(plain, tensors, upstream), with_grads(ours, tensors, upstream)
    tiny = 16 * torch.finfo(torch.float32).eps
    for i, (w, s, x) in enumerate(zip(want, same, got, strict=True)):
        error, allowed = (x.double() - w).abs().max(), 1.5 * (s.double() - w).abs().max() + tiny * w.abs().max()
        assert error <= allowed, f"output {i}: {error:.3g} > {allowed:.3g}"


def slopes(rows: int, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
    g = torch.randn(2, rows, device="cuda")
    return g[0], g[1] if entropy else None


def test_triton_is_what_runs() -> None:
    x = torch.ones(3, 4, device="cuda")
    assert which_impl(x, x) == which_logits(x) == which_scan(x[0]) == "triton"
    assert which_impl(x.double(), x.double()) == "chunked"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("vocab", [1, 127, 9000, 32_003])
def test_linear_logp(options: dict[str, Any], dtype: torch.dtype, entropy: bool, vocab: int) -> None:
    """Blocks that are not whole: 1,300 rows of 1,024, and columns beside the 8,192 of a block."""
    tensors, targets = problem(1300, vocab, dtype=dtype)
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, **options)
    assert_three_way(run, truth(targets, **options), tensors, slopes(1300, entropy))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("vocab", [1, 127, 32_000, 32_003])
def test_logits_logp(options: dict[str, Any], dtype: torch.dtype, inplace: bool, vocab: int) -> None:
    logits = (3 * torch.randn(70, vocab, device="cuda")).to(dtype)
    targets = torch.randint(vocab, (70,), device="cuda")
    run = lambda z: logits_logp(z, targets, inplace_backward=inplace, **options)
    assert_three_way(run, truth(targets, **options), [logits], slopes(70))


def test_more_rows_than_a_grid_axis_has() -> None:
    """70,000 rows (Liger-Kernel#1294), and more than 2^31 logits."""
    logits = torch.randn(70_000, 40_000, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(40_000, (70_000,), device="cuda")
    out = logits_logp(logits, targets)
    for rows in (slice(0, 50), slice(69_950, 70_000)):
        want = torch.log_softmax(logits[rows].double(), -1).gather(1, targets[rows, None])[:, 0]
        torch.testing.assert_close(out.logp[rows].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_and_dead_rows_and_nan(dtype: torch.dtype) -> None:
    tensors, targets = problem(1300, 5000, dtype=dtype)
    mask, dead = torch.arange(1300, device="cuda") % 3 != 1, torch.arange(1300, device="cuda") % 4 == 0
    upstream = [g.masked_fill(dead, 0.0) for g in slopes(1300) if g is not None]
    poisoned, foreign = tensors[0].clone(), torch.where(mask, targets, -100)
    poisoned[~mask] = math.nan
    run = lambda h, w, b: linear_logp(h, w, foreign, bias=b, mask=mask)
    got, want = with_grads(run, [poisoned, *tensors[1:]], upstream), with_grads(run, tensors, upstream)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    assert (got[2][dead | ~mask] == 0).all()
    logits = poisoned @ tensors[1].T
    for inplace in (True, False):
        run = lambda z, i=inplace: logits_logp(z, foreign, mask=mask, inplace_backward=i)
        z = with_grads(run, [logits], upstream)
        assert (z[2][dead | ~mask] == 0).all()
        assert z[2].isfinite().all()
    sick = tensors[0].clone()
    sick[4] = math.nan
    for x in linear_logp(sick, tensors[1], targets):
        assert x.isnan().nonzero().tolist() == [[4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_whatever_surrounds_a_row(dtype: torch.dtype) -> None:
    """Fewer rows, other rows, another order, a second run; the ratio of an unchanged policy is exactly 1."""
    (hidden, weight, _), targets = problem(3000, 20_000, 512, dtype)
    whole = linear_logp(hidden, weight, targets)
    order = torch.randperm(3000, device="cuda")
    for rows in (torch.arange(3000, device="cuda"), order, order[:1], order[:1025], order[7:2055]):
        part = linear_logp(hidden[rows], weight, targets[rows])
        for x, y in zip(part, whole, strict=True):
            assert torch.equal(x, y[rows])
    run = lambda h, w: linear_logp(h, w, targets)
    runs = [with_grads(run, [hidden, weight], (whole.logp, whole.entropy)) for _ in range(2)]
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_equal_the_whole(dtype: torch.dtype) -> None:
    tensors, targets = problem(500, 7001, dtype=dtype)
    h, w, b = tensors
    bounds = [0, 1, 4000, 7001]
    pairs = list(pairwise(bounds))
    parts = [partials(h, w[i:j], targets, vocab_start=i, bias=b[i:j], temperature=0.9) for i, j in pairs]
    combined = reduce(combine, parts)
    upstream = slopes(500)
    want = with_grads(lambda h, w, b: linear_logp(h, w, targets, bias=b, temperature=0.9), tensors, upstream)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for i, j in pairs:
        run = lambda h, w, b, i=i: shard_logp(h, w, targets, bias=b, combined=combined, vocab_start=i, temperature=0.9)
        got = with_grads(run, [h, w[i:j], b[i:j]], upstream)
        for x, y in zip([*got[:2], *got[3:]], [*want[:2], want[3][i:j], want[4][i:j]], strict=True):
            torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_loss_equals_the_generic_path(dtype: torch.dtype) -> None:
    tensors, targets = problem(1300, 9001, dtype=dtype)
    weights = torch.randn(1300, device="cuda")
    weights[::4] = 0.0
    loss_fn = lambda out, w: w * (out.logp.exp() - 0.1 * out.entropy)
    leaves = [[x.clone().requires_grad_() for x in tensors] for _ in range(2)]
    h, w, b = leaves[0]
    fused = fused_loss(h, w, targets, loss_fn=loss_fn, row_data=(weights,), bias=b)
    h, w, b = leaves[1]
    out = linear_logp(h, w, targets, bias=b)
    losses = (fused.loss, loss_fn(out, weights).sum())
    grads = [torch.autograd.grad(loss, x) for loss, x in zip(losses, leaves, strict=True)]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for x, y in zip((losses[0], fused.logp, *grads[0]), (losses[1], out.logp, *grads[1]), strict=True):
        assert (x.double() - y.double()).abs().max() <= tolerance * y.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_the_weights_own_gradient_without_memory_of_its_size(dtype: torch.dtype) -> None:
    """Extra memory of forward and backward: the blocks, and neither [T, V] nor [V, D]."""
    (hidden, weight, _), targets = problem(2048, 150_000, 1024, dtype)
    weight = weight.requires_grad_()
    weight.grad = torch.zeros_like(weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logp(hidden, weight, targets, into_grad=True).logp.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 400 << 20
    assert extra < weight.nbytes
    leaf = weight.detach().clone().requires_grad_()
    linear_logp(hidden, leaf, targets).logp.sum().backward()
    torch.testing.assert_close(weight.grad, leaf.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_mass(dtype: torch.dtype) -> None:
    """Against a full sort in fp64; entries that bf16 rounds across the limit move it by their own probability."""
    (hidden, weight, bias), _ = problem(300, 5000, dtype=dtype)
    got = log_kept_mass(hidden, weight, bias=bias, top_p=0.8, temperature=0.9).exp().double()
    p = ((hidden.double() @ weight.double().T + bias.double()) / 0.9).softmax(-1).sort(-1, descending=True).values
    before = p.cumsum(-1) - p
    want = torch.where(before < 0.8, p, 0.0).sum(-1)
    edge = torch.where(before < 0.8, p, 1.0).amin(-1)
    assert ((got - want).abs() <= edge + 1e-5).all()
    assert ((got - want).abs() <= 1e-5).double().mean() > 0.9


@pytest.mark.parametrize("scale", [1e-8, 1e4])
def test_fp16_gradients_of_any_size(scale: float) -> None:
    (hidden, weight, bias), targets = problem(500, 3000, dtype=torch.float16)
    upstream = [scale * g for g in slopes(500) if g is not None]
    want = with_grads(truth(targets), [hidden.double(), weight.double(), bias.double()], upstream)
    got = with_grads(lambda b: linear_logp(hidden, weight, targets, bias=b), [bias.float()], upstream)
    assert (got[2] - want[4]).abs().max() <= 2e-3 * want[4].abs().max()


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("lens", [[1], [2048], [2049], [5, 0, 4096, 1, 0], [1] * 3000, [2_500_000, 3, 500_000]])
def test_linear_scan(lens: list[int], reverse: bool) -> None:
    total = sum(lens)
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda")
    a = (torch.rand(total, device="cuda") * 0.999).requires_grad_()
    b, x_end = (
        torch.randn(total, device="cuda").requires_grad_(),
        torch.randn(len(lens), device="cuda").requires_grad_(),
    )
    got = linear_scan(a, b, cu_seqlens=cu, x_end=x_end, reverse=reverse)
    g = torch.randn(total, device="cuda")
    ours = [got, *torch.autograd.grad(got, (a, b, x_end), g)]
    leaves = [x.detach().cpu().double().requires_grad_() for x in (a, b, x_end)]
    want = linear_scan(*leaves[:2], cu_seqlens=cu.cpu(), x_end=leaves[2], reverse=reverse, impl="blocked")
    true = [want, *torch.autograd.grad(want, leaves, g.cpu().double())]
    for x, y in zip(ours, true, strict=True):
        torch.testing.assert_close(x.detach().cpu().double(), y.detach(), rtol=1e-5, atol=1e-5)
    again = linear_scan(a, b, cu_seqlens=cu, x_end=x_end, reverse=reverse)
    assert torch.equal(got, again)


@pytest.mark.parametrize("reverse", [True, False])
def test_a_nan_stays_in_its_segment(reverse: bool) -> None:
    lens = [3000, 3000, 3000]
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda")
    a, clean = torch.rand(9000, device="cuda"), torch.randn(9000, device="cuda")
    bad = clean.clone()
    bad[4500] = math.nan
    keep = torch.ones(9000, dtype=torch.bool, device="cuda")
    keep[3000:6000] = False
    runs = []
    for b in (bad, clean):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        x = linear_scan(*leaves, cu_seqlens=cu, reverse=reverse)
        runs.append((x, *torch.autograd.grad(x[keep].sum(), leaves)))
    assert runs[0][0].isnan().any()
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x[keep], y[keep])
    assert torch.equal(runs[0][2], runs[1][2])


def test_operators_and_one_compiled_graph() -> None:
    (hidden, weight, _), targets = problem(30, 500)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    torch.library.opcheck(ops.logp_op, (*leaves, targets, None, None, 0.9, 2.0, False, "triton", False))
    a, b = torch.rand(100, device="cuda").requires_grad_(), torch.randn(100, device="cuda").requires_grad_()
    cu = torch.tensor([0, 30, 100], device="cuda")
    torch.library.opcheck(scan_ops.scan_op, (a, b, cu, None, False, "triton"))

    def step(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_logp(h, w, targets, temperature=1.3)
        traced = linear_scan(out.entropy.detach().sigmoid(), out.logp, reverse=False)
        return traced, logits_logp(h @ w.T, targets).entropy

    compiled = torch.compile(step, fullgraph=True)
    upstream = slopes(30)
    for x, y in zip(with_grads(compiled, leaves, upstream), with_grads(step, leaves, upstream), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
