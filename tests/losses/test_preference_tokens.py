"""LD-DPO's log-ratio and WPO's weight against loops over tokens; AOT against a sorted loop."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import aot, dpo, ld_log_ratio, wpo_weights
from rlkit.segments import cumulative, seq_count, sum_per_seq


def packed(lens: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cu = cumulative(torch.tensor(lens))
    x = torch.randn(sum(lens), dtype=torch.float64, generator=generator)
    return x, torch.rand(sum(lens), generator=generator) < 0.7, cu


@given(lens=st.lists(st.integers(0, 6), min_size=1, max_size=5), seed=st.integers(0, 99), alpha=st.floats(0, 1))
def test_ld_log_ratio_equals_a_loop(lens: list[int], seed: int, alpha: float) -> None:
    x, mask, cu = packed(lens, seed)
    shared = [random.Random(seed + i).randint(0, n) for i, n in enumerate(lens)]
    poisoned = torch.where(mask, x, float("nan"))
    got = ld_log_ratio(poisoned, shared_lens=torch.tensor(shared), ld_alpha=alpha, mask=mask, cu_seqlens=cu)
    for i, n in enumerate(lens):
        begin = cu[i].item()
        actions = [x[t].item() for t in range(begin, begin + n) if mask[t]]
        want = sum(v if k < shared[i] else alpha * v for k, v in enumerate(actions))
        assert got[i].item() == pytest.approx(want, abs=1e-12)


def test_ld_log_ratio_limits_and_gradient() -> None:
    x, mask, cu = packed([5, 0, 4], 3)
    full = {"mask": mask, "cu_seqlens": cu}
    shared = torch.tensor([1, 0, 2])
    torch.testing.assert_close(ld_log_ratio(x, shared_lens=shared, ld_alpha=1.0, **full), sum_per_seq(x, **full))
    lens = seq_count(mask, cu_seqlens=cu)
    torch.testing.assert_close(ld_log_ratio(x, shared_lens=lens, ld_alpha=0.0, **full), sum_per_seq(x, **full))
    x.requires_grad_()
    ld_log_ratio(x, shared_lens=shared, ld_alpha=0.25, **full).sum().backward()
    assert set(x.grad[mask].tolist()) == {1.0, 0.25}
    assert (x.grad[~mask] == 0).all()
    with pytest.raises(ValueError, match="ld_alpha"):
        ld_log_ratio(x, shared_lens=shared, ld_alpha=1.5, **full)
    with pytest.raises(ValueError, match="shared_lens"):
        ld_log_ratio(x, shared_lens=shared[:2], ld_alpha=0.5, **full)


def test_wpo_weights_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0], [9.0, 9.0], [0.0, 3.0]], dtype=torch.float64)
    log_probs = logits.log_softmax(-1)
    logp = log_probs[torch.arange(4), torch.tensor([0, 0, 1, 0])].requires_grad_()
    collision = torch.logsumexp(2 * log_probs, -1)
    mask, cu = torch.tensor([True, True, False, True]), torch.tensor([0, 2, 4, 4])
    got = wpo_weights(logp, collision, mask=mask, cu_seqlens=cu)
    p = 1 / (1 + math.exp(-2))
    q = 1 / (1 + math.exp(3))
    first = math.sqrt((0.5 / 0.5) * (p / (p * p + (1 - p) ** 2)))
    assert got.tolist() == pytest.approx([first, q / (q * q + (1 - q) ** 2), 1.0])
    assert not got.requires_grad


def test_wpo_weights_are_one_for_any_token_of_a_uniform_policy() -> None:
    logp = torch.full((6,), -math.log(50.0))
    weights = wpo_weights(logp, logp, mask=torch.ones(6, dtype=torch.bool), cu_seqlens=torch.tensor([0, 2, 6]))
    torch.testing.assert_close(weights, torch.ones(2))


def test_aot_equals_a_loop_over_ranks() -> None:
    chosen, rejected = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    got = aot(chosen, rejected, beta=0.5, label_smoothing=0.1)
    for i, (a, b) in enumerate(zip(sorted(chosen.tolist()), sorted(rejected.tolist()))):
        p = 1 / (1 + math.exp(-0.5 * (a - b)))
        assert got[i].item() == pytest.approx(-0.9 * math.log(p) - 0.1 * math.log(1 - p))
    shuffled = aot(chosen[torch.randperm(9)], rejected[torch.randperm(9)], beta=0.5, label_smoothing=0.1)
    torch.testing.assert_close(shuffled, got)
    one = aot(chosen[:1], rejected[:1], beta=0.5)
    torch.testing.assert_close(one, dpo(chosen[:1], rejected[:1], beta=0.5))


def test_aot_couples_samples_so_it_does_not_add_up_over_splits() -> None:
    chosen, rejected = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    whole = aot(chosen, rejected, beta=1.0).sum()
    parts = aot(chosen[:1], rejected[:1], beta=1.0).sum() + aot(chosen[1:], rejected[1:], beta=1.0).sum()
    assert whole.item() == pytest.approx(2 * math.log(2), rel=1e-6)
    assert parts.item() > whole.item() + 1


def test_aot_ranks_unmasked_responses_among_themselves() -> None:
    chosen, rejected = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mask = torch.tensor([False, True, True, False, True, False])
    c, r = (torch.where(mask, x, float("nan")).requires_grad_() for x in (chosen, rejected))
    loss = aot(c, r, beta=0.5, mask=mask)
    torch.testing.assert_close(loss[:3], aot(chosen[mask], rejected[mask], beta=0.5))
    assert (loss[3:] == 0).all()
    loss.sum().backward()
    assert (c.grad[mask] < 0).all()
    assert (c.grad[~mask] == 0).all()
    assert (aot(c, r, beta=0.5, mask=torch.zeros(6, dtype=torch.bool)) == 0).all()
    with pytest.raises(ValueError, match=r"shape \[N\]"):
        aot(torch.zeros(2, 2), torch.zeros(2, 2), beta=0.5)


def test_aot_gradcheck_and_extremes() -> None:
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, r: aot(c, r, beta=0.5), (chosen, rejected))
    extreme = torch.tensor([-1e4, 0.0, 1e4], requires_grad=True)
    loss = aot(extreme, -2 * extreme, beta=1.0)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(extreme.grad).all()
