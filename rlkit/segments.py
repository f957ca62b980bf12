"""Sums, means and broadcasts over packed sequences, groups and episodes: no Python loops, no atomics.

Episodes in pieces. A chat template may rewrite history between two turns (drop the reasoning of past turns, reformat a
tool call). The turn that follows was then sampled from another context than the tokens so far, and the episode becomes
several sequences: `Trajectory.continues`, `Batch.episode_ids`. They share one reward and stay in one group.

    baselines         `episode_advantages`: one reward per episode, its advantage for each of its pieces
    token_mean        a token is a token: the pieces weigh as the sampled tokens they hold, like a single sequence
    seq_mean, ...     count *sequences*: an episode of k pieces weighs k times. To count episodes, give their ids to
                      `prompt_mean(mask, group_ids=batch.episode_ids, ...)`: mean over an episode's tokens, then over
                      episodes, which is `seq_mean` where no episode has further pieces
    sequence ratios   (GSPO) are those of a piece, which is what was sampled from one context
    traces            (GAE, returns) end at the end of a piece, each with the episode's reward: exact for gamma = 1 and
                      lam = 1, else the turns of later pieces are not discounted
    batch statistics  of rewards (`whiten`, `reinforce_pp`) count pieces unless given `rewards[is_first_piece(...)]`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import (
    check_bounds,
    check_cu_seqlens,
    check_float,
    check_ids,
    check_mask,
    check_same_device,
    masked,
    upcast,
)
from rlkit.types import Batch


def seq_lens(cu_seqlens: Int[Tensor, "N1"]) -> Int[Tensor, "N"]:
    """Number of tokens of each sequence: `cu_seqlens[i+1] - cu_seqlens[i]`."""
    return cu_seqlens.diff()


def cumulative(lens: Int[Tensor, "N"]) -> Int[Tensor, "N1"]:
    """`cu_seqlens` of given lengths: 0, l_1, l_1 + l_2, ... The inverse of `seq_lens`."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=lens.dtype)])


def seq_ids(cu_seqlens: Int[Tensor, "N1"], *, num_tokens: int) -> Int[Tensor, "T"]:
    """For each token the index of its sequence, e.g. cu_seqlens [0, 2, 2, 3] gives [0, 0, 2]."""
    check_bounds(cu_seqlens, num_tokens)
    num_seqs = cu_seqlens.numel() - 1
    return torch.arange(num_seqs, device=cu_seqlens.device).repeat_interleave(
        seq_lens(cu_seqlens), output_size=num_tokens
    )


def seq_positions(cu_seqlens: Int[Tensor, "N1"], *, num_tokens: int) -> Int[Tensor, "T"]:
    """For each token its index inside its sequence, e.g. cu_seqlens [0, 2, 2, 3] gives [0, 1, 0]."""
    ids = seq_ids(cu_seqlens, num_tokens=num_tokens)
    return torch.arange(num_tokens, device=cu_seqlens.device) - cu_seqlens[ids]


def broadcast_to_tokens(
    x: Float[Tensor, "N"], *, cu_seqlens: Int[Tensor, "N1"], num_tokens: int | None = None
) -> Float[Tensor, "T"]:
    """One value per sequence, repeated for each of its tokens.

    `num_tokens` is `cu_seqlens[-1]`; give it where reading that value would cost a device sync.
    """
    check_bounds(cu_seqlens, num_tokens)
    if x.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(f"x must have one entry per sequence, [{cu_seqlens.numel() - 1}], got {list(x.shape)}")
    check_same_device(cu_seqlens=cu_seqlens, x=x)
    return x.repeat_interleave(seq_lens(cu_seqlens), output_size=num_tokens)


def seq_sum(
    x: Float[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], mask: Bool[Tensor, "T"] | None = None
) -> Float[Tensor, "N"]:
    """Sum over each sequence's (masked-in) tokens; 0 for an empty one."""
    check_float(x=x)
    check_mask(mask, x=x)
    check_cu_seqlens(cu_seqlens, x=x)
    return torch.segment_reduce(masked(upcast(x), mask), "sum", offsets=cu_seqlens, initial=0, unsafe=True)


def seq_count(mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"]) -> Int[Tensor, "N"]:
    """Number of True tokens of each sequence (int64)."""
    check_mask(mask, tokens=mask)
    check_cu_seqlens(cu_seqlens, mask=mask)
    total = cumulative(mask.long())
    return total[cu_seqlens[1:]] - total[cu_seqlens[:-1]]


def seq_mean(
    x: Float[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], mask: Bool[Tensor, "T"] | None = None
) -> Float[Tensor, "N"]:
    """Mean over each sequence's (masked-in) tokens; 0 where there are none."""
    total = seq_sum(x, cu_seqlens=cu_seqlens, mask=mask)
    count = seq_lens(cu_seqlens) if mask is None else seq_count(mask, cu_seqlens=cu_seqlens)
    return total / count.clamp(min=1)


def group_sum(x: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Sum over each member's group, given back to every member. Groups may be ragged and in any order."""
    check_float(x=x)
    check_ids(x, group_ids=group_ids)
    return _by_group(upcast(x), group_ids)


def group_count(group_ids: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Size of each member's group (int64)."""
    check_ids(group_ids=group_ids)
    return _by_group(torch.ones(group_ids.shape, dtype=torch.float64, device=group_ids.device), group_ids).long()


def group_mean(x: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Mean over each member's group, given back to every member."""
    return group_sum(x, group_ids=group_ids) / group_count(group_ids)


def _by_group(x: Tensor, group_ids: Tensor) -> Tensor:
    """Segment sum over runs of equal ids after a stable sort, given back to every member: static shapes, no atomics."""
    order = torch.argsort(group_ids, stable=True)
    ids = group_ids[order]
    rank = torch.cat([ids.new_zeros(min(1, ids.numel())), (ids[1:] != ids[:-1]).cumsum(0)])
    bounds = torch.searchsorted(rank, torch.arange(x.numel() + 1, device=x.device))
    sums = torch.segment_reduce(x[order], "sum", offsets=bounds, initial=0, unsafe=True)
    return torch.empty_like(x).index_copy(0, order, sums[rank])


def is_first_piece(episode_ids: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """True at the first sequence of each episode: `rewards[is_first_piece(episode_ids)]` has one entry per episode.

    Episodes keep the order of their first pieces. All True where every sequence is an episode of its own.
    """
    check_ids(episode_ids=episode_ids)
    return first_of_group(episode_ids) == torch.arange(episode_ids.numel(), device=episode_ids.device)


def episode_advantages(baseline: Callable[..., Float[Tensor, "E"]], batch: Batch) -> Float[Tensor, "N"]:
    """`baseline(rewards, group_ids=group_ids)` over episodes, handed to all pieces of each.

        A_i = baseline({r_e, g_e : e an episode})[episode of i]

    `baseline` is any function of `rlkit.advantages.groups`, or one bound with `partial`; what it takes besides must
    have one entry per episode, in the order of `is_first_piece`. For `opo`, an episode's length is that of all pieces:

        lengths = group_sum(seq_count(batch.mask, cu_seqlens=batch.cu_seqlens).float(), group_ids=batch.episode_ids)
        episode_advantages(partial(opo, lengths=lengths[is_first_piece(batch.episode_ids)]), batch)

    Limits:   where no episode has further pieces this is `baseline(batch.rewards, group_ids=batch.group_ids)`, bit for
              bit. An episode's advantage does not depend on the number of its pieces, or of others'.
    Differs:  from frameworks that treat each rewritten context as a sample of the group: an episode of many pieces then
              counts many times in its own baseline, and `leave_one_out` compares it with itself.
    """
    first = is_first_piece(batch.episode_ids)
    per_episode = baseline(batch.rewards[first], group_ids=batch.group_ids[first])
    shape = getattr(per_episode, "shape", None)
    if shape != (num := int(first.sum()),):
        found = type(per_episode).__name__ if shape is None else f"shape {list(shape)}"
        raise ValueError(f"baseline must return one advantage per episode, a tensor [{num}], got {found}")
    return per_episode[(first.cumsum(0) - 1)[first_of_group(batch.episode_ids)]]


def first_of_group(group_ids: Tensor) -> Tensor:
    """For each member the index of its group's first member."""
    order = torch.argsort(group_ids, stable=True)
    return order[torch.searchsorted(group_ids[order], group_ids)]
