"""The row kernels and what is built on them against fp64 truth, in tiles of a few rows and columns."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Size, assert_three_way, truth, with_grads
from row_cases import FEW, ROW_CASES

from rlkit.kernels.linear_logp import linear_logp, triton
from rlkit.kernels.linear_logp.chunked import Head
from rlkit.kernels.logits_logp import logits_logp

SIZE = Size("cpu", rows=27, vocab=127, dim=24)  # two row blocks, three column blocks, three chunks; none is whole


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, columns that no tile divides, and blocks of a few rows."""
    monkeypatch.setattr(triton, "ROWS", 8)
    monkeypatch.setattr(triton, "STATS", triton.STATS | {"BLOCK": 32})
    monkeypatch.setattr(triton, "GRADIENT", triton.GRADIENT | {"BLOCK": 64})
    for name, value in {
        "HEIGHT": 16,
        "WIDTH": 48,
        "BLOCK_BYTES": 0,
        "MIN_HEIGHT": 12,
        "GRADIENT_BYTES": 0,
        "MIN_WIDTH": 48,
        "NARROW": 0,
    }.items():
        monkeypatch.setattr(triton, name, value)


LONG = {  # half of the time of the few
    "autocast_changes_nothing", "inputs_that_are_not_in_line", "operators_pass_opcheck",
    "the_same_bits_whatever_surrounds_a_row float16", "vocabulary_shards split=[]",
    "vocabulary_shards split=[0.0]", "vocabulary_shards split=[0.01, 0.61]",
}  # fmt: skip
DAY = FEW - LONG


@pytest.mark.parametrize("name", [n if n in DAY else pytest.param(n, marks=pytest.mark.slow) for n in ROW_CASES])
def test_row_case(name: str) -> None:
    ROW_CASES[name](SIZE)


@settings(max_examples=settings.default.max_examples // 3)  # an example takes half a second
@given(
    rows=st.integers(0, 20),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 48, 57, 100, 127]),
    seed=st.integers(0, 99),
    present=st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_any_shape_and_mask(rows: int, vocab: int, seed: int, present: float | None) -> None:
    size = Size("cpu", rows, vocab, 5)
    tensors, targets = size.problem(seed=seed)
    mask = None if present is None else torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < present
    factor = torch.ones(rows).double() if mask is None else mask.double()
    plain = lambda *x: tuple(factor * y for y in truth(targets)(*x))
    want = with_grads(plain, [x.double() for x in tensors], size.slopes())
    got = with_grads(
        lambda h, w, b: linear_logp(h, w, targets, bias=b, mask=mask, impl="triton"), tensors, size.slopes()
    )
    logits = (tensors[0] @ tensors[1].T + tensors[2]).detach()
    from_logits = with_grads(lambda z: logits_logp(z, targets, mask=mask, impl="triton"), [logits], size.slopes())
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-5)
    for x, y in zip(from_logits[:2], want, strict=False):
        torch.testing.assert_close(x.double(), y, rtol=2e-4, atol=2e-5)
    reference = with_grads(lambda z: plain(z), [logits.double()], size.slopes())
    torch.testing.assert_close(from_logits[2].double(), reference[2], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("vocab", [4096, 9000, *(pytest.param(n, marks=pytest.mark.slow) for n in (8192, 16_400))])
def test_unusual_rows_in_the_tiles_that_are_shipped(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks, blocks and a tail, lanes of 16 bytes; a maximum of the last column."""
    monkeypatch.setattr(triton, "STATS", triton.STATS | {"BLOCK": 4096})
    for name, case in ROW_CASES.items():
        if name.startswith("statistics_of_unusual_rows"):
            case(SIZE._replace(vocab=vocab))


def test_32003_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that are shipped."""
    size = Size("cpu", 3, 32_003, 4)
    tensors, targets = size.problem()
    targets[0], targets[1] = 32_002, 0
    monkeypatch.setattr(triton, "STATS", triton.STATS | {"BLOCK": 4096})
    monkeypatch.setattr(triton, "GRADIENT", triton.GRADIENT | {"BLOCK": 4096})
    monkeypatch.setattr(triton, "WIDTH", 8192)
    monkeypatch.setattr(triton, "MIN_WIDTH", 16_384)
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, impl="triton")
    assert_three_way(run, targets, tensors, size.slopes())


@pytest.mark.parametrize("vocab", [33, 127, 128])
def test_rows_begin_at_multiples_of_16(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    """Those of the logits and of their gradient, in every block."""
    steps: list[int] = []

    def seen(name: str, *tensors: int) -> None:
        launch = getattr(triton, name)

        def spy(*args: Any, **options: Any) -> None:
            steps.extend(args[i].stride(0) for i in tensors)
            launch(*args, **options)

        monkeypatch.setattr(triton, name, spy)

    seen("update_stats", 1)
    seen("write_gradient", 0, 1)
    (h, w, _), targets = Size("cpu", 27, vocab, 24).problem(torch.float16)
    h, w = h.requires_grad_(), w.requires_grad_()
    linear_logp(h, w, targets, impl="triton").logp.sum().backward()
    assert steps
    assert [step for step in steps if step % 16] == []


def test_a_gradient_of_padded_rows_stays_in_its_padding() -> None:
    """Up to 15 columns after the last, which hold anything, become 0; what is behind them is not touched."""
    rows, vocab = 5, 35
    x, out = torch.randn(rows, 64), torch.full((rows, 64), 7.0)
    x[:, vocab:] = math.nan
    targets, terms = torch.tensor([0, 34, 33, 1, 2]), torch.rand(3, rows)
    head = Head(torch.empty(vocab, 1), torch.randn(vocab), 0.7, None)
    triton.write_gradient(out[:, :vocab], x[:, :vocab], targets, terms, head, padded_rows=True)
    exact = torch.empty(rows, vocab)
    triton.write_gradient(exact, x[:, :vocab], targets, terms, head)
    assert exact.isfinite().all()
    assert exact.count_nonzero() == exact.numel()
    assert torch.equal(out[:, :vocab], exact)
    assert (out[:, vocab:48] == 0).all()
    assert (out[:, 48:] == 7).all()


def test_narrow_hidden_states_have_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "NARROW", 2048)
    assert [triton.growth(dim) for dim in (64, 512, 896, 1024, 1536, 2048, 4096)] == [4, 4, 2, 2, 1, 1, 1]
    (h, w, b), targets = SIZE.problem()
    run = lambda *x: linear_logp(*x[:2], targets, bias=x[2], impl="triton")
    assert_three_way(run, targets, [h, w, b], SIZE.slopes())


@pytest.mark.parametrize(("gib", "columns"), [(16, 4096), (24, 6144), (40, 10_240), (80, 16_384), (140, 16_384)])
def test_the_gradients_block_is_part_of_the_devices_memory(
    monkeypatch: pytest.MonkeyPatch, gib: int, columns: int
) -> None:
    """1 / 128 of it, at most 512 MB: for 16,384 rows of 2 bytes."""
    for name, value in {"GRADIENT_BYTES": 512 << 20, "MIN_WIDTH": 4096}.items():
        monkeypatch.setattr(triton, name, value)
    device = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    h: Any = SimpleNamespace(is_cuda=True, device="cuda", shape=(16_384, 4096), element_size=lambda: 2)
    assert triton.gradient_width(h, 151_936) == columns
    assert triton.gradient_width(h, 3000) == 3000


def test_one_compiled_graph() -> None:
    size = Size("cpu", 6, 20, 3)
    tensors, targets = size.problem()
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, mask=mask, temperature=1.3, impl="triton")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for x, y in zip(with_grads(compiled, tensors, size.slopes()), with_grads(run, tensors, size.slopes()), strict=True):
        assert torch.equal(x, y)
