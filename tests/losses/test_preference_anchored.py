"""KTO and SPPO on single responses: reference point, weights and what carries no gradient."""

from __future__ import annotations

import math

import pytest
import torch

from rlkit.losses import bco_pair, kto, kto_reference_point, kto_unpaired, nash_md, nca_pair, sppo, sppo_hard


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_unpaired_by_hand() -> None:
    log_ratio = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    desirable = torch.tensor([True, False, False])
    loss = kto_unpaired(log_ratio, desirable, beta=0.5, kl=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    want = [1.5 * (1 - sig(0.5 * 0.7)), 0.5 * (1 - sig(0.5 * 2.3)), 0.5 * (1 - sig(0.5 * -0.2))]
    assert loss.tolist() == pytest.approx(want)


def test_kto_of_a_pair_is_the_sum_of_its_two_responses() -> None:
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64)
    options = {"beta": 0.3, "kl": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    both = kto_unpaired(torch.cat([chosen, rejected]), torch.arange(10) < 5, **options)
    torch.testing.assert_close(kto(chosen, rejected, **options), both[:5] + both[5:])


def test_reference_points_get_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    point = torch.tensor(0.4, requires_grad=True)
    (kto(x, x, beta=0.1, kl=point) + bco_pair(x, x, beta=0.1, delta=point)).sum().backward()
    assert point.grad is None
    win_prob = torch.full((3,), 0.7, requires_grad=True)
    sppo(x, win_prob, beta=0.1).sum().backward()
    assert win_prob.grad is None
    assert not kto_reference_point(x).requires_grad


def test_kto_reference_point_is_a_mean_cut_at_zero() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    mask = torch.tensor([True, False, True])
    assert kto_reference_point(x, mask=mask).item() == 1.5
    assert kto_reference_point(-x, mask=mask).item() == 0
    assert kto_reference_point(x, mask=torch.zeros(3, dtype=torch.bool)).item() == 0
    assert kto_reference_point(torch.zeros(0)).item() == 0


def test_nca_has_its_optimum_at_ln_2() -> None:
    best = torch.tensor(math.log(2) / 0.1, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(nca_pair(best, torch.zeros_like(best), beta=0.1), best)
    assert abs(grad.item()) < 1e-12


def test_sppo_regresses_on_the_centred_win_probability() -> None:
    log_ratio = torch.tensor([0.0, 2.0, 5.0], dtype=torch.float64)
    win_prob = torch.tensor([0.5, 0.7, 1.0], dtype=torch.float64)
    assert sppo(log_ratio, win_prob, beta=0.1).tolist() == pytest.approx([0.0, 0.0, 0.0])
    pair = sppo_hard(log_ratio, -log_ratio, beta=0.1)
    assert pair.tolist() == pytest.approx([50.0, 18.0, 0.0])


def test_nash_md_has_the_policy_gradient_of_its_objective() -> None:
    """By enumeration of 4 responses: E[grad loss] = -grad (E[P(y beats opponent)] - beta KL(policy || reference))."""
    generator = torch.Generator().manual_seed(0)
    theta, ref = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    theta.requires_grad_()
    win, beta = torch.rand(4, dtype=torch.float64, generator=generator), 0.3
    logp, ref_logp = theta.log_softmax(0), ref.log_softmax(0)
    objective = (logp.exp() * (win - beta * (logp - ref_logp))).sum()
    (want,) = torch.autograd.grad(-objective, theta, retain_graph=True)
    loss = nash_md(logp, ref_logp, win, beta=beta)
    (got,) = torch.autograd.grad((logp.exp().detach() * loss).sum(), theta)
    torch.testing.assert_close(got, want)
    by_hand = [-x * (w - 0.5 - beta * (x - y)) for x, y, w in zip(logp.tolist(), ref_logp.tolist(), win.tolist())]
    assert loss.tolist() == pytest.approx(by_hand)
