"""The row kernels and what is built on them against fp64 truth: values, every gradient, and the ways they go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.kernels.linear_logp import combine, fused_loss, fused_triton, linear_logp, row_kernels, shard_logp, triton
from rlkit.kernels.linear_logp import ops as linear_ops
from rlkit.kernels.linear_logp import partials as linear_partials
from rlkit.kernels.logits_logp import logits_logp, ops, partials
from rlkit.kernels.logits_logp import shard_logp as logits_shard
from rlkit.types import LogProbs

OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, columns that no tile divides, and blocks of a few rows."""
    monkeypatch.setattr(row_kernels, "ROWS", 8)
    monkeypatch.setattr(row_kernels, "STATS", {"BLOCK": 32, "num_warps": 4, "STAGES": 2})
    monkeypatch.setattr(row_kernels, "GRADIENT", {"BLOCK": 64, "num_warps": 4})
    for name, value in {
        "HEIGHT": 16,
        "WIDTH": 48,
        "BLOCK_BYTES": 0,
        "MIN_HEIGHT": 12,
        "GRADIENT_BYTES": 0,
        "MIN_WIDTH": 56,
    }.items():
        monkeypatch.setattr(triton, name, value)
    monkeypatch.setattr(fused_triton, "CHUNK_BYTES", 0)
    monkeypatch.setattr(fused_triton, "ROWS_STEP", 10)


def problem(rows: int, vocab: int, dim: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """[hidden, weight, bias] (in `dtype`) and targets."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, dim), (vocab, dim), (vocab,)]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    return tensors, torch.randint(vocab, (rows,), generator=g)


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
    tiny = 8 * torch.finfo(torch.float32).eps
    for i, (w, s, x) in enumerate(zip(want, same, got, strict=True)):
        error, allowed = (x.double() - w).abs().max(), 1.5 * (s.double() - w).abs().max() + tiny * w.abs().max()
        assert error <= allowed, f"output {i}: {error:.3g} > {allowed:.3g}"
        assert x.dtype == (torch.float32 if i < 2 else tensors[i - 2].dtype)


def slopes(rows: int, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
    g = torch.randn(2, rows, generator=torch.Generator().manual_seed(1))
    return g[0], g[1] if entropy else None


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [True, False])
def test_from_logits_three_way(options: dict[str, Any], dtype: torch.dtype, entropy: bool) -> None:
    (x, w, _), targets = problem(19, 127, dtype=torch.float64)
    logits = (x @ w.T).to(dtype)
    for inplace in (True, False):
        run = lambda z, i=inplace: logits_logp(z, targets, impl="triton", inplace_backward=i, **options)
        assert_three_way(run, truth(targets, **options), [logits], slopes(19, entropy))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [True, False])
def test_from_hidden_states_three_way(options: dict[str, Any], dtype: torch.dtype, entropy: bool) -> None:
    """Two row blocks, three column blocks, of which none is whole; with a bias."""
    tensors, targets = problem(19, 127, dtype=dtype)
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, impl="triton", **options)
    assert_three_way(run, truth(targets, **options), tensors, slopes(19, entropy))


@pytest.mark.parametrize("scale", [1e-8, 1e4])
def test_fp16_gradients_of_any_size(scale: float) -> None:
    """A loss divided by a million tokens, or multiplied by a loss scale: fp16 alone would lose or overflow it."""
    (hidden, weight, bias), targets = problem(19, 127, dtype=torch.float16)
    upstream = [scale * g for g in slopes(19) if g is not None]
    want = with_grads(truth(targets), [hidden.double(), weight.double(), bias.double()], upstream)
    run = lambda b: linear_logp(hidden, weight, targets, bias=b, impl="triton")
    got = with_grads(run, [bias.float()], upstream)
    assert (got[2] - want[4]).abs().max() <= 2e-3 * want[4].abs().max()


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 20),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 48, 57, 100, 127]),
    seed=st.integers(0, 99),
    present=st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_any_shape_and_mask(rows: int, vocab: int, seed: int, present: float | None) -> None:
    tensors, targets = problem(rows, vocab, 5, seed)
    mask = None if present is None else torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < present
    factor = torch.ones(rows).double() if mask is None else mask.double()
    plain = lambda *x: tuple(factor * y for y in truth(targets)(*x))
    want = with_grads(plain, [x.double() for x in tensors], slopes(rows))
    got = with_grads(
        lambda h, w, b: linear_logp(h, w, targets, bias=b, mask=mask, impl="triton"), tensors, slopes(rows)
    )
    logits = (tensors[0] @ tensors[1].T + tensors[2]).detach()
    from_logits = with_grads(lambda z: logits_logp(z, targets, mask=mask, impl="triton"), [logits], slopes(rows))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-5)
    for x, y in zip(from_logits[:2], want, strict=False):
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-5)
    reference = with_grads(lambda z: plain(z), [logits.double()], slopes(rows))
    torch.testing.assert_close(from_logits[2].double(), reference[2], rtol=2e-4, atol=2e-5)


def test_32003_entries() -> None:
    tensors, targets = problem(3, 32_003, 4)
    targets[0], targets[1] = 32_002, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_kernels, "STATS", {"BLOCK": 4096, "num_warps": 4, "STAGES": 2})
        patch.setattr(row_kernels, "GRADIENT", {"BLOCK": 4096, "num_warps": 4})
        patch.setattr(triton, "WIDTH", 8192)
        patch.setattr(triton, "MIN_WIDTH", 16_384)
        run = lambda h, w, b: linear_logp(h, w, targets, bias=b, impl="triton")
        assert_three_way(run, truth(targets), tensors, slopes(3))


@pytest.mark.parametrize("offset", [1000.0, -1000.0])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_large_common_offset_and_peaked_rows(offset: float, scale: float) -> None:
    (hidden, weight, _), targets = problem(20, 90, 16)
    hidden = torch.cat([hidden * scale, torch.full((20, 1), offset)], 1)
    weight = torch.cat([weight, torch.ones(90, 1)], 1)
    targets = torch.where(torch.arange(20) % 2 == 0, (hidden @ weight.T).argmax(1), targets)
    run = lambda h, w: linear_logp(h, w, targets, impl="triton")
    assert_three_way(run, truth(targets), [hidden, weight], slopes(20))


def test_banned_padded_and_very_negative_logits() -> None:
    """-inf removes an entry, in logits and in the bias; a shard of nothing but banned entries counts for nothing."""
    (hidden, weight, _), targets = problem(9, 40, 4)
    banned = torch.zeros(40, dtype=torch.bool)
    banned[[3, 17, 33, 34, 35, 36, 37, 38, 39]] = True
    kept = (~banned).nonzero()[:, 0]
    targets = kept[targets % len(kept)]
    bias = torch.where(banned, -math.inf, torch.full((40,), -1e4))
    plain = truth(torch.searchsorted(kept, targets))
    short = [hidden.double(), weight[~banned].double()]
    want = with_grads(plain, short, slopes(9))
    got = with_grads(lambda h, w: linear_logp(h, w, targets, bias=bias, impl="triton"), [hidden, weight], slopes(9))
    for x, y in zip(got, want, strict=True):
        x = x[~banned] if x.shape == weight.shape else x
        assert (x.double() - y).abs().max() < 5e-3  # logits of 1e4 have 1e-3 left
    assert (got[3][banned] == 0).all()
    logits = (hidden @ weight.T).masked_fill(banned, -math.inf)
    from_logits = with_grads(lambda z: logits_logp(z, targets, impl="triton"), [logits], slopes(9))
    for x, y in zip(from_logits[:2], want, strict=False):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert (from_logits[2][:, banned] == 0).all()
    halves = [
        partials(z, targets, vocab_start=a, impl="triton") for z, a in ((logits[:, :33], 0), (logits[:, 33:], 33))
    ]
    torch.testing.assert_close(reduce(combine, halves), partials(logits, targets, impl="triton"))


def test_nan_is_seen_in_live_rows_and_not_in_others() -> None:
    tensors, targets = problem(19, 70)
    mask = torch.arange(19) % 3 != 1
    poisoned = tensors[0].clone()
    poisoned[~mask] = math.nan
    foreign = torch.where(mask, targets, -100)
    upstream = slopes(19)
    run = lambda h, w: linear_logp(h, w, foreign, mask=mask, impl="triton")
    got, want = with_grads(run, [poisoned, tensors[1]], upstream), with_grads(run, tensors[:2], upstream)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    logits = poisoned @ tensors[1].T
    for inplace in (True, False):
        z = with_grads(
            lambda z, i=inplace: logits_logp(z, foreign, mask=mask, inplace_backward=i, impl="triton"),
            [logits],
            upstream,
        )
        torch.testing.assert_close(z[0], want[0])
        assert (z[2][~mask] == 0).all()
        assert z[2].isfinite().all()
    sick = tensors[0].clone()
    sick[4] = math.nan
    logp, entropy = linear_logp(sick, tensors[1], targets, impl="triton")
    assert logp.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[4]]


def test_rows_without_upstream_gradient_leave() -> None:
    tensors, targets = problem(19, 70)
    dead = torch.arange(19) % 4 == 2
    poisoned = tensors[0].clone()
    poisoned[dead] = math.nan
    upstream = [g.masked_fill(dead, 0.0) for g in slopes(19) if g is not None]
    got = with_grads(lambda h, w: linear_logp(h, w, targets, impl="triton"), [poisoned, tensors[1]], upstream)
    rest = [g[~dead] for g in upstream]
    alone = [tensors[0][~dead], tensors[1]]
    want = with_grads(lambda h, w: linear_logp(h, w, targets[~dead], impl="triton"), alone, rest)
    torch.testing.assert_close(got[3], want[3])
    torch.testing.assert_close(got[2][~dead], want[2])
    assert (got[2][dead] == 0).all()


def test_the_same_row_has_the_same_bits_whatever_surrounds_it() -> None:
    (hidden, weight, _), targets = problem(40, 100)
    whole = linear_logp(hidden, weight, targets, impl="triton")
    order = torch.randperm(40)
    for rows in (order, order[:7], order[5:38]):
        part = linear_logp(hidden[rows], weight, targets[rows], impl="triton")
        for x, y in zip(part, whole, strict=True):
            assert torch.equal(x, y[rows])


@pytest.mark.parametrize("split", [[100], [33, 67], [1, 60, 39], [0, 100]])
def test_vocabulary_shards(split: list[int]) -> None:
    tensors, targets = problem(19, 100)
    bounds = [0, *torch.tensor(split).cumsum(0).tolist()]
    options = {"temperature": 0.9, "softcap": 3.0}
    want = with_grads(truth(targets, **options), [x.double() for x in tensors], slopes(19))
    h, w, b = tensors
    parts = [
        linear_partials(h, w[i:j], targets, vocab_start=i, bias=b[i:j], impl="triton", **options)
        for i, j in pairwise(bounds)
    ]
    combined, d_hidden = reduce(combine, parts), torch.zeros_like(h).double()
    logits = h @ w.T + b
    want_logits = with_grads(truth(targets, **options), [logits.double()], slopes(19))
    for i, j in pairwise(bounds):
        shard = {"combined": combined, "vocab_start": i, "impl": "triton", **options}
        run = lambda h, w, b, s=shard: shard_logp(h, w, targets, bias=b, **s)
        got = with_grads(run, [h, w[i:j], b[i:j]], slopes(19))
        d_hidden += got[2].double()
        for x, y in zip([*got[:2], *got[3:]], [*want[:2], want[3][i:j], want[4][i:j]], strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
        run = lambda z, s=shard: logits_shard(z, targets, **s)
        got = with_grads(run, [logits[:, i:j]], slopes(19))
        torch.testing.assert_close(got[2].double(), want_logits[2][:, i:j], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_hidden, want[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_fused_loss_equals_the_generic_path(dtype: torch.dtype, masked: bool) -> None:
    """Three chunks; rows without a gradient leave inside a chunk."""
    tensors, targets = problem(27, 70, dtype=dtype)
    weights = torch.randn(27)
    weights[::4] = 0.0
    mask = torch.arange(27) % 5 != 2 if masked else torch.ones(27, dtype=torch.bool)
    loss_fn = lambda out, w: w * (out.logp.exp() - 0.1 * out.entropy)
    results = []
    for fuse in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        h, w, b = leaves
        if fuse:
            out = fused_loss(h, w, targets, loss_fn=loss_fn, row_data=(weights,), bias=b, mask=mask, impl="triton")
            loss = out.loss
        else:
            out = linear_logp(h, w, targets, bias=b, mask=mask)
            loss = loss_fn(LogProbs(out[0][mask], out[1][mask]), weights[mask]).sum()
        grads = torch.autograd.grad(1.5 * loss, leaves)
        results.append([loss.detach(), out.logp.detach(), out.entropy.detach(), *grads])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for x, y in zip(*results, strict=True):
        assert (x.double() - y.double()).abs().max() <= tolerance * y.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_the_weights_own_gradient(dtype: torch.dtype) -> None:
    tensors, targets = problem(19, 70, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in tensors[:2]]
    plain = with_grads(lambda h, w: linear_logp(h, w, targets, impl="triton"), tensors[:2], slopes(19))
    for _ in range(2):
        logp, entropy = linear_logp(*leaves, targets, into_grad=True, impl="triton")
        sum((g * y).sum() for g, y in zip(slopes(19), (logp, entropy))).backward()
    assert leaves[1].grad.dtype == dtype
    torch.testing.assert_close(leaves[1].grad, 2 * plain[3], rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-6)


def test_operators_pass_opcheck_and_compile() -> None:
    tensors, targets = problem(6, 20, 3)
    h, w, b = [x.requires_grad_() for x in tensors]
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    args = (targets, b, mask, 0.9, 2.0)
    torch.library.opcheck(linear_ops.logp_op, (h, w, *args, False, "triton", False))
    detached = (h.detach(), w.detach(), targets, b.detach(), mask, 0.9, 2.0)
    torch.library.opcheck(linear_ops.partials_op, (*detached, 0, "triton"))
    stats = linear_ops.partials_op(*detached, 0, "triton")
    torch.library.opcheck(linear_ops.shard_op, (h, w, *args, 0, stats, "triton"))
    logits = torch.randn(6, 20, requires_grad=True)
    torch.library.opcheck(ops.partials_op, (logits.detach(), targets, mask, 0.9, 2.0, 0, "triton"))
    torch.library.opcheck(ops.logp_op, (logits, targets, stats, mask, 0.9, 2.0, 0, False, "triton"))
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, mask=mask, temperature=1.3, impl="triton")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for x, y in zip(with_grads(compiled, [h, w, b], slopes(6)), with_grads(run, [h, w, b], slopes(6)), strict=True):
        assert torch.equal(x, y)


def test_rows_that_are_not_in_line() -> None:
    """Logits as the transpose of something, and as a part of wider rows."""
    (x, w, _), targets = problem(9, 70)
    logits = x @ w.T
    want = with_grads(lambda z: logits_logp(z, targets, impl="triton"), [logits], slopes(9))
    for view in (lambda z: z.T.contiguous().T, lambda z: torch.cat([z, z], 1)[:, :70]):
        for inplace in (True, False):
            run = lambda z, v=view, i=inplace: logits_logp(v(z), targets, inplace_backward=i, impl="triton")
            for a, b in zip(with_grads(run, [logits], slopes(9)), want, strict=True):
                assert torch.equal(a, b)
