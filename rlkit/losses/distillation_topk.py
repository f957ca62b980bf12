"""Distillation from part of a teacher's distribution: its log-probs of K tokens per position.

Every function is `f(student_logits, ids, teacher_logp, *, ..., mask=None) -> [..]`, with logits [.., V], and per row K
*distinct* token ids with the teacher's log-probs of them, under its whole vocabulary: usually its top-k as a server
reports it, or any support the caller chose and scored.

The tail. The other V - K tokens are lumped into one: its probability is what is missing to 1, for the teacher as
1 - sum exp(teacher_logp), for the student exactly (a logsumexp over the rest). The loss is the divergence of these
K + 1 probabilities, so it is never negative, a lower bound of the divergence over all V (data processing), equal to it
at K = V or where student and teacher share the shape of the tail, and never 0 by accident as a renormalised top-1 is.
The teacher's tail is held at machine epsilon from below: rounding can make it 0 or negative.

Differs: TRL (`loss_add_tail`) computes the student's tail by the same subtraction, which loses it where the student
is sure, and offers renormalisation instead; verl and NeMo-RL sum over the K tokens alone, which can be negative (verl
clamps the sum at 0 and log-probs at log 1e-8; NeMo-RL's `zero_outside_topk` gives the tail a log-prob of -100).

Memory, chunks, masks, temperature and gradients are as in `rlkit.losses.distillation`; teacher_logp must already be at
the same temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_float, check_mask, check_same_shape, upcast
from rlkit.losses._inputs import check_positive
from rlkit.losses.distillation import (
    CHUNK_SIZE,
    MIN_LOGP,
    by_rows,
    forward_kl_rows,
    jsd_rows,
    mixed_kl_rows,
    reverse_kl_rows,
)


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
