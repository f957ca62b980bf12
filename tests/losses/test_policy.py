"""Elementwise surrogates against scalar formulas, written from the papers in plain Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from rlkit import losses
from rlkit.losses import policy

LOG_RATIOS = (-3.0, -1.0, -0.3, -0.15, -0.05, 0.0, 0.05, 0.15, 0.3, 0.45, 1.0, 1.7, 3.0)
ADVANTAGES = (2.0, 0.5, -0.25, -1.5)
OLD_LOGPS = (-3.05, -4.5)  # low enough that the new probability stays below 1


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo_value(x: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    r = math.exp(x)
    return -min(r * a, clip(r, 1 - low, 1 + high) * a)


def ppo_c(x: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    r = math.exp(x)
    return 0.0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else r


def dual_value(x: float, a: float, c: float, low: float = 0.2, high: float = 0.2) -> float:
    return (
        -max(min(math.exp(x) * a, clip(math.exp(x), 1 - low, 1 + high) * a), c * a)
        if a < 0
        else ppo_value(x, a, low, high)
    )


def dual_c(x: float, a: float, c: float, low: float = 0.2, high: float = 0.2) -> float:
    return 0.0 if a < 0 and math.exp(x) > c else ppo_c(x, a, low, high)


def aspo_c(x: float, a: float) -> float:
    r = math.exp(x)
    return (0.0 if r > 1.2 else min(1 / r, 3.0)) if a > 0 else ppo_c(x, a)


def tv_c(x: float, a: float, old: float) -> float:
    moved = math.exp(old + x) - math.exp(old)
    drop = moved > 0.02 if a > 0 else moved < -0.03
    return 0.0 if drop else min(math.exp(x), 4.0)


def kl_c(x: float, a: float, old: float) -> float:
    q, p = math.exp(old), math.exp(old + x)
    d = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    drop = (d > 0.01 and p > q) if a > 0 else (d > 0.02 and p < q)
    return 0.0 if drop else min(math.exp(x), 4.0)


def sapo_value(x: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau * sigmoid(tau * (math.exp(x) - 1))


def sapo_c(x: float, a: float) -> float:
    tau, r = 1.0 if a > 0 else 1.05, math.exp(x)
    p = sigmoid(tau * (r - 1))
    return 4 * p * (1 - p) * r


@dataclass
class Row:
    """One surrogate: its scalar value (None: only its gradient has a meaning), its coefficient c, and its options."""

    value: Callable[..., float] | None
    c: Callable[..., float]
    options: dict = field(default_factory=dict)
    needs_old: bool = False


ROWS = {
    "ppo_clip": Row(ppo_value, ppo_c),
    "dual_clip": Row(lambda x, a: dual_value(x, a, 2.0), lambda x, a: dual_c(x, a, 2.0), {"clip_c": 2.0}),
    "aspo": Row(None, aspo_c, {"max_weight": 3.0}),
    "unbounded_positive": Row(
        lambda x, a: -a * x if a > 0 else dual_value(x, a, 3.0), lambda x, a: 1.0 if a > 0 else dual_c(x, a, 3.0)
    ),
    "reinforce": Row(lambda x, a: -a * x, lambda x, a: 1.0),
    "importance_sampling": Row(lambda x, a: -a * math.exp(x), lambda x, a: math.exp(x)),
    "cispo": Row(None, lambda x, a: min(math.exp(x), 5.0)),
    "topr": Row(None, lambda x, a: 1.0 if a > 0 else min(math.exp(x), 1.0)),
    "sapo": Row(sapo_value, sapo_c),
    "dppo": Row(None, tv_c, {"delta_low": 0.03, "delta_high": 0.02, "max_weight": 4.0}, needs_old=True),
    "dppo_kl": Row(None, kl_c, {"delta_low": 0.02, "delta_high": 0.01, "max_weight": 4.0}, needs_old=True),
}
UNTABLED = {"dft", "dro", "gspo", "luspo", "gmpo", "vespo", "kimi15"}  # those of sequences: test_policy_seq.py


def grid(needs_old: bool) -> list[tuple[float, ...]]:
    axes = [(x, a) for x in LOG_RATIOS for a in ADVANTAGES]
    return [(*p, old) for p in axes for old in OLD_LOGPS] if needs_old else axes


def columns(points: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(c, dtype=torch.float64) for c in zip(*points, strict=True)]


def call(name: str, x: torch.Tensor, a: torch.Tensor, *old: torch.Tensor, **more: object) -> torch.Tensor:
    given = {"old_logp": old[0]} if old else {}
    return getattr(losses, name)(x, a, **given, **ROWS[name].options, **more)


@pytest.mark.parametrize("name", ROWS)
def test_value_and_gradient_are_those_of_the_scalar_formula(name: str) -> None:
    row = ROWS[name]
    points = grid(row.needs_old)
    x, a, *old = columns(points)
    x.requires_grad_()
    loss = call(name, x, a, *old)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    c = torch.tensor([row.c(*p) for p in points], dtype=torch.float64)
    torch.testing.assert_close(grad, -c * a, rtol=1e-12, atol=1e-14)
    value = row.value or (lambda *p: -row.c(*p) * p[1] * p[0])
    if name == "aspo":
        value = lambda x, a: -aspo_c(x, a) * a * x if a > 0 else ppo_value(x, a)
    torch.testing.assert_close(
        loss, torch.tensor([value(*p) for p in points], dtype=torch.float64), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("name", ROWS)
def test_on_policy_it_is_reinforce(name: str) -> None:
    a = torch.tensor([1.5, -2.0, 0.25], dtype=torch.float64)
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    old = [torch.full((3,), -1.0, dtype=torch.float64)] if ROWS[name].needs_old else []
    (grad,) = torch.autograd.grad(call(name, x, a, *old).sum(), x)
    torch.testing.assert_close(grad, -a, rtol=1e-12, atol=0)


def test_every_public_surrogate_has_a_row() -> None:
    assert set(policy.__all__) == set(ROWS) | UNTABLED


@pytest.mark.parametrize("name", ROWS)
def test_masked_positions_reach_neither_value_nor_gradient(name: str) -> None:
    bad = float("nan"), float("inf"), float("-inf")
    x = torch.tensor([0.1, *bad, -0.4], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, *reversed(bad), -2.0], dtype=torch.float64)
    old = [torch.tensor([-1.0, *bad, -2.0], dtype=torch.float64)] if ROWS[name].needs_old else []
    keep = torch.tensor([True, False, False, False, True])
    loss = call(name, x, a, *old, mask=keep)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert (loss[1:4] == 0).all()
    assert (grad[1:4] == 0).all()
    alone = x.detach()[keep].requires_grad_()
    expected = call(name, alone, a[keep], *(o[keep] for o in old))
    assert torch.equal(loss[keep], expected)
    assert torch.equal(grad[keep], torch.autograd.grad(expected.sum(), alone)[0])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_shape_and_extremes(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[-1e4, -30.0, 0.0], [25.0, 80.0, 1e4]], dtype=dtype, requires_grad=True)
    a = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 2.0, -3.0]], dtype=dtype)
    old = [torch.full_like(a, -2.0)] if ROWS[name].needs_old else []
    loss = call(name, x, a, *old)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == x.shape
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), x)[0].isfinite().all()
    assert call(name, x[:0], a[:0], *(o[:0] for o in old)).shape == (0, 3)


@pytest.mark.parametrize("name", ROWS)
def test_losses_of_micro_batches_add_up_exactly(name: str) -> None:
    points = grid(ROWS[name].needs_old)
    x, a, *old = columns(points)
    whole = call(name, x, a, *old)
    parts = [call(name, x[i::3], a[i::3], *(o[i::3] for o in old)) for i in range(3)]
    assert all(torch.equal(whole[i::3], part) for i, part in enumerate(parts))


@pytest.mark.parametrize("name", ROWS)
def test_compiles_without_graph_break(name: str) -> None:
    x, a, *old = columns(grid(ROWS[name].needs_old))
    mask = a > -1
    given = {"old_logp": old[0]} if old else {}
    options = {**given, **ROWS[name].options, "mask": mask}
    compiled = torch.compile(getattr(losses, name), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, a, **options), getattr(losses, name)(x, a, **options))


def test_open_clips_are_importance_sampling() -> None:
    x, a = columns([(x, a) for x in LOG_RATIOS for a in (*ADVANTAGES, 0.0)])
    x.requires_grad_()
    inf = float("inf")
    plain = losses.importance_sampling(x, a)
    for loss in (
        losses.ppo_clip(x, a, clip_low=inf, clip_high=inf),
        losses.dual_clip(x, a, clip_c=inf, clip_low=inf, clip_high=inf),
    ):
        torch.testing.assert_close(loss, plain)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (loss, plain)))


def test_clip_distances_may_be_tensors() -> None:
    x, a = columns(grid(False))
    per_token = torch.linspace(0.05, 0.6, x.numel(), dtype=torch.float64)
    expected = [ppo_value(*p, low=0.3, high=h) for p, h in zip(grid(False), per_token.tolist(), strict=True)]
    loss = losses.ppo_clip(x, a, clip_low=torch.tensor(0.3, dtype=torch.float64), clip_high=per_token)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))


def test_dft_is_the_nll_with_the_gradient_of_the_probability() -> None:
    logp = torch.tensor([-0.1, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    loss = losses.dft(logp)
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.tolist() == pytest.approx([-x * math.exp(x) for x in (-0.1, -1.0, -3.0)])
    assert grad.tolist() == pytest.approx([-math.exp(x) for x in (-0.1, -1.0, -3.0)])


def test_dro_is_the_policy_gradient_plus_a_quadratic_pull() -> None:
    points = [(x, a) for x in LOG_RATIOS for a in (*ADVANTAGES, 0.0)]
    x, a = columns(points)
    x.requires_grad_()
    loss = losses.dro(x, a, beta=0.3)
    torch.testing.assert_close(loss, torch.tensor([-a * x + 0.15 * x * x for x, a in points], dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss.sum(), x)
    torch.testing.assert_close(grad, torch.tensor([0.3 * x - a for x, a in points], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("ppo_clip", {"clip_low": -0.1}, "clip_low must be at least 0"),
        ("ppo_clip", {"clip_high": float("nan")}, "clip_high must be at least 0"),
        ("dual_clip", {"clip_c": 1.0}, "clip_c must be above 1"),
        ("cispo", {"max_weight": -1.0}, "max_weight must be at least 0"),
        ("cispo", {"max_weight": 0.2}, "max_weight bounds the ratio.* for a distance of 0.2 give 1.2"),
        ("sapo", {"tau_neg": 0.0}, "tau_neg must be positive"),
        ("dro", {"beta": -1.0}, "beta must be at least 0"),
    ],
)
def test_bad_options_are_named(name: str, options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        getattr(losses, name)(torch.zeros(2), torch.ones(2), **options)


@pytest.mark.parametrize("name", ["reinforce", "dual_clip", "dppo", "gspo", "kimi15", "m2po", "kl_cov"])
def test_exchanged_arguments_are_named(name: str) -> None:
    """Advantages are data: what requires a gradient in their place is the log-ratio."""
    whole = {"mask": None, "cu_seqlens": torch.tensor([0, 2])}
    more = {
        "dual_clip": {"clip_c": 3.0}, "dppo": {"old_logp": -torch.ones(2)}, "gspo": whole, "m2po": {"cutoff": 1.0},
        "kimi15": whole | {"tau": 0.1}, "kl_cov": {"selected": torch.ones(2).bool(), "kl_coef": 1.0},
    }  # fmt: skip
    fn = partial(getattr(losses, name), **more.get(name, {}))
    log_ratio, advantages = torch.zeros(2, requires_grad=True), torch.ones(2)
    with pytest.raises(ValueError, match=r"the order is \(log_ratio, advantages\), and .* need \.detach\(\)"):
        fn(advantages, log_ratio)
    assert fn(log_ratio, advantages).requires_grad
    assert not fn(log_ratio.detach(), advantages).requires_grad


def test_bad_tensors_are_named() -> None:
    with pytest.raises(ValueError, match="advantages must have the shape of log_ratio"):
        losses.ppo_clip(torch.zeros(2), torch.ones(2, 1))
    with pytest.raises(TypeError, match="mask must be bool"):
        losses.cispo(torch.zeros(2), torch.ones(2), mask=torch.ones(2))
    with pytest.raises(TypeError, match="advantages must be a floating-point tensor"):
        losses.sapo(torch.zeros(2), torch.ones(2, dtype=torch.long))


def test_a_ratio_in_place_of_its_logarithm_is_refused():
    """Here an own loop would train on exp(ratio); a log-ratio of samples is not large at all of many tokens."""
    generator = torch.Generator().manual_seed(0)
    old, advantages = -torch.rand(128, generator=generator) * 3, torch.randn(128, generator=generator)
    noise, mask = 0.1 * torch.randn(128, generator=generator), torch.arange(128) % 8 > 0
    on_policy, near, later = (old - x for x in (old, old + 1e-7 * noise.sign(), old + noise))
    for log_ratio in (on_policy, near, later):
        for loss in (losses.ppo_clip, losses.cispo, losses.reinforce):
            assert torch.isfinite(loss(log_ratio, advantages)).all()
            with pytest.raises(
                ValueError, match=r"log_ratio is at least [\d.]+ at all \d+ tokens: is it a ratio\? Give"
            ):
                loss(log_ratio.exp(), advantages)
            with pytest.raises(ValueError, match="is it a ratio"):
                loss(torch.where(mask, log_ratio.exp(), torch.nan), advantages, mask=mask)
    of_sequences = torch.tensor([0.7, 2.5]).repeat_interleave(64)  # the sums of log-ratios, at each token
    for fine in (
        of_sequences,
        torch.full((128,), 1.25),
        later.abs(),
        later.exp()[:12],
        5 + later.exp(),  # of a policy that has moved far
        torch.where(mask, later.exp(), 0),
    ):
        losses.ppo_clip(fine, advantages[: len(fine)])
    with pytest.raises(ValueError, match="is it a ratio"):
        losses.tis(later.exp(), max_weight=2.0)
