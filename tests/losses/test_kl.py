"""KL estimators: exact expectations of values and gradients by enumerating a small vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit import losses
from rlkit.losses import (
    abs_kl,
    k1,
    k1_straight_through,
    k2,
    k3,
    k3_straight_through,
    kl_from_logits,
    kl_in_reward,
    unbiased_kl,
)

VOCAB = 6


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy (with gradient), log-probs of the reference and of an older policy."""
    g = torch.Generator().manual_seed(seed)
    theta, ref, old = torch.randn(3, VOCAB, dtype=torch.float64, generator=g).unbind()
    return theta.clone().requires_grad_(), ref.log_softmax(0), old.log_softmax(0)


def expected_gradient(per_token: Tensor, behaviour: Tensor, theta: Tensor) -> Tensor:
    """sum over the vocabulary of q(v) grad(per_token_v), q a constant: what sampling estimates."""
    return torch.autograd.grad((behaviour.exp().detach() * per_token).sum(), theta, retain_graph=True)[0]


def grad_kl(first: Tensor, second: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad((first.exp() * (first - second)).sum(), theta, retain_graph=True)[0]


FORWARD, REVERSE, NONE = "KL(pi || ref)", "KL(ref || pi)", "nothing"
ESTIMATED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "k1": (k1, NONE),
    "k2": (k2, FORWARD),
    "k3": (k3, REVERSE),
    "k1_straight_through": (k1_straight_through, FORWARD),
    "k3_straight_through": (k3_straight_through, FORWARD),
}


@pytest.mark.parametrize("name", ESTIMATED)
@pytest.mark.parametrize("seed", range(3))
def test_expected_on_policy_gradient(name: str, seed: int) -> None:
    theta, ref, _ = policies(seed)
    logp = theta.log_softmax(0)
    f, what = ESTIMATED[name]
    got = expected_gradient(f(logp, ref), logp, theta)
    expected = {
        NONE: torch.zeros(VOCAB).double(),
        FORWARD: grad_kl(logp, ref, theta),
        REVERSE: grad_kl(ref, logp, theta),
    }
    torch.testing.assert_close(got, expected[what], rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", [k1, k3])
@pytest.mark.parametrize("seed", range(3))
def test_ratio_corrected_estimator_is_unbiased_off_policy(estimator: Callable[..., Tensor], seed: int) -> None:
    theta, ref, old = policies(seed)
    logp = theta.log_softmax(0)
    per_token = unbiased_kl(logp, ref, old, estimator=estimator)
    exact = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close((old.exp() * per_token).sum(), exact, rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient(per_token, old, theta), grad_kl(logp, ref, theta), rtol=0, atol=1e-10)


def test_ratio_corrected_estimator_on_policy_has_the_value_of_k3() -> None:
    theta, ref, _ = policies(0)
    logp = theta.log_softmax(0)
    torch.testing.assert_close(unbiased_kl(logp, ref, logp.detach()), k3(logp, ref))


@pytest.mark.parametrize("seed", range(3))
def test_values_in_expectation(seed: int) -> None:
    theta, ref, _ = policies(seed)
    logp = theta.log_softmax(0).detach()
    mean = lambda per_token: (logp.exp() * per_token).sum().item()
    exact = mean(logp - ref)
    for unbiased in (k1, k3, k1_straight_through, k3_straight_through):
        assert mean(unbiased(logp, ref)) == pytest.approx(exact, abs=1e-12)
    assert mean(k2(logp, ref)) == pytest.approx(sum(p * d * d / 2 for p, d in zip(logp.exp(), logp - ref, strict=True)))
    assert mean(abs_kl(logp, ref)) > exact
    assert kl_from_logits(logp + 3, ref - 1).item() == pytest.approx(exact, abs=1e-12)


@given(st.floats(-60, 60), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_non_negative_and_its_slope_keeps_its_sign(gap: float, dtype: torch.dtype) -> None:
    logp = torch.tensor([gap], dtype=dtype, requires_grad=True)
    value = k3(logp, torch.zeros(1, dtype=dtype))
    (grad,) = torch.autograd.grad(value.sum(), logp)
    assert value.item() >= 0
    assert value.isfinite().all()
    assert grad.isfinite().all()
    assert grad.item() * gap >= 0


def test_small_gaps_keep_their_precision() -> None:
    gap = torch.tensor([1e-3, -1e-4, 1e-5])
    torch.testing.assert_close(k3(gap, torch.zeros(3)), gap.double().square().float() / 2, rtol=2e-2, atol=0)


def test_the_exponent_is_capped_at_20_and_the_linear_term_is_not() -> None:
    value = k3(torch.tensor([-50.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert value.item() == pytest.approx(torch.e**20 - 1 - 50, rel=1e-12)


def test_masked_positions_reach_neither_value_nor_gradient() -> None:
    nan = float("nan")
    mask = torch.tensor([True, False, True])
    ref = torch.tensor([-1.0, float("-inf"), -2.0], dtype=torch.float64)
    for f in (
        k1,
        k2,
        k3,
        abs_kl,
        k1_straight_through,
        k3_straight_through,
        lambda *x, mask: unbiased_kl(*x, x[1], mask=mask),
    ):
        logp = torch.tensor([-1.5, nan, -0.5], dtype=torch.float64, requires_grad=True)
        loss = f(logp, ref, mask=mask)
        (grad,) = torch.autograd.grad(loss.sum(), logp)
        alone = f(logp[mask], ref[mask], mask=None)
        assert torch.equal(loss[mask], alone)
        assert loss[1] == 0
        assert grad[1] == 0
        assert torch.equal(grad[mask], torch.autograd.grad(alone.sum(), logp)[0][mask])


def test_kl_in_reward() -> None:
    rewards = torch.tensor([0.0, float("nan"), 1.0])
    logp = torch.tensor([-1.0, float("inf"), -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, 3.0, -1.0])
    mask = torch.tensor([True, False, True])
    got = kl_in_reward(rewards, logp, ref, kl_coef=0.2, mask=mask)
    assert not got.requires_grad
    torch.testing.assert_close(got, torch.tensor([-0.1, 0.0, 1.2]))
    got = kl_in_reward(rewards, logp, ref, kl_coef=torch.tensor(0.2), mask=mask, estimator=k2)
    torch.testing.assert_close(got, torch.tensor([-0.2 * 0.125, 0.0, 1 - 0.2 * 0.5]))
    assert (
        kl_in_reward(rewards.bfloat16(), logp.bfloat16(), ref.bfloat16(), kl_coef=0.2, mask=mask).dtype == torch.float32
    )


@pytest.mark.parametrize(("estimator", "unbiased"), [(k1, True), (k2, False), (k3, False)])
def test_in_the_reward_only_k1_is_unbiased(estimator: Callable[..., Tensor], unbiased: bool) -> None:
    """REINFORCE on -KL in one state: the gradient through k2 or k3 is missing."""
    theta, ref, _ = policies(0)
    logp = theta.log_softmax(0)
    reward = kl_in_reward(torch.zeros(VOCAB).double(), logp, ref, kl_coef=1.0, mask=None, estimator=estimator)
    off = expected_gradient(-logp * reward, logp, theta) - grad_kl(logp, ref, theta)
    assert (off.norm() < 1e-12) == unbiased
    assert unbiased or off.norm() > 0.1 * grad_kl(logp, ref, theta).norm()


def test_kl_in_the_reward_gives_the_gradient_of_the_kl_between_sequences() -> None:
    """Two steps over two tokens, the second state depending on the first token: enumerate all four sequences."""
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(3, 2, dtype=torch.float64, generator=g).requires_grad_()
    ref = torch.randn(3, 2, dtype=torch.float64, generator=g).log_softmax(-1)
    logp = theta.log_softmax(-1)
    exact, estimate, local = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for first in (0, 1):
        for second in (0, 1):
            lp = torch.stack([logp[0, first], logp[1 + first, second]])
            rp = torch.stack([ref[0, first], ref[1 + first, second]])
            p = lp.sum().exp()
            exact = exact + p * (lp - rp).sum()
            rewards = kl_in_reward(torch.zeros(2).double(), lp, rp, kl_coef=1.0, mask=None)
            to_go = rewards.flip(0).cumsum(0).flip(0)
            estimate = estimate + p.detach() * (-to_go * lp).sum()
            local = local + p.detach() * k2(lp, rp).sum()
    grads = [torch.autograd.grad(x, theta, retain_graph=True)[0] for x in (exact, estimate, local)]
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-12)
    assert (grads[2] - grads[0]).abs().max() > 1e-3  # k2 as a loss sees each state by itself


def test_exact_kl_takes_impossible_tokens_masks_and_gradients() -> None:
    inf = float("inf")
    logits = torch.tensor(
        [[0.0, -inf, 0.0], [1.0, 2.0, 3.0], [float("nan")] * 3], dtype=torch.float64, requires_grad=True
    )
    ref = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -inf], [1.0, 2.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    got = kl_from_logits(logits, ref, mask=mask)
    assert got[0].item() == pytest.approx(torch.tensor(1.5).log().item())
    assert got[1].item() == inf
    assert got[2].item() == 0
    (grad,) = torch.autograd.grad(got[0] + got[2], logits)
    assert grad[[0, 2]].isfinite().all()
    far = torch.tensor([0.0, -200.0], requires_grad=True)  # whose probability is 0 in fp32
    value = kl_from_logits(far, torch.tensor([0.0, -inf]))
    (grad,) = torch.autograd.grad(value, far)
    assert value.item() == 0
    assert grad.isfinite().all()
    with pytest.raises(ValueError, match="ref_logits must have the shape of logits"):
        kl_from_logits(logits, ref[:2])


@pytest.mark.parametrize("f", [k1, k2, k3, abs_kl, k3_straight_through])
def test_dtypes_errors_and_compilation(f: Callable[..., Tensor]) -> None:
    a, b = torch.randn(4), torch.randn(4)
    assert f(a.bfloat16(), b.bfloat16()).dtype == torch.float32
    assert f(a.double(), b.double()).dtype == torch.float64
    with pytest.raises(ValueError, match="ref_logp must have the shape of logp"):
        f(a, b[:2])
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(a, b), f(a, b))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs_kl", "unbiased_kl", "k3_straight_through"])
def test_exchanged_arguments_are_named(name: str) -> None:
    """What requires a gradient in the reference's place is the policy's log-prob."""
    logp, ref = -torch.ones(2, requires_grad=True), -torch.ones(2)
    fn = partial(getattr(losses, name), **({"old_logp": ref} if name == "unbiased_kl" else {}))
    with pytest.raises(ValueError, match=r"ref_logp has a gradient and logp has none: the order is \(logp, ref_logp\)"):
        fn(ref, logp)
    assert fn(logp, ref).requires_grad
    assert not fn(logp.detach(), ref).requires_grad
