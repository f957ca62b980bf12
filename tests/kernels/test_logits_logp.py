"""logits_logp against fp64 truth by plain log_softmax, whole and in vocabulary shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Size, assert_three_way, truth
from torch import Tensor

from rlkit.kernels.linear_logp import chunked as tiles
from rlkit.kernels.linear_logp import combine, linear_logp
from rlkit.kernels.logits_logp import logits_logp, ops, partials, shard_logp

OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"softcap": 2.0, "temperature": 1.3}]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many blocks":
        monkeypatch.setattr(tiles, "CPU_TILE_BYTES", 3 * 40 * 4)


def problem(
    rows: int = 17, vocab: int = 40, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=g, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocab, (rows,), generator=g)


def test_torch_func_gives_the_gradients_of_each_row() -> None:
    """Of a masked batch with NaN in a masked row: vmap of grad, per sample, is the rows of autograd's gradient."""
    logits, targets = problem(6)
    mask, upstream = torch.arange(6) % 3 != 1, torch.randn(2, 6, dtype=torch.float64)
    logits[1] = math.nan
    want = with_grads(lambda x: logits_logp(x, targets, mask=mask), logits, *upstream)

    def total(row: Tensor, target: Tensor, on: Tensor, g: Tensor) -> Tensor:
        return (g * torch.cat(logits_logp(row[None], target[None], mask=on[None]))).sum()

    got = torch.func.vmap(torch.func.grad(total))(logits, targets, mask, upstream.T)
    torch.testing.assert_close(got, want[2], rtol=1e-12, atol=1e-12)


def with_grads(run: Callable[..., Any], logits: Tensor, g_logp: Tensor, g_entropy: Tensor | None) -> list[Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    logp, entropy = run(leaf * 1)
    loss = (g_logp.to(logp.dtype) * logp).sum()
    if g_entropy is not None:
        loss = loss + (g_entropy.to(logp.dtype) * entropy).sum()
    return [logp.detach(), entropy.detach(), torch.autograd.grad(loss, leaf)[0]]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_three_way_oracle(options: dict[str, Any], dtype: torch.dtype, entropy: bool, inplace: bool) -> None:
    logits, targets = problem(dtype=dtype)
    run = lambda x: logits_logp(x, targets, inplace_backward=inplace, **options)
    assert_three_way(run, targets, [logits], Size("cpu", 17, 40, 1).slopes(entropy), **options)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_by_finite_differences(options: dict[str, Any], impl: str) -> None:
    logits, targets = problem(5, 9)
    mask = torch.tensor([1, 0, 1, 1, 1]).bool()
    torch.autograd.gradcheck(
        lambda x: logits_logp(x, targets, mask=mask, impl=impl, **options), (logits.requires_grad_(),)
    )


@given(
    rows=st.integers(0, 9), vocab=st.integers(1, 60), seed=st.integers(0, 99), present=st.sampled_from([0.0, 0.5, 1.0])
)
def test_equals_linear_logp(rows: int, vocab: int, seed: int, present: float) -> None:
    """An identity projection makes the two the same function."""
    logits, targets = problem(rows, vocab, seed=seed)
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < present
    eye = torch.eye(vocab, dtype=torch.float64)
    g = torch.randn(2, rows, dtype=torch.float64)
    got = with_grads(lambda x: logits_logp(x, targets, mask=mask, temperature=0.9), logits, *g)
    want = with_grads(lambda x: linear_logp(x, eye, targets, mask=mask, temperature=0.9), logits, *g)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_masked_and_dead_rows(inplace: bool, impl: str) -> None:
    """NaN logits and foreign targets at masked rows; rows without an upstream gradient get exactly 0."""
    logits, targets = problem(dtype=torch.float32)
    mask = torch.arange(17) % 3 != 1
    clean = logits.clone()
    logits[~mask], targets[~mask] = math.nan, -100
    g_logp, g_entropy = torch.randn(2, 17)
    g_logp[::4], g_entropy[::4] = 0.0, 0.0
    run = lambda x: logits_logp(x, targets, mask=mask, inplace_backward=inplace, impl=impl)
    logp, entropy, grad = with_grads(run, logits, g_logp, g_entropy)
    want = with_grads(truth(targets.clamp(min=0)), clean, g_logp * mask, g_entropy * mask)
    torch.testing.assert_close(logp, want[0] * mask)
    torch.testing.assert_close(entropy, want[1] * mask)
    torch.testing.assert_close(grad, want[2])
    assert (grad[~mask] == 0).all()
    assert (grad[::4] == 0).all()


@pytest.mark.parametrize("split", [[40], [25, 15], [1, 30, 9], [0, 40]])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_vocabulary_shards(split: list[int], options: dict[str, Any], masked: bool) -> None:
    logits, targets = problem()
    g_logp, g_entropy = torch.randn(2, 17, dtype=torch.float64)
    mask = torch.arange(17) % 3 != 1
    plain = truth(targets, **options)
    run = (lambda z: [torch.where(mask, x, 0.0) for x in plain(z)]) if masked else plain
    want = with_grads(run, logits, g_logp, g_entropy)
    options = {**options, "mask": mask if masked else None}
    starts = [0, *torch.tensor(split).cumsum(0).tolist()]
    shards = [(a, logits[:, a:b]) for a, b in pairwise(starts)]
    combined = reduce(combine, [partials(x, targets, vocab_start=a, **options) for a, x in shards])
    grads = []
    for a, x in shards:
        run = lambda z, a=a: shard_logp(z, targets, combined=combined, vocab_start=a, **options)
        logp, entropy, grad = with_grads(run, x, g_logp, g_entropy)
        torch.testing.assert_close(logp, want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy, want[1], rtol=1e-12, atol=1e-12)
        grads.append(grad)
    torch.testing.assert_close(torch.cat(grads, 1), want[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_banned_entries_and_offsets(impl: str) -> None:
    """-inf removes an entry; +1000 everywhere changes results only by the rounding of the logits."""
    logits, targets = problem(dtype=torch.float32)
    logits = (logits * 8).round() / 8
    moved = logits_logp(logits + 1000, targets, impl=impl)
    plain = logits_logp(logits, targets, impl=impl)
    for x, y in zip(moved, plain, strict=True):
        assert (x - y).abs().max() < 2e-6
    banned = logits.clone()
    banned[:, 5:10] = -math.inf
    some = torch.where((targets >= 5) & (targets < 10), 0, targets)
    got = with_grads(lambda x: logits_logp(x, some, impl=impl), banned, torch.ones(17), torch.ones(17))
    keep = [v for v in range(40) if not 5 <= v < 10]
    short = torch.tensor([keep.index(v) for v in some.tolist()])
    want = with_grads(truth(short), banned[:, keep], torch.ones(17), torch.ones(17))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    torch.testing.assert_close(got[2][:, keep], want[2])
    assert (got[2][:, 5:10] == 0).all()


def test_inplace_backward_reuses_the_logits() -> None:
    logits, targets = problem()
    leaf = logits.clone().requires_grad_()
    own = leaf * 1
    seen: list[Tensor] = []
    own.register_hook(lambda g: seen.append(g))
    loss = logits_logp(own, targets, inplace_backward=True).logp.sum()
    loss.backward(retain_graph=True)
    assert seen[0].data_ptr() == own.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="leaf"):
        logits_logp(leaf, targets, inplace_backward=True)


@pytest.mark.slow_cases("one block")
def test_operators_and_compilation() -> None:
    logits, targets = problem(6, 11)
    mask = torch.arange(6) != 2
    torch.library.opcheck(ops.partials_op, (logits, targets, mask, 0.9, 2.0, 0, "chunked"))
    stats = ops.partials_op(logits, targets, mask, 0.9, 2.0, 0, "chunked")
    leaf = logits.clone().requires_grad_()
    torch.library.opcheck(ops.logp_op, (leaf, targets, stats, mask, 0.9, 2.0, 0, False, "chunked"))
    run = lambda x: logits_logp(x, targets, mask=mask, softcap=2.0, inplace_backward=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    g = torch.randn(2, 6, dtype=torch.float64)
    for x, y in zip(with_grads(compiled, logits, *g), with_grads(run, logits, *g), strict=True):
        assert torch.equal(x, y)


def test_errors_name_the_argument() -> None:
    logits, targets = problem(3, 4)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("logits must be", lambda: logits_logp(logits[None], targets)),
        (r"targets must be in \[0, 4\)", lambda: logits_logp(logits, targets * 0 + 4)),
        ("temperature must be > 0", lambda: logits_logp(logits, targets, temperature=-1.0)),
        ("impl must be", lambda: logits_logp(logits, targets, impl="fast")),
    ]
    for match, call in cases:
        with pytest.raises(ValueError, match=match):
            call()
