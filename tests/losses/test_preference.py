"""Every loss on pairs against its paper's formula in plain `math`, and the properties that all of them share."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import losses as L

BETA, E = 0.3, 0.1


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def nll(x: float) -> float:
    return -math.log(sig(x))


def bernoulli_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def smoothed(x: float, e: float) -> float:
    return (1 - e) * nll(x) + e * nll(-x)


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


def alpha_reward(logp: float, a: float) -> float:
    return (1 - math.exp(logp) ** -a) / a


def of_scores(loss, score):
    """A loss of the margin of scores, with the mask on both sides of the composition."""
    return lambda c, r, mask=None: loss(score(c, mask=mask), score(r, mask=mask), mask=mask)


# name: (function of (chosen, rejected), the paper's formula of two floats, log-probs instead of log-ratios)
GAP = 0.75  # exact in bf16
PAIRS = {
    "dpo": (partial(L.dpo, beta=BETA), lambda c, r: nll(BETA * (c - r)), False),
    "cdpo": (partial(L.dpo, beta=BETA, label_smoothing=E), lambda c, r: smoothed(BETA * (c - r), E), False),
    "robust_dpo": (
        partial(L.robust_dpo, beta=BETA, label_smoothing=E),
        lambda c, r: ((1 - E) * nll(BETA * (c - r)) - E * nll(-BETA * (c - r))) / (1 - 2 * E),
        False,
    ),
    "ipo": (partial(L.ipo, beta=BETA), lambda c, r: (c - r - 1 / (2 * BETA)) ** 2, False),
    "hinge": (partial(L.hinge, beta=BETA), lambda c, r: max(0.0, 1 - BETA * (c - r)), False),
    "exo_pair": (
        partial(L.exo_pair, beta=BETA, label_smoothing=E),
        lambda c, r: bernoulli_kl(sig(BETA * (c - r)), 1 - E),
        False,
    ),
    "discopop": (
        partial(L.discopop, beta=BETA, tau=0.05),
        lambda c, r: (
            (1 - sig(BETA * (c - r) / 0.05)) * nll(BETA * (c - r))
            + sig(BETA * (c - r) / 0.05) * math.exp(-BETA * (c - r))
        ),
        False,
    ),
    "kto": (
        partial(L.kto, beta=BETA, kl=0.4, desirable_weight=1.2, undesirable_weight=0.9),
        lambda c, r: 1.2 * (1 - sig(BETA * (c - 0.4))) + 0.9 * (1 - sig(BETA * (0.4 - r))),
        False,
    ),
    "bco_pair": (
        partial(L.bco_pair, beta=BETA, delta=0.2),
        lambda c, r: nll(BETA * c - 0.2) + nll(0.2 - BETA * r),
        False,
    ),
    "nca_pair": (
        partial(L.nca_pair, beta=BETA),
        lambda c, r: nll(BETA * c) + 0.5 * nll(-BETA * c) + 0.5 * nll(-BETA * r),
        False,
    ),
    "sppo_hard": (
        partial(L.sppo_hard, beta=BETA),
        lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
        False,
    ),
    "apo_down": (partial(L.apo_down, beta=BETA), lambda c, r: sig(BETA * c) + 1 - sig(BETA * (c - r)), False),
    "dpo of js_score": (
        of_scores(partial(L.dpo, beta=BETA), L.js_score),
        lambda c, r: nll(
            BETA * (math.log(2 * math.exp(c) / (1 + math.exp(c))) - math.log(2 * math.exp(r) / (1 + math.exp(r))))
        ),
        False,
    ),
    "dpo of alpha_score": (
        of_scores(partial(L.dpo, beta=BETA), partial(L.alpha_score, alpha=0.4)),
        lambda c, r: nll(BETA * (alpha_reward(c, 0.4) - alpha_reward(r, 0.4))),
        False,
    ),
    "simpo": (partial(L.simpo, beta=2.0, gamma=0.6), lambda c, r: nll(2.0 * (c - r) - 0.6), True),
    "simpo of alpha_score": (
        of_scores(partial(L.simpo, beta=2.0, gamma=0.6), partial(L.alpha_score, alpha=0.25)),
        lambda c, r: nll(2.0 * (alpha_reward(c, 0.25) - alpha_reward(r, 0.25)) - 0.6),
        True,
    ),
    "orpo": (partial(L.orpo, beta=BETA), lambda c, r: -BETA * math.log(sig(math.log(odds(c) / odds(r)))), True),
    "reward_aware_squared": (
        lambda c, r, **kw: L.reward_aware_squared(c, r, torch.full_like(c, GAP), beta=BETA, reward_scale=2.0, **kw),
        lambda c, r: (BETA * (c - r) - 2 * GAP) ** 2,
        False,
    ),
    "reward_aware_kl": (
        lambda c, r, **kw: L.reward_aware_kl(c, r, torch.full_like(c, GAP), beta=BETA, reward_scale=2.0, **kw),
        lambda c, r: bernoulli_kl(sig(2 * GAP), sig(BETA * (c - r))),
        False,
    ),
    "reward_aware_reverse_kl": (
        lambda c, r, **kw: L.reward_aware_reverse_kl(c, r, torch.full_like(c, GAP), beta=BETA, reward_scale=2.0, **kw),
        lambda c, r: bernoulli_kl(sig(BETA * (c - r)), sig(2 * GAP)),
        False,
    ),
}
MONOTONE = sorted(  # raising the chosen response lowers the loss everywhere; the others have an optimum or a bump
    {
        *("dpo", "robust_dpo", "kto", "bco_pair", "simpo", "orpo"),
        *("dpo of js_score", "dpo of alpha_score", "simpo of alpha_score"),
    }
)
everywhere = pytest.mark.parametrize("name", PAIRS)
numbers = st.floats(-6, 6, allow_nan=False)


def inputs(name: str, n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratios of both signs, or log-probs below 0."""
    chosen, rejected = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    return (-chosen.abs() - 0.05, -rejected.abs() - 0.05) if PAIRS[name][2] else (chosen, rejected)


@everywhere
@given(c=numbers, r=numbers)
def test_equals_the_papers_formula(name: str, c: float, r: float) -> None:
    f, formula, of_logp = PAIRS[name]
    if of_logp:
        c, r = -abs(c) - 0.01, -abs(r) - 0.01
    loss = f(torch.tensor(c, dtype=torch.float64), torch.tensor(r, dtype=torch.float64))
    assert loss.item() == pytest.approx(formula(c, r), rel=1e-9, abs=1e-9)


@everywhere
def test_gradcheck(name: str) -> None:
    chosen, rejected = (x.requires_grad_() for x in inputs(name))
    assert torch.autograd.gradcheck(PAIRS[name][0], (chosen, rejected))


@pytest.mark.parametrize("name", MONOTONE)
def test_raising_the_chosen_response_lowers_the_loss_and_raising_the_rejected_one_raises_it(name: str) -> None:
    chosen, rejected = (x.requires_grad_() for x in inputs(name, 64))
    PAIRS[name][0](chosen, rejected).sum().backward()
    assert (chosen.grad < 0).all()
    assert (rejected.grad > 0).all()


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_1e4_in_value_and_gradient(name: str, dtype: torch.dtype) -> None:
    f, _, of_logp = PAIRS[name]
    extremes = torch.tensor([-1e4, -30.0, -1.0, 0.0] + ([] if of_logp else [30.0, 1e4]), dtype=dtype)
    chosen, rejected = (x.flatten().clone().requires_grad_() for x in torch.meshgrid(extremes, extremes, indexing="ij"))
    loss = f(chosen, rejected)
    loss.sum().backward()
    for x in (loss, chosen.grad, rejected.grad):
        assert torch.isfinite(x).all()


@everywhere
def test_masked_pairs_give_zero_and_pass_no_nan(name: str) -> None:
    f = PAIRS[name][0]
    chosen, rejected = inputs(name)
    mask = torch.tensor([True, False, True, True, False, True, False])
    plain = f(chosen, rejected)
    for poison in (float("nan"), float("inf"), -float("inf")):
        c, r = (torch.where(mask, x, poison).requires_grad_() for x in (chosen, rejected))
        loss = f(c, r, mask=mask)
        torch.testing.assert_close(loss, torch.where(mask, plain, 0.0), rtol=0, atol=0)
        loss.sum().backward()
        for x in (c, r):
            assert torch.isfinite(x.grad).all()
            assert (x.grad[~mask] == 0).all()


@everywhere
def test_any_shape_and_dtypes(name: str) -> None:
    f = PAIRS[name][0]
    chosen, rejected = inputs(name, 6)
    flat = f(chosen, rejected)
    assert flat.dtype == torch.float64
    torch.testing.assert_close(f(chosen.reshape(2, 3), rejected.reshape(2, 3)).flatten(), flat)
    torch.testing.assert_close(f(chosen[2], rejected[2]), flat[2])
    for dtype in (torch.bfloat16, torch.float16):
        low = f(chosen.to(dtype), rejected.to(dtype))
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, f(chosen.to(dtype).float(), rejected.to(dtype).float()))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c, r: L.dpo(c, r, beta=0.0), "beta must be positive"),
        (lambda c, r: L.ipo(c, r, beta=-1.0), "beta must be positive"),
        (lambda c, r: L.dpo(c, r, beta=0.1, label_smoothing=0.6), "label_smoothing"),
        (lambda c, r: L.dpo(c, r, beta=0.1, label_smoothing=-0.1), "label_smoothing"),
        (lambda c, r: L.dpo(c, r, beta=0.1, label_smoothing=float("nan")), "label_smoothing"),
        (lambda c, r: L.robust_dpo(c, r, beta=0.1, label_smoothing=0.5), "label_smoothing"),
        (lambda c, r: L.exo_pair(c, r, beta=0.1, label_smoothing=0.0), "label_smoothing"),
        (lambda c, r: L.discopop(c, r, beta=0.1, tau=0.0), "tau"),
        (lambda c, r: L.kto(c, r, beta=0.1, desirable_weight=-1.0), "desirable_weight"),
        (lambda c, r: L.kto(c, r, beta=0.1, kl=c), "kl must be one number for the whole batch, got shape"),
        (lambda c, r: L.kto_unpaired(c, c > 0, beta=0.1, kl=c), "kl must be one number for the whole batch, got shape"),
        (lambda c, r: L.sppo(c, 1 + r.abs(), beta=0.1), r"win_prob must be in \[0, 1\], got 1"),
        (lambda c, r: L.nash_md(c, r, -1 - c.abs(), beta=0.1), r"win_prob must be in \[0, 1\], got -"),
        (lambda c, r: L.bco_pair(c, r, beta=0.1, delta=c), "delta must be one number for the whole batch, got shape"),
        (lambda c, r: L.dpo(c, r[:2], beta=0.1), "rejected_log_ratio must have the shape of chosen_log_ratio"),
        (lambda c, r: L.orpo(c, r[:2], beta=0.1), "rejected_logp must have the shape of chosen_logp"),
        (
            lambda c, r: L.orpo(0 * c, 0 * r + 0.5, beta=0.1),
            "rejected_logp must be log-probs, at most 0, got 0.5: are",
        ),
        (lambda c, r: L.sppo_hard(c, r[:2], beta=0.1), "rejected_log_ratio"),
        (lambda c, r: L.xpo(c, r, r, beta=0.1, alpha=-1.0), "alpha"),
    ],
)
def test_errors_name_the_argument(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(*inputs("dpo"))


def test_dpo_with_a_margin_is_the_log_loss_of_the_scaled_difference_less_the_margin() -> None:
    c, r, m = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, -1.0, 2.0], [0.1, 0.3, -1.0], [0.2, 0.0, 3.0]))
    x = [0.3 * (a - b) - k for a, b, k in zip(c.tolist(), r.tolist(), m.tolist(), strict=True)]
    want = [math.log1p(math.exp(-v)) for v in x]
    assert L.dpo(c, r, beta=0.3, margin=m).tolist() == pytest.approx(want, abs=1e-12)
    smooth = [0.9 * a + 0.1 * math.log1p(math.exp(v)) for a, v in zip(want, x, strict=True)]
    assert L.dpo(c, r, beta=0.3, margin=m, label_smoothing=0.1).tolist() == pytest.approx(smooth, abs=1e-12)
    assert torch.equal(L.dpo(c, r, beta=0.3, margin=torch.zeros(3)), L.dpo(c, r, beta=0.3))
    assert L.dpo(c[:1], r[:1], beta=0.3, margin=0.2).tolist() == pytest.approx(want[:1], abs=1e-12)


def test_wrong_dtypes_name_the_argument() -> None:
    c, r = inputs("dpo")
    with pytest.raises(TypeError, match="chosen_log_ratio"):
        L.dpo(c.long(), r, beta=0.1)
    with pytest.raises(TypeError, match="mask must be bool"):
        L.dpo(c, r, beta=0.1, mask=torch.ones(len(c)))
    with pytest.raises(TypeError, match="desirable must be bool"):
        L.kto_unpaired(c, torch.ones_like(c), beta=0.1)
