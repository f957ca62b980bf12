"""Log-probabilities of the targets and entropies from hidden states, without storing the logits."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import transformed
from rlkit.kernels._checks import check_head, check_targets
from rlkit.kernels.linear_logp import chunked, ops
from rlkit.kernels.linear_logp import reference as _reference
from rlkit.kernels.linear_logp.ops import which_impl
from rlkit.kernels.linear_logp.reference import Partials, combine, compute_dtype, finish
from rlkit.types import LogProbs

CPU_LOGITS_BYTES, LOGITS_BYTES = 32 << 20, 1 << 30  # logits in memory at a time in `linear_log_kept_mass`

__all__ = [
    "Partials",
    "combine",
    "finish",
    "linear_log_kept_mass",
    "linear_logp",
    "partials",
    "shard_logp",
    "which_impl",
]


def linear_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability of each target and entropy of its distribution, in nats, from the last hidden states.

        z = softcap * tanh((hidden W^T + bias) / softcap) / temperature
        logp_t = log softmax(z_t)[targets_t]
        entropy_t = - sum_v softmax(z_t)[v] log softmax(z_t)[v]

    Differentiable in `hidden`, `weight` and `bias`, through both outputs. The `[T, V]` logits are never stored: each
    pass computes them block by block (4 MB on a CPU; on a GPU 32 MB forward and 64 MB backward, twice that where D <=
    2048 and four times where D <= 1024), and the backward recomputes them (four matrix products in total), with at most
    512 MB of their gradient at a time on a GPU, or 4096 columns. Exception: on a CPU, if the log-probabilities and
    probabilities together take at most 16 MB, they are kept for the backward (measured: 20% faster).

    Rows where `mask` is False are skipped: logp = entropy = 0, gradient 0; they may hold NaN. The backward also skips
    rows whose upstream gradients are both 0 (clipped, no advantage). Both are exact, and time is proportional to the
    remaining rows. Gradients of tensors that do not require one (a frozen head) are not computed. On CUDA the backward
    waits for the device once, to count the remaining rows, and so does the forward if the mask is there: the mask may
    be on the CPU instead, and no wait is then needed.

    Limits:     softcap None is softcap -> inf, z = (hidden W^T + bias) / temperature; V = 1 gives logp = entropy = 0.
    Precision:  logits, statistics and sums are fp32 for all inputs (fp64 for fp64); each gradient is rounded once to
                its tensor's dtype. Statistics are relative to the row's maximum (see `finish`). On a GPU the gradient
                of the logits is rounded to the inputs' 16 bits before its two products. Runs are bit-identical; with
                "triton" a row's values do not depend on the other rows. A bias of -inf bans a vocabulary entry; the
                logp of that entry is about -1e30, not -inf. Products of fp32 inputs follow torch's global setting: on
                CUDA `torch.set_float32_matmul_precision("high")` makes them TF32, which rounds hidden states, weights
                and the logits' gradient to 10 bits after the point (relative error up to 5e-4 each).
    Args:       targets: ids in [0, V) where the mask is True, anything elsewhere.  temperature: > 0, as sampled.
                mask: on the device of `hidden`, or on the CPU.
                impl: "reference" (checkpointed log-softmax over chunks of rows), "chunked" (torch, tile by tile) or
                "triton" (library products and Triton passes over their blocks); default: see `which_impl`.
    Differs:    from verl `FusedLinearForPPO` and TRL: the logits of bf16 models are fp32, not rounded to bf16. From
                apple CCE: no gradient is dropped, and the result is deterministic.
    Reference:  online softmax, arXiv:1805.02867; recomputing logits in the backward, arXiv:2411.09009 (CCE).
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], weight.shape[0], mask)
    chosen, dtype = ops.check_impl(impl, hidden, weight, bias, ops.IMPLS), compute_dtype(hidden, weight, bias)
    if chosen == "reference" or transformed():
        return _reference.linear_logp(
            hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, mask=mask
        )
    keep = chosen == "chunked" and chunked.can_keep(hidden.shape[0], weight.shape[0], dtype)
    out = ops.logp_op(hidden, weight, targets, bias, mask, temperature, softcap, keep, chosen)
    return LogProbs(out[0], out[1])


def partials(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    vocab_start: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> Partials:
    """Softmax statistics of one vocabulary shard (tensor parallel), to be merged over shards by `combine`.

    `weight` and `bias` are the shard's rows, starting at vocabulary entry `vocab_start`; `targets` are ids of the whole
    vocabulary. Shards may differ in size or be empty. The result has no gradient; use `shard_logp` for that:

        mine = partials(hidden, shard, targets, vocab_start=start)
        everyone = [Partials(*x) for x in all_gather(torch.stack(mine))]
        out = shard_logp(hidden, shard, targets, combined=reduce(combine, everyone), vocab_start=start)

    Without gradients `finish(reduce(combine, everyone))` is enough. Rows where `mask` is False are not read. `impl` is
    "chunked" or "triton"; default: see `which_impl`.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], None, mask)
    chosen, b = ops.check_impl(impl, hidden, weight, bias), None if bias is None else bias.detach()
    args = (hidden.detach(), weight.detach(), targets, b, mask, temperature, softcap, vocab_start, chosen)
    return Partials(*ops.partials_op(*args))


def shard_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    combined: Partials,
    vocab_start: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability and entropy over the whole vocabulary, differentiable in this shard's weight.

    `combined` holds the merged statistics of all shards; the values are `finish(combined)`, the same on every rank.
    The backward gives the complete gradient of this shard's `weight` and `bias`, and this shard's *term* of the
    gradient of `hidden`: sum it over the shards (the all-reduce of a column-parallel layer). All ranks must compute the
    same loss, so that their upstream gradients are equal.

    Differs: from Megatron-style vocabulary-parallel cross entropy (verl, NeMo, slime): no logits are stored, the
    entropy has a gradient, and the caller does the only collective, one all-gather of `[4, T]`.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], None, mask)
    stats, chosen = torch.stack(combined).detach(), ops.check_impl(impl, hidden, weight, bias)
    args = (hidden, weight, targets, bias, mask, temperature, softcap, vocab_start, stats, chosen)
    return LogProbs(*ops.shard_op(*args))


@torch.no_grad()
def linear_log_kept_mass(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
) -> Float[Tensor, "T"]:
    """log S: log of the probability mass kept by top-p, top-k and min-p sampling in each row, in nats.

        p = softmax(z), z as in `linear_logp`, in descending order: p_(1) >= p_(2) >= ...
        S = sum of p_(i) with  i <= top_k,  p_(1) + ... + p_(i-1) < top_p  and  p_(i) >= min_p p_(1)

    `rollout_logp - log S` is the log-probability of a token under the truncated distribution it was sampled from;
    without the correction every ratio is too large by a factor 1 / S. Detached: S belongs to the behaviour policy.
    `top_k=0`, `top_p=1.0` and `min_p=0.0` are off; log S is then 0, as it is where `mask` is False. The vocabulary is
    not sorted: the largest 128 (or top_k) entries are selected, and more only for rows that keep more. Memory: 32 MB of
    logits on a CPU, 1 GB elsewhere (at least one row), and the same again for their softmax.

    Limits:     top_k = 1 is the largest log-probability; top_k >= V, top_p = 1 and min_p = 0 give 0.
    Differs:    all limits apply to p itself, as in SGLang and `rlkit.rollout`; Hugging Face `generate` and vLLM
                renormalise after top-k, before top-p, and so does SGLang where a request has min-p. This matters only
                if both limits are on.
    Reference:  nucleus sampling, arXiv:1904.09751; the bias without the correction, huggingface/trl#6789.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if top_k < 0:
        raise ValueError(f"top_k must be >= 0 (0 is off), got {top_k}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be from 0 (off) to 1, got {min_p}")
    vocab, dtype = weight.shape[0], compute_dtype(hidden, weight, bias)
    out = hidden.new_zeros(hidden.shape[0], dtype=dtype)
    if top_p == 1 and min_p == 0 and not 0 < top_k < vocab:
        return out
    head = chunked.Head(weight, ops.finite(bias, dtype), temperature, softcap)
    rows = ops.present(mask, hidden.device)
    rows = torch.arange(hidden.shape[0], device=hidden.device) if rows is None else rows
    chunk_bytes = CPU_LOGITS_BYTES if hidden.device.type == "cpu" else LOGITS_BYTES
    for chunk in rows.split(max(1, chunk_bytes // (vocab * dtype.itemsize))):
        p = chunked.logits(hidden[chunk], head, dtype).softmax(1)
        out[chunk] = chunked.kept_mass(p, top_p, min(top_k or vocab, vocab), min_p).log().clamp_(max=0).to(dtype)
    return out
