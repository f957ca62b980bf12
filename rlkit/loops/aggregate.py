"""What each token of an optimizer step weighs, from the step's batch: what `aggregate=` of the GRPO loops takes.

Every rank holds the whole batch before it is split, so the counts are those of the step. An episode that came in pieces
counts once (see `rlkit.segments`). An episode or prompt without a trainable token is not counted.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from rlkit.losses import constant_length, prompt_mean, token_mean
from rlkit.segments import seq_count
from rlkit.types import Batch


def per_token(batch: Batch) -> Float[Tensor, "T"]:
    """All tokens alike: `token_mean` (DAPO)."""
    return token_mean(batch.mask, num_tokens=int(batch.mask.sum()))


def per_episode(batch: Batch) -> Float[Tensor, "T"]:
    """All episodes alike, and the tokens of one alike: `seq_mean` where an episode is a sequence (GRPO's paper)."""
    return _mean_of(batch, batch.episode_ids)


def per_prompt(batch: Batch) -> Float[Tensor, "T"]:
    """All prompts alike, and the tokens of all samples of one alike: `prompt_mean`."""
    return _mean_of(batch, batch.group_ids)


def per_length(batch: Batch, *, max_length: int) -> Float[Tensor, "T"]:
    """All tokens of an episode add up, over a constant: `constant_length`, so that no length is favoured (Dr. GRPO)."""
    num_seqs = _count(batch, batch.episode_ids)
    return constant_length(batch.mask, cu_seqlens=batch.cu_seqlens, max_length=max_length, num_seqs=num_seqs)


def _mean_of(batch: Batch, ids: Int[Tensor, "N"]) -> Tensor:
    return prompt_mean(batch.mask, group_ids=ids, cu_seqlens=batch.cu_seqlens, num_groups=_count(batch, ids))


def _count(batch: Batch, ids: Int[Tensor, "N"]) -> int:
    """How many different ids have a trainable token."""
    return ids[seq_count(batch.mask, cu_seqlens=batch.cu_seqlens) > 0].unique().numel()
