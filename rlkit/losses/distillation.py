"""Distillation from a teacher's whole distribution: divergences of logits [.., V], one per row.

Every function is `f(student_logits, teacher_logits, *, ..., mask=None) -> [..]` in nats, with q the student, p the
teacher, both softmax(logits / temperature). The vocabulary axis is last; all other axes are rows. Masked rows give loss
0 and gradient 0, whatever they hold (NaN included). Only the student gets a gradient. Nothing is multiplied by
temperature^2 (Hinton's convention; TRL's GKD neither).

Memory. Rows are worked off in chunks, and each chunk is recomputed in the backward pass, so nothing of the logits' size
is kept in between. Beside the two logits the peak is the larger of twice the student's gradient (the chunks' pieces,
then the whole) and the gradient plus 8 to 10 fp32 copies of [chunk_size, V]; unchunked it is 6 (KL) to 10 (JSD) fp32
copies of [rows, V]. Logits that are not contiguous (a slice along a padded axis) are copied first.

Log-probs are held at -1e9 from below, so that tokens excluded by -inf logits on both sides (a padded vocabulary) give
0; a token that the student excludes and the teacher wants costs 1e9 times its probability.

With only the teacher's top-k at hand: `rlkit.losses.distillation_topk`; with only its log-probs of the sampled tokens:
`rlkit.losses.distillation_on_policy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlkit._tensors import check_float, check_mask, masked, upcast
from rlkit.losses._inputs import check_positive
from rlkit.losses._pairs import check_between

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
