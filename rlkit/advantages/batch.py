"""Advantages that need statistics of the whole batch: whitening, REINFORCE++, multiple rewards.

The batch is the data of one optimizer step over all ranks. Rollout metadata is replicated on every rank before the
split, so no collective is needed. Computed on a shard, these functions give a different estimator.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    check_cu_seqlens,
    check_float,
    check_mask,
    check_not_negative,
    masked,
    upcast,
)
from rlkit.advantages.groups import group_centered, group_zscore
from rlkit.advantages.traces import discounted_returns
from rlkit.segments import broadcast_to_tokens

__all__ = ["gdpo", "normalize_then_sum", "reinforce_pp", "reinforce_pp_baseline", "whiten"]


def whiten(
    advantages: Float[Tensor, "*shape"], *, mask: Bool[Tensor, "*shape"] | None = None, eps: float = 1e-6
) -> Float[Tensor, "*shape"]:
    """Shift and scale to mean 0 and standard deviation 1 over all unmasked entries of the batch.

        (x - mean) / (std + eps)          std unbiased; 0 where the mask is False and where all entries are equal

    Limits:   invariant to a shift and (eps -> 0) to a positive scale; for rewards [N] equal to `group_zscore` with one
              group.
    Differs:  from verl (`masked_whiten`): (x - mean) / sqrt(var + 1e-8), and a single entry raises.
    Reference: Andrychowicz et al. 2020, https://arxiv.org/abs/2006.05990
    """
    check_float(advantages=advantages)
    check_mask(mask, advantages=advantages)
    check_not_negative(eps=eps)
    x = masked(upcast(advantages), mask)
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    count = mask.sum()
    # Subtract one entry first: equal entries then become exact zeros, however their mean rounds.
    if x.numel():
        first = mask.flatten().int().argmax().reshape(1)
        x = masked(x - x.flatten().index_select(0, first), mask)
    centered = masked(x - x.sum() / count.clamp(min=1), mask)
    var = centered.square().sum() / (count - 1).clamp(min=1)
    std = torch.where(var == 0, torch.ones_like(var), var).sqrt()
    return masked(torch.where(var == 0, torch.zeros_like(centered), centered / (std + eps)), mask)


def reinforce_pp(
    rewards: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    gamma: float | Float[Tensor, "T"] = 1.0,
    eps: float = 1e-6,
) -> Float[Tensor, "T"]:
    """Whitened reward-to-go of each action token (REINFORCE++ without a baseline).

        A = whiten(G)          G_t = r_t + gamma G'          (`discounted_returns`)

    `rewards` are per token and include the KL penalty (`rlkit.losses.kl_in_reward`): the paper's
    r_t = [t is last] R - kl_coef (log pi - log pi_ref).

    Limits:   without KL and at gamma = 1, every token of a sequence gets the sequence's reward, whitened over *tokens*.
    Differs:  from slime and miles: masked gaps are not discounted (mask [1, 0, 0, 1], kl 1, gamma .9: -1.9 here, -1.729
              there, -3.439 where the gap leaks).
    Reference: Hu et al. 2025, https://arxiv.org/abs/2501.03262
    """
    return whiten(discounted_returns(rewards, mask=mask, cu_seqlens=cu_seqlens, gamma=gamma), mask=mask, eps=eps)


def reinforce_pp_baseline(
    rewards: Float[Tensor, "N"],
    *,
    group_ids: Int[Tensor, "N"],
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    eps: float = 1e-6,
) -> Float[Tensor, "T"]:
    """Group-centred rewards, broadcast to tokens and whitened over the batch's tokens (REINFORCE++-baseline).

        A_t = whiten(r_i - mean(r))          for each action token t of sequence i

    Centring is per group and scaling per batch, so a group whose rewards hardly vary is not amplified. The paper puts
    the KL into the loss (k2). For the KL in the token rewards, as slime can, use `reinforce_pp` on centred rewards.

    Limits:   a batch in which every group has equal rewards gets 0. A singleton enters the whitening with 0.
    Differs:  from verl (`reinforce_plus_plus_baseline`): a singleton enters the whitening with its raw reward.
    Reference: Hu et al. 2025, https://arxiv.org/abs/2501.03262
    """
    centered = group_centered(rewards, group_ids=group_ids)
    check_mask(mask, values=mask)
    check_cu_seqlens(cu_seqlens, mask=mask)
    return whiten(broadcast_to_tokens(centered, cu_seqlens=cu_seqlens, num_tokens=mask.shape[0]), mask=mask, eps=eps)


def normalize_then_sum(
    rewards: Float[Tensor, "N K"],
    *,
    group_ids: Int[Tensor, "N"],
    weights: Float[Tensor, "K"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "N"]:
    """Z-score each of K rewards inside its group, then take their weighted sum.

        A_i = sum_k w_k group_zscore(r_k)_i          w_k defaults to 1

    A reward with a large variance does not dominate the others, and answers whose reward vectors differ but have the
    same sum get different advantages.

    Limits:   K = 1 is `group_zscore`; invariant to a shift and (eps -> 0) a positive scale of each reward.
    Differs:  from TRL (`multi_objective_aggregation="normalize_then_sum"`): NaN does not mean "does not apply", and the
              division by the batch's std that follows there is `gdpo`.
    Reference: Liu et al. 2026 (GDPO), https://arxiv.org/abs/2601.05242
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [N, K], one column per reward, got {list(rewards.shape)}")
    columns = [group_zscore(column, group_ids=group_ids, eps=eps) for column in rewards.unbind(1)]
    scores = torch.stack(columns, 1) if columns else upcast(rewards)
    if weights is None:
        return scores.sum(1)
    if weights.shape != (rewards.shape[1],):
        raise ValueError(f"weights must have one entry per reward, [{rewards.shape[1]}], got {list(weights.shape)}")
    return scores @ weights.to(scores.dtype)


def gdpo(
    rewards: Float[Tensor, "N K"],
    *,
    group_ids: Int[Tensor, "N"],
    weights: Float[Tensor, "K"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "N"]:
    """Z-score each of K rewards inside its group, then whiten their weighted sum over the batch (GDPO).

        A = whiten(normalize_then_sum(rewards))

    Limits:   K = 1 is whitened `group_zscore`; the scale of the advantages does not grow with K.
    Differs:  from verl (`gdpo`): it whitens over tokens, so long answers weigh more.
    Reference: Liu et al. 2026, https://arxiv.org/abs/2601.05242
    """
    return whiten(normalize_then_sum(rewards, group_ids=group_ids, weights=weights, eps=eps), eps=eps)
