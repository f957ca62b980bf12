"""Whitening, REINFORCE++, several rewards, step groups, token baselines: against loops written from their equations."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import advantages as A

NAN = float("nan")


def close(actual, expected, tol=1e-9):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tol, atol=tol)


@given(st.lists(st.tuples(st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=12))
def test_whiten(rows):
    kept = [x for x, m in rows if m]
    std = statistics.stdev(kept) if len(kept) > 1 else 0.0
    expected = [(x - statistics.fmean(kept)) / (std + 1e-6) if m and std else 0.0 for x, m in rows]
    mask = torch.tensor([m for _, m in rows])
    x = torch.where(mask, torch.tensor([x for x, _ in rows], dtype=torch.float64), NAN).requires_grad_()
    out = A.whiten(x, mask=mask)
    close(out, expected, 1e-6)
    (grad,) = torch.autograd.grad((out * torch.arange(len(rows))).sum(), x)
    assert grad.isfinite().all()
    assert (grad[~mask] == 0).all()


def test_whiten_shapes_dtypes_and_equal_entries():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=g)
    out = A.whiten(x)
    close(out.mean(), 0.0, 1e-6)
    close(out.std(), 1.0, 1e-5)
    assert torch.equal(A.whiten(x.flatten()).view(3, 5), out)
    assert A.whiten(x.bfloat16()).dtype == torch.float32
    assert A.whiten(x.double()).dtype == torch.float64
    assert A.whiten(torch.zeros(0)).shape == (0,)
    assert torch.equal(A.whiten(torch.full((7,), 1000.1)), torch.zeros(7))
    assert torch.equal(A.whiten(x, mask=torch.zeros(3, 5, dtype=torch.bool)), torch.zeros(3, 5))
    with pytest.raises(TypeError, match="advantages must be a floating"):
        A.whiten(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask must have the shape of advantages"):
        A.whiten(x, mask=torch.ones(5, dtype=torch.bool))


MASK = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
CU = torch.tensor([0, 4, 6, 6, 9])


def test_reinforce_pp():
    rewards = torch.tensor([-0.1, NAN, NAN, 1.0, 0.2, -0.5, NAN, 0.0, 2.0], dtype=torch.float64)
    returns = [-0.1 + 0.9 * 1.0, 1.0, 0.2 + 0.9 * -0.5, -0.5, 0.0 + 0.9 * 2.0, 2.0]
    mean, std = statistics.fmean(returns), statistics.stdev(returns)
    out = A.reinforce_pp(rewards, mask=MASK, cu_seqlens=CU, gamma=0.9)
    close(out[MASK], [(x - mean) / (std + 1e-6) for x in returns])
    assert (out[~MASK] == 0).all()


def test_reinforce_pp_baseline():
    """Whitened over tokens: longer answers count more; the singleton enters with 0 and not with its reward."""
    rewards = torch.tensor([1.0, 0.0, 5.0, 7.0], dtype=torch.float64)
    per_token = [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]
    mean, std = statistics.fmean(per_token), statistics.stdev(per_token)
    ids = torch.tensor([3, 3, 1, 0])
    out = A.reinforce_pp_baseline(rewards, group_ids=ids, mask=MASK, cu_seqlens=CU)
    close(out[MASK], [(x - mean) / (std + 1e-6) for x in per_token])
    assert (out[~MASK] == 0).all()
    hopeless = A.reinforce_pp_baseline(torch.full((4,), 0.1), group_ids=ids, mask=MASK, cu_seqlens=CU)
    assert torch.equal(hopeless, torch.zeros(9))


def test_normalize_then_sum_and_gdpo():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 30.0], [1.0, 10.0], [4.0, 4.0], [2.0, 4.0]], dtype=torch.float64)
    ids, w = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1.0, 0.5], dtype=torch.float64)
    z = []
    for members in ([0, 1, 2], [3, 4]):
        columns = []
        for k in range(2):
            x = [rewards[i, k].item() for i in members]
            std = statistics.stdev(x)
            columns.append([(y - statistics.fmean(x)) / (std + 1e-6) if std else 0.0 for y in x])
        z += [a + 0.5 * b for a, b in zip(*columns)]
    out = A.normalize_then_sum(rewards, group_ids=ids, weights=w)
    close(out, z)
    mean, std = statistics.fmean(z), statistics.stdev(z)
    close(A.gdpo(rewards, group_ids=ids, weights=w), [(x - mean) / (std + 1e-6) for x in z])

    close(A.normalize_then_sum(rewards * torch.tensor([3.0, 100.0]) + 7, group_ids=ids, weights=w), z, 1e-5)
    close(A.normalize_then_sum(rewards[:, :1], group_ids=ids), A.group_zscore(rewards[:, 0], group_ids=ids))
    # equal sums of rewards, but different advantages: summing first would lose the difference
    pair = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    out = A.normalize_then_sum(pair, group_ids=torch.zeros(4, dtype=torch.int64))
    assert abs(out[0] - out[1]) > 0.1
    with pytest.raises(ValueError, match="rewards must have shape"):
        A.normalize_then_sum(rewards[:, 0], group_ids=ids)
    with pytest.raises(ValueError, match="weights must have one entry per reward"):
        A.gdpo(rewards, group_ids=ids, weights=torch.ones(3))


def test_gigpo():
    """Two tasks, two episodes each; steps 0 and 3 start in the same state, so do 1 and 4; step 2 is alone."""
    rewards = torch.tensor([1.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    step_returns = torch.tensor([0.9, 1.0, 0.3, 0.1, 0.2, 2.0], dtype=torch.float64)
    k = {
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "step_seq_ids": torch.tensor([0, 0, 0, 1, 1, 2]),
        "step_group_ids": torch.tensor([5, 6, 7, 5, 6, 8]),
    }
    episode = [0.5, 0.5, 0.5, -0.5, -0.5, 0.0]
    step = [0.4, 0.4, 0.0, -0.4, -0.4, 0.0]
    close(A.gigpo(rewards, step_returns, **k), [a + b for a, b in zip(episode, step)])
    close(A.gigpo(rewards, step_returns, step_weight=0.0, **k), episode)
    root = math.sqrt(0.5)
    zscored = [2 * root, 2 * root, root, -2 * root, -2 * root, 0]
    close(A.gigpo(rewards, step_returns, baseline=A.group_zscore, **k), zscored, 1e-5)
    with pytest.raises(ValueError, match="step_seq_ids must have one entry"):
        A.gigpo(rewards, step_returns[:-1], **k)


def token_baseline_batch(seed):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 8, (7,), generator=g)
    total = int(lens.sum())
    p = torch.rand(total, generator=g, dtype=torch.float64)
    return {
        "rewards": torch.randn(total, generator=g, dtype=torch.float64),
        "logp": p.log(),
        "sum_pi_squared": p**2 + (1 - p) ** 2 * torch.rand(total, generator=g, dtype=torch.float64),
        "mask": torch.rand(total, generator=g) < 0.7,
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]),
        "group_ids": torch.tensor([2, 0, 2, 2, 0, 9, 0]),
        "is_weights": torch.rand(total, generator=g, dtype=torch.float64) + 0.5,
    }


def call_otb(b):
    streams = [b[n] for n in ("rewards", "logp", "sum_pi_squared")]
    return A.optimal_token_baseline(
        *streams, **{k: v for k, v in b.items() if k not in ("rewards", "logp", "sum_pi_squared")}
    )


@pytest.mark.parametrize("seed", range(5))
def test_optimal_token_baseline(seed):
    b = token_baseline_batch(seed)
    rows = []
    for start, stop in zip(b["cu_seqlens"].tolist(), b["cu_seqlens"].tolist()[1:]):
        actions = [t for t in range(start, stop) if b["mask"][t]]
        w, path = 0.0, []
        for t in actions:
            pi = math.exp(b["logp"][t])
            w += (1 - 2 * pi + b["sum_pi_squared"][t].item()) * b["is_weights"][t].item() ** 2
            path.append(w)
        returns = [sum(b["rewards"][u].item() for u in actions[i:]) for i in range(len(actions))]
        rows.append((actions, returns, path))
    expected = torch.zeros_like(b["rewards"])
    for i, (actions, returns, _) in enumerate(rows):
        for t, token in enumerate(actions):
            mates = [j for j in range(7) if b["group_ids"][j] == b["group_ids"][i] and len(rows[j][0]) > t]
            total = sum(rows[j][2][t] for j in mates)
            expected[token] = returns[t] - sum(rows[j][1][t] * rows[j][2][t] for j in mates) / total
    out = call_otb(b)
    close(out, expected)
    poisoned = b | {n: torch.where(b["mask"], b[n], NAN) for n in ("rewards", "logp", "sum_pi_squared", "is_weights")}
    assert torch.equal(call_otb(poisoned), out)


def test_optimal_token_baseline_limits():
    """Equal probabilities: the group's mean, for a terminal reward `group_centered`. Alone at a position: exactly 0."""
    cu = torch.tensor([0, 3, 6, 9, 14])
    rewards = torch.zeros(14)
    rewards[[2, 5, 8, 13]] = torch.tensor([1.0, 0.0, 0.3, 0.1])
    k = {"mask": torch.ones(14, dtype=torch.bool), "cu_seqlens": cu, "group_ids": torch.tensor([0, 0, 0, 1])}
    for p in (0.3, 1.0):
        out = A.optimal_token_baseline(rewards, torch.full((14,), p).log(), torch.full((14,), p), **k)
        expected = A.group_centered(torch.tensor([1.0, 0.0, 0.3, 0.1]), group_ids=k["group_ids"])
        close(out, expected.repeat_interleave(cu.diff()), 1e-6)
        assert torch.equal(out[9:], torch.zeros(5))
    k["group_ids"] = torch.zeros(4, dtype=torch.int64)
    tail = A.optimal_token_baseline(rewards, torch.full((14,), -1.0), torch.full((14,), 0.5), **k)[12:]
    assert torch.equal(tail, torch.zeros(2))


def test_the_weights_of_a_nearly_certain_policy_are_no_less_than_0():
    """1 - 2 pi + sum pi^2 is a square, and fp32 makes it negative; of rewards 0 and 1 every |A| is at most 1."""
    z = 0.01 * torch.randn(8, 6, 2000, generator=torch.Generator().manual_seed(0))
    z[..., 0] += 20
    logp, squares = z.log_softmax(-1)[..., 0].flatten(), z.softmax(-1).square().sum(-1).flatten()
    squares -= 1e-6  # as another way to sum them may leave it
    assert (1 - 2 * logp.exp() + squares < 0).any()
    rewards = torch.zeros(8, 6)
    rewards[::2, -1] = 1
    options = {"cu_seqlens": torch.arange(9) * 6, "group_ids": torch.zeros(8, dtype=torch.long)}
    mask = torch.ones(48, dtype=torch.bool)
    assert A.optimal_token_baseline(rewards.flatten(), logp, squares, mask=mask, **options).abs().max() <= 1


@pytest.mark.slow
def test_compile_and_int32():
    b = token_baseline_batch(1)
    rewards = torch.randn(7, generator=torch.Generator().manual_seed(0)).double()
    k = {"mask": b["mask"], "cu_seqlens": b["cu_seqlens"]}
    two = torch.stack([rewards, rewards.square()], 1)
    ids = b["group_ids"]
    steps = {"group_ids": ids, "step_seq_ids": torch.arange(7), "step_group_ids": ids}
    for f in (
        lambda k: call_otb(b | k),
        lambda k: A.whiten(b["rewards"], mask=k["mask"]),
        lambda k: A.reinforce_pp(b["rewards"], gamma=0.9, **k),
        lambda k: A.reinforce_pp_baseline(rewards, group_ids=ids, **k),
        lambda _: A.gdpo(two, group_ids=ids),
        lambda _: A.gigpo(rewards, rewards, **steps),
    ):
        torch._dynamo.reset()
        expected = f(k)
        close(torch.compile(f, fullgraph=True, backend="aot_eager")(k), expected)
        close(f(k | {"cu_seqlens": k["cu_seqlens"].int()}), expected)
