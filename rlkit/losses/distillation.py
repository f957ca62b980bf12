"""Distillation from a teacher's full distribution, its top-k tokens, or its log-probs of sampled tokens.

docs/distillation.md compares these functions with those of other frameworks.

**Full distribution.** `f(student_logits, teacher_logits, *, ..., mask=None) -> [..]` in nats; q is the student, p the
teacher, both softmax(logits / temperature). The vocabulary axis is last; all other axes are rows. Masked rows have loss
0 and gradient 0, even if they hold NaN. Only the student gets a gradient. There is no factor temperature^2 (Hinton's
convention).

Memory. Rows are processed in chunks, and each chunk is recomputed in the backward pass, so no tensor of the logits'
size is kept. Besides the two logits, the peak is the larger of twice the student's gradient (while its chunks are
concatenated) and the gradient plus 8 to 10 fp32 copies of [chunk_size, V]; unchunked it is 6 (KL) to 10 (JSD) fp32
copies of [rows, V]. Non-contiguous logits (a slice along a padded axis) are copied first.

Log-probs are clamped to at least -1e9, so tokens with -inf logits on both sides (a padded vocabulary) contribute 0; a
token that only the student excludes costs 1e9 times its teacher probability.

**Top-k.** `f(student_logits, ids, teacher_logp, *, ..., mask=None) -> [..]`: per row K *distinct* token ids and the
teacher's log-probs of them, normalised over its whole vocabulary at the same temperature. The ids are usually the
teacher's top-k, but may be any support. Memory, masks and gradients are as above. On CPU tensors, ids that repeat and
log-probs that sum to more than 1 are a ValueError, except at masked rows, where ids may be anything (-100).

The other V - K tokens are merged into one tail token. Its probability is 1 - sum exp(teacher_logp) for the teacher
(clamped to at least machine epsilon, because rounding can make it 0 or negative), and exact for the student (a
logsumexp over the rest). The loss is the divergence of these K + 1 probabilities. It is therefore non-negative, a lower
bound of the divergence over all V tokens (data processing), and equal to it at K = V or if student and teacher have
proportional tails. A renormalised top-1, in contrast, is always 0.

**On-policy.** The student samples, the teacher scores the sampled tokens, and the difference is the advantage, for any
surrogate (`reinforce`, `ppo_clip` with `tis`, ...). The expected gradient of `-logp * opd_advantages` is that of
KL(student || teacher) in each visited state; with `discounted_returns(opd_advantages(...), gamma=1)` it is that of the
KL between whole sequences.

Several teachers: to route each prompt to its own teacher, choose `teacher_logp` accordingly; `teacher_mixture` and
`teacher_product` combine several into one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkit._util.tensors import (
    check_cu_seqlens,
    check_float,
    check_log_probs,
    check_logits,
    check_mask,
    check_same_shape,
    masked,
    readable,
    transformed,
    upcast,
)
from rlkit.advantages.traces import discounted_returns
from rlkit.kernels.linear_scan import linear_scan
from rlkit.losses._inputs import check_at_least, check_between, check_positive, prepared, targets
from rlkit.segments import broadcast_to_tokens, sum_per_seq

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
MAX_TOTAL = 1.1  # of a teacher's probabilities: its log-probs may be rounded to bf16


def forward_kl(
    student_logits: Float[Tensor, "*rows V"],
    teacher_logits: Float[Tensor, "*rows V"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """KL(teacher || student): mode-covering.

        loss = KL(p || q) = sum_v p_v (log p_v - log q_v)             gradient w.r.t. logits: (q - p) / temperature

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
    """KL(student || teacher): mode-seeking.

        loss = KL(q || p) = sum_v q_v (log q_v - log p_v)

    On the student's own samples this is the exact, per-state form of `opd_advantages`, and MiniLLM's single-step term.
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
    """Weighted sum of the two KL directions.

        loss = w KL(p || q) + (1 - w) KL(q || p)          w = forward_weight in [0, 1]

    Limits: w = 1 is `forward_kl`, w = 0 is `reverse_kl`.
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
    """Generalised Jensen-Shannon divergence (GKD): bounded, between the two KLs.

        loss = beta KL(p || m) + (1 - beta) KL(q || m)          m = beta p + (1 - beta) q

    For 0 < beta < 1 it is at most the entropy of (beta, 1 - beta), and tends to 0 at both ends: loss / beta tends to
    KL(p || q) as beta -> 0, loss / (1 - beta) to KL(q || p) as beta -> 1. At the ends it is *defined* by these limits,
    as in TRL: beta = 0 is `forward_kl`, beta = 1 is `reverse_kl`. The scale of the loss therefore jumps there.
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
    """Universal logit distillation between different vocabularies: L1 distance of the *sorted* probabilities.

        loss = sum_i |q_(i) - p_(i)|          q_(1) >= q_(2) >= ..; the shorter one padded with zeros

    It matches the shape of the teacher's distribution, not the identity of its tokens. The caller aligns the rows (same
    text position in both tokenisations). In [0, 2].
    Differs: TRL `GOLDTrainer` averages it over a sequence and multiplies the probabilities of split tokens first.
    Reference: arXiv:2402.12030; TRL experimental/gold.
    """
    return _divergence(uld_rows, student_logits, teacher_logits, temperature, chunk_size, mask, same_vocab=False)


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


def uld_rows(log_q: Tensor, log_p: Tensor) -> Tensor:
    """The L1 distance of sorted probabilities, over the last axis."""
    q, p = (x.exp().sort(dim=-1, descending=True).values for x in (log_q, log_p))
    size = max(q.shape[-1], p.shape[-1])
    q, p = (torch.nn.functional.pad(x, (0, size - x.shape[-1])) for x in (q, p))
    return (q - p).abs().sum(-1)


def bounded_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) in fp32 or fp64, clamped to at least `MIN_LOGP`."""
    return (upcast(logits) / temperature).log_softmax(-1).clamp(min=MIN_LOGP)


def by_rows(rows: Callable[..., Tensor], *tensors: Tensor, chunk_size: int, mask: Tensor | None) -> Tensor:
    """`rows(*chunk)` over chunks of the leading axes, recomputed in the backward pass; 0 at masked rows.

    Masked rows of the tensors are zeroed before `rows` sees them, ids too.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    shape = tensors[0].shape[:-1]
    row_mask = torch.ones(shape, dtype=torch.bool, device=tensors[0].device) if mask is None else mask

    def one_chunk(row_mask: Tensor, *chunk: Tensor) -> Tensor:
        if mask is not None:
            chunk = tuple(masked(x, row_mask.unsqueeze(-1)) for x in chunk)
        return masked(rows(*chunk), row_mask)

    split = [x.reshape(shape.numel(), x.shape[-1]).split(chunk_size) for x in tensors]
    chunks = zip(row_mask.reshape(-1).split(chunk_size), *split)
    if transformed():  # saved-tensor hooks do not exist there: the memory of all chunks
        return torch.cat([one_chunk(*chunk) for chunk in chunks]).reshape(shape)
    out = [checkpoint(one_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
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
    """Check the arguments; the divergence of two log-softmaxes by rows."""
    check_float(student_logits=student_logits, teacher_logits=teacher_logits)
    check_logits(student_logits=student_logits, teacher_logits=teacher_logits)
    check_positive(temperature=temperature)
    student, teacher = list(student_logits.shape), list(teacher_logits.shape)
    if student[:-1] != teacher[:-1] or (same_vocab and student != teacher):
        raise ValueError(f"teacher_logits must have the shape of student_logits, {student}, got {teacher}")
    check_mask(mask, student_logits=student_logits[..., 0])

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        return rows(bounded_log_softmax(student, temperature), bounded_log_softmax(teacher, temperature))

    (teacher_logits,) = targets(teacher_logits, student_logits=student_logits)
    return by_rows(divergence, student_logits, teacher_logits, chunk_size=chunk_size, mask=mask)


def forward_kl_topk(
    student_logits: Float[Tensor, "*rows V"],
    ids: Int[Tensor, "*rows K"],
    teacher_logp: Float[Tensor, "*rows K"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    mask: Bool[Tensor, "*rows"] | None = None,
) -> Float[Tensor, "*rows"]:
    """KL(teacher || student) over K tokens and the tail.

        loss = sum_k p_k log(p_k / q_k) + p_tail log(p_tail / q_tail)

    Limits: K = V is `forward_kl`.
    Differs: verl 0.9 `forward_kl_topk` drops the tail, so its sum may be negative; NeMo-RL renormalises over the k.
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
    """KL(student || teacher) over K tokens and the tail.

        loss = sum_k q_k log(q_k / p_k) + q_tail log(q_tail / p_tail)

    With the teacher's top-k, the distribution of the student's mass over the tail is lost. The *student's* top-k,
    scored by the teacher, covers most of its mass; TRL uses that support for this direction.
    Limits: K = V is `reverse_kl`.
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
    """Weighted sum of the two KL directions over K tokens and the tail.

        loss = w forward_kl_topk + (1 - w) reverse_kl_topk          w = forward_weight in [0, 1]

    Limits: K = V is `mixed_kl`.
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
    """Generalised Jensen-Shannon divergence over K tokens and the tail; beta = 0 and 1 are the two KLs, as in `jsd`.

        loss = beta KL(p || m) + (1 - beta) KL(q || m)          m = beta p + (1 - beta) q

    Limits: K = V is `jsd`.
    Differs: TRL `IWOPDTrainer` uses the union of both models' top-k for 0 < beta < 1; pass it as `ids`.
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
    """Check the arguments; a divergence over K tokens and the tail by rows."""
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
    check_support(ids, teacher_logp, mask=mask, vocab_size=student_logits.shape[-1])

    def divergence(logits: Tensor, ids: Tensor, teacher_logp: Tensor) -> Tensor:
        return topk_rows(rows, upcast(logits) / temperature, ids, teacher_logp)

    (teacher_logp,) = targets(teacher_logp, student_logits=student_logits)
    return by_rows(divergence, student_logits, ids, teacher_logp, chunk_size=chunk_size, mask=mask)


def check_support(ids: Tensor, teacher_logp: Tensor, *, mask: Tensor | None, vocab_size: float = math.inf) -> None:
    """Distinct ids below `vocab_size` and log-probs of at most 1 in sum, in each trainable row (CPU tensors, outside
    compilation)."""
    if not (readable(ids) and readable(teacher_logp)):
        return
    rows = torch.ones(ids.shape[:-1], dtype=torch.bool) if mask is None else mask.to(ids.device)
    ids, total = ids[rows].sort(-1).values, upcast(teacher_logp.detach()[rows]).logsumexp(-1).exp()
    repeating = ids[(ids.diff(dim=-1) == 0).any(-1)]
    if repeating.numel():
        raise ValueError(f"ids must be distinct in each row, got {repeating[0].tolist()[:16]}: mask the row")
    if ids.numel() and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"ids must be in [0, {vocab_size}) where trainable, got {ids.min()} to {ids.max()}")
    if (total > MAX_TOTAL).any():
        raise ValueError(
            f"teacher_logp must be log-probs, whose probabilities sum to at most 1 in each row, got {total.max():.3g}: "
            "normalise logits by log_softmax over the teacher's whole vocabulary, and pad with -inf"
        )


def topk_rows(rows: Callable[[Tensor, Tensor], Tensor], logits: Tensor, ids: Tensor, teacher_logp: Tensor) -> Tensor:
    """`rows` over K tokens and the tail, of the student's logits (at the temperature) and the teacher's log-probs."""
    whole = ids.shape[-1] == logits.shape[-1]
    return rows(_student_logp(logits, ids, whole), _teacher_logp(upcast(teacher_logp), whole))


def _student_logp(logits: Tensor, ids: Tensor, whole: bool) -> Tensor:
    """Log-probs [.., K + 1] of the K tokens and of the tail ([.., K] if the ids are the `whole` vocabulary)."""
    parts = logits.gather(-1, ids)
    if not whole:
        low = torch.finfo(logits.dtype).min  # not -inf: the gradient of a tail of -inf alone is NaN
        rest = logits.scatter(-1, ids, low).logsumexp(-1, keepdim=True)
        parts = torch.cat([parts, rest], -1)
    return (parts - logits.logsumexp(-1, keepdim=True)).clamp(min=MIN_LOGP)


def _teacher_logp(logp: Tensor, whole: bool) -> Tensor:
    """The parts of the teacher: its tail is 1 minus the sum, clamped to at least machine epsilon."""
    if not whole:
        log_mass = logp.logsumexp(-1, keepdim=True)
        tail = (-torch.expm1(log_mass)).clamp(min=torch.finfo(logp.dtype).eps).log()
        logp = torch.cat([logp, tail], -1)
    return logp.clamp(min=MIN_LOGP)


def opd_advantages(
    logp: Float[Tensor, "*shape"], teacher_logp: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """On-policy distillation advantage of each sampled token. Detached; 0 where the mask is False.

        A_t = teacher_logp_t - logp_t

    `logp` is of the student that sampled (`old_logp`); both are at the same temperature. The expectation of A is
    -KL(student || teacher); a student equal to the teacher has A = 0 everywhere, without a baseline. Add rewards to A.
    For a discounted return use `discounted_returns(opd_advantages(...), mask=mask, cu_seqlens=cu_seqlens,
    gamma=gamma)`; gamma = 0 is this function.
    Differs: verl 0.9 takes k3 (clamped at 10) in place of the log-ratio as the advantage by default.
    Reference: arXiv:2601.02780, equation 8; arXiv:2306.13649.
    """
    logp, teacher_logp = prepared(mask, logp=logp.detach(), teacher_logp=teacher_logp.detach())
    check_log_probs(logp=logp, teacher_logp=teacher_logp)
    return teacher_logp - logp


def proximal_teacher(
    logp: Float[Tensor, "*shape"],
    teacher_logp: Float[Tensor, "*shape"],
    *,
    alpha: float,
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Log-prob of each sampled token under a mixture of teacher and student. Detached.

        log(alpha p + (1 - alpha) q)          p = exp(teacher_logp), q = exp(logp), alpha in (0, 1]

    Use it as `teacher_logp` in `opd_advantages`: the advantage is then at least log(1 - alpha), so a token that the
    teacher excludes does not dominate the step.
    Limits: alpha = 1 is the teacher.
    Reference: arXiv:2607.04751 (Trust Region Policy Distillation).
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    logp, teacher_logp = prepared(mask, logp=logp.detach(), teacher_logp=teacher_logp.detach())
    check_log_probs(logp=logp, teacher_logp=teacher_logp)
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
    """Weights of importance-weighted on-policy distillation: decrease with the drift accumulated before a token.

        w_t = 1 + gamma (1 - sum_{i < t} |A_i| / sum_i |A_i|)          i over the sequence's action tokens; detached

    `advantages` are `opd_advantages`; train on `w * A`. w falls from 1 + gamma at the first action token towards 1. If
    all A of a sequence are 0, w is 1 + gamma everywhere. Masked tokens have weight 0.
    Limits: gamma = 0 gives 1.
    Reference: arXiv:2606.22600; TRL experimental/iw_opd.
    """
    check_at_least(0, gamma=gamma)
    check_float(advantages=advantages)
    check_mask(mask, advantages=advantages)
    check_cu_seqlens(cu_seqlens, advantages=advantages)
    advantages = masked(upcast(advantages.detach()), mask)
    gap = advantages.abs().double()
    total = sum_per_seq(gap, cu_seqlens=cu_seqlens)
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
    """MiniLLM's length-normalised return: the mean of `opd_advantages` over the remaining tokens. Detached.

        A_t = sum_{i >= t} gamma^(i - t) (teacher_logp_i - logp_i) / sum_{i >= t} gamma^(i - t)       i: action tokens

    The normalisation removes the incentive to stop early. MiniLLM adds `reverse_kl` per token (its single-step term,
    which has less variance than the sampled one) and trains with `ppo_clip`. 0 where the mask is False.
    Limits: gamma = 0 is `opd_advantages`.
    Differs: the paper's code divides by the number of remaining tokens (equal at gamma = 1), then whitens.
    Reference: arXiv:2306.08543; LMOps minillm/losses.py.
    """
    check_at_least(0, gamma=gamma)
    gap = opd_advantages(logp, teacher_logp, mask=mask)
    check_cu_seqlens(cu_seqlens, logp=logp)
    total = discounted_returns(gap, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma)
    weight = discounted_returns(torch.ones_like(gap), mask=mask, cu_seqlens=cu_seqlens, gamma=gamma)
    return total / weight.clamp(min=1)


def teacher_mixture(
    teacher_logits: Float[Tensor, "M *rows V"], weights: Float[Tensor, "M"], *, temperature: float = 1.0
) -> Float[Tensor, "*rows V"]:
    """Log-probs of the arithmetic mixture of M teachers. Detached.

        log sum_m w_m p_m          p_m = softmax(teacher_logits_m / temperature), w normalised to sum 1

    Pass it as `teacher_logits` (log-probs are logits), with temperature 1. `forward_kl` to it has the gradient of
    sum_m w_m forward_kl(student, teacher_m), NeMo-RL's `kd_loss_mode="sum"`, and differs from that sum by a constant.
    Limits: one teacher is its log-softmax.
    Reference: NeMo-RL nemo_rl/algorithms/loss, `CrossTokenizerDistillationLossFn`.
    """
    check_positive(temperature=temperature)
    log_w = _log_weights(teacher_logits, weights)
    return torch.logsumexp(bounded_log_softmax(teacher_logits.detach(), temperature) + log_w, dim=0)


def teacher_product(
    teacher_logits: Float[Tensor, "M *rows V"], weights: Float[Tensor, "M"], *, temperature: float = 1.0
) -> Float[Tensor, "*rows V"]:
    """Log-probs of the geometric mixture of M teachers. Detached.

        log softmax(sum_m w_m log p_m) = log softmax(sum_m w_m teacher_logits_m / temperature), w normalised to sum 1

    Pass it as `teacher_logits`, with temperature 1. `reverse_kl` to it has the gradient of
    sum_m w_m reverse_kl(student, teacher_m), and differs from that sum by a constant.
    Limits: one teacher is its log-softmax.
    Reference: NeMo-RL nemo_rl/algorithms/loss, `CrossTokenizerDistillationLossFn`.
    """
    check_positive(temperature=temperature)
    w = _log_weights(teacher_logits, weights).exp()
    return (bounded_log_softmax(teacher_logits.detach(), temperature) * w).sum(0).log_softmax(-1)


def _log_weights(teacher_logits: Tensor, weights: Tensor) -> Tensor:
    """log of the normalised weights, shaped to broadcast over [M, *rows, V]."""
    check_float(teacher_logits=teacher_logits, weights=weights)
    check_same_shape(teacher_logits=teacher_logits.new_empty(teacher_logits.shape[:1]), weights=weights)
    weights = upcast(weights.detach())
    if readable(weights) and not (weights.min() >= 0 and 0 < weights.sum() < math.inf):
        raise ValueError(f"weights must be at least 0, with a positive and finite sum, got {weights.tolist()}")
    return (weights / weights.sum()).log().reshape(-1, *[1] * (teacher_logits.ndim - 1))
