"""Best-of-k advantages against the enumeration of all subsets, their unbiasedness against that of all draws."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import max_at_k, pass_at_k

ZEROS = lambda n: torch.zeros(n, dtype=torch.int64)


def subsets(n, k):
    return list(itertools.combinations(range(n), k))


VALUES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-3, 3, width=32))


@given(st.lists(VALUES, min_size=1, max_size=8), st.integers(2, 8))
def test_max_at_k_is_the_average_over_subsets(r, k):
    n, expected = len(r), [0.0] * len(r)
    for chosen in subsets(n, k):
        for i in chosen:
            lead = max(r[j] for j in chosen) - max(r[j] for j in chosen if j != i)
            expected[i] += n * lead / math.comb(n, k)
    actual = max_at_k(torch.tensor(r, dtype=torch.float64), group_ids=ZEROS(n), k=k)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@given(st.lists(VALUES, min_size=2, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_grpo_on_subsets(r, k):
    n, expected = len(r), [0.0] * len(r)
    best = {chosen: max(r[j] for j in chosen) for chosen in subsets(n, k)}
    if len(set(best.values())) > 1:
        mean = sum(best.values()) / len(best)
        std = math.sqrt(sum((x - mean) ** 2 for x in best.values()) / len(best))
        for i in range(n):
            mine = [x for chosen, x in best.items() if i in chosen]
            expected[i] = (sum(mine) / len(mine) - mean) / (std + 1e-6)
    actual = pass_at_k(torch.tensor(r, dtype=torch.float64), group_ids=ZEROS(n), k=k)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "solved", "k"), [(8, 3, 4), (16, 1, 8), (32, 20, 4), (6, 2, 2)])
def test_pass_at_k_published_closed_form(n, solved, k):
    failed = n - solved
    mean = 1 - math.comb(failed, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    good = (1 - mean) / std
    bad = (1 - mean - math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    r = torch.tensor([1.0] * solved + [0.0] * failed, dtype=torch.float64)
    expected = torch.tensor([good] * solved + [bad] * failed, dtype=torch.float64)
    torch.testing.assert_close(pass_at_k(r, group_ids=ZEROS(n), k=k, eps=0.0), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_max_at_k_gradient_is_unbiased(k):
    """Over all draws of n samples from a categorical, E[mean A_i grad log p_i] = grad E[max of k], by enumeration."""
    rewards = torch.tensor([0.0, 1.0, 0.3, -2.0], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.5, 0.1, 0.7], dtype=torch.float64, requires_grad=True)
    p = logits.softmax(0)
    objective = sum(p[list(d)].prod() * rewards[list(d)].max() for d in itertools.product(range(4), repeat=k))
    (truth,) = torch.autograd.grad(objective, logits, retain_graph=True)

    n, draws = 4, list(itertools.product(range(4), repeat=4))
    chosen = torch.tensor(draws)
    ids = torch.arange(len(draws)).repeat_interleave(n)
    adv = max_at_k(rewards[chosen].flatten(), group_ids=ids, k=k).view(-1, n)
    surrogate = (p.detach()[chosen].prod(1) * (adv * p.log()[chosen]).mean(1)).sum()
    (estimate,) = torch.autograd.grad(surrogate, logits)
    torch.testing.assert_close(estimate, truth, rtol=1e-10, atol=1e-12)


def test_ragged_groups_smaller_than_k_get_zero():
    r = torch.tensor([1.0, 5.0, 0.0, 3.0, 2.0])
    ids = torch.tensor([4, 0, 4, 4, 0])
    for f in (max_at_k, pass_at_k):
        out = f(r, group_ids=ids, k=3)
        assert out[[1, 4]].tolist() == [0.0, 0.0]
    assert max_at_k(r, group_ids=ids, k=3)[3].item() == pytest.approx(3 * (3.0 - 1.0))  # n times the lead


def test_nan_stays_in_its_group():
    r = torch.tensor([float("nan"), 1.0, 0.0, 2.0])
    ids = torch.tensor([0, 0, 1, 1])
    assert max_at_k(r, group_ids=ids, k=2)[2:].tolist() == [0.0, 4.0]


def test_large_groups_do_not_overflow():
    """C(4096, 2048) is far outside fp64; the shares are not."""
    r = (torch.arange(4096) % 512 == 0).double()
    out = max_at_k(r, group_ids=ZEROS(4096), k=64)
    assert out.isfinite().all()
    p_alone = math.comb(4096 - 8, 63) / math.comb(4096, 64)  # subsets in which a given solved sample is the only one
    torch.testing.assert_close(out[0].item(), 4096 * p_alone, rtol=1e-9, atol=0)


def test_k_below_one_raises():
    for f in (max_at_k, pass_at_k):
        for k in (0, 1.5):
            with pytest.raises(ValueError, match="k must be a whole number of at least 1"):
                f(torch.ones(2), group_ids=ZEROS(2), k=k)
