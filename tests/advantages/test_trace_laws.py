"""Properties of every token-level estimator: masks, segments, dtypes, gradients, errors."""

import pytest
import torch

from rlkit import advantages as A

NAN = float("nan")


def on_policy(f):
    return lambda s, **k: f(s["rewards"], s["values"], lam=s["lam"], **k)


def off_policy(f):
    return lambda s, **k: f(s["rewards"], s["values"], s["log_ratio"], lam=s["lam"], **k)


def action_values(f, **extra):
    named = lambda s: {name: s[name] for name in extra.get("named", ())}
    return lambda s, **k: f(s["rewards"], s["q_values"], s["values"], lam=s["lam"], **named(s), **k)


# name -> (call on streams, streams it reads)
TRACES = {
    "discounted_returns": (lambda s, **k: A.discounted_returns(s["rewards"], **k), ("rewards",)),
    "td_lambda": (on_policy(A.td_lambda), ("rewards", "values", "lam")),
    "gae": (on_policy(A.gae), ("rewards", "values", "lam")),
    "gae_decoupled": (
        lambda s, **k: A.gae_decoupled(s["rewards"], s["values"], lam_policy=s["lam"], **k),
        ("rewards", "values", "lam"),
    ),
    "n_step": (lambda s, **k: A.n_step(s["rewards"], s["values"], n=3, **k), ("rewards", "values")),
    "vtrace": (off_policy(A.vtrace), ("rewards", "values", "log_ratio", "lam")),
    "vtrace_uncapped": (
        lambda s, **k: A.vtrace(s["rewards"], s["values"], s["log_ratio"], rho_max=5.0, c_max=5.0, **k),
        ("rewards", "values", "log_ratio"),
    ),
    "retrace": (
        action_values(A.retrace, named=("log_ratio",)),
        ("rewards", "q_values", "values", "log_ratio", "lam"),
    ),
    "q_lambda": (action_values(A.q_lambda), ("rewards", "q_values", "values", "lam")),
    "clipped_is_returns": (
        lambda s, **k: A.clipped_is_returns(s["rewards"], s["log_ratio"], **k),
        ("rewards", "log_ratio"),
    ),
}
LENS = [4, 0, 7, 1, 5]
MASK = torch.tensor([1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
CU = torch.tensor([0, 4, 4, 11, 12, 17])


def streams(seed=0, dtype=torch.float64, total=17):
    g = torch.Generator().manual_seed(seed)
    out = {
        n: torch.randn(total, generator=g, dtype=torch.float64) for n in ("rewards", "values", "q_values", "log_ratio")
    }
    out |= {n: torch.rand(total, generator=g, dtype=torch.float64) for n in ("lam", "gamma")}
    return {n: x.to(dtype) for n, x in out.items()}


def boot(dtype=torch.float64):
    return torch.tensor([0.5, 9.0, -1.0, 2.0, 0.25], dtype=dtype)


def outputs(result):
    return list(result) if isinstance(result, tuple) else [result]


def each(name, s, **k):
    k = {"mask": MASK, "cu_seqlens": CU, "gamma": s["gamma"], "bootstrap": boot(s["rewards"].dtype)} | k
    return outputs(TRACES[name][0](s, **k))


@pytest.fixture(params=TRACES)
def name(request):
    return request.param


def test_masked_positions_may_hold_anything(name):
    """NaN and inf at masked positions, in every stream, change neither values nor gradients; outputs are 0 there."""
    clean = {n: x.requires_grad_() for n, x in streams().items()}
    dirty = {}
    for n, x in streams().items():
        bad = torch.where(torch.arange(17) % 2 == 0, NAN, float("inf")).double()
        dirty[n] = torch.where(MASK, x, bad).requires_grad_()
    grad_out = torch.randn(17, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    used = (*TRACES[name][1], "gamma")
    results = []
    for s in (clean, dirty):
        out = each(name, s)
        grads = torch.autograd.grad(sum((x * grad_out).sum() for x in out), [s[n] for n in used], allow_unused=True)
        results.append((out, grads))
    for x, y in zip(*(r[0] for r in results)):
        assert torch.equal(x, y)
        assert (y[~MASK] == 0).all()
        assert (y[MASK] != 0).any()
    for x, y, n in zip(*(r[1] for r in results), used):
        if x is not None:
            assert torch.equal(x, y), n
            assert (y[~MASK] == 0).all(), n


def test_gaps_are_transparent(name):
    """Removing the masked tokens leaves the rest bit-identical: a gap neither decays nor leaks."""
    s = streams()
    kept = {n: x[MASK] for n, x in s.items()}
    count = torch.stack([part.sum() for part in MASK.split(LENS)])
    compact = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    dense = each(name, kept, mask=torch.ones(int(count.sum()), dtype=torch.bool), cu_seqlens=compact)
    for x, y in zip(each(name, s), dense):
        assert torch.equal(x[MASK], y)


def test_sequences_are_independent(name):
    """NaN stays in its sequence; results do not depend on order and neighbours."""
    s = streams()
    alone = each(name, {n: x[4:11] for n, x in s.items()}, mask=MASK[4:11], cu_seqlens=torch.tensor([0, 7]),
                 bootstrap=boot()[2:3])  # fmt: skip
    poisoned = {n: torch.where((torch.arange(17) < 4) | (torch.arange(17) > 10), NAN, x) for n, x in s.items()}
    if name != "discounted_returns":
        poisoned |= {n: s[n] for n in ("gamma", "lam")}
    else:
        poisoned["gamma"] = s["gamma"]
    bad_boot = torch.tensor([NAN, NAN, -1.0, NAN, NAN], dtype=torch.float64)
    for x, y in zip(alone, each(name, poisoned, bootstrap=bad_boot)):
        torch.testing.assert_close(y[4:11], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_dtypes(name, dtype, ints):
    """16-bit inputs are computed and returned in fp32, fp64 stays; both integer types of cu_seqlens."""
    s = streams(dtype=dtype)
    exact = each(name, {n: x.double() for n, x in s.items()}, bootstrap=boot())
    for x, y in zip(each(name, s, cu_seqlens=CU.to(ints)), exact):
        assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_one_fp64_stream_promotes_all(name):
    s = streams(dtype=torch.float32)
    s["rewards"] = s["rewards"].double()
    assert all(x.dtype == torch.float64 for x in each(name, s))


def test_floats_and_tensors_agree(name):
    s = streams()
    s["lam"], s["gamma"] = torch.full_like(s["lam"], 0.9), torch.full_like(s["gamma"], 0.8)
    as_floats = s | {"lam": 0.9}
    for x, y in zip(each(name, s), each(name, as_floats, gamma=0.8)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_no_bootstrap_is_termination(name):
    for x, y in zip(each(name, streams(), bootstrap=None), each(name, streams(), bootstrap=torch.zeros(5).double())):
        assert torch.equal(x, y)


def test_gradients(name):
    used = (*TRACES[name][1], "gamma")
    given = streams(3)
    # away from the kinks of min(cap, ratio), which finite differences cannot see
    given["log_ratio"] = torch.where(given["log_ratio"].abs() < 0.1, 0.3, given["log_ratio"])

    def call(end, *tensors):
        return tuple(each(name, given | dict(zip(used, tensors)), bootstrap=end))

    tensors = [given[n].clone().requires_grad_() for n in used]
    assert torch.autograd.gradcheck(call, (boot().requires_grad_(), *tensors))


# The others nightly: each is a scan as `gae`, which tests/laws compiles.
COMPILED = [n if n in ("n_step", "vtrace") else pytest.param(n, marks=pytest.mark.slow) for n in TRACES]


@pytest.mark.slow_cases("vtrace")
@pytest.mark.parametrize("name", COMPILED, indirect=True)
def test_compiles(name):
    torch._dynamo.reset()
    s = streams()
    call = lambda s, mask, cu, end: TRACES[name][0](s, mask=mask, cu_seqlens=cu, gamma=s["gamma"], bootstrap=end)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(outputs(compiled(s, MASK, CU, boot())), each(name, s)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cu", [[0], [0, 0], [0, 0, 0]])
def test_empty_streams(name, cu):
    out = each(
        name,
        streams(total=0),
        mask=torch.zeros(0, dtype=torch.bool),
        cu_seqlens=torch.tensor(cu),
        bootstrap=torch.ones(len(cu) - 1).double(),
    )
    assert all(x.shape == (0,) for x in out)


def test_fully_masked_is_zero(name):
    for x in each(name, streams(), mask=torch.zeros(17, dtype=torch.bool)):
        assert torch.equal(x, torch.zeros_like(x))


def test_errors_name_the_argument(name):
    s = streams()

    def fails(match, error=ValueError, **k):
        with pytest.raises(error, match=match):
            each(name, s, **k)

    fails("mask must be bool", TypeError, mask=MASK.long())
    fails("mask must have the shape", mask=MASK[:-1])
    fails("cu_seqlens must start at 0", cu_seqlens=torch.tensor([1, 4, 4, 11, 12, 17]))
    fails("cu_seqlens must end at", cu_seqlens=torch.tensor([0, 4, 4, 11, 12, 16]))
    fails("cu_seqlens must be non-decreasing", cu_seqlens=torch.tensor([0, 4, 3, 11, 12, 17]))
    fails("cu_seqlens must be int32 or int64", TypeError, cu_seqlens=CU.double())
    fails("gamma must be in", gamma=1.5)
    fails("gamma must be in", gamma=NAN)
    fails("gamma must be in", gamma=torch.full((17,), -1.01))
    fails("gamma must have the shape", gamma=torch.ones(3))
    fails("bootstrap must have one value per sequence", bootstrap=torch.zeros(4))
    fails("bootstrap must be a floating", TypeError, bootstrap=torch.zeros(5, dtype=torch.int64))
    for stream in TRACES[name][1]:
        good = s[stream]
        s[stream] = good[:-1]
        fails(f"must have the shape of|{stream} must have|lam_policy must have")
        s[stream] = good.long()
        fails(f"({stream}|lam_policy) must be a floating-point", TypeError)
        s[stream] = good
    if "lam" in TRACES[name][1]:
        s["lam"] = 1.2
        fails("lam(_policy)? must be in")
    s["lam"] = 0.5
    for stream in ("rewards", "values", "q_values", "log_ratio"):
        s[stream] = s[stream].reshape(1, -1)
    fails("must be packed", mask=MASK.reshape(1, -1))


def test_errors_of_single_functions():
    s, k = streams(), {"mask": MASK, "cu_seqlens": CU}
    with pytest.raises(ValueError, match="n must be a whole number of at least 1, got 0"):
        A.n_step(s["rewards"], s["values"], n=0, **k)
    with pytest.raises(ValueError, match="rho_max must be at least 0"):
        A.vtrace(s["rewards"], s["values"], s["log_ratio"], rho_max=-1.0, **k)
    with pytest.raises(ValueError, match="c_max must be at least 0"):
        A.retrace(s["rewards"], s["q_values"], s["values"], log_ratio=s["log_ratio"], c_max=NAN, **k)
    with pytest.raises(ValueError, match="alpha must be positive"):
        A.length_adaptive_lam(MASK, cu_seqlens=CU, alpha=0.0)
    with pytest.raises(TypeError, match="truncated must be bool"):
        A.bootstrap_values(s["values"], truncated=torch.zeros(5), cu_seqlens=CU)


def test_huge_ratios_stay_finite():
    s = streams(dtype=torch.float32)
    s["log_ratio"] = torch.tensor([1e4, -1e4, 80.0, -80.0, 0.0, 1e30] * 3)[:17]
    for name in ("vtrace", "retrace", "clipped_is_returns"):
        assert all(x.isfinite().all() for x in each(name, s))


def test_bootstrap_values():
    """The value at the last position of a truncated sequence; other values are not read, nor in the gradient."""
    values = torch.tensor([1.0, 2, NAN, 4, 5, 6], requires_grad=True)
    cu = torch.tensor([0, 2, 2, 3, 6])
    out = A.bootstrap_values(values, truncated=torch.tensor([True, True, False, True]), cu_seqlens=cu)
    assert out.tolist() == [2.0, 0.0, 0.0, 6.0]
    out.sum().backward()
    assert values.grad.tolist() == [0, 1, 0, 0, 0, 1]


def test_length_adaptive_lam_counts_actions():
    mask = torch.tensor([True] * 30 + [False] * 20 + [True] * 10 + [True] * 25 + [False] * 5)
    cu = torch.tensor([0, 60, 60, 90])
    lam = A.length_adaptive_lam(mask, cu_seqlens=cu)
    assert torch.equal(lam[~mask], torch.zeros(25))
    torch.testing.assert_close(lam[:30], torch.full((30,), 1 - 1 / (0.05 * 40)))
    torch.testing.assert_close(lam[60:85], torch.full((25,), 1 - 1 / (0.05 * 25)))
    short = A.length_adaptive_lam(torch.ones(20, dtype=torch.bool), cu_seqlens=torch.tensor([0, 20]))
    torch.testing.assert_close(short, torch.zeros(20))
    long = A.length_adaptive_lam(torch.ones(10_000, dtype=torch.bool), cu_seqlens=torch.tensor([0, 10_000]))
    torch.testing.assert_close(long, torch.full((10_000,), 1 - 1 / 500))
