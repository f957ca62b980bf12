"""A baseline per token position, from the group's other sequences at the same position."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_ids, masked
from rlkit.advantages._recurrence import end_values, prepared, scan
from rlkit.kernels.linear_scan import linear_scan
from rlkit.segments import cumulative, seq_ids


def optimal_token_baseline(
    rewards: Float[Tensor, "T"],
    logp: Float[Tensor, "T"],
    sum_pi_squared: Float[Tensor, "T"],
    *,
    mask: Bool[Tensor, "T"],
    cu_seqlens: Int[Tensor, "N1"],
    group_ids: Int[Tensor, "N"],
    is_weights: Float[Tensor, "T"] | None = None,
) -> Float[Tensor, "T"]:
    """Return minus the variance-optimal baseline of the group at this action (OTB).

        s_t = 1 - 2 pi_t + sum_v pi(v)^2           squared norm of d log pi_t / d logits, pi_t = exp(logp_t)
        W_t = s_1 w_1^2 + ... + s_t w_t^2          over the actions so far; w: `is_weights`, 1 where not given
        B_t = sum_j G_jt W_jt / sum_j W_jt         over the sequences j of the group that have a t-th action
        A_t = G_t - B_t                            G: reward-to-go (gamma = 1)

    t counts actions, so tool output does not shift the comparison. `sum_pi_squared` is sum over the vocabulary of the
    squared probabilities of the distribution that gave `logp`.

    Limits:   equal W (e.g. the same probabilities), or W = 0 throughout, gives the group's mean return at each t; for
              a terminal reward and equal lengths that is `group_centered`. Where one sequence alone is that long, and
              for a singleton group, A = 0.
    Differs:  from verl `optimal_token_baseline`: it compares by position, gaps counted, and its singleton keeps the
              return; from `tir_optimal_token_baseline` (actions counted, as here): there the tail of the longest
              sequence keeps the return (`handle_zero_tail`).
    Reference: verl/trainer/ppo/core_algos.py; https://arxiv.org/abs/2602.07078
    """
    given = {"rewards": rewards, "logp": logp, "sum_pi_squared": sum_pi_squared}
    if is_weights is not None:
        given["is_weights"] = is_weights
    rewards, logp, sum_pi_squared, *rest = prepared(mask, cu_seqlens, **given)
    check_ids(cu_seqlens[1:], group_ids=group_ids)
    if rewards.numel() == 0:
        return rewards
    one = torch.ones_like(rewards)
    returns = scan(one, rewards, mask=mask, cu_seqlens=cu_seqlens, end=end_values(None, cu_seqlens, rewards))
    energy = 1 - 2 * logp.exp() + sum_pi_squared
    if rest:
        energy = energy * rest[0].square()
    path = masked(linear_scan(one, masked(energy, mask), cu_seqlens=cu_seqlens, reverse=False), mask)

    seqs = seq_ids(cu_seqlens, num_tokens=mask.shape[0])
    count = cumulative(mask.long())
    action = count[1:] - count[cu_seqlens[:-1]][seqs]
    keys = group_ids[seqs].long() * count.numel() + action
    return masked(_minus_weighted_mean(returns, path, keys, mask), mask)


def _minus_weighted_mean(x: Tensor, weights: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """`x` minus its weighted mean over the (masked-in) tokens of one key; the plain mean where all weights are 0."""
    order = torch.argsort(keys, stable=True)
    keys, x, weights, mask = keys[order], x[order], weights[order], mask[order]
    new = torch.cat([keys.new_ones(1, dtype=torch.bool), keys[1:] != keys[:-1]])
    run = new.cumsum(0) - 1
    places = torch.arange(keys.numel() + 1, device=keys.device)
    bounds = torch.searchsorted(run, places)
    first = torch.where(new, places[:-1], 0).cummax(0).values

    def run_sum(y: Tensor) -> Tensor:
        return torch.segment_reduce(y, "sum", offsets=bounds, initial=0, unsafe=True)[run]

    weights = torch.where(run_sum(weights) <= 0, mask.to(x.dtype), weights)
    x = masked(x - x[first], mask)  # equal values become exact zeros
    total = run_sum(weights)
    mean = run_sum(weights * x) / torch.where(total <= 0, 1, total)
    return torch.empty_like(x).index_copy(0, order, x - mean)
