from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import corrections
from rlkit.losses.corrections import kept_support
from rlkit.rollout.sampling import sample, sample_kept, support_of, uniforms

MASK = 2**64 - 1


def splitmix_uniform(seed: int, position: int) -> float:
    """The documented formula in Python integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    bits = mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    return ((bits >> 12) + 0.5) / 2**52


def test_splitmix_reference_is_splitmix():
    """The first outputs of SplitMix64 seeded with 0, as published with Vigna's splitmix64.c."""
    golden = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    state = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    from rlkit.rollout.sampling import _mix

    assert [int(x) for x in _mix(state)] == golden


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 2**31)), min_size=1, max_size=8))
def test_uniforms_are_the_documented_function_of_seed_and_position(pairs):
    seeds, positions = np.array([s for s, _ in pairs], np.uint64), np.array([p for _, p in pairs], np.int64)
    assert uniforms(seeds, positions).tolist() == [splitmix_uniform(s, p) for s, p in pairs]


def test_uniforms_are_uniform_over_consecutive_seeds_and_positions():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel())
    assert 0 < u.min() < u.max() < 1
    expected = u.size / 64
    chi2 = ((np.histogram(u, 64, (0, 1))[0] - expected) ** 2 / expected).sum()
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    grid = u.reshape(200, 200)
    for neighbours in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):  # product of independent uniforms: mean 1/4
        assert abs(neighbours.mean() - 0.25) < 5 * math.sqrt(7 / 144 / neighbours.size)


@pytest.mark.parametrize("more", [0, 5000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_share_of_the_unit_interval_that_gives_a_token_is_its_probability(temperature, more):
    logits = torch.tensor([0.3, -2.0, 1.5, -8.0, 0.0, 2.2, -1.0, *[-torch.inf] * more])
    n = 2000 if more else 20_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    out = sample(logits.expand(n, -1), u, temperature=torch.full((n,), temperature))
    p = (logits.double() / temperature).softmax(-1)
    assert (torch.bincount(out.ids, minlength=7 + more) / n - p).abs().max() <= 1.01 / n
    largest = logits.abs().max() / temperature  # two roundings of the scaled logit, two of the normaliser
    assert (out.logp - p.log()[out.ids]).abs().max() <= 4 * torch.finfo(torch.float32).eps * largest
    assert (out.ids.diff() >= 0).all()


def kept_by_hand(p: list[float], top_p: float, top_k: int, min_p: float) -> list[bool]:
    kept, mass = [False] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: (-p[i], i))):
        kept[i] = (top_k == 0 or rank < top_k) and (top_p >= 1 or mass < top_p) and p[i] >= min_p * max(p)
        mass += p[i]
    return kept


@given(
    st.lists(st.integers(0, 12), min_size=2, max_size=9).filter(any),
    st.sampled_from([0.01, 0.3, 0.55, 0.9, 0.999, 1.0]),
    st.integers(0, 10),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.sampled_from([1, 2, 128]),
)
def test_support_is_the_documented_one(counts, top_p, top_k, min_p, first):
    p = torch.tensor([[c / sum(counts) for c in counts]], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrections, "FIRST_RANKED", first)
        shares = {"top_p": torch.tensor([top_p], dtype=torch.float64), "min_p": torch.tensor([min_p])}
        kept = kept_support(p, **shares, top_k=torch.tensor([top_k]))
    truth = kept_by_hand(p[0].tolist(), top_p, top_k, min_p)
    ranked = sorted(p[0].tolist(), reverse=True)
    if all(abs(sum(ranked[:i]) - top_p) > 1e-9 for i in range(len(ranked) + 1)):  # not on the edge of a sum
        assert kept[0].tolist() == truth
    assert kept[0, p[0].argmax()]


def test_truncated_sampling_gives_exactly_the_support_in_proportion_and_the_untruncated_logp():
    p = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15], dtype=torch.float64)
    n = 10_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    rows = {"top_p": torch.full((n,), 0.8, dtype=torch.float64), "top_k": torch.zeros(n, dtype=torch.int64)}
    least = {"min_p": torch.full((n,), 0.3, dtype=torch.float64)}
    for limits, support in ((rows, {1, 3, 4}), (rows | {"top_k": torch.full((n,), 2)}, {1, 3}), (least, {1, 3, 4})):
        out = sample(p.log().expand(n, -1), u, **limits)
        share = torch.bincount(out.ids, minlength=5) / n
        kept = torch.tensor([v in support for v in range(5)])
        assert (share - torch.where(kept, p, 0) / p[kept].sum()).abs().max() <= 1.01 / n
        assert (out.logp - p.log()[out.ids]).abs().max() < 1e-12


def test_each_row_has_its_own_settings():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(4, -1)
    u = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    out = sample(
        logits,
        u,
        temperature=torch.tensor([0.0, 1.0, 1.0, 1.0]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 1.0], dtype=torch.float64),
        top_k=torch.tensor([0, 0, 2, 0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0]),
    )
    assert out.ids.tolist() == [0, 2, 1, 3]  # p = .644 .237 .087 .032
    assert sample(logits, u, min_p=torch.tensor([0.0, 0.1, 0.3, 1.0])).ids.tolist() == [3, 2, 1, 0]
    assert torch.allclose(out.logp, logits.log_softmax(-1)[torch.arange(4), out.ids])


WIDER = pytest.mark.parametrize("more", [0, 5000], ids=["whole", "by blocks"])  # tokens of probability 0


@WIDER
def test_a_token_of_probability_zero_is_never_drawn(more):
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf, *[-torch.inf] * (more + 1)])
    u = torch.tensor([2.0**-53, 0.25, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    out = sample(logits.expand(4, -1), u)
    assert out.ids.tolist() == [1, 1, 3, 3]
    assert out.logp.tolist() == pytest.approx([-math.log(2)] * 4)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_limits_look_at_the_tokens_that_may_be_drawn(limit):
    logits = torch.tensor([[0.0, 3.0, 9.0, 1.0, -20.0]])
    limits = {name: torch.tensor([x], dtype=None if name == "top_k" else torch.float64) for name, x in limit.items()}
    (ids, logp), kept = sample_kept(logits, torch.tensor([0.5], dtype=torch.float64), never=(2,), **limits)
    assert ids.tolist() == [1]
    assert logp.item() == pytest.approx(-6.0029, abs=1e-4)
    assert kept[0].nonzero()[:, 0].tolist() == ([1, 3] if "top_p" in limit else [1])


@WIDER
def test_greedy_takes_the_lowest_of_equal_logits_and_temperature_one(more):
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0, *[-torch.inf] * more]])
    out = sample(logits, torch.tensor([0.99], dtype=torch.float64), temperature=torch.zeros(1))
    assert out.ids.tolist() == [1]
    assert out.logp.item() == pytest.approx(3 - math.log(1 + 2 * math.e**3 + math.e), abs=1e-6)


@pytest.mark.parametrize("width", [1000, 6000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logp_is_computed_in_fp32_or_better(dtype, width):
    logits = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    u = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = sample(logits, u, temperature=torch.full((64,), 0.7))
    truth = (logits.double() / torch.tensor(0.7).double()).log_softmax(-1).gather(-1, out.ids[:, None])[:, 0]
    assert out.logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rounding = math.sqrt(width) + 4 * (logits.double() / 0.7).abs().max()  # of a sum of its terms, and of the logits
    assert (out.logp - truth).abs().max() <= torch.finfo(out.logp.dtype).eps * rounding


@pytest.mark.parametrize("size", [3, 256, 257, 1000, 5120])
def test_the_token_is_that_of_the_whole_cdf(size):
    g = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(64, size, generator=g)
    logits[::2, : size // 2] = -torch.inf  # whole blocks without mass
    u = torch.rand(64, generator=g, dtype=torch.float64)
    u[0], u[1], u[2], u[3] = 2.0**-53, 1 - 2.0**-53, 2.0**-53, 1 - 2.0**-53
    found = sample(logits, u)
    p = logits.softmax(-1).double()
    cdf = p.cumsum(-1)
    for row, token in enumerate(found.ids.tolist()):
        before = cdf[row, token] - p[row, token]
        assert p[row, token] > 0
        assert before - 1e-12 <= u[row] * cdf[row, -1] <= cdf[row, token] + 1e-12


def test_logits_that_are_not_finite_give_no_finite_log_prob():
    for value in (torch.nan, torch.inf):
        logits = torch.zeros(2, 5000)
        logits[1, 4321] = value
        assert sample(logits, torch.full((2,), 0.5, dtype=torch.float64)).logp.isfinite().tolist() == [True, False]


def test_the_support_has_the_kept_tokens_and_is_padded_with_minus_one():
    ids, mass = support_of(torch.tensor([[0.0, 0.25, 0.5, 0.0], [0.0, 0.0, 0.0, 0.125]]))
    assert [sorted(row) for row in ids.tolist()] == [[1, 2], [-1, 3]]
    assert (ids.dtype, mass.tolist()) == (np.int32, [0.75, 0.125])
