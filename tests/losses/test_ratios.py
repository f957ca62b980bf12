"""Sequence log-ratios against loops over Python lists."""

from __future__ import annotations

import pytest
import torch

from rlkit.losses import ppo_clip, seq_log_ratio, seq_log_ratio_sum, token_gradient

LENS = [3, 0, 1, 4, 2]
CU = torch.tensor([0, 3, 3, 4, 8, 10])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 0]).bool()
X = torch.tensor([0.5, 9.0, -1.5, 2.0, 0.1, 0.2, 7.0, 0.6, 4.0, 5.0], dtype=torch.float64)


def looped(reduce: str, mask: torch.Tensor) -> list[float]:
    out: list[float] = []
    start = 0
    for n in LENS:
        kept = [v for v, m in zip(X[start : start + n].tolist(), mask[start : start + n].tolist(), strict=True) if m]
        total = sum(kept)
        out += [total if reduce == "sum" else total / max(len(kept), 1)] * n
        start += n
    return out


@pytest.mark.parametrize("mask", [MASK, None])
def test_mean_and_sum_over_each_sequence(mask: torch.Tensor | None) -> None:
    full = torch.ones_like(MASK) if mask is None else mask
    for f, reduce in ((seq_log_ratio, "mean"), (seq_log_ratio_sum, "sum")):
        got = f(X, mask=mask, cu_seqlens=CU)
        torch.testing.assert_close(got, torch.tensor(looped(reduce, full), dtype=torch.float64))


def test_docstring_example() -> None:
    assert seq_log_ratio(torch.tensor([1.0, 3, 5]), mask=None, cu_seqlens=torch.tensor([0, 2, 3])).tolist() == [2, 2, 5]


def test_gradient_of_the_mean_reaches_every_trainable_token_alike() -> None:
    x = X.clone().requires_grad_()
    upstream = torch.arange(10, dtype=torch.float64)
    (grad,) = torch.autograd.grad((seq_log_ratio(x, mask=MASK, cu_seqlens=CU) * upstream).sum(), x)
    third = (0 + 1 + 2) / 2
    fourth = (4 + 5 + 6 + 7) / 3
    expected = [third, 0, third, 3.0, fourth, fourth, 0, fourth, 0, 0]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))


def test_masked_nan_stays_out() -> None:
    x = torch.where(MASK, X, torch.nan).requires_grad_()
    s = seq_log_ratio(x, mask=MASK, cu_seqlens=CU)
    torch.testing.assert_close(s, torch.tensor(looped("mean", MASK), dtype=torch.float64))
    (grad,) = torch.autograd.grad(s.sum(), x)
    assert (grad[~MASK] == 0).all()
    assert grad.isfinite().all()


def of_sequence_with_token_gradient(x: torch.Tensor) -> torch.Tensor:
    return token_gradient(seq_log_ratio(x, mask=MASK, cu_seqlens=CU), x)


def test_gspo_token_has_the_sequences_value_and_the_tokens_gradient() -> None:
    x = X.clone().requires_grad_()
    s = of_sequence_with_token_gradient(x)
    torch.testing.assert_close(s, torch.tensor(looped("mean", MASK), dtype=torch.float64))
    weights = torch.arange(10, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad((s * weights).sum(), x)[0], weights)


def test_gspo_token_equals_gspo_for_one_advantage_per_sequence() -> None:
    x = (0.1 * X).requires_grad_()
    a = torch.tensor([1.0, 1, 1, -2, 0.5, 0.5, 0.5, 0.5, 3, 3], dtype=torch.float64)
    grads = []
    for s in (seq_log_ratio(x, mask=MASK, cu_seqlens=CU), of_sequence_with_token_gradient(x)):
        loss = ppo_clip(s, a, clip_low=0.03, clip_high=0.03, mask=MASK)
        grads.append(torch.autograd.grad(loss.sum(), x)[0])
    torch.testing.assert_close(*grads)
    assert (grads[0] != 0).any()


def test_token_gradient_checks_shapes() -> None:
    with pytest.raises(ValueError, match="log_ratio must have the shape of value"):
        token_gradient(torch.zeros(3), torch.zeros(2))
