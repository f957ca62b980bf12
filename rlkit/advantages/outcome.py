"""Group baselines: one reward per sequence [N] in, one advantage per sequence [N] out.

`group_ids` say which sequences answer the same prompt. Groups may be ragged, in any order and with gaps in the ids.
A group of one has nothing to be compared with: its advantage is 0 under every function here. So is the advantage of a
group whose rewards are all equal, exactly, whatever the rounding: filters may test for `== 0`.

    b_i     baseline of sequence i          n      size of its group
    mean    over its group                  std    unbiased (ddof 1) over its group
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit._tensors import check_float, check_ids, check_same_shape, upcast
from rlkit.segments import group_count, group_mean, group_sum


def group_centered(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward minus the group's mean (Dr. GRPO).

        A_i = r_i - mean(r)

    Limits:   invariant under a shift of a group's rewards; scales with them; sums to 0 in each group.
    Differs:  from verl (`norm_adv_by_std_in_grpo=False`): a singleton has advantage 0; there it keeps the raw reward.
              From slime and SkyRL: groups need no common size. From TRL (`scale_rewards="none"`): nothing.
    Reference: Liu et al. 2025, https://arxiv.org/abs/2503.20783
    """
    check_float(rewards=rewards)
    check_ids(rewards, group_ids=group_ids)
    rewards = upcast(rewards)
    shifted = rewards - rewards[first_of_group(group_ids)]  # equal rewards become exact zeros before any rounding
    return shifted - group_mean(shifted, group_ids=group_ids)


def group_zscore(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], eps: float = 1e-6) -> Float[Tensor, "N"]:
    """Reward minus the group's mean, over the group's unbiased standard deviation (GRPO).

        A_i = (r_i - mean(r)) / (std(r) + eps)

    Limits:   invariant under a shift of a group's rewards, and under their scale for eps -> 0.
    Differs:  from TRL: eps is 1e-4 there. From verl: its singleton has mean 0 and std 1, so the raw reward; here 0.
              The gradient at equal rewards is 0, not NaN.
    Reference: Shao et al. 2024, https://arxiv.org/abs/2402.03300
    """
    centered = group_centered(rewards, group_ids=group_ids)
    return _over_std(centered, group_sum(centered.square(), group_ids=group_ids), group_count(group_ids), eps)


def leave_one_out(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward minus the mean of the group's *other* members (RLOO).

        A_i = r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean(r)) n / (n - 1)

    The baseline does not depend on the sample itself, so the gradient estimate is unbiased.

    Limits:   n / (n - 1) times `group_centered`.
    Differs:  from verl `rloo`: its singleton keeps the raw reward; here 0, as in verl `rloo_vectorized`.
    Reference: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
    """
    count = group_count(group_ids)
    return group_centered(rewards, group_ids=group_ids) * count / (count - 1).clamp(min=1)


def max_rl(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], eps: float = 1e-6) -> Float[Tensor, "N"]:
    """Reward minus the group's mean, over the mean (MaxRL).

        A_i = (r_i - mean(r)) / (mean(r) + eps)          0 where mean(r) = 0

    With 0/1 rewards a solved sample of a group with success rate p gets (1 - p) / p: rare successes weigh most, as in
    maximum likelihood, of whose gradient this is an unbiased estimate truncated at order n. Made for rewards >= 0.

    Limits:   scales neither with the rewards nor with their unit (eps -> 0); a group without success gets 0.
    Differs:  from SkyRL (`maxrl`): its singleton keeps the raw reward. From prime-rl (`max_rl`): no epsilon there, and
              0 where the mean is negative.
    Reference: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710
    """
    centered = group_centered(rewards, group_ids=group_ids)
    mean = group_mean(rewards, group_ids=group_ids)
    ratio = centered / torch.where(mean == 0, torch.ones_like(mean), mean + eps)
    return torch.where(mean == 0, torch.zeros_like(mean), ratio)


def group_mean_batch_std(
    rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], eps: float = 1e-6
) -> Float[Tensor, "N"]:
    """Reward minus the group's mean, over the standard deviation of *all* rewards of the batch.

        A_i = (r_i - mean(r)) / (std_batch(r) + eps)          std unbiased

    One scale for all groups: an easy or hard prompt, whose rewards hardly vary, is not blown up.

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

    The baseline of least variance if the squared gradient norm of a sequence grows with its length.

    Limits:   equal lengths give `group_centered`; invariant under a shift of a group's rewards and a scale of lengths.
    Differs:  from verl `opo`: its singleton keeps the raw reward; here 0. Lengths that are all 0 count alike.
    Reference: Hao et al. 2025, https://arxiv.org/abs/2505.23585
    """
    centered = group_centered(rewards, group_ids=group_ids)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must have the shape of rewards, {list(rewards.shape)}, got {list(lengths.shape)}")
    weights = lengths.to(centered.dtype)
    total = group_sum(weights, group_ids=group_ids)
    baseline = group_sum(weights * centered, group_ids=group_ids) / torch.where(total > 0, total, 1)
    return centered - baseline


def remax(rewards: Float[Tensor, "N"], *, greedy_rewards: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward minus that of the greedy answer to the same prompt (ReMax).

        A_i = r_i - r_greedy(prompt of i)

    `greedy_rewards` holds, for each sequence, the reward of one completion at temperature 0.

    Limits:   the greedy answer itself gets 0. No group is needed, so a singleton is not special.
    Differs:  from verl `remax`: none for a terminal reward (its token version is `discounted_returns` minus this).
    Reference: Li et al. 2023, https://arxiv.org/abs/2310.10505
    """
    check_float(rewards=rewards, greedy_rewards=greedy_rewards)
    check_same_shape(rewards=rewards, greedy_rewards=greedy_rewards)
    return upcast(rewards) - upcast(greedy_rewards)


def gpg(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Centred rewards, scaled up by the share of samples that carry no signal (GPG).

        A_i = N / (N - M) (r_i - mean(r))          M: samples of groups whose rewards are all equal

    so that a batch with many solved or hopeless prompts has no smaller gradient.

    Limits:   M = 0 gives `group_centered`; M = N gives 0.
    Differs:  from verl `gpg`: it divides by the number of nonzero *rewards* in place of N - M.
    Reference: Chu et al. 2025, https://arxiv.org/abs/2504.02546
    """
    centered = group_centered(rewards, group_ids=group_ids)
    varies = group_sum(centered.abs(), group_ids=group_ids) != 0
    return centered * centered.numel() / varies.sum().clamp(min=1)


def first_of_group(group_ids: Tensor) -> Tensor:
    """For each member the index of its group's first member."""
    order = torch.argsort(group_ids, stable=True)
    return order[torch.searchsorted(group_ids[order], group_ids)]


def _over_std(centered: Tensor, sum_squares: Tensor, count: Tensor, eps: float) -> Tensor:
    """`centered / (std + eps)` with the unbiased std; 0, also in the gradient, where the std is 0."""
    var = sum_squares / (count - 1).clamp(min=1)
    std = torch.where(var == 0, torch.ones_like(var), var).sqrt()
    return torch.where(var == 0, torch.zeros_like(centered), centered / (std + eps))
