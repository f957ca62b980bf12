"""How the losses on pairs are related: special cases, invariances, optima, and terms that add."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from rlkit import losses as L

BETA, E = 0.3, 0.1


def nll(x: float) -> float:
    return math.log(1 + math.exp(-x))


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    return chosen, rejected


def test_margin_losses_ignore_a_shift_of_both_log_ratios() -> None:
    chosen, rejected = pairs()
    gap = torch.full_like(chosen, 0.75)
    for f in (
        partial(L.dpo, beta=BETA),
        partial(L.dpo, beta=BETA, label_smoothing=E),
        partial(L.robust_dpo, beta=BETA, label_smoothing=E),
        partial(L.ipo, beta=BETA),
        partial(L.hinge, beta=BETA),
        partial(L.exo_pair, beta=BETA),
        partial(L.discopop, beta=BETA),
        partial(L.reward_aware_kl, reward_gap=gap, beta=BETA),
    ):
        torch.testing.assert_close(f(chosen + 3, rejected + 3), f(chosen, rejected))


def test_limits_between_losses() -> None:
    c, r = pairs()
    dpo = L.dpo(c, r, beta=BETA)
    close = torch.testing.assert_close
    close(L.dpo(c, r, beta=BETA, label_smoothing=0.0), dpo)
    close(L.robust_dpo(c, r, beta=BETA, label_smoothing=0.0), dpo)
    close(L.dpo(c, r, beta=BETA, label_smoothing=0.5), L.dpo(r, c, beta=BETA, label_smoothing=0.5))
    close(L.alpha_score(c, alpha=1e-7), c, rtol=1e-6, atol=1e-6)
    close(L.alpha_score(c, alpha=0.0), c)
    close(L.simpo(c, r, beta=BETA, gamma=0.0), dpo)
    close(L.xpo(c, r, torch.ones_like(c), beta=BETA, alpha=0.0), dpo)
    close(L.reward_aware_kl(c, r, torch.full_like(c, 40.0), beta=BETA), dpo)


def test_the_smoothed_label_as_a_reward_gap() -> None:
    c, r = pairs()
    gap = torch.full_like(c, math.log((1 - E) / E))
    entropy = -(E * math.log(E) + (1 - E) * math.log(1 - E))
    cdpo = L.dpo(c, r, beta=BETA, label_smoothing=E)
    torch.testing.assert_close(L.reward_aware_kl(c, r, gap, beta=BETA), cdpo - entropy)
    exo = L.exo_pair(c, r, beta=BETA, label_smoothing=E)
    torch.testing.assert_close(L.reward_aware_reverse_kl(c, r, gap, beta=BETA), exo)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    c, r = pairs()
    robust = partial(L.robust_dpo, beta=BETA, label_smoothing=E)
    torch.testing.assert_close((1 - E) * robust(c, r) + E * robust(r, c), L.dpo(c, r, beta=BETA))


def test_cdpo_and_exo_have_their_optimum_at_the_labels_log_odds() -> None:
    best = torch.full((1,), math.log((1 - E) / E) / BETA, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    for f in (L.dpo, L.exo_pair):
        (grad,) = torch.autograd.grad(f(best, zero, beta=BETA, label_smoothing=E).sum(), best)
        assert abs(grad.item()) < 1e-12
    assert L.exo_pair(best, zero, beta=BETA, label_smoothing=E).item() == pytest.approx(0, abs=1e-12)


def test_xpo_adds_its_term() -> None:
    c, r = pairs()
    logp = -torch.rand(len(c), dtype=torch.float64)
    for i in range(len(c)):
        pair = nll(BETA * (c[i] - r[i]).item())
        assert L.xpo(c, r, logp, beta=BETA, alpha=0.01)[i].item() == pytest.approx(pair + 0.01 * logp[i].item())


@pytest.mark.parametrize(
    ("score", "f"),
    [
        (partial(L.alpha_score, alpha=1.0), lambda u: u - math.log(u)),  # -log u, and u for the constant: f'(1) = 0
        (L.js_score, lambda u: u * math.log(u) - (u + 1) * math.log((u + 1) / 2)),
        (partial(L.alpha_score, alpha=0.3), lambda u: (u ** (1 - 0.3) / (0.3 - 1) + u) / 0.3),
        (partial(L.alpha_score, alpha=0.0), lambda u: u * math.log(u) - u),
    ],
)
@pytest.mark.parametrize("u", [0.2, 1.0, 3.0])
def test_scores_are_derivatives_of_the_divergences_generators(score, f, u: float) -> None:
    slope = (f(u + 1e-5) - f(u - 1e-5)) / 2e-5
    assert score(torch.tensor(math.log(u), dtype=torch.float64)).item() == pytest.approx(slope, abs=1e-8)
