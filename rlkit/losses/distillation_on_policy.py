"""On-policy distillation: the student samples, the teacher scores the sampled tokens, and the gap is the advantage.

What comes out goes where any advantage goes (`reinforce`, `ppo_clip` with `tis`, ...); no new loss is needed. The
expected gradient of `-logp * opd_advantages` is that of KL(student || teacher) in each state the student visits; with
`discounted_returns(opd_advantages(...), gamma=1)` it is that of the KL between whole sequences.

Several teachers. Routing (each prompt to its own teacher; verl, NeMo-RL's MOPD) is a choice of `teacher_logp` before
these functions. Two ways to make one teacher of several: `teacher_mixture` and `teacher_product`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_float, check_mask, check_same_shape, masked, upcast
from rlkit.advantages.traces import discounted_returns
from rlkit.kernels.linear_scan import linear_scan
from rlkit.losses._inputs import check_at_least, prepared
from rlkit.losses.distillation import bounded_log_softmax
from rlkit.segments import broadcast_to_tokens, seq_sum


def opd_advantages(
    logp: Float[Tensor, "*shape"], teacher_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """Advantage of each sampled token: how much likelier the teacher finds it. Detached; 0 where the mask is False.

        A_t = teacher_logp_t - logp_t

    `logp` is of the student that sampled (`old_logp`), both at one temperature. The expectation of A is
    -KL(student || teacher); a perfect student has A = 0 everywhere, without a baseline.
    Discount: `discounted_returns(opd_advantages(...), mask=mask, cu_seqlens=cu_seqlens, gamma=gamma)`; this function
    is gamma = 0, the default of Tinker `kl_discount_factor`. Rewards join by addition.
    Differs: verl differentiates a KL estimator of the sampled token instead: `k1(logp, teacher_logp)` and its siblings.
    Reference: arXiv:2601.02780, equation 8; arXiv:2306.13649.
    """
    logp, teacher_logp = prepared(mask, logp=logp.detach(), teacher_logp=teacher_logp.detach())
    return teacher_logp - logp


def proximal_teacher(
    logp: Float[Tensor, "*shape"],
    teacher_logp: Float[Tensor, "*shape"],
    *,
    alpha: float,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Log-prob of each sampled token under a teacher within reach: the mixture of teacher and student. Detached.

        log(alpha p + (1 - alpha) q)          p = exp(teacher_logp), q = exp(logp), alpha in (0, 1]

    Takes the teacher's place in `opd_advantages`, which is then at least log(1 - alpha): a token that the teacher
    rules out no longer dominates the step.
    Limits: alpha = 1 is the teacher.
    Reference: arXiv:2607.04751 (Trust Region Policy Distillation).
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must lie in (0, 1], got {alpha}")
    logp, teacher_logp = prepared(mask, logp=logp.detach(), teacher_logp=teacher_logp.detach())
    if alpha == 1:
        return teacher_logp
    return masked(torch.logaddexp(teacher_logp + math.log(alpha), logp + math.log1p(-alpha)), mask)


def iw_opd_weights(
    advantages: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float = 0.5,
) -> Float[Tensor, "T"]:
    """Weights of importance-weighted on-policy distillation: early tokens count more, late ones after much drift less.

        w_t = 1 + gamma (1 - sum_{i < t} |A_i| / sum_i |A_i|)          i over the sequence's action tokens; detached

    `advantages` are `opd_advantages`; train on `w * A`. w falls from 1 + gamma at the first action token to above 1.
    A sequence without any gap has 1 + gamma everywhere; masked tokens have weight 0.
    Limits: gamma = 0 gives 1.
    Differs: TRL's `IWOPDTrainer` (`iw_opd_gamma` 0.5) keeps the sum above 1e-8, with the same result.
    Reference: arXiv:2606.22600; TRL experimental/iw_opd.
    """
    check_at_least(0, gamma=gamma)
    check_float(advantages=advantages)
    check_mask(mask, advantages=advantages)
    advantages = masked(upcast(advantages.detach()), mask)
    gap = advantages.abs().double()
    total = seq_sum(gap, cu_seqlens=cu_seqlens)
    before = linear_scan(torch.ones_like(gap), gap, cu_seqlens=cu_seqlens, reverse=False) - gap
    total = broadcast_to_tokens(total, cu_seqlens=cu_seqlens, num_tokens=gap.numel())
    drift = torch.where(total == 0, 0.0, before / total)
    return masked((1 + gamma * (1 - drift)).to(advantages.dtype), mask)


def minillm_advantages(
    logp: Float[Tensor, "T"],
    teacher_logp: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float = 1.0,
) -> Float[Tensor, "T"]:
    """MiniLLM's length-normalised return: the mean gap from here to the end. Detached; 0 where the mask is False.

        A_t = sum_{i >= t} gamma^(i - t) (teacher_logp_i - logp_i) / sum_{i >= t} gamma^(i - t)       i: action tokens

    Keeps the student from ending early just to stop losing. MiniLLM adds `reverse_kl` per token (its single-step
    term, which has less variance than the sampled one) and trains with `ppo_clip`.
    Limits: gamma = 0 is `opd_advantages`.
    Differs: the paper's code divides by the number of tokens left, the same at gamma = 1, and whitens afterwards.
    Reference: arXiv:2306.08543; LMOps minillm/losses.py.
    """
    gap = opd_advantages(logp, teacher_logp, mask=mask)
    total = discounted_returns(gap, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma)
    weight = discounted_returns(torch.ones_like(gap), mask=mask, cu_seqlens=cu_seqlens, gamma=gamma)
    return total / weight.clamp(min=1)


def teacher_mixture(
    teacher_logits: Float[Tensor, "M *rows V"], weights: Float[Tensor, "M"], *, temperature: float = 1.0
) -> Float[Tensor, "*rows V"]:
    """Log-probs of the arithmetic mixture of M teachers: what any of them would say. Detached.

        log sum_m w_m p_m          p_m = softmax(teacher_logits_m / temperature), w normalised to sum 1

    Goes where `teacher_logits` goes (log-probs are logits; temperature then 1). `forward_kl` to it has the gradient of
    sum_m w_m forward_kl(student, teacher_m), NeMo-RL's `kd_loss_mode="sum"`, and differs from it by a constant.
    Limits: one teacher is its log-softmax.
    Differs: NeMo-RL computes the sum of KLs.
    Reference: NeMo-RL nemo_rl/algorithms/loss, `CrossTokenizerDistillationLossFn`.
    """
    log_w = _log_weights(teacher_logits, weights)
    return torch.logsumexp(bounded_log_softmax(teacher_logits.detach(), temperature) + log_w, dim=0)


def teacher_product(
    teacher_logits: Float[Tensor, "M *rows V"], weights: Float[Tensor, "M"], *, temperature: float = 1.0
) -> Float[Tensor, "*rows V"]:
    """Log-probs of the geometric mixture of M teachers: what all of them would say. Detached.

        log softmax(sum_m w_m log p_m) = log softmax(sum_m w_m teacher_logits_m / temperature), w normalised to sum 1

    Goes where `teacher_logits` goes. `reverse_kl` to it has the gradient of sum_m w_m reverse_kl(student, teacher_m),
    and differs from it by a constant.
    Limits: one teacher is its log-softmax.
    Differs: nothing (NeMo-RL `kd_loss_mode="averaged_logits"`).
    Reference: NeMo-RL nemo_rl/algorithms/loss, `CrossTokenizerDistillationLossFn`.
    """
    w = _log_weights(teacher_logits, weights).exp()
    return (bounded_log_softmax(teacher_logits.detach(), temperature) * w).sum(0).log_softmax(-1)


def _log_weights(teacher_logits: Tensor, weights: Tensor) -> Tensor:
    """log of the normalised weights, shaped to broadcast over [M, *rows, V]."""
    check_float(teacher_logits=teacher_logits, weights=weights)
    check_same_shape(teacher_logits=teacher_logits.new_empty(teacher_logits.shape[:1]), weights=weights)
    weights = upcast(weights.detach())
    return (weights / weights.sum()).log().reshape(-1, *[1] * (teacher_logits.ndim - 1))
