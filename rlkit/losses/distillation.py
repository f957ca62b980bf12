"""Distillation from a teacher: its whole distribution, its top k tokens, or its log-probs of sampled tokens.

**Whole distribution.** `f(student_logits, teacher_logits, *, ..., mask=None) -> [..]` in nats, with q the student, p
the teacher, both softmax(logits / temperature). The vocabulary axis is last; all other axes are rows. Masked rows give
loss 0 and gradient 0, whatever they hold (NaN included). Only the student gets a gradient. Nothing is multiplied by
temperature^2 (Hinton's convention; TRL's GKD neither).

Memory. Rows are worked off in chunks, and each chunk is recomputed in the backward pass, so nothing of the logits' size
is kept in between. Beside the two logits the peak is the larger of twice the student's gradient (the chunks' pieces,
then the whole) and the gradient plus 8 to 10 fp32 copies of [chunk_size, V]; unchunked it is 6 (KL) to 10 (JSD) fp32
copies of [rows, V]. Logits that are not contiguous (a slice along a padded axis) are copied first.

Log-probs are held at -1e9 from below, so that tokens excluded by -inf logits on both sides (a padded vocabulary) give
0; a token that the student excludes and the teacher wants costs 1e9 times its probability.

**Top k.** `f(student_logits, ids, teacher_logp, *, ..., mask=None) -> [..]`, with logits [.., V], and per row K
*distinct* token ids with the teacher's log-probs of them, under its whole vocabulary and at the same temperature:
usually its top-k as a server reports it, or any support the caller chose and scored. Memory, masks and gradients as
above.

The tail. The other V - K tokens are lumped into one: its probability is what is missing to 1, for the teacher as
1 - sum exp(teacher_logp), for the student exactly (a logsumexp over the rest). The loss is the divergence of these
K + 1 probabilities, so it is never negative, a lower bound of the divergence over all V (data processing), equal to it
at K = V or where student and teacher share the shape of the tail, and never 0 by accident as a renormalised top-1 is.
The teacher's tail is held at machine epsilon from below: rounding can make it 0 or negative.
Differs: TRL (`loss_add_tail`) computes the student's tail by the same subtraction, which loses it where the student
is sure, and offers renormalisation instead; verl and NeMo-RL sum over the K tokens alone, which can be negative (verl
clamps the sum at 0 and log-probs at log 1e-8; NeMo-RL's `zero_outside_topk` gives the tail a log-prob of -100).

**On policy.** The student samples, the teacher scores the sampled tokens, and the gap is the advantage. It goes where
any advantage goes (`reinforce`, `ppo_clip` with `tis`, ...); no new loss is needed. The expected gradient of
`-logp * opd_advantages` is that of KL(student || teacher) in each state the student visits; with
`discounted_returns(opd_advantages(...), gamma=1)` it is that of the KL between whole sequences.
Several teachers. Routing (each prompt to its own teacher; verl, NeMo-RL's MOPD) is a choice of `teacher_logp` before
these functions. Two ways to make one teacher of several: `teacher_mixture` and `teacher_product`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkit._tensors import check_float, check_mask, check_same_shape, masked, upcast
from rlkit.advantages.traces import discounted_returns
from rlkit.kernels.linear_scan import linear_scan
from rlkit.losses._inputs import check_at_least, check_positive, prepared
from rlkit.losses.preference import check_between
from rlkit.segments import broadcast_to_tokens, seq_sum

__all__ = [
    "forward_kl",
    "forward_kl_topk",
    "iw_opd_weights",
    "jsd",
    "jsd_topk",
    "minillm_advantages",
    "mixed_kl",
    "mixed_kl_topk",
    "opd_advantages",
    "proximal_teacher",
    "reverse_kl",
    "reverse_kl_topk",
    "teacher_mixture",
    "teacher_product",
    "uld",
]

MIN_LOGP = -1e9
CHUNK_SIZE = 256


def forward_kl(
    student_logits: Float[Tensor, "*rows V"],
    teacher_logits: Float[Tensor, "*rows V"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """KL from teacher to student: the student must cover all that the teacher does.

        loss = KL(p || q) = sum_v p_v (log p_v - log q_v)             gradient by the logits: (q - p) / temperature

    Differs: nothing (TRL `GKDTrainer` with `beta=0`; NeMo-RL `forward`).
    Reference: arXiv:2306.13649.
    """
    return _divergence(forward_kl_rows, student_logits, teacher_logits, temperature, chunk_size, mask)


def reverse_kl(
    student_logits: Float[Tensor, "*rows V"],
    teacher_logits: Float[Tensor, "*rows V"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """KL from student to teacher: the student must avoid what the teacher avoids.

        loss = KL(q || p) = sum_v q_v (log q_v - log p_v)

    On the student's own samples this is the exact, per-state form of `opd_advantages`, and MiniLLM's single-step term.
    Differs: nothing (TRL `GKDTrainer` with `beta=1`; NeMo-RL `reverse`).
    Reference: arXiv:2306.08543; arXiv:2306.13649.
    """
    return _divergence(reverse_kl_rows, student_logits, teacher_logits, temperature, chunk_size, mask)


def mixed_kl(
    student_logits: Float[Tensor, "*rows V"],
    teacher_logits: Float[Tensor, "*rows V"],
    *,
    forward_weight: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """A weighted sum of the two directions.

        loss = w KL(p || q) + (1 - w) KL(q || p)          w = forward_weight in [0, 1]

    Limits: w = 1 is `forward_kl`, w = 0 is `reverse_kl`.
    Differs: nothing (NeMo-RL `kl_type="mixed"`, `mixed_kl_weight`).
    Reference: NeMo-RL nemo_rl/algorithms/loss, `DistillationLossFn`.
    """
    rows = mixed_kl_rows(forward_weight)
    return _divergence(rows, student_logits, teacher_logits, temperature, chunk_size, mask)


def jsd(
    student_logits: Float[Tensor, "*rows V"],
    teacher_logits: Float[Tensor, "*rows V"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """Generalised Jensen-Shannon divergence (GKD): bounded, and in between the two KLs.

        loss = beta KL(p || m) + (1 - beta) KL(q || m)          m = beta p + (1 - beta) q

    For 0 < beta < 1 it is at most the entropy of (beta, 1 - beta), and shrinks to 0 at both ends: loss / beta tends to
    KL(p || q) as beta -> 0, loss / (1 - beta) to KL(q || p) as beta -> 1. At the ends themselves it is *defined* as the
    limit, not as 0: beta = 0 is `forward_kl`, beta = 1 `reverse_kl`, as in TRL; so the scale jumps there.
    Differs: nothing (TRL `GKDTrainer`, `DistillationTrainer`).
    Reference: arXiv:2306.13649, equation 1.
    """
    return _divergence(jsd_rows(beta), student_logits, teacher_logits, temperature, chunk_size, mask)


def uld(
    student_logits: Float[Tensor, "*rows V"],
    teacher_logits: Float[Tensor, "*rows U"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """Universal logit distillation between vocabularies of any sizes: distance of the *sorted* probabilities.

        loss = sum_i |q_(i) - p_(i)|          q_(1) >= q_(2) >= ..; the shorter one padded with zeros

    Knows how peaked the teacher is, not which tokens it means. The rows must be aligned by the caller (same text
    position in both tokenisations). In [0, 2].
    Differs: TRL `GOLDTrainer` averages it over a sequence and multiplies the probabilities of split tokens first.
    Reference: arXiv:2402.12030; TRL experimental/gold.
    """
    return _divergence(_uld_rows, student_logits, teacher_logits, temperature, chunk_size, mask, same_vocab=False)


def forward_kl_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p || q) of log-probs, summed over the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q || p) of log-probs, summed over the last axis."""
    return forward_kl_rows(log_p, log_q)


def mixed_kl_rows(forward_weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of (log_q, log_p) behind `mixed_kl`."""
    check_between(0, 1, forward_weight=forward_weight)

    def rows(log_q: Tensor, log_p: Tensor) -> Tensor:
        return forward_weight * forward_kl_rows(log_q, log_p) + (1 - forward_weight) * reverse_kl_rows(log_q, log_p)

    return rows


def jsd_rows(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of (log_q, log_p) behind `jsd`."""
    check_between(0, 1, beta=beta)
    if beta == 0:
        return forward_kl_rows
    if beta == 1:
        return reverse_kl_rows

    def rows(log_q: Tensor, log_p: Tensor) -> Tensor:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        return beta * forward_kl_rows(log_m, log_p) + (1 - beta) * forward_kl_rows(log_m, log_q)

    return rows


def _uld_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    q, p = (x.exp().sort(dim=-1, descending=True).values for x in (log_q, log_p))
    longest = max(q.shape[-1], p.shape[-1])
    q, p = (torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for x in (q, p))
    return (q - p).abs().sum(-1)


def bounded_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) in fp32 or fp64, held at `MIN_LOGP` from below."""
    return (upcast(logits) / temperature).log_softmax(-1).clamp(min=MIN_LOGP)


def by_rows(rows: Callable[..., Tensor], *tensors: Tensor, chunk_size: int, mask: Tensor | None) -> Tensor:
    """`rows(*chunk)` over chunks of the leading axes, recomputed in the backward pass; 0 at masked rows.

    Masked rows of the floating-point tensors are zeroed before `rows` sees them.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    shape = tensors[0].shape[:-1]
    kept = torch.ones(shape, dtype=torch.bool, device=tensors[0].device) if mask is None else mask

    def one_chunk(kept: Tensor, *chunk: Tensor) -> Tensor:
        if mask is not None:
            chunk = tuple(masked(x, kept.unsqueeze(-1)) if x.is_floating_point() else x for x in chunk)
        return masked(rows(*chunk), kept)

    split = [x.reshape(shape.numel(), x.shape[-1]).split(chunk_size) for x in tensors]
    pieces = zip(kept.reshape(-1).split(chunk_size), *split)
    out = [checkpoint(one_chunk, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.cat(out).reshape(shape)


def _divergence(
    rows: Callable[[Tensor, Tensor], Tensor],
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float,
    chunk_size: int,
    mask: Tensor | None,
    *,
    same_vocab: bool = True,
) -> Tensor:
    """A divergence of two log-softmaxes by rows, checked."""
    check_float(student_logits=student_logits, teacher_logits=teacher_logits)
    check_positive(temperature=temperature)
    student, teacher = list(student_logits.shape), list(teacher_logits.shape)
    if student[:-1] != teacher[:-1] or (same_vocab and student != teacher):
        raise ValueError(f"teacher_logits must have the shape of student_logits, {student}, got {teacher}")
    check_mask(mask, student_logits=student_logits[..., 0])

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        return rows(bounded_log_softmax(student, temperature), bounded_log_softmax(teacher, temperature))

    return by_rows(divergence, student_logits, teacher_logits.detach(), chunk_size=chunk_size, mask=mask)


def forward_kl_topk(
    student_logits: Float[Tensor, "*rows V"],
    ids: Int[Tensor, "*rows K"],
    teacher_logp: Float[Tensor, "*rows K"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """KL from teacher to student over K tokens and the tail.

        loss = sum_k p_k log(p_k / q_k) + p_tail log(p_tail / q_tail)

    Limits: K = V is `forward_kl`.
    Differs: see the module; verl `forward_kl_topk`, NeMo-RL `forward`.
    Reference: TRL experimental/server_distillation; verl verl/trainer/distillation/losses.py.
    """
    return _topk(forward_kl_rows, student_logits, ids, teacher_logp, temperature, chunk_size, mask)


def reverse_kl_topk(
    student_logits: Float[Tensor, "*rows V"],
    ids: Int[Tensor, "*rows K"],
    teacher_logp: Float[Tensor, "*rows K"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """KL from student to teacher over K tokens and the tail.

        loss = sum_k q_k log(q_k / p_k) + q_tail log(q_tail / p_tail)

    On the teacher's top-k it does not see where in the tail the student's mass lies; on the *student's* top-k, scored
    by the teacher, it sees most of it (TRL's choice of support for this direction).
    Limits: K = V is `reverse_kl`.
    Differs: see the module; NeMo-RL `reverse`.
    Reference: TRL experimental/iw_opd.
    """
    return _topk(reverse_kl_rows, student_logits, ids, teacher_logp, temperature, chunk_size, mask)


def mixed_kl_topk(
    student_logits: Float[Tensor, "*rows V"],
    ids: Int[Tensor, "*rows K"],
    teacher_logp: Float[Tensor, "*rows K"],
    *,
    forward_weight: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """A weighted sum of the two directions over K tokens and the tail.

        loss = w forward_kl_topk + (1 - w) reverse_kl_topk          w = forward_weight in [0, 1]

    Limits: K = V is `mixed_kl`.
    Differs: see the module; NeMo-RL `kl_type="mixed"`, `mixed_kl_weight`.
    Reference: NeMo-RL nemo_rl/algorithms/loss, `DistillationLossFn`.
    """
    rows = mixed_kl_rows(forward_weight)
    return _topk(rows, student_logits, ids, teacher_logp, temperature, chunk_size, mask)


def jsd_topk(
    student_logits: Float[Tensor, "*rows V"],
    ids: Int[Tensor, "*rows K"],
    teacher_logp: Float[Tensor, "*rows K"],
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """Generalised Jensen-Shannon divergence over K tokens and the tail; beta as in `jsd`, the two KLs at its ends.

        loss = beta KL(p || m) + (1 - beta) KL(q || m)          m = beta p + (1 - beta) q

    Limits: K = V is `jsd`.
    Differs: TRL `IWOPDTrainer` takes the union of both models' top-k for 0 < beta < 1: pass it as `ids`.
    Reference: arXiv:2306.13649, equation 1; TRL experimental/iw_opd.
    """
    return _topk(jsd_rows(beta), student_logits, ids, teacher_logp, temperature, chunk_size, mask)


def _topk(
    rows: Callable[[Tensor, Tensor], Tensor],
    student_logits: Tensor,
    ids: Tensor,
    teacher_logp: Tensor,
    temperature: float,
    chunk_size: int,
    mask: Tensor | None,
) -> Tensor:
    """A divergence over K tokens and the tail by rows, checked."""
    check_float(student_logits=student_logits, teacher_logp=teacher_logp)
    check_same_shape(ids=ids, teacher_logp=teacher_logp)
    check_positive(temperature=temperature)
    if ids.dtype != torch.int64:
        raise TypeError(f"ids must be int64, got {ids.dtype}")
    if ids.shape[:-1] != student_logits.shape[:-1] or not 0 < ids.shape[-1] <= student_logits.shape[-1]:
        raise ValueError(
            f"ids must have the rows of student_logits {list(student_logits.shape)} and 1 to V entries in each, "
            f"got {list(ids.shape)}"
        )
    check_mask(mask, student_logits=student_logits[..., 0])

    def divergence(logits: Tensor, ids: Tensor, teacher_logp: Tensor) -> Tensor:
        whole = ids.shape[-1] == logits.shape[-1]
        return rows(_student(upcast(logits) / temperature, ids, whole), _teacher(upcast(teacher_logp), whole))

    return by_rows(divergence, student_logits, ids, teacher_logp.detach(), chunk_size=chunk_size, mask=mask)


def _student(logits: Tensor, ids: Tensor, whole: bool) -> Tensor:
    """Log-probs [.., K + 1] of the chosen tokens and of all others together ([.., K] where there are none)."""
    parts = logits.gather(-1, ids)
    if not whole:
        rest = logits.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
        parts = torch.cat([parts, rest], -1)
    return (parts - logits.logsumexp(-1, keepdim=True)).clamp(min=MIN_LOGP)


def _teacher(logp: Tensor, whole: bool) -> Tensor:
    """The same for the teacher, whose tail is what is missing to 1, not below machine epsilon."""
    if not whole:
        kept = logp.logsumexp(-1, keepdim=True)
        tail = (-torch.expm1(kept)).clamp(min=torch.finfo(logp.dtype).eps).log()
        logp = torch.cat([logp, tail], -1)
    return logp.clamp(min=MIN_LOGP)


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
