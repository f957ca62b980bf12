"""Published values of policy losses, KL estimators, aggregation and corrections, each with its source."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlkit import losses


def moments(f: Callable[..., Tensor], mu: float) -> tuple[float, float]:
    """Mean and standard deviation of an estimator of KL(q || p), x ~ q = N(0, 1), p = N(mu, 1), by quadrature."""
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    log_q = -0.5 * x.square() - 0.5 * math.log(2 * math.pi)
    log_p = -0.5 * (x - mu).square() - 0.5 * math.log(2 * math.pi)
    mass = log_q.exp() * (x[1] - x[0])
    value = f(log_q, log_p)
    mean = (mass * value).sum()
    return mean.item(), (mass * (value - mean).square()).sum().sqrt().item()


SCHULMAN = {  # (estimator, mu): bias / true, std / true
    ("k1", 0.1): (0, 20),
    ("k2", 0.1): (0.0025, 1.4177),
    ("k3", 0.1): (0, 1.4166),
    ("k1", 1.0): (0, 2),
    ("k2", 1.0): (0.25, 1.7321),
    ("k3", 1.0): (0, 1.6950),
}


@pytest.mark.parametrize(("name", "mu"), SCHULMAN)
def test_schulmans_table(name: str, mu: float) -> None:
    """http://joschu.net/blog/kl-approx.html, its two Gaussian examples: true KL 0.005 and 0.5."""
    mean, std = moments(getattr(losses, name), mu)
    true = mu * mu / 2
    bias, spread = SCHULMAN[name, mu]
    assert mean / true - 1 == pytest.approx(bias, abs=1e-6)
    assert std / true == pytest.approx(spread, abs=1e-4)


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.05, 3.0])
def test_sapo_gate_at_ratio_one(tau: float) -> None:
    """arXiv:2511.20347: the gate is 2 / tau and its slope in the ratio is 1 for every tau."""
    ratio = torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss = losses.sapo(ratio.log(), torch.tensor([1.0, -1.0], dtype=torch.float64), tau_pos=tau, tau_neg=tau)
    torch.testing.assert_close(loss, torch.tensor([-2 / tau, 2 / tau], dtype=torch.float64))
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), ratio)[0], torch.tensor([-1.0, 1.0], dtype=torch.float64)
    )


def test_sapo_known_value_of_areal() -> None:
    """AReaL `test_known_value`: ratio 1, advantage 1, tau 1 gives loss -2."""
    assert losses.sapo(torch.zeros(1), torch.ones(1)).item() == -2.0


def test_vespo_phi_is_one_on_policy() -> None:
    """arXiv:2602.10693: phi(1) = 1, for both signs; and phi peaks at W = k / lambda."""
    for sign, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        log_w = torch.linspace(-3, 3, 6001, dtype=torch.float64)
        a = torch.full_like(log_w, sign)
        cu = torch.arange(6002)
        x = log_w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(losses.vespo(x, a, mask=None, cu_seqlens=cu).sum(), x)
        phi = -grad * sign
        assert phi[3000].item() == pytest.approx(1, abs=1e-12)
        assert log_w[phi.argmax()].exp().item() == pytest.approx(peak, abs=2e-3)


def test_trl_6789_renormalisation_is_log_s() -> None:
    """https://github.com/huggingface/trl/issues/6789: full log p - renormalised log p = log S for every kept token."""
    logits = torch.randn(50, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for options in ({"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.7, "top_k": 8}):
        log_s = losses.log_kept_mass(logits, **options)
        p = logits.softmax(-1)
        ranked = p.sort(-1, descending=True)
        before = ranked.values.cumsum(-1) - ranked.values
        rank = torch.arange(30)
        kept = (before < options.get("top_p", 2)) & (rank < options.get("top_k", 30))
        full = ranked.values.log()
        renormalised = torch.where(kept, full, -torch.inf).log_softmax(-1)
        gap = (full - renormalised)[kept]
        torch.testing.assert_close(gap, log_s[:, None].expand(50, 30)[kept], rtol=0, atol=1e-12)
    assert losses.log_kept_mass(torch.tensor([0.9, 0.1]).log(), top_p=0.9).exp().item() == pytest.approx(0.9)


def test_roll_444_masked_numerator() -> None:
    """https://github.com/alibaba/ROLL/pull/444: 1.0 is right, 26.0 came from an unmasked numerator."""
    loss = torch.tensor([[1.0, 100.0], [1.0, -50.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    cu = torch.tensor([0, 2, 4])
    flat = mask.flatten()
    all_weights = {
        "token_mean": losses.token_mean(mask).flatten(),
        "seq_mean": losses.seq_mean(flat, cu_seqlens=cu),
        "seq_mean_token_sum": losses.seq_mean_token_sum(flat, cu_seqlens=cu),
        "prompt_mean": losses.prompt_mean(flat, group_ids=torch.tensor([0, 1]), cu_seqlens=cu),
    }
    for name, weights in all_weights.items():
        total = (weights * loss.flatten()).sum()
        assert total.item() == 1.0, name
        assert (torch.autograd.grad(total, loss)[0][~mask] == 0).all()


def test_trl_2995_accumulation_does_not_change_the_loss() -> None:
    """https://github.com/huggingface/trl/issues/2995: unequal micro-batches add up to the whole token mean."""
    loss = torch.tensor([1.0, 2, 3, 4, 10, 20], dtype=torch.float64)
    mask = torch.ones(6, dtype=torch.bool)
    parts = [(losses.token_mean(mask[s], num_tokens=6) * loss[s]).sum() for s in (slice(0, 1), slice(1, 6))]
    assert sum(parts).item() == pytest.approx(loss.mean().item(), rel=1e-6)


DEFAULTS = [
    (losses.gspo, {"clip_low": 3e-4, "clip_high": 4e-4}),  # arXiv:2507.18071
    (losses.gmpo, {"clip_low": 0.4, "clip_high": 0.4}),  # arXiv:2507.20673, log space
    (losses.sapo, {"tau_pos": 1.0, "tau_neg": 1.05}),  # arXiv:2511.20347
    (losses.vespo, {"k_pos": 2, "lambda_pos": 3, "k_neg": 3, "lambda_neg": 2}),  # arXiv:2602.10693
    (losses.cispo, {"max_weight": 5.0, "min_weight": 0.0}),  # ScaleRL, arXiv:2510.13786
    (losses.icepop, {"low": 0.5, "high": 5.0}),  # IcePop
    (losses.seq_mask_tis, {"low": 0.999, "high": 1.002}),  # seq-mask-TIS
    (losses.veto, {"min_ratio": 1e-4}),  # slime mis.py
    (losses.opsm, {"delta": 1e-4}),  # slime --opsm-delta
    (losses.dppo, {"delta_low": 0.2, "delta_high": 0.2}),  # prime-rl
    (losses.dppo_kl, {"delta_low": 0.05, "delta_high": 0.05}),  # verl's example
    (losses.select_between, {"low": 1.0, "high": 5.0, "fraction": 2e-4}),  # Clip-Cov, arXiv:2505.22617
    (losses.m2_cutoff, {"max_m2": 0.04}),  # arXiv:2510.01161
    (losses.bapo_clip_range, {"target": 0.4, "low": (0.6, 0.9), "high": (1.2, 3.0)}),  # arXiv:2510.18927
]


@pytest.mark.parametrize(("f", "published"), DEFAULTS)
def test_defaults_are_the_published_ones(f: Callable[..., Tensor], published: dict) -> None:
    parameters = inspect.signature(f).parameters
    assert {name: parameters[name].default for name in published} == published
