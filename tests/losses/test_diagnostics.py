"""Diagnostics: definitions by hand, and exact addition over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from rlkit.losses import kl_stats, mismatch_stats, policy_stats, ratio_stats, seq_kl_stats, weight_stats
from rlkit.metrics import Metrics, finalize, merge

X = torch.tensor([0.5, -0.5, 0.0, 0.4, -0.5, 99.0], dtype=torch.float64)
A = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False])


def test_ratio_stats_by_hand() -> None:
    got = finalize(ratio_stats(torch.where(MASK, X, torch.nan), mask=MASK, clip_low=0.2, clip_high=0.28, advantages=A))
    r = [math.exp(x) for x in X[:5].tolist()]
    expected = {
        "ratio": sum(r) / 5,
        "ratio_max": math.exp(0.5),
        "ratio_min": math.exp(-0.5),
        "ratio_is_one": 0.2,
        "clip_low": 0.4,
        "clip_high": 0.2,
        "kl_old_k1": -sum(X[:5].tolist()) / 5,
        "kl_old_k3": sum(math.exp(x) - 1 - x for x in X[:5].tolist()) / 5,
        "abs_log_ratio_max": 0.5,
    }
    assert got == pytest.approx(expected)


def test_ratio_stats_without_advantages_count_both_sides() -> None:
    got = finalize(ratio_stats(X, mask=MASK, clip_low=0.2, clip_high=0.28))
    assert (got["clip_low"], got["clip_high"]) == (0.4, 0.4)
    got = finalize(ratio_stats(X, mask=MASK, clip_low=0.2, clip_high=0.7))
    assert (got["clip_low"], got["clip_high"]) == (0.4, 0.0)


def test_the_clip_share_is_where_the_gradient_is_zero() -> None:
    from rlkit.losses import ppo_clip

    x = torch.linspace(-1, 1, 41, dtype=torch.float64).requires_grad_()
    a = torch.tensor([1.0, -1.0] * 20 + [1.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(ppo_clip(x, a, clip_high=0.3).sum(), x)
    got = finalize(ratio_stats(x, mask=None, clip_low=0.2, clip_high=0.3, advantages=a))
    assert got["clip_low"] + got["clip_high"] == pytest.approx((grad == 0).double().mean().item())


def test_mismatch_stats_by_hand() -> None:
    old, rollout = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.tensor([-1.5, -2.0, float("nan")]).double()
    got = finalize(mismatch_stats(old, rollout, mask=torch.tensor([True, True, False])))
    expected = {
        "mismatch_k1": -0.25,
        "mismatch_k3": (math.exp(0.5) - 1.5) / 2,
        "mismatch_abs": 0.25,
        "mismatch_max": 0.5,
        "mismatch_prob": (math.exp(-1) - math.exp(-1.5)) / 2,
        "mismatch_prob_max": math.exp(-1) - math.exp(-1.5),
        "mismatch_chi2": (math.e - 1) / 2,
    }
    assert got == pytest.approx(expected)


def test_weight_kl_and_policy_stats_by_hand() -> None:
    w = torch.tensor([0.0, 2.0, 1.0, float("nan")])
    got = finalize(weight_stats(w, mask=torch.tensor([True, True, True, False]), max_weight=2.0))
    third = pytest.approx(1 / 3)
    assert got == {
        "weight": 1.0,
        "weight_max": 2.0,
        "weight_min": 0.0,
        "weight_square": pytest.approx(5 / 3),
        "weight_rejected": third,
        "weight_capped": third,
    }
    got = finalize(kl_stats(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5]), mask=None))
    assert got == pytest.approx(
        {"kl_ref_k1": 0.25, "kl_ref_k3": (math.exp(-1) + math.exp(0.5) - 1.5) / 2, "kl_ref_max": 1.0}
    )
    got = finalize(
        policy_stats(torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 1.5]), torch.tensor([0.0, -4.0]), mask=None)
    )
    assert got == {
        "logp": -2.0,
        "entropy": 1.0,
        "advantage": -2.0,
        "advantage_abs": 2.0,
        "advantage_zero": 0.5,
        "advantage_positive": 0.0,
    }


def test_seq_kl_stats_count_sequences_with_a_trainable_token() -> None:
    got = finalize(seq_kl_stats(X, mask=MASK, cu_seqlens=torch.tensor([0, 1, 3, 5, 6])))
    assert got == pytest.approx({"seq_log_ratio": -0.1 / 3, "seq_log_ratio_max": 0.5, "seq_log_ratio_min": -0.5})


def test_all_metrics_add_over_micro_batches() -> None:
    def all_of(at: slice) -> Metrics:
        x, a, m = X[at], A[at], MASK[at]
        return {
            **ratio_stats(x, mask=m, clip_low=0.2, clip_high=0.2, advantages=a),
            **mismatch_stats(x - 3, -x - 3, mask=m),
            **weight_stats(x.abs(), mask=m),
            **kl_stats(x, -x, mask=m),
            **policy_stats(x, x.abs(), a, mask=m),
        }

    whole = finalize(all_of(slice(None)))
    split = finalize(merge(all_of(slice(0, 1)), all_of(slice(1, 4)), all_of(slice(4, 6))))
    assert split == pytest.approx(whole, rel=1e-14)


@pytest.mark.parametrize("sign", [-1, 1])
def test_log_ratios_of_one_sign_are_no_probabilities(sign: int) -> None:
    x = sign * torch.linspace(0.01, 0.4, 64, dtype=torch.float64)
    mask = torch.ones(64, dtype=torch.bool)
    expected = pytest.approx(float((x.exp() - 1 - x).mean()))
    assert finalize(ratio_stats(x, mask=mask, clip_low=0.2, clip_high=0.28))["kl_old_k3"] == expected
    assert finalize(mismatch_stats(x - 1, torch.full_like(x, -1.0), mask=mask))["mismatch_k3"] == expected
