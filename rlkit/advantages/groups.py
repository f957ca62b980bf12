"""Group baselines: one reward per sequence [N] in, one advantage per sequence [N] out.

Sequences with equal `group_ids` answer the same prompt. Groups may be ragged and in any order, and ids may have gaps.
Every function here gives advantage 0 to a group of one, and to a group whose rewards are all equal. The 0 is exact
(no rounding noise), so filters may test for `== 0`.

    b_i     baseline of sequence i          n      size of its group
    mean    over its group                  std    unbiased (ddof 1) over its group

Best of k (`max_at_k`, `pass_at_k`): the objective is E[max of k samples' rewards]; with 0/1 rewards this is pass@k.
Both average over the size-k subsets of a group of n in closed form: with the group's rewards sorted, the sample of rank
j (0 = worst) is the best of C(j, k-1) of the C(n, k) subsets. A group smaller than k gets advantage 0. Equal rewards
get equal advantages.

`optimal_token_baseline` has one baseline per token position, computed from all sequences of the group at that position.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import (
    check_count,
    check_float,
    check_ids,
    check_log_probs,
    check_not_negative,
    masked,
    readable,
    upcast,
)
from rlkit.advantages.traces import end_values, prepared, scan
from rlkit.kernels.linear_scan import linear_scan
from rlkit.segments import cumulative, first_of_group, group_count, group_mean, group_sum, seq_ids, sum_between

__all__ = [
    "gpg",
    "group_centered",
    "group_mean_batch_std",
    "group_zscore",
    "leave_one_out",
    "max_at_k",
    "max_rl",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
]
TURNED = (
    "max_rl divides by a group's mean reward, and the lowest is %g: in such a group the best answers are pushed down; "
    "use rewards of at least 0 (and no KL in them), or another baseline"
)


def group_centered(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward minus the group's mean (Dr. GRPO).

        A_i = r_i - mean(r)

    Limits:   invariant to a shift of a group's rewards; scales with them; sums to 0 in each group.
    Differs:  from verl (`norm_adv_by_std_in_grpo=False`): there a singleton keeps its raw reward.
    Reference: Liu et al. 2025, https://arxiv.org/abs/2503.20783
    """
    _check_rewards(rewards, group_ids)
    rewards = upcast(rewards)
    shifted = rewards - rewards[first_of_group(group_ids)]  # equal rewards become exact zeros before any rounding
    return shifted - group_mean(shifted, group_ids=group_ids)


def group_zscore(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], eps: float = 1e-6) -> Float[Tensor, "N"]:
    """Reward minus the group's mean, over the group's unbiased standard deviation (GRPO).

        A_i = (r_i - mean(r)) / (std(r) + eps)

    Limits:   invariant to a shift of a group's rewards, and to their scale for eps -> 0. The gradient at equal rewards
              is 0, not NaN.
    Differs:  from verl: there a singleton keeps its raw reward. From TRL: eps is 1e-4 there.
    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300
    """
    centered = group_centered(rewards, group_ids=group_ids)
    return _over_std(centered, group_sum(centered.square(), group_ids=group_ids), group_count(group_ids), eps)


def leave_one_out(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward minus the mean of the group's *other* members (RLOO).

        A_i = r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean(r)) n / (n - 1)

    The baseline does not depend on the sample itself, so the gradient estimate is unbiased.

    Limits:   n / (n - 1) times `group_centered`.
    Differs:  from verl `rloo`: there a singleton keeps its raw reward; verl `rloo_vectorized` gives 0, as here.
    Reference: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
    """
    centered, count = group_centered(rewards, group_ids=group_ids), group_count(group_ids)
    return centered * count / (count - 1).clamp(min=1)


def max_rl(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], eps: float = 1e-6) -> Float[Tensor, "N"]:
    """Reward minus the group's mean, over the mean (MaxRL).

        A_i = (r_i - mean(r)) / (mean(r) + eps)          0 where mean(r) = 0

    With 0/1 rewards a solved sample of a group with success rate p gets (1 - p) / p, so rare successes weigh most. On
    policy, with p the probability of success and n samples, the group's mean of A_i grad log pi_i has the expectation

        sum_{k=1..n-1} (1 - p)^(k-1) grad p          of grad log p = sum_{k=1,2,...} (1 - p)^(k-1) grad p

    that is the maximum-likelihood gradient up to order n - 1; groups of two give grad p, as `leave_one_out` does. (A of
    -1 in a group without success would add order n.) Meant for rewards >= 0: a group of negative mean has the opposite
    signs, so that its best samples are pushed down: a UserWarning on the CPU, and the loops report it once.

    Limits:   invariant to the scale of the rewards (eps -> 0); a group without success gets 0.
    Differs:  from SkyRL (`maxrl`): there a singleton keeps its raw reward.
    Reference: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710
    """
    centered = group_centered(rewards, group_ids=group_ids)
    mean = group_mean(rewards, group_ids=group_ids)
    check_not_negative(eps=eps)
    if readable(mean) and (mean < 0).any():
        warnings.warn(TURNED % float(mean.min()), stacklevel=2)
    ratio = centered / torch.where(mean == 0, torch.ones_like(mean), mean + eps)
    return torch.where(mean == 0, torch.zeros_like(mean), ratio)


def group_mean_batch_std(
    rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], eps: float = 1e-6
) -> Float[Tensor, "N"]:
    """Reward minus the group's mean, over the standard deviation of *all* rewards of the batch.

        A_i = (r_i - mean(r)) / (std_batch(r) + eps)          std unbiased

    All groups share one scale, so a very easy or very hard prompt, whose rewards hardly vary, is not amplified.

    Limits:   a positive multiple of `group_centered`; with one group it is `group_zscore`.
    Differs:  from TRL (`scale_rewards="batch"`): eps is 1e-4 there.
    Reference: Liu et al. 2025 (Lite PPO), https://arxiv.org/abs/2508.08221
    """
    centered = group_centered(rewards, group_ids=group_ids)
    rewards = upcast(rewards)
    shifted = rewards - rewards[:1]
    spread = shifted - shifted.mean()
    return _over_std(centered, spread.square().sum(), torch.tensor(rewards.numel(), device=rewards.device), eps)


def opo(rewards: Float[Tensor, "N"], *, lengths: Int[Tensor, "N"], group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward minus the length-weighted mean of the group (OPO).

        A_i = r_i - sum_j l_j r_j / sum_j l_j          l_j: number of action tokens of sequence j

    The minimum-variance baseline if the squared gradient norm of a sequence is proportional to its length.

    Limits:   equal lengths (also all 0) give `group_centered`; invariant to a shift of a group's rewards and to a scale
              of the lengths.
    Differs:  from verl `opo`: there a singleton keeps its raw reward.
    Reference: Hao et al. 2025, https://arxiv.org/abs/2505.23585
    """
    centered = group_centered(rewards, group_ids=group_ids)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must have the shape of rewards, {list(rewards.shape)}, got {list(lengths.shape)}")
    check_not_negative(lengths=lengths)
    weights = lengths.to(centered.dtype)
    total = group_sum(weights, group_ids=group_ids)
    baseline = group_sum(weights * centered, group_ids=group_ids) / torch.where(total > 0, total, 1)
    return centered - baseline


def gpg(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Centred rewards, scaled up to make up for samples without a learning signal (GPG).

        A_i = N / (N - M) (r_i - mean(r))          M: samples of groups whose rewards are all equal

    Prompts that are always or never solved then do not shrink the batch's gradient.

    Limits:   M = 0 gives `group_centered`; M = N gives 0.
    Differs:  from verl `gpg`: it divides by the number of nonzero *rewards* instead of N - M.
    Reference: Chu et al. 2025, https://arxiv.org/abs/2504.02546
    """
    centered = group_centered(rewards, group_ids=group_ids)
    varies = group_sum(centered.abs(), group_ids=group_ids) != 0
    return centered * centered.numel() / varies.sum().clamp(min=1)


def _check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    """One floating-point reward per sequence, and the id of its group."""
    check_float(rewards=rewards)
    if rewards.ndim != 1:
        fix = "rewards.flatten()"
        if rewards.ndim == 2 and rewards.shape[1] != 1:
            by_row = f"rewards.flatten() and group_ids=torch.arange({rewards.numel()}) // {rewards.shape[1]}"
            fix = f"{by_row} if a row is a group, rewards.sum(1) if it holds a sequence's token rewards"
        raise ValueError(f"rewards must have one entry per sequence, [N], got {list(rewards.shape)}; use {fix}")
    check_ids(rewards, group_ids=group_ids)


def _over_std(centered: Tensor, sum_squares: Tensor, count: Tensor, eps: float) -> Tensor:
    """`centered / (std + eps)` with the unbiased std; 0, also in the gradient, where the std is 0."""
    check_not_negative(eps=eps)
    var = sum_squares / (count - 1).clamp(min=1)
    std = torch.where(var == 0, torch.ones_like(var), var).sqrt()
    return torch.where(var == 0, torch.zeros_like(centered), centered / (std + eps))


def max_at_k(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], k: int) -> Float[Tensor, "N"]:
    """Unbiased estimator of the gradient of E[max of k rewards] (PKPO), with a leave-one-out baseline of size k - 1.

        A_i = n / C(n, k) sum_{I: |I| = k, i in I} (max_I r - max_{I \\\\ i} r)
            = n / C(n, k) sum_{j < i} C(j, k-2) (r_(i) - r_(j))          ranks in ascending order

    A sample gets, for each subset of which it is the best, its lead over the second best. The mean over the group of
    A_i grad log p_i has expectation grad E[max].

    Limits:   k = 1 is `leave_one_out` (a baseline of size 0 is undefined); k = n gives only the best sample a nonzero
              advantage: n times its lead over the second. Invariant to a shift of a group's rewards; scales with them.
    Differs:  from the paper: n times its s^(loo-1), because a loss averages over samples. verl `grpo_passk` is k = n,
              divided by n (and by the group's std).
    Reference: Walder & Karkhanis 2025, https://arxiv.org/abs/2505.15201, eq. 33; Tang et al. 2025,
               https://arxiv.org/abs/2503.19595 for k = n
    """
    check_count(k=k)
    if k == 1:
        return leave_one_out(rewards, group_ids=group_ids)
    g = _sorted_groups(rewards, group_ids)
    second = _share(g.rank, k - 2, g.size, k)
    lead = g.rewards * _sum_below(second, g) - _sum_below(second * g.rewards, g)
    return g.restore(g.size * lead, like=rewards)


def pass_at_k(
    rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], k: int, eps: float = 1e-6
) -> Float[Tensor, "N"]:
    """GRPO on subsets: each size-k subset is one sample, and its reward is the maximum (Pass@k training).

        A_i = (mean_{I: i in I} max_I r - mean_I max_I r) / (std_I max_I r + eps)          I: the subsets of size k

    For 0/1 rewards with n - c failures this is the published closed form

        R = 1 - C(n-c, k) / C(n, k)      std = sqrt(R (1 - R))
        A = (1 - R) / std  if solved,    A = (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / std  if not.

    The std is over all subsets (ddof 0), as in the paper. Rewards may be any real numbers.

    Limits:   k = 1 is `group_zscore` with the biased std; k = n (one subset) and k > n (none) give 0; invariant to a
              shift and (eps -> 0) a scale of the rewards.
    Reference: Chen et al. 2025, https://arxiv.org/abs/2508.10751, section 2.4
    """
    check_count(k=k)
    check_not_negative(eps=eps)
    g = _sorted_groups(rewards, group_ids)
    # The best of a subset has rank >= k - 1. Subtract the reward of that rank: equal maxima then give an exact zero.
    least = torch.arange(g.rank.numel(), device=g.rank.device) - g.rank + (g.size - 1).clamp(max=k - 1)
    r = g.rewards - g.rewards[least]
    best = _share(g.rank, k - 1, g.size, k)  # share of the subsets of which this sample is the best
    mean = group_sum(best * r, group_ids=g.ids)
    var = group_sum(best * (r - mean).square(), group_ids=g.ids)

    # Subsets that contain i: i itself is the best, or a sample of higher rank is.
    better = _share(g.rank - 1, k - 2, g.size - 1, k - 1) * r
    above = group_sum(better, group_ids=g.ids) - _sum_below(better, g) - better
    with_i = _share(g.rank, k - 1, g.size - 1, k - 1) * r + above
    std = torch.where(var == 0, 1, var).sqrt()
    return g.restore(torch.where(var == 0, 0, (with_i - mean) / (std + eps)), like=rewards)


class _Sorted(NamedTuple):
    """A batch sorted by group, then by reward, in fp64; shifted so that each group's lowest reward is 0."""

    rewards: Tensor
    ids: Tensor
    rank: Tensor
    size: Tensor
    order: Tensor

    def restore(self, x: Tensor, *, like: Tensor) -> Tensor:
        """`x` in the order of the input, in the input's compute dtype."""
        return torch.empty_like(x).index_copy(0, self.order, x).to(upcast(like[:0]).dtype)


def _sorted_groups(rewards: Tensor, group_ids: Tensor) -> _Sorted:
    _check_rewards(rewards, group_ids)
    by_reward = torch.argsort(rewards, stable=True)
    order = by_reward[torch.argsort(group_ids[by_reward], stable=True)]
    ids = group_ids.sort().values  # those of `order`
    first, stop = torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
    sorted_rewards = rewards[order].double()
    rank = torch.arange(ids.numel(), device=ids.device) - first
    return _Sorted(sorted_rewards - sorted_rewards[first], ids, rank, stop - first, order)


def _sum_below(x: Tensor, g: _Sorted) -> Tensor:
    """Sum of `x` over the members of the same group of lower rank."""
    return linear_scan((g.rank > 0).to(x.dtype), x, reverse=False) - x


def _share(n: Tensor, k: int, of_n: Tensor, of_k: int) -> Tensor:
    """C(n, k) / C(of_n, of_k) elementwise, in fp64; in log space, so large groups do not overflow; 0 if either is 0."""
    defined = (n >= k) & (k >= 0) & (of_n >= of_k)
    log_share = _log_binomial(n.clamp(min=max(k, 0)), k) - _log_binomial(of_n.clamp(min=of_k), of_k)
    return torch.where(defined, log_share.exp(), 0.0)


def _log_binomial(n: Tensor, k: int) -> Tensor:
    n = n.double()
    return torch.lgamma(n + 1) - torch.lgamma(n - k + 1) - math.lgamma(max(k, 0) + 1)


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

    t counts actions, so tool output does not shift the comparison. `sum_pi_squared` is the sum over the vocabulary of
    the squared probabilities of the distribution that gave `logp`.

    Limits:   with equal W (e.g. equal probabilities), or W = 0 everywhere, B is the group's mean return at each t; for
              a terminal reward and equal lengths A is `group_centered`. A = 0 where only one sequence of the group is
              long enough, and for a singleton group.
    Differs:  from verl `optimal_token_baseline`: it compares by position, counting gaps, and a singleton keeps its
              return. In `tir_optimal_token_baseline`, which counts actions, the tail of the longest sequence keeps it.
    Reference: verl/trainer/ppo/core_algos.py; https://arxiv.org/abs/2602.07078
    """
    streams = {"rewards": rewards, "logp": logp, "sum_pi_squared": sum_pi_squared}
    if is_weights is not None:
        streams["is_weights"] = is_weights
    rewards, logp, sum_pi_squared, *rest = prepared(mask, cu_seqlens, **streams)
    check_log_probs(logp=logp)
    check_ids(cu_seqlens[1:], group_ids=group_ids)
    if rewards.numel() == 0:
        return rewards
    one = torch.ones_like(rewards)
    returns = scan(one, rewards, mask=mask, cu_seqlens=cu_seqlens, end=end_values(None, cu_seqlens, rewards))
    energy = (1 - 2 * logp.exp() + sum_pi_squared).clamp(min=0)  # a square, which rounding makes negative near 0
    if rest:
        energy = energy * rest[0].square()
    path = masked(linear_scan(one, masked(energy, mask), cu_seqlens=cu_seqlens, reverse=False), mask)

    seqs = seq_ids(cu_seqlens, num_tokens=mask.shape[0])
    count = cumulative(mask.long())
    action = count[1:] - count[cu_seqlens[:-1]][seqs]
    keys = group_ids[seqs].long() * count.numel() + action
    return masked(_minus_weighted_mean(returns, path, keys, mask), mask)


def _minus_weighted_mean(x: Tensor, weights: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """`x` minus its weighted mean over the unmasked tokens of equal key; unweighted where all weights are 0."""
    order = torch.argsort(keys, stable=True)
    keys, x, weights, mask = keys[order], x[order], weights[order], mask[order]
    new = torch.cat([keys.new_ones(1, dtype=torch.bool), keys[1:] != keys[:-1]])
    run = new.cumsum(0) - 1
    index = torch.arange(keys.numel() + 1, device=keys.device)
    bounds = torch.searchsorted(run, index)
    first = torch.where(new, index[:-1], 0).cummax(0).values

    def run_sum(y: Tensor) -> Tensor:
        return sum_between(y, bounds)[run]

    weights = torch.where(run_sum(weights) <= 0, mask.to(x.dtype), weights)
    x = masked(x - x[first], mask)  # equal values become exact zeros
    total = run_sum(weights)
    mean = run_sum(weights * x) / torch.where(total <= 0, 1, total)
    return torch.empty_like(x).index_copy(0, order, x - mean)
