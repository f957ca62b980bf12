"""The C kernels of a layer against torch in fp64, and what happens where there are none."""

import math
import os
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rlkit.kernels import layer
from rlkit.kernels.layer import compiled, halves

EPS = 1e-6
SHAPES = [(1, 1), (3, 5), (17, 64), (70, 130), (600, 128)]  # the last is above what one thread does
needs_c = pytest.mark.skipif(compiled.library() is None, reason="no C compiler")


either = pytest.mark.usefixtures("backend")


@pytest.fixture(params=[pytest.param("C", marks=needs_c), "torch"])
def backend(request, monkeypatch):
    """The kernels, and torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(layer, "library", lambda: None)


def draw(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def truth(function, *inputs, grad):
    """The outputs of `function` and the gradients of its inputs, in fp64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad.double())


def close(got, expected, tolerance=2e-6):
    assert got.shape == expected.shape
    return (got - expected).norm() <= tolerance * (1 + expected.norm())


@either
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows, width):
    x, weight, grad, residual = draw(rows, width), draw(width), draw(rows, width, seed=1), draw(rows, width, seed=2)
    expected, (dx, d_weight) = truth(lambda x, w: F.rms_norm(x, w.shape, w, EPS), x, weight, grad=grad)
    out, scale = layer.rms_norm(x, weight, EPS)
    assert close(out, expected)
    assert close(scale[:, 0], (x.double().square().mean(-1) + EPS).rsqrt())
    apart = torch.stack((residual, residual), -1)[..., 0]  # gradients come with any strides
    got = layer.rms_norm_backward(grad.t().contiguous().t(), x, weight, scale, apart)
    assert all(close(*pair, 5e-6) for pair in zip(got, (dx + residual, d_weight, expected), strict=True))


def turned(x, norm, cos, sin):
    y = x if norm is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
    a, b = y.tensor_split(2, -1)
    return y * cos + torch.cat((b, a), -1) * sin


@either
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("rows", "heads", "n"), [(1, 1, 2), (5, 3, 8), (300, 4, 32)])
def test_rotary(rows, heads, n, normed):
    """x is part of a wider tensor, as the queries are of the stacked product."""
    wide, grad = draw(rows, heads + 2, n), draw(rows, heads, n, seed=1)
    x, norm, cos, sin = wide[:, 1:-1], draw(n) if normed else None, draw(rows, 1, n, seed=2), draw(rows, 1, n, seed=3)
    inputs = (x, norm) if normed else (x,)
    angles = cos.double(), sin.double()
    expected, grads = truth(lambda x, w=None: turned(x, w, *angles), *inputs, grad=grad)
    assert close(layer.rotary(x, norm, cos, sin, eps=EPS), expected)
    d_wide = torch.zeros_like(wide)
    grad = grad.transpose(0, 1).contiguous().transpose(0, 1)  # gradients come with any strides
    d_norm = layer.rotary_backward(grad, x, norm, cos, sin, eps=EPS, dx=d_wide[:, 1:-1])
    assert close(d_wide[:, 1:-1], grads[0], 5e-6)
    assert not d_wide[:, [0, -1]].any()
    assert d_norm is None if norm is None else close(d_norm, grads[1], 5e-6)


@either
def test_a_nan_stays_in_its_row():
    x = draw(4, 20)
    x[1, 3] = math.nan
    assert layer.rms_norm(x, draw(20), EPS)[0].isnan().any(1).tolist() == [False, True, False, False]


def first_half(x, cos, sin, norm, q, q_bias, k, k_bias, v, v_bias, q_norm, k_norm):
    h, n = F.rms_norm(x, norm.shape, norm, EPS), cos.shape[-1]
    q, k, v = (F.linear(h, *p).unflatten(1, (-1, n)) for p in ((q, q_bias), (k, k_bias), (v, v_bias)))
    return turned(q, q_norm, cos, sin), turned(k, k_norm, cos, sin), v, x


def second_half(x, attended, o, o_bias, norm, gate, up, down):
    y = x + F.linear(attended, o, o_bias)
    h = F.rms_norm(y, norm.shape, norm, EPS)
    return y + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def same_as(function, formula, inputs, tolerance=5e-6):
    """Values and gradients of a function of C and of its formula in fp64."""
    leaves = [x if x is None else x.clone().requires_grad_() for x in inputs]
    wide = [x if x is None else x.double().requires_grad_() for x in inputs]
    out, expected = function(leaves), formula(wide)
    got, want = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (out, expected))
    assert all(close(*pair, tolerance) for pair in zip(got, want, strict=True))
    shifts = [draw(*t.shape, seed=3) for t in got]
    shifts = [g.transpose(0, 1).contiguous().transpose(0, 1) for g in shifts]  # gradients come with any strides
    leaves, wide = ([x for x in tensors if x is not None] for tensors in (leaves, wide))
    grads = torch.autograd.grad(got, leaves, shifts)
    truths = torch.autograd.grad(want, wide, [g.double() for g in shifts])
    assert all(close(*pair, tolerance) for pair in zip(grads, truths, strict=True))


@needs_c
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "heads", "kv_heads", "n"), [(1, 4, 1, 1, 2), (5, 12, 4, 2, 8), (600, 96, 6, 1, 32)]
)
def test_the_first_half_of_a_layer(rows, width, heads, kv_heads, n, normed, biased):
    sizes = [heads * n, kv_heads * n, kv_heads * n]
    weights = [draw(width)]
    for i, size in enumerate(sizes):
        weights += [draw(size, width, seed=i) / width, draw(size, seed=i) if biased else None]
    weights += [draw(n, seed=5), draw(n, seed=6)] if normed else [None, None]
    x, cos, sin = draw(rows, width), draw(rows, 1, n, seed=1), draw(rows, 1, n, seed=2)
    same_as(
        lambda t: halves.Project.apply(t[0], cos, sin, EPS, *t[1:]),
        lambda t: first_half(t[0], cos.double(), sin.double(), *t[1:]),
        [x, *weights],
    )


@needs_c
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "width", "inner", "hidden"), [(1, 1, 1, 1), (5, 12, 20, 7), (600, 96, 64, 130)])
def test_the_second_half_of_a_layer(rows, width, inner, hidden, biased):
    weights = [draw(width, inner) / inner, draw(width, seed=1) if biased else None, draw(width, seed=2)]
    weights += [draw(hidden, width), draw(hidden, width, seed=1), draw(width, hidden, seed=2) / hidden]
    same_as(
        lambda t: halves.Finish.apply(*t[:2], EPS, *t[2:]),
        lambda t: second_half(*t),
        [draw(rows, width), draw(rows, inner, seed=1), *weights],
    )


@needs_c
@pytest.mark.parametrize("gate", [0.0, -0.0, 1e-30, 20.0, -20.0, 89.0, -89.0, 1e4, -1e4, math.inf, math.nan, 1.0])
def test_silu_at_its_borders(gate):
    """Of one hidden number: z - x = silu(gate), where norm(x) is 1."""
    x, one, none = torch.full((1, 1), 100.0), torch.ones(1, 1), torch.zeros(1, 1)
    z = halves.Finish.apply(x, one, EPS, none, None, torch.ones(1), torch.full((1, 1), gate), one, one)
    expected = F.silu(torch.tensor(gate).double()).float()
    assert torch.allclose(z - x, expected, rtol=1e-6, atol=1e-5, equal_nan=True)


SPANS = [  # first query, number of queries, ranges of keys: two prompts, samples that share the first, a sample alone
    (0, 4, [(0, 4)]), (4, 1, [(4, 1)]), (5, 3, [(0, 4), (5, 3)]), (8, 6, [(0, 4), (8, 6)]), (14, 2, [(14, 2)]),
]  # fmt: skip


def table(spans):
    most = max(len(ranges) for *_, ranges in spans)
    lens = [sum(n for _, n in ranges) for *_, ranges in spans]
    before = [0, *accumulate(a * b for (_, a, _), b in zip(spans, lens))]
    rows = [
        [first, a, b, at, *(n for r in [*ranges, *[(0, 0)] * (most - len(ranges))] for n in r)]
        for (first, a, ranges), b, at in zip(spans, lens, before)
    ]
    return torch.tensor(rows), before[-1]


def attended(q, k, v, scale, spans=SPANS):
    """One query at a time."""
    out = []
    for first, a, ranges in spans:
        keys = [j for start, n in ranges for j in range(start, start + n)]
        for i in range(a):
            seen = keys[: len(keys) - a + i + 1]
            for head in range(q.shape[1]):
                kv_head = head * k.shape[1] // q.shape[1]
                probs = (k[seen, kv_head] @ q[first + i, head] * scale).softmax(0)
                out.append(probs @ v[seen, kv_head])
    return torch.stack(out).view(-1, *q.shape[1:])


@needs_c
@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(1, 1, 3), (4, 2, 32), (6, 1, 16)])
def test_attention_of_few_queries(heads, kv_heads, n):
    q, k, wide, grad = draw(16, heads, n), draw(16, kv_heads, n), draw(16, kv_heads + 1, n), draw(16, heads, n, seed=1)
    v = wide[:, 1:]
    expected, grads = truth(lambda q, k, v: attended(q, k, v, 0.3), q, k, v, grad=grad)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = layer.Attention.apply(*leaves, *table(SPANS), 0.3)
    assert close(out, expected)
    for got, want in zip(torch.autograd.grad(out, leaves, grad), grads, strict=True):
        assert close(got, want)


@needs_c
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("start", [0, 5])
def test_all_layers_and_the_norm_after_them(start, biased):
    """Two layers of other weights, where the queries of the last one are all rows, or those after the prompts."""
    rows, width, hidden, heads, n, sizes = 16, 12, 20, 4, 8, (32, 16, 16)
    x, cos, sin = draw(rows, width), draw(rows, 1, n, seed=1), draw(rows, 1, n, seed=2)
    norm, last, weights = draw(width, seed=3), [span for span in SPANS if span[0] >= start], []
    for seed in (10, 30):
        weights.append(draw(width, seed=seed))
        for i, size in enumerate(sizes, start=seed):
            weights += [draw(size, width, seed=i) / width, draw(size, seed=i) if biased else None]
        weights += [draw(n, seed=seed + 4), draw(n, seed=seed + 5), draw(width, heads * n, seed=seed) / width]
        weights += [draw(width, seed=seed + 6) if biased else None, draw(width, seed=seed + 7)]
        weights += [draw(hidden, width, seed=seed + i) for i in (8, 9)] + [draw(width, hidden, seed=seed) / hidden]

    def formula(t):
        x, norm, *weights = t
        for own, first, spans in ((weights[:15], 0, SPANS), (weights[15:], start, last)):
            q, k, v, x = first_half(x, cos.double(), sin.double(), *own[:9])
            x = second_half(x[first:], attended(q, k, v, 0.3, spans).flatten(1), *own[9:])
        return F.rms_norm(x, norm.shape, norm, EPS)

    def function(t, *, trains=True):
        return halves.Layers.apply(*t[:2], cos, sin, table(SPANS), table(last), (start, EPS, 0.3), trains, *t[2:])

    same_as(function, formula, [x, norm, *weights], 5e-5)
    with torch.no_grad():
        assert torch.equal(function([x, norm, *weights], trains=False), function([x, norm, *weights]))


@either
def test_equal_calls_give_equal_bits():
    x, weight = draw(3000, 128), draw(128)
    scale = layer.rms_norm(x, weight, EPS)[1]
    first = layer.rms_norm_backward(x.clone(), x, weight, scale, x)
    for _ in range(5):
        again = layer.rms_norm_backward(x.clone(), x, weight, scale, x)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@pytest.mark.parametrize("reason", ["no compiler", "switched off", "a compiler that fails", "a folder that is a file"])
def test_without_the_library_torch_does_the_work(tmp_path, monkeypatch, reason):
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    (tmp_path / "rlkit").write_text("")
    env = {
        "no compiler": {"PATH": str(tmp_path / "none")},
        "switched off": {"RLKIT_C_KERNELS": "0"},
        "a compiler that fails": {"CC": str(tmp_path / "cc"), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        "a folder that is a file": {"XDG_CACHE_HOME": str(tmp_path)},
    }[reason]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    compiled.library.cache_clear()
    try:
        assert compiled.library() is None
        assert layer.rms_norm(torch.ones(1, 2), torch.ones(2), 3.0)[0].tolist() == [[0.5, 0.5]]
    finally:
        compiled.library.cache_clear()


@needs_c
def test_torch_and_the_kernels_share_their_threads():
    layer.rms_norm(draw(3000, 128), draw(128), EPS)
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert sum(os.path.basename(path).startswith(("libgomp", "libiomp", "libomp")) for path in maps) == 1
