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

from rlkit._tensors import check_float, check_ids, upcast
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
    check_ids(rewards.shape[0], group_ids=group_ids)
    rewards = upcast(rewards)
    shifted = rewards - rewards[_first_of_group(group_ids)]  # equal rewards become exact zeros before any rounding
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


def _first_of_group(group_ids: Tensor) -> Tensor:
    """For each member the index of its group's first member."""
    order = torch.argsort(group_ids, stable=True)
    return order[torch.searchsorted(group_ids[order], group_ids)]


def _over_std(centered: Tensor, sum_squares: Tensor, count: Tensor, eps: float) -> Tensor:
    """`centered / (std + eps)` with the unbiased std; 0, also in the gradient, where the std is 0."""
    var = sum_squares / (count - 1).clamp(min=1)
    std = torch.where(var > 0, var, torch.ones_like(var)).sqrt()
    return torch.where(var > 0, centered / (std + eps), torch.zeros_like(centered))
