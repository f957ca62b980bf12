"""The row kernels and what is built on them against fp64 truth, in tiles of a few rows and columns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Size, assert_three_way, truth, with_grads
from row_cases import ROW_CASES

from rlkit.kernels.linear_logp import linear_logp, triton
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
        "MIN_WIDTH": 56,
    }.items():
        monkeypatch.setattr(triton, name, value)
    monkeypatch.setattr(triton, "CHUNK_BYTES", 0)
    monkeypatch.setattr(triton, "ROWS_STEP", 10)


@pytest.mark.parametrize("name", ROW_CASES)
def test_row_case(name: str) -> None:
    ROW_CASES[name](SIZE)


@settings(max_examples=15, deadline=None)
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


@pytest.mark.parametrize("vocab", [4096, 8192, 9000, 16_400])
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


def test_one_compiled_graph() -> None:
    size = Size("cpu", 6, 20, 3)
    tensors, targets = size.problem()
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    run = lambda h, w, b: linear_logp(h, w, targets, bias=b, mask=mask, temperature=1.3, impl="triton")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for x, y in zip(with_grads(compiled, tensors, size.slopes()), with_grads(run, tensors, size.slopes()), strict=True):
        assert torch.equal(x, y)
