"""linear_log_kept_mass against a sampler written out: sort, walk, sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.kernels.linear_logp import chunked, linear_log_kept_mass, linear_logp


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def by_hand(p: list[float], top_p: float, top_k: int, min_p: float) -> float:
    """Walk down the sorted probabilities until the nucleus is full, top_k are taken or the next is too small."""
    kept, count = 0.0, 0
    for x in sorted(p, reverse=True):
        if (top_k and count == top_k) or (top_p < 1 and kept >= top_p) or x < min_p * max(p):
            break
        kept, count = kept + x, count + 1
    return math.log(min(kept, 1.0))


@given(
    rows=st.integers(0, 7),
    vocab=st.integers(1, 60),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.013, 0.999]),
    top_k=st.sampled_from([0, 1, 5, 59, 1000]),
    min_p=st.sampled_from([0.0, 0.3]),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    seed=st.integers(0, 99),
)
def test_equals_the_walk(
    rows: int, vocab: int, top_p: float, top_k: int, min_p: float, scale: float, seed: int
) -> None:
    limits = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((rows, 4), (vocab, 4), (vocab,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "FIRST_CANDIDATES", 2)
        patch.setattr(chunked, "COLUMNS", 16)
        patch.setattr("rlkit.kernels.linear_logp.CPU_LOGITS_BYTES", 2 * vocab * 8)
        got = linear_log_kept_mass(hidden * scale, weight, bias=bias, temperature=0.7, **limits)
    p = ((hidden * scale @ weight.T + bias) / 0.7).softmax(1)
    want = torch.tensor([by_hand(row, top_p, top_k, min_p) for row in p.tolist()], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_known_mass() -> None:
    """p = .5 .3 .15 .05: a nucleus of .5 is the first token alone, of .51 the first two."""
    z = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    hidden, weight = torch.ones(1, 1, dtype=torch.float64), z[:, None]
    for options, mass in (
        ({"top_p": 0.49}, 0.5),
        ({"top_p": 0.51}, 0.8),
        ({"top_k": 3}, 0.95),
        ({"top_k": 1, "top_p": 0.9}, 0.5),
        ({"min_p": 0.31}, 0.8),
        ({"min_p": 0.29}, 0.95),
        ({"min_p": 1.0}, 0.5),
    ):
        assert linear_log_kept_mass(hidden, weight, **options).item() == pytest.approx(math.log(mass))


def test_limits() -> None:
    hidden, weight = torch.randn(5, 3), torch.randn(9, 3)
    largest = (hidden @ weight.T).argmax(1)
    top = linear_logp(hidden, weight, largest, softcap=1.5).logp
    torch.testing.assert_close(linear_log_kept_mass(hidden, weight, top_k=1, softcap=1.5), top)
    assert torch.equal(linear_log_kept_mass(hidden, weight, top_k=9), torch.zeros(5))
    assert torch.equal(linear_log_kept_mass(hidden, weight), torch.zeros(5))


def test_masked_rows_are_not_read_and_nothing_is_trained() -> None:
    hidden, weight = torch.randn(6, 3), torch.randn(9, 3, requires_grad=True)
    mask = torch.arange(6) % 2 == 0
    want = linear_log_kept_mass(hidden, weight, top_p=0.6)
    hidden[~mask] = math.nan
    got = linear_log_kept_mass(hidden, weight, top_p=0.6, mask=mask)
    assert not got.requires_grad
    assert (want < 0).all()
    torch.testing.assert_close(got, torch.where(mask, want, 0.0))


@pytest.mark.parametrize("limits", [{"top_p": 0.6}, {"top_k": 2}, {"min_p": 0.1}, {"top_p": 0.6, "top_k": 3}])
def test_a_row_of_nan_is_nan(limits: dict[str, float]) -> None:
    hidden, weight = torch.randn(6, 3), torch.randn(9, 3)
    want = linear_log_kept_mass(hidden, weight, **limits)
    hidden[2] = math.nan
    got = linear_log_kept_mass(hidden, weight, **limits)
    assert got[2].isnan()
    torch.testing.assert_close(got[[0, 1, 3, 4, 5]], want[[0, 1, 3, 4, 5]])


def test_errors_name_the_argument() -> None:
    x = torch.randn(3, 3)
    with pytest.raises(ValueError, match="top_p must be in"):
        linear_log_kept_mass(x, x, top_p=0.0)
    with pytest.raises(ValueError, match="top_k must be >= 0"):
        linear_log_kept_mass(x, x, top_k=-1)
    with pytest.raises(ValueError, match="min_p must be from 0"):
        linear_log_kept_mass(x, x, min_p=1.5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_16_bit_inputs(softcap: float | None, dtype: torch.dtype) -> None:
    """What a GPU computes, without an fp32 weight: the exact products of the 16-bit numbers, then fp32."""
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=g).to(dtype) for s in ((5, 8), (11, 8)))
    bias, out = torch.randn(11, generator=g), torch.empty(5, 11)
    chunked.logits_by_library(out, h, chunked.Head(w, bias, 0.7, softcap))
    z = h.double() @ w.double().T + bias
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    torch.testing.assert_close(out.double(), z / 0.7, rtol=1e-5, atol=1e-5)
