"""Group baselines against loops over the members of each group, and their invariances."""

import itertools
import math
import statistics
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import advantages as A

NAMES = ("group_centered", "group_zscore", "leave_one_out", "max_rl", "group_mean_batch_std", "gpg", "opo",
         "max_at_k", "pass_at_k")  # fmt: skip
EPS = 1e-6


def apply(name, rewards, group_ids, lengths=None):
    f = getattr(A, name)
    if name == "opo":
        return f(rewards, lengths=lengths, group_ids=group_ids)
    if name in ("max_at_k", "pass_at_k"):
        return f(rewards, group_ids=group_ids, k=2)
    return f(rewards, group_ids=group_ids)


@st.composite
def grouped(draw, binary=False):
    """Rewards, ids of ragged and unordered groups with gaps in the numbering, lengths. Shrinks to one singleton."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    names = draw(st.permutations([0, 3, 4, 9]))[: len(sizes)]
    members = draw(st.permutations([n for n, size in zip(names, sizes) for _ in range(size)]))
    value = (
        st.sampled_from([0.0, 1.0]) if binary else st.one_of(st.floats(-5, 5, width=32), st.sampled_from([0.1, 3.0]))
    )
    rewards = draw(st.lists(value, min_size=len(members), max_size=len(members)))
    lengths = draw(st.lists(st.integers(1, 100), min_size=len(members), max_size=len(members)))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(members), torch.tensor(lengths)


def groups_of(ids):
    return {g: [i for i, x in enumerate(ids.tolist()) if x == g] for g in set(ids.tolist())}


def by_group(rewards, ids, definition):
    """`definition(r, members)` gives the advantages of one group, in the order of `members`."""
    out = torch.zeros_like(rewards)
    for members in groups_of(ids).values():
        if len(members) > 1:
            for i, x in zip(members, definition([rewards[i].item() for i in members], members)):
                out[i] = x
    return out


def close(actual, expected, tol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


@given(grouped())
def test_against_loops(data):
    r, ids, lengths = data
    mean = statistics.fmean

    def zscore(x, std):
        return [(y - mean(x)) / (std + EPS) if len(set(x)) > 1 else 0.0 for y in x]

    close(A.group_centered(r, group_ids=ids), by_group(r, ids, lambda x, _: [y - mean(x) for y in x]))
    close(A.group_zscore(r, group_ids=ids), by_group(r, ids, lambda x, _: zscore(x, statistics.stdev(x))), 1e-7)
    others = lambda x, _: [y - (sum(x) - y) / (len(x) - 1) for y in x]
    close(A.leave_one_out(r, group_ids=ids), by_group(r, ids, others))

    def opo(x, members):
        l = [lengths[i].item() for i in members]
        return [y - sum(a * b for a, b in zip(l, x)) / sum(l) for y in x]

    close(A.opo(r, lengths=lengths, group_ids=ids), by_group(r, ids, opo))
    if len(set(r.tolist())) > 1:
        std = statistics.stdev(r.tolist())
        expected = by_group(r, ids, lambda x, _: [(y - mean(x)) / (std + EPS) for y in x])
        close(A.group_mean_batch_std(r, group_ids=ids), expected, 1e-7)
    informative = sum(len(m) for m in groups_of(ids).values() if len({r[i].item() for i in m}) > 1)
    scale = len(r) / max(informative, 1)
    close(A.gpg(r, group_ids=ids), by_group(r, ids, lambda x, _: [scale * (y - mean(x)) for y in x]))


@given(grouped(binary=True))
def test_max_rl_weights_rare_successes_most(data):
    r, ids, _ = data

    def definition(x, _):
        p = statistics.fmean(x)
        return [(y - p) / (p + EPS) if p else 0.0 for y in x]

    close(A.max_rl(r, group_ids=ids), by_group(r, ids, definition))


@pytest.mark.slow_cases("5")
@pytest.mark.parametrize("n", [2, 3, 5])
def test_max_rl_is_the_likelihood_gradient_up_to_order_n_minus_1(n):
    """Over all draws of n samples from a categorical: E[mean A_i grad log p_i], against the series of grad log p."""
    logits = torch.tensor([0.3, -0.8, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    solved = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    logp = logits.log_softmax(0)
    (grad_p,) = torch.autograd.grad((logp.exp() * solved).sum(), logits, retain_graph=True)
    p = float((logp.exp() * solved).sum())
    total = torch.zeros(())
    for draw in itertools.product(range(4), repeat=n):
        ids = torch.tensor(draw)
        a = A.max_rl(solved[ids], group_ids=torch.zeros(n, dtype=torch.int64), eps=0.0)
        total = total + logp[ids].sum().exp().detach() * (a * logp[ids]).mean()
    (got,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(got, sum((1 - p) ** (k - 1) for k in range(1, n)) * grad_p, rtol=1e-10, atol=1e-12)
    order_n = sum((1 - p) ** (k - 1) for k in range(1, n + 1)) * grad_p
    assert (got - order_n).abs().max() > 0.01


def test_max_rl_warns_of_a_group_whose_signs_turn():
    ids = torch.tensor([0, 0, 1, 1])
    with pytest.warns(UserWarning, match="the lowest is -0.5: in such a group the best answers are pushed down"):
        A.max_rl(torch.tensor([1.0, 1.0, -1.0, 0.0]), group_ids=ids)
    with warnings.catch_warnings(action="error"):
        A.max_rl(torch.tensor([1.0, -1.0, 1.0, 0.0]), group_ids=ids)


def test_max_rl_is_exactly_zero_at_mean_zero():
    r = torch.tensor([-1.0, 1.0, 0.0, 0.0], requires_grad=True)
    out = A.max_rl(r, group_ids=torch.tensor([0, 0, 1, 1]))
    assert out.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert torch.autograd.grad(out.sum(), r)[0].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_group_with_one_reward_is_exactly_zero(name, dtype):
    """Singletons and equal rewards, at values whose mean is not exact; filters may test for == 0."""
    r = torch.tensor([0.1, 1000.1, 0.1, 7.3, 0.1, 1000.1, 1000.1, 5.0, 2.0], dtype=dtype)
    ids = torch.tensor([0, 1, 0, 2, 0, 1, 1, 3, 3])
    out = apply(name, r, ids, torch.arange(1, 10))
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out[:7], torch.zeros_like(out[:7]))
    assert (out[7] > 0) == (name != "pass_at_k")  # of a pair, there is but one subset of two
    assert (out[8] < 0) == (name not in ("max_at_k", "pass_at_k"))


@pytest.mark.parametrize("name", NAMES)
def test_invariant_to_order_and_numbering_of_groups(name):
    g = torch.Generator().manual_seed(1)
    r, ids = torch.randn(24, generator=g).double(), torch.randint(0, 5, (24,), generator=g)
    lengths = torch.randint(1, 50, (24,), generator=g)
    expected = apply(name, r, ids, lengths)
    order = torch.randperm(24, generator=g)
    renamed = torch.tensor([40, 2, 17, 8, 0])[ids].int()
    close(apply(name, r[order], renamed[order], lengths[order]), expected[order])


@pytest.mark.parametrize("name", NAMES)
def test_shift_and_scale(name):
    g = torch.Generator().manual_seed(2)
    r, ids = torch.randn(24, generator=g).double(), torch.randint(0, 5, (24,), generator=g)
    lengths = torch.randint(1, 50, (24,), generator=g)
    base = apply(name, r, ids, lengths)
    assert base.abs().max() > 0.1
    if name == "max_rl":  # made for rewards >= 0: not invariant under a shift, but under a scale
        r = r.abs()
        base = apply(name, r, ids, lengths)
    elif name != "group_mean_batch_std":
        shift = torch.tensor([3.0, -50.0, 0.1, 7.0, 1e3], dtype=torch.float64)[ids]
        close(apply(name, r + shift, ids, lengths), base, 1e-7)
    else:
        close(apply(name, r + 50.0, ids, lengths), base, 1e-7)
    scaled = apply(name, 8 * r, ids, lengths)
    unit_free = name in ("group_zscore", "max_rl", "group_mean_batch_std", "pass_at_k")
    close(scaled, base if unit_free else 8 * base, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_finite_and_right(name):
    """Differentiable where the rewards differ, 0 and not NaN where they do not."""
    ids, lengths = torch.tensor([0, 1, 0, 1, 0, 2, 3, 3]), torch.arange(1, 9)
    r = torch.tensor([1.0, 2.5, 0.2, 4.0, 3.1, 9.0, 0.4, 0.4], dtype=torch.float64, requires_grad=True)
    grad = torch.autograd.grad((apply(name, r, ids, lengths) * torch.arange(8)).sum(), r)[0]
    assert grad.isfinite().all()
    free = torch.tensor([1.0, 2.5, 0.2, 4.0, 3.1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply(name, x, ids[:5], lengths[:5]), free)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch(name):
    no_ids = torch.zeros(0, dtype=torch.int64)
    assert apply(name, torch.zeros(0), no_ids, no_ids).shape == (0,)


# The others nightly: sums over a group, as the first; the second sorts.
COMPILED = [n if n in ("group_zscore", "max_at_k") else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]


@pytest.mark.slow_cases("group_zscore")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name):
    torch._dynamo.reset()
    r, ids, lengths = torch.tensor([1.0, 0, 0, 1, 2]), torch.tensor([0, 0, 1, 1, 1]), torch.arange(1, 6)
    compiled = torch.compile(lambda *a: apply(name, *a), fullgraph=True, backend="aot_eager")
    close(compiled(r, ids, lengths), apply(name, r, ids, lengths), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_errors(name):
    ids, lengths = torch.tensor([0, 0, 1]), torch.ones(3)
    with pytest.raises(TypeError, match="must be a floating-point"):
        apply(name, torch.tensor([1, 0, 1]), ids, lengths)
    with pytest.raises(TypeError, match="group_ids must be int32 or int64"):
        apply(name, torch.ones(3), ids.double(), lengths)
    with pytest.raises(ValueError, match="group_ids must have one entry"):
        apply(name, torch.ones(3), ids[:2], lengths)
    with pytest.raises(ValueError, match="group_ids must be >= 0"):
        apply(name, torch.ones(3), ids - 1, lengths)


def test_rewards_of_two_axes_are_told_their_readings():
    rewards = torch.arange(12.0).reshape(3, 4)
    with pytest.raises(ValueError, match=r"\[3, 4\]; use (.*), rewards.sum\(1\) if it holds a sequence's") as refused:
        A.group_centered(rewards, group_ids=torch.arange(3))
    flat, ids = str(refused.value).partition("use ")[2].partition(" if a row is a group")[0].split(" and group_ids=")
    got = A.group_centered(eval(flat), group_ids=eval(ids))
    torch.testing.assert_close(got, (rewards - rewards.mean(1, keepdim=True)).flatten())
    with pytest.raises(ValueError, match=r"use rewards.flatten\(\)$"):
        A.group_centered(rewards[:, :1], group_ids=torch.arange(3))


def test_limits():
    g = torch.Generator().manual_seed(4)
    r, ids = torch.randn(20, generator=g).double(), torch.randint(0, 4, (20,), generator=g)
    centered = A.group_centered(r, group_ids=ids)
    count = torch.bincount(ids)[ids].double()
    close(A.leave_one_out(r, group_ids=ids), centered * count / (count - 1).clamp(min=1))
    close(A.opo(r, lengths=torch.full((20,), 7), group_ids=ids), centered)
    close(A.gpg(r, group_ids=ids), centered * 20 / (count > 1).sum())
    one = torch.zeros(20, dtype=torch.int64)
    close(A.group_mean_batch_std(r, group_ids=one), A.group_zscore(r, group_ids=one))
    close(A.whiten(r), A.group_zscore(r, group_ids=one))
    close(A.max_at_k(r, group_ids=ids, k=1), A.leave_one_out(r, group_ids=ids))
    biased = A.group_zscore(r, group_ids=ids) * (count / (count - 1).clamp(min=1)).sqrt()
    close(A.pass_at_k(r, group_ids=ids, k=1), biased, 1e-5)


def test_opo_baseline_has_minimum_variance():
    """OPO's b minimises the sum of l (r - b)^2 over constants: the gradient's variance if its square grows with l."""
    g = torch.Generator().manual_seed(5)
    r, lengths = torch.randn(50, generator=g).double(), torch.randint(1, 99, (50,), generator=g)
    b = (r - A.opo(r, lengths=lengths, group_ids=torch.zeros(50, dtype=torch.int64)))[0]
    spread = lambda b: (lengths * (r - b).square()).sum()
    assert spread(b) < spread(b + 1e-3)
    assert spread(b) < spread(b - 1e-3)


def test_opo_checks_lengths():
    with pytest.raises(ValueError, match="lengths must have the shape"):
        A.opo(torch.ones(3), lengths=torch.ones(2), group_ids=torch.zeros(3, dtype=torch.int64))


def test_extreme_rewards_stay_finite():
    r = torch.tensor([1e30, -1e30, 1e-30, 0.0, 3.0, 3.0])
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    for name in ("group_centered", "leave_one_out", "max_rl", "max_at_k"):
        assert apply(name, r, ids).isfinite().all(), name
    assert math.isclose(A.leave_one_out(r, group_ids=ids)[0].item(), 2e30, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["group_zscore", "group_mean_batch_std"])
def test_a_large_offset_costs_no_precision(name):
    """Rewards 2^24 - 8 and above are exact in fp32; twice as much is not."""
    small = torch.tensor([0.0, 1.0, 3.0, 3.0, 0.0, 2.0])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    shifted = small + (2.0**24 - 8)
    torch.testing.assert_close(apply(name, shifted, ids), apply(name, small, ids), rtol=1e-5, atol=1e-6)
