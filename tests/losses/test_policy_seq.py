"""Sequence-level surrogates against loops over sequences in plain Python floats."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch

from rlkit import losses

LENS = [3, 0, 1, 4, 2]
CU = torch.tensor([0, 3, 3, 4, 8, 10])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 0]).bool()
X = torch.tensor([0.5, 9.0, -0.9, 0.7, 0.3, -0.2, 7.0, -0.9, 4.0, 5.0], dtype=torch.float64)
SEQ_ADVANTAGES = [1.5, 0.0, -2.0, -0.5, 3.0]
A = torch.tensor([a for a, n in zip(SEQ_ADVANTAGES, LENS, strict=True) for _ in range(n)], dtype=torch.float64)

Sequence = Callable[[list[float], float], tuple[list[float], list[float]]]


def ppo(s: float, a: float, low: float, high: float) -> tuple[float, float]:
    r = math.exp(s)
    clipped = min(max(r, 1 - low), 1 + high)
    silent = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
    return -min(r * a, clipped * a), 0.0 if silent else r


def gspo(xs: list[float], a: float, low: float = 3e-4, high: float = 4e-4) -> tuple[list[float], list[float]]:
    value, c = ppo(sum(xs) / len(xs), a, low, high)
    return [value] * len(xs), [c] * len(xs)


def luspo(xs: list[float], a: float) -> tuple[list[float], list[float]]:
    values, cs = gspo(xs, a, 0.5, 0.5)
    return [v * len(xs) for v in values], [c * len(xs) for c in cs]


def gmpo(xs: list[float], a: float) -> tuple[list[float], list[float]]:
    inner = [min(x, 0.4) if a > 0 else max(x, -0.4) for x in xs]
    s = math.exp(sum(inner) / len(inner))
    return [-a * s] * len(xs), [s if i == x else 0.0 for i, x in zip(inner, xs, strict=True)]


def vespo(xs: list[float], a: float) -> tuple[list[float], list[float]]:
    k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    w = math.exp(sum(xs))
    phi = math.exp(lam) * w**k * math.exp(-lam * w)
    return [-phi * a * x for x in xs], [phi] * len(xs)


def kimi15(xs: list[float], a: float, tau: float = 0.7) -> tuple[list[float], list[float]]:
    total = sum(xs)
    return [(-a + tau / 2 * total) * x for x in xs], [(a - tau * total) / a] * len(xs)


ROWS: dict[str, tuple[Sequence, dict]] = {
    "gspo": (gspo, {}),
    "luspo": (luspo, {"clip_low": 0.5, "clip_high": 0.5}),
    "gmpo": (gmpo, {}),
    "vespo": (vespo, {}),
    "kimi15": (kimi15, {"tau": 0.7}),
}


def looped(f: Sequence, xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, grads = [0.0] * 10, [0.0] * 10
    for i, a in enumerate(SEQ_ADVANTAGES):
        at = [t for t in range(CU[i], CU[i + 1]) if MASK[t]]
        if at:
            for t, v, c in zip(at, *f([xs[t].item() for t in at], a), strict=True):
                values[t], grads[t] = v, -c * a
    return torch.tensor(values, dtype=torch.float64), torch.tensor(grads, dtype=torch.float64)


def call(name: str, x: torch.Tensor, a: torch.Tensor = A, mask: torch.Tensor | None = MASK) -> torch.Tensor:
    return getattr(losses, name)(x, a, mask=mask, cu_seqlens=CU, **ROWS[name][1])


def test_every_public_surrogate_has_a_row() -> None:
    takes_bounds = {
        n
        for n in losses.__all__
        if inspect.getmodule(getattr(losses, n)).__name__ == "rlkit.losses.policy"
        and "cu_seqlens" in inspect.signature(getattr(losses, n)).parameters
    }
    assert takes_bounds == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-4])
def test_value_and_gradient_are_those_of_the_loop(name: str, scale: float) -> None:
    x = (scale * X).requires_grad_()
    loss = call(name, x)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    values, grads = looped(ROWS[name][0], scale * X)
    torch.testing.assert_close(loss, values, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ROWS)
def test_on_policy_gradient(name: str) -> None:
    x = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(call(name, x).sum(), x)
    lens = torch.tensor([2.0] * 3 + [1.0] + [3.0] * 4 + [0.0] * 2, dtype=torch.float64)
    torch.testing.assert_close(grad, -A * MASK * (lens if name == "luspo" else 1))


@pytest.mark.parametrize("name", ROWS)
def test_masked_positions_reach_neither_value_nor_gradient(name: str) -> None:
    clean, dirty = X.clone().requires_grad_(), torch.where(MASK, X, torch.nan).requires_grad_()
    a = torch.where(MASK, A, torch.inf)
    losses_ = [call(name, clean), call(name, dirty, a)]
    assert torch.equal(*losses_)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y, x in zip(losses_, (clean, dirty), strict=True)))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_extremes_are_finite_and_bf16_becomes_fp32(name: str, size: float) -> None:
    for sign in (1.0, -1.0):
        x = torch.full((10,), sign * size, dtype=torch.bfloat16, requires_grad=True)
        loss = call(name, x, A.bfloat16())
        assert loss.dtype == torch.float32
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", ROWS)
def test_sequences_do_not_touch_each_other(name: str) -> None:
    whole = call(name, X)
    for i in range(5):
        at = slice(CU[i], CU[i + 1])
        cu = torch.tensor([0, LENS[i]])
        alone = getattr(losses, name)(X[at], A[at], mask=MASK[at], cu_seqlens=cu, **ROWS[name][1])
        torch.testing.assert_close(whole[at], alone, rtol=1e-14, atol=0)


def test_sequences_of_one_token_are_the_token_losses() -> None:
    x, a = torch.linspace(-1, 1, 9, dtype=torch.float64), torch.tensor([1.0, -1, 2] * 3, dtype=torch.float64)
    cu = torch.arange(10)
    one = {"mask": None, "cu_seqlens": cu}
    assert torch.equal(losses.gspo(x, a, clip_low=0.2, clip_high=0.3, **one), losses.ppo_clip(x, a, clip_high=0.3))
    torch.testing.assert_close(losses.kimi15(x, a, tau=0.4, **one), losses.dro(x, a, beta=0.4))


def test_luspo_with_sequence_means_is_gspo_with_token_sums() -> None:
    x = (1e-4 * X).requires_grad_()
    one = (losses.seq_mean(MASK, cu_seqlens=CU) * losses.luspo(x, A, mask=MASK, cu_seqlens=CU)).sum()
    two = (losses.seq_mean_token_sum(MASK, cu_seqlens=CU) * losses.gspo(x, A, mask=MASK, cu_seqlens=CU)).sum()
    torch.testing.assert_close(one, two, rtol=1e-6, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (one, two)), rtol=1e-6, atol=1e-9)


def test_topr_takes_the_sequences_ratio_through_token_gradient() -> None:
    x = X.clone().requires_grad_()
    whole = losses.seq_log_ratio_sum(x, mask=MASK, cu_seqlens=CU)
    loss = losses.topr(losses.token_gradient(whole, x), A, mask=MASK)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    third = min(1.0, math.exp(0.7)) * 2.0
    fourth = min(1.0, math.exp(0.3 - 0.2 - 0.9)) * 0.5
    expected = [-1.5, 0, -1.5, third, fourth, fourth, 0, fourth, 0, 0]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ROWS)
def test_compiles_without_graph_break(name: str) -> None:
    compiled = torch.compile(getattr(losses, name), backend="aot_eager", fullgraph=True)
    got = compiled(X, A, mask=MASK, cu_seqlens=CU, **ROWS[name][1])
    torch.testing.assert_close(got, call(name, X))
