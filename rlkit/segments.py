"""Sums, means and broadcasts over packed sequences, groups and episodes: no Python loops, no atomics
(but under torch.func).

Episodes in several pieces. A chat template may rewrite history between two turns (drop the reasoning of past turns,
reformat a tool call). The next turn is then sampled from a context that does not extend the tokens so far, and the
episode becomes several sequences, its pieces (`Trajectory.continues`, `Batch.episode_ids`). They share one reward and
one group.

    baselines         `episode_advantages`: one reward per episode; all its pieces get the same advantage
    token_mean        counts tokens, so splitting an episode into pieces changes nothing
    mean_per_seq, ...     count *sequences*, so an episode of k pieces weighs k times. To count episodes, use
                      `prompt_mean(mask, group_ids=batch.episode_ids, ...)`: mean over an episode's tokens, then over
                      episodes; equal to `mean_per_seq` if every episode is one piece
    sequence ratios   (GSPO) are per piece, the unit that was sampled from one context
    traces            (GAE, returns) end at the end of a piece, with the episode's reward: exact for gamma = lam = 1;
                      otherwise the reward is not discounted over later pieces
    batch statistics  of rewards (`whiten`, `reinforce_pp`) count pieces unless given `rewards[is_first_piece(...)]`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    check_bounds,
    check_call,
    check_cu_seqlens,
    check_float,
    check_ids,
    check_mask,
    check_not_negative,
    check_same_device,
    check_tensor,
    masked,
    transformed,
    upcast,
)
from rlkit.types import Batch


def seq_lens(cu_seqlens: Int[Tensor, "N1"]) -> Int[Tensor, "N"]:
    """Number of tokens of each sequence: `cu_seqlens[i+1] - cu_seqlens[i]`."""
    check_bounds(cu_seqlens, None)
    return cu_seqlens.diff()


def cumulative(lens: Int[Tensor, "N"]) -> Int[Tensor, "N1"]:
    """`cu_seqlens` from lengths: 0, l_1, l_1 + l_2, ... The inverse of `seq_lens`."""
    check_tensor(lens=lens)
    check_not_negative(lens=lens)
    return torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=lens.dtype)])


def seq_ids(cu_seqlens: Int[Tensor, "N1"], *, num_tokens: int) -> Int[Tensor, "T"]:
    """The index of each token's sequence, e.g. cu_seqlens [0, 2, 2, 3] gives [0, 0, 2]."""
    check_bounds(cu_seqlens, num_tokens)
    num_seqs = cu_seqlens.numel() - 1
    return torch.arange(num_seqs, device=cu_seqlens.device).repeat_interleave(
        seq_lens(cu_seqlens), output_size=num_tokens
    )


def seq_positions(cu_seqlens: Int[Tensor, "N1"], *, num_tokens: int) -> Int[Tensor, "T"]:
    """The index of each token inside its sequence, e.g. cu_seqlens [0, 2, 2, 3] gives [0, 1, 0]."""
    ids = seq_ids(cu_seqlens, num_tokens=num_tokens)
    return torch.arange(num_tokens, device=cu_seqlens.device) - cu_seqlens[ids]


def broadcast_to_tokens(
    x: Float[Tensor, "N"], *, cu_seqlens: Int[Tensor, "N1"], num_tokens: int | None = None
) -> Float[Tensor, "T"]:
    """Repeat one value per sequence for each of its tokens.

    `num_tokens` is `cu_seqlens[-1]`; pass it to avoid the device sync of reading that value.
    """
    check_bounds(cu_seqlens, num_tokens)
    check_tensor(x=x)
    if x.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(f"x must have one entry per sequence, [{cu_seqlens.numel() - 1}], got {list(x.shape)}")
    check_same_device(cu_seqlens=cu_seqlens, x=x)
    return x.repeat_interleave(seq_lens(cu_seqlens), output_size=num_tokens)


def sum_per_seq(
    x: Float[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], mask: Bool[Tensor, "T"] | None = None
) -> Float[Tensor, "N"]:
    """Sum over each sequence's unmasked tokens; 0 for an empty sequence."""
    check_float(x=x)
    check_mask(mask, x=x)
    check_cu_seqlens(cu_seqlens, x=x)
    return sum_between(masked(upcast(x), mask), cu_seqlens)


def seq_count(mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"]) -> Int[Tensor, "N"]:
    """Number of True tokens of each sequence (int64)."""
    check_mask(mask, tokens=mask)
    check_cu_seqlens(cu_seqlens, mask=mask)
    total = cumulative(mask.long())
    return total[cu_seqlens[1:]] - total[cu_seqlens[:-1]]


def mean_per_seq(
    x: Float[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"], mask: Bool[Tensor, "T"] | None = None
) -> Float[Tensor, "N"]:
    """Mean over each sequence's unmasked tokens; 0 if there are none."""
    total = sum_per_seq(x, cu_seqlens=cu_seqlens, mask=mask)
    count = seq_lens(cu_seqlens) if mask is None else seq_count(mask, cu_seqlens=cu_seqlens)
    return total / count.clamp(min=1)


def group_sum(x: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Sum over each member's group, returned for every member. Groups may be ragged and in any order."""
    check_float(x=x)
    check_ids(x, group_ids=group_ids)
    return _by_group(upcast(x), group_ids)


def group_count(group_ids: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Size of each member's group (int64)."""
    check_ids(group_ids=group_ids)
    return _by_group(torch.ones(group_ids.shape, dtype=torch.float64, device=group_ids.device), group_ids).long()


def group_mean(x: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Mean over each member's group, returned for every member."""
    return group_sum(x, group_ids=group_ids) / group_count(group_ids)


def _by_group(x: Tensor, group_ids: Tensor) -> Tensor:
    """Segment sum over runs of equal ids after a stable sort: static shapes, no atomics."""
    order = torch.argsort(group_ids, stable=True)
    ids = group_ids[order]
    rank = torch.cat([ids.new_zeros(min(1, ids.numel())), (ids[1:] != ids[:-1]).cumsum(0)])
    bounds = torch.searchsorted(rank, torch.arange(x.numel() + 1, device=x.device))
    return torch.empty_like(x).index_copy(0, order, sum_between(x[order], bounds)[rank])


def sum_between(x: Float[Tensor, "T"], bounds: Int[Tensor, "N1"]) -> Float[Tensor, "N"]:
    """The sum of x from each bound to the next."""
    if transformed():  # torch.func has no rule for segment_reduce
        ids = torch.searchsorted(bounds[1:].contiguous(), torch.arange(len(x), device=x.device), right=True)
        return x.new_zeros(len(bounds) - 1).index_add(0, ids, x)
    return torch.segment_reduce(x, "sum", offsets=bounds, initial=0, unsafe=True)


def is_first_piece(episode_ids: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """True at the first sequence of each episode: `rewards[is_first_piece(episode_ids)]` has one entry per episode.

    Episodes keep the order of their first pieces. All True if every episode is one sequence.
    """
    check_ids(episode_ids=episode_ids)
    return first_of_group(episode_ids) == torch.arange(episode_ids.numel(), device=episode_ids.device)


def episode_advantages(baseline: Callable[..., Float[Tensor, "E"]], batch: Batch) -> Float[Tensor, "N"]:
    """`baseline(rewards, group_ids=group_ids)` over episodes; all pieces of an episode get its advantage.

        A_i = baseline({r_e, g_e : e an episode})[episode of i]

    With several roles (`Trajectory.role`) the episodes of a group are compared with those of the same role. `baseline`
    is any function of `rlkit.advantages.groups`, or one bound with `partial`; its other tensor arguments must have one
    entry per episode, in the order of `is_first_piece`. For `opo`, sum the length over the pieces:

        lengths = group_sum(seq_count(batch.mask, cu_seqlens=batch.cu_seqlens).float(), group_ids=batch.episode_ids)
        episode_advantages(partial(opo, lengths=lengths[is_first_piece(batch.episode_ids)]), batch)

    Limits:   if every episode is one piece this is `baseline(batch.rewards, group_ids=batch.group_ids)`, bit for bit.
              An episode's advantage does not depend on the number of pieces of any episode.
    Differs:  if each piece counted as a sample of the group, an episode of many pieces would count many times in its
              own baseline, and `leave_one_out` would compare it with itself.
    """
    check_call("baseline", baseline, "baseline(rewards, group_ids=group_ids)")
    first, ids = is_first_piece(batch.episode_ids), compared_ids(batch)
    per_episode = baseline(batch.rewards[first], group_ids=ids[first])
    shape = getattr(per_episode, "shape", None)
    if shape != (num := int(first.sum()),):
        returned = type(per_episode).__name__ if shape is None else f"shape {list(shape)}"
        raise ValueError(f"baseline must return one advantage per episode, a tensor [{num}], got {returned}")
    return per_episode[(first.cumsum(0) - 1)[first_of_group(batch.episode_ids)]]


def compared_ids(batch: Batch) -> Int[Tensor, "N"]:
    """Equal ids for sequences that are compared with each other: of one group and, with several roles, of one role."""
    if batch.roles is None:
        return batch.group_ids
    return (batch.group_ids * (batch.roles.max() + 1) + batch.roles).unique(return_inverse=True)[1]


def first_of_group(group_ids: Tensor) -> Tensor:
    """The index of the first member of each member's group."""
    order = torch.argsort(group_ids, stable=True)
    return order[torch.searchsorted(group_ids[order], group_ids)]
