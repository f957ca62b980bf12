"""Loss aggregation as a weight vector: `loss = (weights * token_loss).sum()`.

Compute the weights over the batch of one optimizer step (all ranks, all micro-batches) and split them with it: the
losses of any split then add up exactly. A process that sees only its share of the batch must pass the global count. The
count of the local mask is the default in a single process only: with several `torch.distributed` ranks a missing count
raises. A single process that computes weights per micro-batch, instead of once per step, must pass the count too; this
cannot be detected.

Weights have torch's default dtype (at least fp32), are 0 where the mask is False, and carry no gradient. Sequences,
prompts and sources without a trainable token are not counted; if nothing is trainable, all weights are 0.

The sum of the weights is 1 for `token_mean`, `seq_mean` and `prompt_mean`. With DDP or FSDP, which average gradients
over ranks, multiply the loss by the number of data-parallel ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    check_below,
    check_float,
    check_ids,
    check_mask,
    check_not_negative,
    check_same_shape,
    readable,
)
from rlkit.losses._inputs import check_alone, check_one_number, check_positive
from rlkit.segments import broadcast_to_tokens, group_sum, seq_count

__all__ = ["constant_length", "per_source_mean", "prompt_mean", "seq_mean", "seq_mean_token_sum", "token_mean"]

Count = int | Int[Tensor, ""]
_FIX = "count over the whole step"


def token_mean(mask: Bool[Tensor, "*shape"], *, num_tokens: Count | None = None) -> Float[Tensor, "*shape"]:
    """Mean over all trainable tokens of the batch.

        w_t = m_t / num_tokens

    `num_tokens`: trainable tokens of the whole optimizer step; optional in a single process (see the module).
    Differs: TRL `bnpo` divides by the count of the micro-batch, so the result depends on how the batch is split.
    Reference: arXiv:2503.14476, section 3.3.
    """
    weights = _as_float(mask)
    return weights / _count("num_tokens", num_tokens, mask)


def seq_mean(
    mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], num_seqs: Count | None = None
) -> Float[Tensor, "T"]:
    """Mean over each sequence's tokens, then over sequences: long and short sequences have equal weight.

        w_t = m_t / (tokens of t's sequence * num_seqs)

    `num_seqs`: sequences of the whole optimizer step that have a trainable token. An episode in k pieces counts k
    times; `prompt_mean(mask, group_ids=batch.episode_ids, ...)` counts it once.
    Differs: TRL `grpo` and SkyRL `sequence_mean` also count empty sequences.
    Reference: arXiv:2402.03300, equation 3.
    """
    lens = seq_count(mask, cu_seqlens=cu_seqlens)
    per_seq = 1 / (lens.clamp(min=1).double() * _count("num_seqs", num_seqs, lens > 0))
    return _token_weights(per_seq, mask, cu_seqlens)


def seq_mean_token_sum(
    mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], num_seqs: Count | None = None
) -> Float[Tensor, "T"]:
    """Sum over each sequence's tokens, mean over sequences: the unbiased policy gradient of the expected return.

    w_t = m_t / num_seqs

    """
    lens = seq_count(mask, cu_seqlens=cu_seqlens)
    return _as_float(mask) / _count("num_seqs", num_seqs, lens > 0)


def constant_length(
    mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], max_length: int, num_seqs: Count | None = None
) -> Float[Tensor, "T"]:
    """Dr. GRPO: `seq_mean_token_sum` divided by a constant, the generation limit; no bias towards any length.

        w_t = m_t / (max_length * num_seqs)

    Errors: ValueError if a sequence on the CPU has more than `max_length` trainable tokens.
    Differs: verl `seq-mean-token-sum-norm` divides by the padded width unless `loss_scale_factor` is set.
    Reference: arXiv:2503.20783, appendix.
    """
    check_positive(max_length=max_length)
    lens = seq_count(mask, cu_seqlens=cu_seqlens)
    if readable(lens) and bool((lens > max_length).any()):
        raise ValueError(f"max_length is {max_length}, and a sequence has {int(lens.max())} trainable tokens: raise it")
    return seq_mean_token_sum(mask, cu_seqlens=cu_seqlens, num_seqs=num_seqs) / max_length


def prompt_mean(
    mask: Bool[Tensor, "T"],
    *,
    group_ids: Int[Tensor, "N"],
    cu_seqlens: Int[Tensor, "N1"],
    num_groups: Count | None = None,
    group_tokens: Int[Tensor, "N"] | None = None,
) -> Float[Tensor, "T"]:
    """Mean over all tokens of a prompt's samples, then over prompts.

        w_t = m_t / (tokens of t's group * num_groups)

    `num_groups`: groups of the whole step that have a trainable token. `group_tokens`: for each sequence, the trainable
    tokens of its whole group; needed only if groups are split between processes.
    Differs: SkyRL `prompt_mean` also counts empty prompts.
    Reference: SkyRL `apply_loss_reduction_to_advantages_minibatch`; slime PR#2090.
    """
    lens = seq_count(mask, cu_seqlens=cu_seqlens)
    check_ids(lens, group_ids=group_ids)
    if num_groups is None:
        check_alone("num_groups")
    total = group_sum(lens.double(), group_ids=group_ids) if group_tokens is None else group_tokens.double()
    seqs_in_group = group_sum((lens > 0).double(), group_ids=group_ids).clamp(min=1)
    here = ((lens > 0) / seqs_in_group).sum().round()
    groups = here if num_groups is None else _of_step("num_groups", num_groups, here)
    per_seq = 1 / (total.clamp(min=1) * _at_least_one("num_groups", groups))
    return _token_weights(per_seq, mask, cu_seqlens)


def per_source_mean(
    mask: Bool[Tensor, "T"],
    *,
    source_ids: Int[Tensor, "N"],
    source_weights: Float[Tensor, "S"],
    cu_seqlens: Int[Tensor, "N1"],
    num_tokens: Int[Tensor, "S"] | None = None,
) -> Float[Tensor, "T"]:
    """Token mean per data source, mixed with given weights: a source's share is independent of its number of tokens.

        w_t = m_t source_weights[s] / num_tokens[s]              s = source of t's sequence

    `num_tokens`: trainable tokens of each source over the whole step. An absent source contributes 0; the others are
    not scaled up.
    Limits: one source of weight 1 is `token_mean`.
    """
    lens = seq_count(mask, cu_seqlens=cu_seqlens)
    check_ids(lens, source_ids=source_ids)
    check_float(source_weights=source_weights)
    if source_weights.ndim != 1:
        raise ValueError(f"source_weights must have shape [S], one weight per source, got {list(source_weights.shape)}")
    check_below(source_weights.shape[0], source_ids=source_ids)
    check_same_shape(source_weights=source_weights, num_tokens=num_tokens)
    if num_tokens is None:
        check_alone("num_tokens")
        total = group_sum(lens.double(), group_ids=source_ids)
    else:
        total = num_tokens.double()[source_ids]
        if readable(total) and bool((fewer := total < group_sum(lens.double(), group_ids=source_ids)).any()):
            source = int(source_ids[fewer][0])
            raise ValueError(
                f"num_tokens[{source}] is {int(num_tokens[source])}, fewer than this mask alone has: {_FIX}"
            )
    per_seq = source_weights.detach().double()[source_ids] / total.clamp(min=1)
    return _token_weights(per_seq, mask, cu_seqlens)


def _count(name: str, count: Count | None, counted: Tensor) -> Count | Tensor:
    """The given count, or in a single process the number of True entries; at least 1."""
    if count is None:
        check_alone(name)
        count = counted.sum()
    return _at_least_one(name, _of_step(name, count, counted.sum()))


def _of_step(name: str, count: Count | Tensor, here: Tensor) -> Count | Tensor:
    """The count of the whole step; ValueError if it is smaller than that of this mask alone.

    Of sequences only if it is 0: pieces of one episode may be counted once.
    """
    check_one_number(**{name: count})
    check_not_negative(**{name: count})
    readable_now = not isinstance(count, Tensor) or readable(count)
    if readable_now and readable(here) and bool(count < (here.clamp(max=1) if name == "num_seqs" else here)):
        raise ValueError(f"{name} is {int(count)}, and this mask alone has {int(here)}: {_FIX}")
    return count


def _at_least_one(name: str, count: Count | Tensor) -> Count | Tensor:
    check_one_number(**{name: count})
    check_not_negative(**{name: count})
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def _token_weights(per_seq: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """One weight per sequence as one per token, 0 where the mask is False."""
    weights = broadcast_to_tokens(per_seq, cu_seqlens=cu_seqlens, num_tokens=mask.shape[0])
    return _as_float(mask) * weights.to(_dtype())


def _as_float(mask: Tensor) -> Tensor:
    check_mask(mask, tokens=mask)
    return mask.to(_dtype())


def _dtype() -> torch.dtype:
    return torch.promote_types(torch.get_default_dtype(), torch.float32)
