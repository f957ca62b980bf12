"""Every trace against its definition as a forward sum in Python floats, per sequence, over compacted action tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import (
    clipped_is_returns,
    discounted_returns,
    gae,
    gae_decoupled,
    n_step,
    q_lambda,
    retrace,
    td_lambda,
    vtrace,
)


def make_batch(seed: int, per_token: bool, max_len: int = 9) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    num_seqs = int(torch.randint(1, 6, (1,), generator=g))
    lens = torch.randint(0, max_len, (num_seqs,), generator=g)
    total = int(lens.sum())
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    coef = lambda: torch.rand(total if per_token else 1, generator=g, dtype=torch.float64).expand(total).clone()
    return {
        "rewards": draw(total),
        "values": draw(total),
        "q_values": draw(total),
        "log_ratio": draw(total),
        "mask": torch.rand(total, generator=g) < 0.6,
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)]),
        "gamma": coef(),
        "lam": coef(),
        "bootstrap": draw(num_seqs),
    }


def per_sequence(b: dict[str, torch.Tensor], definition) -> torch.Tensor:
    """`definition(row, t)` for each action t of each sequence; `row` holds the compacted columns and `boot`."""
    out = torch.zeros_like(b["rewards"])
    columns = {k: v.tolist() for k, v in b.items() if v.shape == b["rewards"].shape}
    for i, (start, stop) in enumerate(zip(b["cu_seqlens"].tolist(), b["cu_seqlens"].tolist()[1:])):
        actions = [t for t in range(start, stop) if columns["mask"][t]]
        row = {k: [v[t] for t in actions] for k, v in columns.items()}
        row["boot"] = b["bootstrap"][i].item()
        for k, t in enumerate(actions):
            out[t] = definition(row, k)
    return out


def next_value(row, t, name="values"):
    return row[name][t + 1] if t + 1 < len(row[name]) else row["boot"]


def n_step_return(row, t, n):
    total, discount = 0.0, 1.0
    for k in range(t, min(t + n, len(row["rewards"]))):
        total += discount * row["rewards"][k]
        discount *= row["gamma"][k]
    end = row["values"][t + n] if t + n < len(row["values"]) else row["boot"]
    return total + discount * end


def lambda_return(row, t):
    left, total, weight = len(row["rewards"]) - t, 0.0, 1.0
    for n in range(1, left):
        lam = row["lam"][t + n - 1]
        total += weight * (1 - lam) * n_step_return(row, t, n)
        weight *= lam
    return total + weight * n_step_return(row, t, left)


def weighted_td_errors(row, t, decay, scale=lambda row, k: 1.0, base="values"):
    """Sum over k of (decay_t .. decay_{k-1}) scale_k (r_k + gamma_k V' - base_k)."""
    total, weight = 0.0, 1.0
    for k in range(t, len(row["rewards"])):
        delta = row["rewards"][k] + row["gamma"][k] * next_value(row, k) - row[base][k]
        total += weight * scale(row, k) * delta
        if k + 1 < len(row["rewards"]):
            weight *= decay(row, k)
    return total


def ratio(row, k, cap):
    return min(cap, math.exp(row["log_ratio"][k]))


BATCHES = st.builds(make_batch, st.integers(0, 10_000), st.booleans())
COMMON = ("mask", "cu_seqlens", "gamma", "bootstrap")


def kw(b, *names):
    return {k: b[k] for k in (*COMMON, *names)}


def close(actual, expected, tol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


@given(BATCHES)
def test_returns_and_on_policy_traces(b):
    r, v = b["rewards"], b["values"]
    close(discounted_returns(r, **kw(b)), per_sequence(b, lambda row, t: n_step_return(row, t, 10**6)))
    close(td_lambda(r, v, **kw(b, "lam")), per_sequence(b, lambda_return))
    a_of = lambda row, t: weighted_td_errors(row, t, lambda row, k: row["gamma"][k] * row["lam"][k])
    out = gae(r, v, **kw(b, "lam"))
    close(out.advantages, per_sequence(b, a_of))
    close(out.returns, per_sequence(b, lambda row, t: a_of(row, t) + row["values"][t]))


@given(BATCHES, st.integers(1, 12))
def test_n_step(b, n):
    expected = per_sequence(b, lambda row, t: n_step_return(row, t, n))
    close(n_step(b["rewards"], b["values"], n=n, **kw(b)), expected)


@given(BATCHES, st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf]), st.sampled_from([0.3, 1.0, 2.0]), st.booleans())
def test_vtrace(b, rho_max, c_max, own_pg_cap):
    def x(row, t):
        decay = lambda row, k: row["gamma"][k] * row["lam"][k] * ratio(row, k, c_max)
        return weighted_td_errors(row, t, decay, scale=lambda row, k: ratio(row, k, rho_max))

    def advantage(row, t):
        ahead = row["values"][t + 1] + x(row, t + 1) if t + 1 < len(row["values"]) else row["boot"]
        delta = row["rewards"][t] + row["gamma"][t] * ahead - row["values"][t]
        return ratio(row, t, 0.7 if own_pg_cap else rho_max) * delta

    caps = {"rho_max": rho_max, "c_max": c_max, "pg_rho_max": 0.7 if own_pg_cap else None}
    out = vtrace(b["rewards"], b["values"], b["log_ratio"], **caps, **kw(b, "lam"))
    close(out.targets, per_sequence(b, lambda row, t: row["values"][t] + x(row, t)))
    close(out.advantages, per_sequence(b, advantage))


@given(BATCHES, st.sampled_from([0.5, 1.0, 3.0]))
def test_retrace_and_q_lambda(b, c_max):
    def target(c):
        decay = lambda row, k: row["gamma"][k] * c(row, k + 1)
        return lambda row, t: row["q_values"][t] + weighted_td_errors(row, t, decay, base="q_values")

    args = (b["rewards"], b["q_values"], b["values"])
    actual = retrace(*args, log_ratio=b["log_ratio"], c_max=c_max, **kw(b, "lam"))
    close(actual, per_sequence(b, target(lambda row, k: row["lam"][k] * ratio(row, k, c_max))))
    close(q_lambda(*args, **kw(b, "lam")), per_sequence(b, target(lambda row, k: row["lam"][k])))


@given(BATCHES, st.sampled_from([0.5, 1.0, 3.0, math.inf]))
def test_clipped_is_returns(b, rho_max):
    def definition(row, t):
        total, weight = 0.0, 1.0
        for k in range(t, len(row["rewards"])):
            weight *= ratio(row, k, rho_max)
            total += weight * row["rewards"][k]
            weight *= row["gamma"][k]
        return total + weight * row["boot"]

    close(clipped_is_returns(b["rewards"], b["log_ratio"], rho_max=rho_max, **kw(b)), per_sequence(b, definition))


@given(BATCHES, st.floats(0, 1))
def test_limits(b, lam):
    """A special case of one estimator is another one."""
    r, v, q, mask = b["rewards"], b["values"], b["q_values"], b["mask"]
    k = kw(b)
    zero = torch.zeros_like(r)
    v0 = torch.where(mask, v, 0.0)
    returns, one_step = discounted_returns(r, **k), n_step(r, v, n=1, **k)
    close(gae(r, v, lam=1.0, **k).advantages, returns - v0)
    close(gae(r, v, lam=0.0, **k).advantages, one_step - v0)
    close(gae(r, v, lam=lam, **k).returns, td_lambda(r, v, lam=lam, **k))
    close(td_lambda(r, v, lam=1.0, **k), returns)
    close(td_lambda(r, v, lam=0.0, **k), one_step)
    close(n_step(r, v, n=max(1, int(b["cu_seqlens"].diff().max())), **k), returns)
    close(n_step(r, v, n=r.numel() + 7, **k), returns)
    close(discounted_returns(r, **(k | {"gamma": 0.0})), torch.where(mask, r, 0.0))

    on_policy = vtrace(r, v, zero, lam=lam, **k)
    close(on_policy.targets, td_lambda(r, v, lam=lam, **k))
    close(vtrace(r, v, zero, lam=1.0, rho_max=3.0, c_max=2.0, **k).advantages, returns - v0)
    close(vtrace(r, v, b["log_ratio"], rho_max=0.0, c_max=0.0, **k).targets, v0)
    per_decision = vtrace(r, zero, b["log_ratio"], rho_max=2.0, c_max=2.0, **k).targets
    close(clipped_is_returns(r, b["log_ratio"], rho_max=2.0, **k), per_decision)
    close(clipped_is_returns(r, zero, **k), returns)

    close(retrace(r, v, v, log_ratio=zero, **k), returns)
    close(retrace(r, q, v, log_ratio=b["log_ratio"], lam=0.0, **k), one_step)
    close(retrace(r, q, v, log_ratio=torch.full_like(r, -1e4), **k), one_step)
    close(retrace(r, q, v, log_ratio=torch.full_like(r, 1e4), lam=lam, **k), q_lambda(r, q, v, lam=lam, **k))
    close(q_lambda(r, v, v, lam=lam, **k), td_lambda(r, v, lam=lam, **k))

    both = gae_decoupled(r, v, lam_policy=lam, lam_value=1.0, **k)
    close(both.advantages, gae(r, v, lam=lam, **k).advantages)
    close(both.returns, returns)


@pytest.mark.parametrize("num_tokens", [5_000])
def test_long_streams_agree_with_a_loop_in_fp64(num_tokens):
    """Above the length at which the scan runs in blocks, in fp32, with gaps and sequences of very unequal length.

    The bound is derived: each step of x = a x' + b rounds by u times its terms, and earlier errors decay with a. Added
    as independent errors that is one standard deviation; eight are allowed, in any order of composition.
    """
    g = torch.Generator().manual_seed(0)
    cuts = torch.randint(0, num_tokens, (20,), generator=g).sort().values
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), cuts.int(), torch.tensor([num_tokens], dtype=torch.int32)])
    r, v = torch.randn(2, num_tokens, generator=g)
    log_ratio = 0.3 * torch.randn(num_tokens, generator=g)
    mask = torch.rand(num_tokens, generator=g) < 0.7
    boot = torch.randn(21, generator=g)
    gamma, lam, u = 0.997, 0.95, torch.finfo(torch.float32).eps / 2

    expected = {name: torch.zeros(num_tokens).double() for name in ("returns", "advantages", "targets", "of_vtrace")}
    rounding = {name: torch.zeros(num_tokens).double() for name in expected}
    for i, (start, stop) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        ret = nxt = boot[i].item()
        adv = x = 0.0
        ret_error = adv_error = x_error = 0.0
        for t in reversed([t for t in range(start, stop) if mask[t]]):
            rt, vt, rho = r[t].item(), v[t].item(), min(1.0, math.exp(log_ratio[t].item()))
            size = abs(rt) + gamma * abs(nxt) + abs(vt)  # the terms of delta
            delta = rt + gamma * nxt - vt
            ret_error = math.hypot(gamma * ret_error, u * (abs(rt) + 2 * abs(gamma * ret)))
            adv_error = math.hypot(gamma * lam * adv_error, u * (2 * size + 2 * abs(gamma * lam * adv)))
            rounding["of_vtrace"][t] = math.hypot(rho * gamma * x_error, u * (3 * size + 3 * abs(x)))
            x_error = math.hypot(gamma * lam * rho * x_error, u * (4 * size + 3 * abs(gamma * lam * rho * x)))
            ret = rt + gamma * ret
            adv = delta + gamma * lam * adv
            expected["of_vtrace"][t] = rho * (rt + gamma * (nxt + x) - vt)
            x = rho * delta + gamma * lam * rho * x
            nxt = vt
            expected["returns"][t], expected["advantages"][t], expected["targets"][t] = ret, adv, vt + x
            rounding["returns"][t], rounding["advantages"][t] = ret_error, adv_error
            rounding["targets"][t] = x_error + u * (abs(vt) + abs(x))

    k = {"mask": mask, "cu_seqlens": cu, "gamma": gamma, "bootstrap": boot}
    off = vtrace(r, v, log_ratio, lam=lam, **k)
    actual = {
        "returns": discounted_returns(r, **k),
        "advantages": gae(r, v, lam=lam, **k).advantages,
        "targets": off.targets,
        "of_vtrace": off.advantages,
    }
    for name, x in actual.items():
        assert x.dtype == torch.float32
        assert ((x.double() - expected[name]).abs() <= 8 * rounding[name]).all(), name
    torch.testing.assert_close(n_step(r, v, n=num_tokens - 1, **k), actual["returns"], rtol=2e-4, atol=2e-4)
