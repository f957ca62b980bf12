"""Credit per turn of an agent: one number per step (turn) `[S]` in, one advantage per step `[S]` out.

The steps of all episodes are one axis. `step_seq_ids [S]` is the episode of each, an index of `group_ids [N]`; the
steps of an episode are in the order in which they happened, and episodes may be in any order. From and to tokens:

    lens = turn_lens(mask, cu_seqlens=cu_seqlens)                              # [S], of the sampled tokens
    step_rewards = sum_per_seq(token_rewards[mask], cu_seqlens=cumulative(lens))
    step_seq_ids = seq_ids(cu_seqlens, num_tokens=mask.numel())[turn_starts(mask, cu_seqlens=cu_seqlens)]
    advantages = mask.to(step_rewards).masked_scatter(mask, per_step.repeat_interleave(lens))

Bias. The gradient is a sum over turns, E[sum_k A_k d log pi(a_k | s_k)]. A baseline of *other* episodes does not depend
on a_k once s_k is known, so it adds nothing to that expectation, also where the policy ends episodes and the number
that have a k-th turn is random. What depends on that number is the scale. With b others alive at turn k (binomial: the
episodes are independent, each alive there with probability p), turn k's share of the gradient is multiplied by

    leave_one_out      P(b >= 1)          = 1 - (1 - p)^(n-1)              a step alone has advantage 0
    group_centered     E[b / (b + 1)]     = 1 - (1 - (1 - p)^n) / (n p)

for groups of n. At p = 1 these are 1 and (n-1)/n for every turn: one step size. At p < 1 late turns are learned more
slowly than early ones, and the whole is the gradient of no objective. A z-scored baseline is that of none anyway.
With gamma < 1 the return of turn k is discounted from k on: the factor gamma^k of the discounted objective is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    check_below,
    check_cu_seqlens,
    check_float,
    check_ids,
    check_log_probs,
    check_mask,
    check_same_shape,
    upcast,
)
from rlkit.advantages.groups import group_centered
from rlkit.advantages.traces import discounted_returns, n_step
from rlkit.segments import seq_positions

__all__ = ["gigpo", "step_returns", "trace_credit", "turn_lens", "turn_returns", "turn_starts"]


def turn_starts(mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"]) -> Bool[Tensor, "T"]:
    """True at the first token of each turn: a run of tokens of one sequence that the policy sampled.

    Two turns with no token of the environment between them are one.
    """
    check_mask(mask, tokens=mask)
    check_cu_seqlens(cu_seqlens, mask=mask)
    first = seq_positions(cu_seqlens, num_tokens=mask.shape[0]) == 0
    return mask & (first | ~mask.roll(1))


def turn_lens(mask: Bool[Tensor, "T"], *, cu_seqlens: Int[Tensor, "N1"]) -> Int[Tensor, "S"]:
    """Number of sampled tokens of each turn of `turn_starts`."""
    return turn_starts(mask, cu_seqlens=cu_seqlens).cumsum(0)[mask].unique_consecutive(return_counts=True)[1]


def step_returns(
    step_rewards: Float[Tensor, "S"], *, step_seq_ids: Int[Tensor, "S"], gamma: float = 1.0
) -> Float[Tensor, "S"]:
    """Discounted sum of the rewards from each step of an episode on: one gamma per turn, however long it is.

        G_k = r_k + gamma G_{k+1}          G after the last step: 0

    Limits:   gamma = 0 gives the rewards; with one token per turn it is `discounted_returns`.
    Reference: Feng et al. 2025, https://arxiv.org/abs/2505.10978, eq. 5
    """
    order, cu_steps = _by_episode(step_rewards, step_seq_ids)
    rewards = upcast(step_rewards)[order]
    mask = torch.ones_like(rewards, dtype=torch.bool)
    returns = discounted_returns(rewards, mask=mask, cu_seqlens=cu_steps, gamma=gamma)
    return torch.empty_like(returns).index_copy(0, order, returns)


def turn_returns(
    step_rewards: Float[Tensor, "S"],
    *,
    group_ids: Int[Tensor, "N"],
    step_seq_ids: Int[Tensor, "S"],
    gamma: float = 1.0,
    baseline: Callable[..., Tensor] = group_centered,
) -> Float[Tensor, "S"]:
    """Reward-to-go of each turn, compared with the k-th turns of the other episodes of the group.

        A_k = baseline({G_jk : j in the group has a k-th turn})          G: `step_returns`

    `baseline` is any `(rewards, *, group_ids)` function of this package. An episode that has ended is not compared
    at later turns; alone at a turn, an episode has advantage 0 there.

    Limits:   with one turn each this is `baseline` of the rewards. With gamma = 1, a reward at the last turn alone and
              episodes of equal length, it is the episode's advantage at every turn.
    Bias:     none that depends on the actions; a scale per turn where the policy ends episodes (see the module).
    Differs:  from a baseline over all turns of the group (one mean for early and late turns): its mean has returns of
              episode i's own later turns, which depend on the action.
    """
    returns = step_returns(step_rewards, step_seq_ids=step_seq_ids, gamma=gamma)
    check_ids(group_ids=group_ids)
    check_below(group_ids.shape[0], step_seq_ids=step_seq_ids)
    order, cu_steps = _by_episode(step_rewards, step_seq_ids)
    place = torch.empty_like(order).index_copy(0, order, seq_positions(cu_steps, num_tokens=order.numel()))
    return baseline(returns, group_ids=group_ids[step_seq_ids].long() * max(1, order.numel()) + place)


def gigpo(
    rewards: Float[Tensor, "N"],
    step_returns: Float[Tensor, "S"],
    *,
    group_ids: Int[Tensor, "N"],
    step_seq_ids: Int[Tensor, "S"],
    step_group_ids: Int[Tensor, "S"],
    step_weight: float = 1.0,
    baseline: Callable[..., Tensor] = group_centered,
) -> Float[Tensor, "S"]:
    """Two levels of groups for agents: episodes of one task, and steps that start in the same state (GiGPO).

        A_s = baseline(rewards)[episode of s] + step_weight * baseline(step_returns, by anchor state)[s]

    `step_seq_ids` is the index of each step's episode. Steps with equal `step_group_ids` start in the same state of the
    same task; ids must differ between tasks. `step_returns` are the returns of the steps (`rlkit.advantages.
    step_returns`). `baseline` is any `(rewards, *, group_ids)` function of this package.

    Limits:   with step_weight = 0, or if no state repeats, this is the episode's advantage.
    Bias:     the second term is biased where an episode comes to a state twice: the return of the one visit, which the
              action of the other changes, is then in its baseline. Without such a return to a state only the scale
              depends on the number of others that came to it, as for `turn_returns`.
    Reference: Feng et al. 2025, https://arxiv.org/abs/2505.10978, eq. 3-8
    """
    check_ids(step_returns, step_seq_ids=step_seq_ids, step_group_ids=step_group_ids)
    check_below(rewards.shape[0], step_seq_ids=step_seq_ids)
    episode = baseline(rewards, group_ids=group_ids)[step_seq_ids]
    return episode + step_weight * baseline(step_returns, group_ids=step_group_ids)


def trace_credit(
    outcome: Float[Tensor, "N"],
    answer_logp: Float[Tensor, "S"],
    *,
    step_seq_ids: Int[Tensor, "S"],
    weight: float = 0.2,
    n: int = 3,
    gamma: float = 0.8,
    gap: float = 0.1,
    terminal: float = 2.0,
) -> Float[Tensor, "S"]:
    """The episode's advantage, and how much closer the next n tool calls bring the gold answer (TRACE).

        d_k = gap - answer_logp_k          delta_k = log d_k - log d_{k+1}          k = 0 .. K, turns of an episode
        C_k = sum_{j<m} gamma^j delta_{k+j} / sum_{j<m} gamma^j                     m = min(n, K - k)
              + terminal gamma^{K-k} outcome                                        where K - k <= n
        A_k = outcome + weight C_k for k < K          A_K = outcome: the turn of the final answer

    `outcome` is the advantage of each episode, of a group baseline. `answer_logp` is the mean log-prob per token, at
    most 0, of the gold answer under a frozen reference that is shown the context before turn k (examples/turn_credit.py
    has that forward). log(d_0 / d_k) is a potential of the state: the delta of an episode's turns sum to its last one.

    Limits:   weight = 0, and an episode of one turn, give `outcome`; n = 1 and terminal = 0 give C = delta.
    Bias:     the credit is not an estimate of the reward's gradient: it also trains what makes the answer likely to the
              reference. Its scale is not that of the rewards, hence `weight`.
    Differs:  the paper divides the outcomes by the biased standard deviation of the group; here that is the caller's.
    Reference: Tao et al. 2026, https://arxiv.org/abs/2607.13988, algorithm 1, with its constants
    """
    if not gap > 0:
        raise ValueError(f"gap must be positive, got {gap}")
    check_float(outcome=outcome)
    check_log_probs(answer_logp=answer_logp)
    check_below(outcome.shape[0], step_seq_ids=step_seq_ids)
    order, cu_steps = _by_episode(answer_logp, step_seq_ids)
    distance = (gap - upcast(answer_logp)[order].clamp(max=0)).log()
    last = torch.zeros_like(order, dtype=torch.bool).index_fill(0, cu_steps[1:] - 1, True)
    nothing = torch.zeros_like(distance)
    where: dict[str, Any] = {"n": n, "mask": ~last, "cu_seqlens": cu_steps, "gamma": gamma}
    closer = n_step(distance - distance.roll(-1), nothing, **where)
    ends = upcast(outcome).to(distance)[step_seq_ids[order]]
    fill = n_step(nothing, nothing, bootstrap=ends[cu_steps[:-1].clamp(max=max(0, ends.numel() - 1))], **where)
    credit = closer / n_step(nothing + 1, nothing, **where).where(~last, 1.0) + terminal * fill
    return torch.empty_like(ends).index_copy(0, order, ends + weight * credit)


def _by_episode(steps: Tensor, step_seq_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The order of the steps by episode, and the bounds [S+1] of the episodes in it, then of empty ones."""
    check_float(steps=steps)
    check_ids(steps, step_seq_ids=step_seq_ids)
    check_same_shape(steps=steps, step_seq_ids=step_seq_ids)
    order = torch.argsort(step_seq_ids, stable=True)
    ids = step_seq_ids[order]
    rank = torch.cat([ids.new_zeros(min(1, ids.numel())), (ids[1:] != ids[:-1]).cumsum(0)])
    return order, torch.searchsorted(rank, torch.arange(ids.numel() + 1, device=ids.device))
