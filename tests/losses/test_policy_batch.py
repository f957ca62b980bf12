"""Batch statistics against the papers' own procedures (greedy loops), and the surrogates that take them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import (
    bapo_clip_range,
    clip_cov,
    importance_sampling,
    kl_cov,
    m2_cutoff,
    m2po,
    ppo_clip,
    select_between,
    select_top,
    token_covariance,
)

ratios = st.floats(-1.5, 1.5).map(lambda x: round(x, 2))
tokens = st.lists(st.tuples(ratios, st.sampled_from([-1.0, 2.0, 0.0]), st.booleans()), min_size=1, max_size=12)


def columns(batch: list[tuple[float, float, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, a, m = zip(*batch, strict=True)
    mask = torch.tensor(m)
    hide = lambda v: torch.where(mask, torch.tensor(v, dtype=torch.float64), torch.nan)
    return hide(x), hide(a), mask


def moves_on(x: float, a: float) -> bool:
    return (a > 0 and x > 0) or (a < 0 and x < 0)


def greedily_kept(batch: list[tuple[float, float, bool]], budget: float) -> set[int]:
    """Algorithm 1 of arXiv:2510.01161: while the mean is too large, drop the largest; equal values go together."""
    region = {i: x * x for i, (x, a, m) in enumerate(batch) if m and moves_on(x, a)}
    while region and sum(sorted(region.values())) / len(region) > budget:
        worst = max(region.values())
        region = {i: v for i, v in region.items() if v < worst}
    others = {i for i, (x, a, m) in enumerate(batch) if m and not moves_on(x, a)}
    return set(region) | others


@given(tokens, st.sampled_from([0.0, 0.0413, 0.3017, 1.0019]))
def test_m2po_keeps_what_the_papers_loop_keeps(batch: list[tuple[float, float, bool]], budget: float) -> None:
    x, a, mask = columns(batch)
    x.requires_grad_()
    cutoff = m2_cutoff(x, a, max_m2=budget, mask=mask)
    assert not cutoff.requires_grad
    loss = m2po(x, a, cutoff=cutoff, mask=mask)
    keep = greedily_kept(batch, budget + 1e-12)
    expected = [-a * math.exp(x) if i in keep else 0.0 for i, (x, a, _) in enumerate(batch)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_m2_equal_values_go_together() -> None:
    x, a = torch.tensor([0.1, 0.3, 0.3], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    cutoff = m2_cutoff(x, a, max_m2=0.05 + 1e-12)  # one 0.3 would fit, two do not
    assert (m2po(x, a, cutoff=cutoff) == 0).tolist() == [False, True, True]


def test_m2_cutoff_says_when_nothing_need_go() -> None:
    x, a = torch.tensor([0.1, -0.1, 3.0]), torch.tensor([1.0, -1.0, -1.0])
    assert m2_cutoff(x, a) == torch.inf  # the third token moves back towards 1
    assert m2_cutoff(x[:0], a[:0]) == torch.inf
    assert m2_cutoff(torch.tensor([3.0]), torch.tensor([1.0])) == 0
    assert torch.equal(m2po(x, a, cutoff=float("inf")), importance_sampling(x, a))


def schedule_of_the_paper(
    batch: list[tuple[float, float, bool]], old: list[float], target: float
) -> tuple[float, float]:
    """Algorithm 1 of arXiv:2510.18927 with its equation 8, as a while loop."""
    live = [(math.exp(x), a, math.exp(o)) for (x, a, m), o in zip(batch, old, strict=True) if m]

    def share(low: float, high: float) -> float:
        positive = sum(p * a * min(r, high) for r, a, p in live if a > 0)
        negative = sum(p * -a * max(r, low) for r, a, p in live if a < 0)
        return positive / (positive + negative) if positive + negative else 1.0

    low, high = 0.6, 1.2
    while share(low, high) < target and low + 0.02 <= 0.9 + 1e-9:
        if high + 0.05 <= 3.0 + 1e-9:
            high += 0.05
        else:
            low += 0.02
    return low, high


@given(tokens, st.sampled_from([0.0, 0.3, 0.4, 0.6, 0.9]))
def test_bapo_finds_the_range_of_the_papers_loop(batch: list[tuple[float, float, bool]], target: float) -> None:
    x, a, mask = columns(batch)
    old = [-0.1 - 0.3 * i for i in range(len(batch))]
    old_logp = torch.where(mask, torch.tensor(old, dtype=torch.float64), torch.nan)
    found = bapo_clip_range(x, a, old_logp=old_logp, target=target + 1e-9, mask=mask)
    low, high = schedule_of_the_paper(batch, old, target + 1e-9)
    assert found.clip_low.item() == pytest.approx(1 - low, abs=1e-9)
    assert found.clip_high.item() == pytest.approx(high - 1, abs=1e-9)


@pytest.mark.parametrize("old", [[0.0, 0.0], [-0.1, 0.0], [-0.4, 0.0], [-3.0, 0.0]])
def test_bapo_weighs_tokens_by_the_old_policy(old: list[float]) -> None:
    batch = [(1.0, 1.0, True), (0.0, -1.0, True)]
    x, a, _ = columns(batch)
    found = bapo_clip_range(x, a, old_logp=torch.tensor(old, dtype=torch.float64), target=0.601)
    low, high = schedule_of_the_paper(batch, old, 0.601)
    assert (1 - found.clip_low.item(), 1 + found.clip_high.item()) == pytest.approx((low, high))


def test_bapo_range_goes_into_ppo_clip() -> None:
    x = torch.tensor([0.7, 0.7, -0.8, 0.1], dtype=torch.float64)
    a = torch.tensor([1.0, 1.0, -3.0, -0.1], dtype=torch.float64)
    clip = bapo_clip_range(x, a, old_logp=torch.zeros(4, dtype=torch.float64), target=0.6)
    assert 0.2 < clip.clip_high.item() < 2.0
    assert ppo_clip(x, a, **clip._asdict())[0].item() == pytest.approx(-(1 + clip.clip_high.item()))


def test_covariance_is_the_product_of_deviations() -> None:
    logp = torch.tensor([-1.0, -3.0, float("nan"), -0.5], dtype=torch.float64)
    a = torch.tensor([2.0, -1.0, float("nan"), 0.5], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    cov = token_covariance(logp, a, mask=mask)
    mean_a, mean_l = 1.5 / 3, -4.5 / 3
    expected = [(2 - mean_a) * (-1 - mean_l), (-1 - mean_a) * (-3 - mean_l), 0, (0.5 - mean_a) * (-0.5 - mean_l)]
    torch.testing.assert_close(cov, torch.tensor(expected, dtype=torch.float64))
    means = {"mean_logp": torch.tensor(mean_l), "mean_advantage": torch.tensor(mean_a)}
    part = token_covariance(logp[:2], a[:2], mask=mask[:2], **means)
    torch.testing.assert_close(part, cov[:2])


def test_each_mean_of_the_covariance_is_used_where_it_is_given() -> None:
    logp, a = torch.tensor([-1.0, -3.0], dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64)
    one = token_covariance(logp, a, mean_logp=torch.tensor(-5.0, dtype=torch.float64))
    torch.testing.assert_close(one, torch.tensor([(2 - 0.5) * 4.0, (-1 - 0.5) * 2.0], dtype=torch.float64))
    other = token_covariance(logp, a, mean_advantage=torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(other, torch.tensor([1.0 * 1.0, -2.0 * -1.0], dtype=torch.float64))


def test_select_top_breaks_ties_by_its_seed() -> None:
    def chosen(cov: torch.Tensor, seed: int, fraction: float = 1e-3) -> list[int]:
        mask = torch.arange(cov.numel()) % 4 != 3
        generator = torch.Generator().manual_seed(seed)
        return select_top(cov, fraction=fraction, mask=mask, generator=generator).nonzero().flatten().tolist()

    equal = torch.zeros(1000)
    drawn = [chosen(equal, seed) for seed in range(40)]
    assert all(len(x) == 1 and x[0] % 4 != 3 for x in drawn), "one of 750 trainable ones, though all are tied"
    assert len({x[0] for x in drawn}) > 30
    assert chosen(equal, 0) == drawn[0]
    edge = torch.cat([torch.tensor([9.0, 5.0, 5.0, 9.9, 5.0]), torch.arange(35) / 100])
    drawn = [chosen(edge, seed, fraction=0.1) for seed in range(40)]  # three of thirty
    assert all(len(x) == 3 and 0 in x and {*x} <= {0, 1, 2, 4} for x in drawn)
    assert {i for x in drawn for i in x} == {0, 1, 2, 4}


def test_kl_cov_penalises_the_share_it_was_asked_for_where_all_advantages_are_equal() -> None:
    generator = torch.Generator().manual_seed(1)
    logp = -torch.rand(1000, generator=generator, dtype=torch.float64)
    selected = select_top(token_covariance(logp, torch.ones(1000, dtype=torch.float64)), generator=generator)
    assert selected.sum() == 1


@pytest.mark.parametrize("select", [select_top, partial(select_between, low=-1.0)])
def test_a_choice_refuses_nan(select) -> None:
    cov = torch.tensor([1.0, float("nan"), 2.0])
    with pytest.raises(ValueError, match="cov must not be NaN where trainable, got 1 NaN"):
        select(cov)
    assert select(cov, mask=torch.tensor([True, False, True])).sum() == 1


def test_select_top_takes_the_largest() -> None:
    cov = torch.tensor([5.0, float("nan"), 1.0, 9.0, -2.0, 7.0])
    mask = torch.tensor([True, False, True, True, True, True])
    assert select_top(cov, fraction=0.4, mask=mask).tolist() == [False, False, False, True, False, True]
    assert select_top(cov, fraction=0.0, mask=mask).sum() == 1
    assert select_top(cov, mask=mask & False).sum() == 0
    assert select_top(cov[:0]).shape == (0,)


def test_select_between_draws_from_the_interval_only() -> None:
    cov = torch.linspace(-1, 7, 801)
    inside = (cov > 1) & (cov < 5)
    drawn = [select_between(cov, fraction=0.05, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for choice in drawn:
        assert choice.sum() == 40
        assert (inside | ~choice).all()
    assert torch.equal(drawn[0], select_between(cov, fraction=0.05, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(drawn[0], drawn[1])
    assert select_between(cov, low=8, high=9).sum() == 0
    mask = torch.arange(20) % 2 == 0  # the fraction is of trainable tokens
    chosen = select_between(torch.full((20,), 2.0), fraction=0.5, mask=mask)
    assert chosen.sum() == 5
    assert not chosen[~mask].any()


def test_clip_cov_and_kl_cov_change_selected_tokens_only() -> None:
    x = torch.tensor([0.1, -0.1, 0.1, 0.0, float("nan")], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, -2.0, 3.0, 4.0, 1.0], dtype=torch.float64)
    selected = torch.tensor([True, True, False, True, False])
    mask = torch.tensor([True, True, True, True, False])
    loss = clip_cov(x, a, selected=selected, mask=mask)
    assert loss.tolist() == [0, 0, -3 * math.exp(0.1), 0, 0]
    assert torch.autograd.grad(loss.sum(), x)[0].tolist() == [0, 0, -3 * math.exp(0.1), 0, 0]
    assert clip_cov(x, a, selected=torch.ones(5, dtype=torch.bool)).isnan().tolist() == [False] * 4 + [True]
    loss = kl_cov(x, a, selected=selected, kl_coef=0.5, mask=mask)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    values = [-math.exp(0.1) + 0.05, 2 * math.exp(-0.1) + 0.05, -3 * math.exp(0.1), -4, 0]
    grads = [-math.exp(0.1) + 0.5, 2 * math.exp(-0.1) - 0.5, -3 * math.exp(0.1), -4, 0]
    torch.testing.assert_close(loss, torch.tensor(values, dtype=torch.float64))
    torch.testing.assert_close(grad, torch.tensor(grads, dtype=torch.float64))
