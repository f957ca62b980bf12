"""On-policy distillation: expectations by enumeration, loops over tokens, and what several teachers add up to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import losses as L
from rlkit.segments import cumulative


def packed(lens: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logp, teacher_logp = -torch.rand(2, sum(lens), dtype=torch.float64, generator=generator) * 3
    return logp, teacher_logp, torch.rand(sum(lens), generator=generator) < 0.7, cumulative(torch.tensor(lens))


def test_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Per state, by enumeration: E[-A grad logp] = grad KL(student || teacher)."""
    student, teacher = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    logp, teacher_logp = student.log_softmax(0), teacher.log_softmax(0)
    advantages = L.opd_advantages(logp, teacher_logp)
    assert not advantages.requires_grad
    (got,) = torch.autograd.grad((logp.exp().detach() * -advantages * logp).sum(), student)
    (want,) = torch.autograd.grad(L.reverse_kl(student, teacher), student)
    torch.testing.assert_close(got, want)
    mean = (logp.exp() * advantages).sum()
    torch.testing.assert_close(mean, -L.reverse_kl(student, teacher))


@given(lens=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 99), gamma=st.floats(0, 1))
def test_loops_over_action_tokens(lens: list[int], seed: int, gamma: float) -> None:
    logp, teacher_logp, mask, cu = packed(lens, seed)
    bad = [torch.where(mask, x, float("nan")) for x in (logp, teacher_logp)]
    gap = L.opd_advantages(*bad, mask=mask)
    torch.testing.assert_close(gap, torch.where(mask, teacher_logp - logp, 0.0))
    minillm = L.minillm_advantages(*bad, mask=mask, cu_seqlens=cu, gamma=gamma)
    weights = L.iw_opd_weights(torch.where(mask, gap, float("nan")), mask=mask, cu_seqlens=cu, gamma=gamma)
    for i in range(len(lens)):
        actions = [t for t in range(cu[i], cu[i + 1]) if mask[t]]
        gaps = [gap[t].item() for t in actions]
        total = sum(abs(g) for g in gaps)
        for n, t in enumerate(actions):
            discounts = [gamma**j for j in range(len(gaps) - n)]
            want = sum(d * g for d, g in zip(discounts, gaps[n:])) / sum(discounts)
            assert minillm[t].item() == pytest.approx(want, abs=1e-9)
            prefix = sum(abs(g) for g in gaps[:n])
            assert weights[t].item() == pytest.approx(1 + gamma * (1 - prefix / total), abs=1e-9)
    assert (minillm[~mask] == 0).all()
    assert (weights[~mask] == 0).all()


def test_limits() -> None:
    logp, teacher_logp, mask, cu = packed([4, 3], 1)
    gap = L.opd_advantages(logp, teacher_logp, mask=mask)
    torch.testing.assert_close(L.minillm_advantages(logp, teacher_logp, mask=mask, cu_seqlens=cu, gamma=0.0), gap)
    torch.testing.assert_close(L.iw_opd_weights(gap, mask=mask, cu_seqlens=cu, gamma=0.0), mask.double())
    still = L.iw_opd_weights(torch.zeros_like(gap), mask=mask, cu_seqlens=cu, gamma=0.5)
    torch.testing.assert_close(still, 1.5 * mask.double())
    torch.testing.assert_close(L.proximal_teacher(logp, teacher_logp, alpha=1.0), teacher_logp)


def test_proximal_teacher_is_a_mixture_and_bounds_the_advantage() -> None:
    logp, teacher_logp, mask, _ = packed([6], 2)
    got = L.proximal_teacher(logp, teacher_logp, alpha=0.3)
    for i in range(6):
        want = math.log(0.3 * math.exp(teacher_logp[i]) + 0.7 * math.exp(logp[i]))
        assert got[i].item() == pytest.approx(want)
    ruled_out = L.proximal_teacher(logp, torch.full_like(logp, -1e4), alpha=0.3)
    torch.testing.assert_close(L.opd_advantages(logp, ruled_out), torch.full_like(logp, math.log(0.7)))
    bad = torch.where(mask, logp, float("nan"))
    assert (L.proximal_teacher(bad, bad, alpha=0.3, mask=mask)[~mask] == 0).all()
    with pytest.raises(ValueError, match="alpha"):
        L.proximal_teacher(logp, teacher_logp, alpha=0.0)


def test_weights_stay_exact_over_a_long_batch_in_fp32() -> None:
    gap = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 10
    cu = torch.tensor([0, 199_990, 200_000])
    weights = L.iw_opd_weights(gap, mask=torch.ones(200_000, dtype=torch.bool), cu_seqlens=cu, gamma=1.0)
    alone = L.iw_opd_weights(gap[-10:], mask=torch.ones(10, dtype=torch.bool), cu_seqlens=cu[1:] - 199_990, gamma=1.0)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[-10:], alone)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_several_teachers(temperature: float) -> None:
    """Sums of KLs and the KL to a mixture have one gradient: arithmetic for forward KLs, geometric for reverse ones."""
    teachers = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2
    weights = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)
    student = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    w = weights / weights.sum()
    mixture = L.teacher_mixture(teachers, weights, temperature=temperature)
    p = (teachers / temperature).softmax(-1)
    torch.testing.assert_close(mixture.exp(), (w[:, None, None] * p).sum(0))
    product = L.teacher_product(teachers, weights, temperature=temperature)
    torch.testing.assert_close(product, ((w[:, None, None] * teachers).sum(0) / temperature).log_softmax(-1))
    for f, one in ((L.forward_kl, mixture), (L.reverse_kl, product)):
        apart = sum(w[m] * f(student, teachers[m] / temperature) for m in range(3))
        together = f(student, one)
        grads = [torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (apart, together)]
        torch.testing.assert_close(*grads)
        assert ((apart - together) > 1e-3).all()


def test_one_teacher_is_itself() -> None:
    teacher = torch.randn(1, 3, 5, dtype=torch.float64)
    for f in (L.teacher_mixture, L.teacher_product):
        torch.testing.assert_close(f(teacher, torch.ones(1, dtype=torch.float64)), teacher[0].log_softmax(-1))
        for bad in ([-0.5, 1.0], [0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0]):
            with pytest.raises(ValueError, match="weights must"):
                f(teacher.expand(2, 3, 5), torch.tensor(bad))
    with pytest.raises(ValueError, match="weights"):
        L.teacher_mixture(teacher, torch.ones(2))
    one_of_two = L.teacher_product(torch.cat([teacher, -teacher]), torch.tensor([2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(one_of_two, teacher[0].log_softmax(-1))


def test_errors_name_the_argument() -> None:
    logp, teacher_logp, mask, cu = packed([4], 0)
    with pytest.raises(ValueError, match="teacher_logp must have the shape of logp"):
        L.opd_advantages(logp, teacher_logp[:2])
    with pytest.raises(ValueError, match="gamma"):
        L.iw_opd_weights(logp, mask=mask, cu_seqlens=cu, gamma=-1.0)
    with pytest.raises(ValueError, match=r"gamma must be at least 0, got -0\.5"):
        L.minillm_advantages(logp, teacher_logp, mask=mask, cu_seqlens=cu, gamma=-0.5)
    with pytest.raises(TypeError, match="mask must be bool"):
        L.iw_opd_weights(logp, mask=mask.float(), cu_seqlens=cu)


@pytest.mark.parametrize("combine", [L.teacher_mixture, L.teacher_product])
def test_combined_teachers_are_a_target(combine):
    given = [torch.randn(2, 3, 5, requires_grad=True), torch.tensor([0.25, 0.75], requires_grad=True)]
    assert not combine(*given).requires_grad
