"""Episodes that came in pieces: what counts an episode once, and what counts its pieces.

A chat template may rewrite history between two turns (drop the reasoning of past turns, reformat a tool call). The turn
that follows was then sampled from another context than the one the tokens so far make up, and the episode becomes
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

from rlkit._tensors import check_ids
from rlkit.advantages.outcome import first_of_group
from rlkit.types import Batch


def is_first_piece(episode_ids: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """True at the first sequence of each episode: `rewards[is_first_piece(episode_ids)]` has one entry per episode.

    Episodes keep the order of their first pieces. All True where every sequence is an episode of its own.
    """
    check_ids(episode_ids=episode_ids)
    return first_of_group(episode_ids) == torch.arange(episode_ids.numel(), device=episode_ids.device)


def episode_advantages(baseline: Callable[..., Float[Tensor, "E"]], batch: Batch) -> Float[Tensor, "N"]:
    """`baseline(rewards, group_ids=group_ids)` over episodes, handed to all pieces of each.

        A_i = baseline({r_e, g_e : e an episode})[episode of i]

    `baseline` is any function of `rlkit.advantages.outcome`, or one bound with `partial`; what it takes besides must
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
