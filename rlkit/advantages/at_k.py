"""Advantages for the best of k: the objective is E[max of k samples' rewards], which with 0/1 rewards is pass@k.

All are averages over the size-k subsets of a group of n, in closed form: the rewards of a group are sorted, and the
sample of rank j (0 = worst) is the best of C(j, k-1) of the C(n, k) subsets. Groups may be ragged; a group smaller
than k has no such subset and gets advantage 0. Ties need no care: equal rewards get equal advantages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit._tensors import check_float, check_ids, upcast
from rlkit.advantages.outcome import leave_one_out
from rlkit.kernels.linear_scan import linear_scan
from rlkit.segments import group_sum


def max_at_k(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], k: int) -> Float[Tensor, "N"]:
    """The unbiased estimator of the gradient of E[max of k rewards] (PKPO), with its baseline of size k - 1.

        A_i = n / C(n, k) sum_{I: |I| = k, i in I} (max_I r - max_{I \\\\ i} r)
            = n / C(n, k) sum_{j < i} C(j, k-2) (r_(i) - r_(j))          ranks in ascending order

    Only a sample that beats k - 1 others of some subset is rewarded, by how much it beats the second best.
    The mean over the group of A_i grad log p_i has expectation grad E[max].

    Limits:   k = 1 is `leave_one_out` (the baseline of no sample is not defined); k = n rewards the best sample alone,
              by n times its lead over the second. Invariant under a shift of a group's rewards; scales with them.
    Differs:  from the paper: n times its s^(loo-1), because a loss averages over samples. From verl `grpo_passk`, which
              is k = n divided by n (and by the group's std): any k <= n, ties and singletons included.
    Reference: Walder & Karkhanis 2025, https://arxiv.org/abs/2505.15201, eq. 33; Tang et al. 2025,
               https://arxiv.org/abs/2503.19595 for k = n
    """
    _check_k(k)
    if k == 1:
        return leave_one_out(rewards, group_ids=group_ids)
    g = _sorted_groups(rewards, group_ids)
    second = _share(g.rank, k - 2, g.size, k)
    lead = g.rewards * _sum_below(second, g) - _sum_below(second * g.rewards, g)
    return g.restore(g.size * lead, like=rewards)


def pass_at_k(
    rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"], k: int, eps: float = 1e-6
) -> Float[Tensor, "N"]:
    """GRPO on subsets: each size-k subset is one sample whose reward is its maximum (Pass@k training).

        A_i = (mean_{I: i in I} max_I r - mean_I max_I r) / (std_I max_I r + eps)          I: the subsets of size k

    For 0/1 rewards with n - c failures this is the published closed form

        R = 1 - C(n-c, k) / C(n, k)      std = sqrt(R (1 - R))
        A = (1 - R) / std  if solved,    A = (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / std  if not.

    Limits:   k = 1 is `group_zscore` with the biased std; k = n, one subset, gives 0; invariant under a shift and
              (eps -> 0) a scale of rewards.
    Differs:  from the paper: any real rewards. The std is that over all subsets (ddof 0), as there.
    Reference: Chen et al. 2025, https://arxiv.org/abs/2508.10751, section 2.4
    """
    _check_k(k)
    g = _sorted_groups(rewards, group_ids)
    # No subset's best ranks below k - 1: with that one's reward as zero, equal bests give an exact zero.
    least = torch.arange(g.rank.numel(), device=g.rank.device) - g.rank + (g.size - 1).clamp(max=k - 1)
    r = g.rewards - g.rewards[least]
    best = _share(g.rank, k - 1, g.size, k)  # share of the subsets of which this sample is the best
    mean = group_sum(best * r, group_ids=g.ids)
    var = group_sum(best * (r - mean).square(), group_ids=g.ids)

    # Of the subsets with i: those that i itself wins, and those that a better sample does.
    better = _share(g.rank - 1, k - 2, g.size - 1, k - 1) * r
    above = group_sum(better, group_ids=g.ids) - _sum_below(better, g) - better
    with_i = _share(g.rank, k - 1, g.size - 1, k - 1) * r + above
    std = torch.where(var == 0, 1, var).sqrt()
    return g.restore(torch.where(var == 0, 0, (with_i - mean) / (std + eps)), like=rewards)


class _Sorted(NamedTuple):
    """A batch sorted by group, then by reward: fp64, shifted so that each group's worst reward is 0."""

    rewards: Tensor
    ids: Tensor
    rank: Tensor
    size: Tensor
    order: Tensor

    def restore(self, x: Tensor, *, like: Tensor) -> Tensor:
        """`x` in the order of the input and the dtype that the input is computed in."""
        return torch.empty_like(x).index_copy(0, self.order, x).to(upcast(like[:0]).dtype)


def _sorted_groups(rewards: Tensor, group_ids: Tensor) -> _Sorted:
    check_float(rewards=rewards)
    check_ids(rewards, group_ids=group_ids)
    by_reward = torch.argsort(rewards, stable=True)
    order = by_reward[torch.argsort(group_ids[by_reward], stable=True)]
    ids = group_ids[order]
    first, stop = torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
    sorted_rewards = rewards[order].double()
    rank = torch.arange(ids.numel(), device=ids.device) - first
    return _Sorted(sorted_rewards - sorted_rewards[first], ids, rank, stop - first, order)


def _sum_below(x: Tensor, g: _Sorted) -> Tensor:
    """Sum of `x` over the members of the same group of lower rank."""
    return linear_scan((g.rank > 0).to(x.dtype), x, reverse=False) - x


def _share(n: Tensor, k: int, of_n: Tensor, of_k: int) -> Tensor:
    """C(n, k) / C(of_n, of_k) elementwise in fp64, by logarithms so that no group is too large; 0 where either is 0."""
    defined = (n >= k) & (k >= 0) & (of_n >= of_k)
    log_share = _log_binomial(n.clamp(min=max(k, 0)), k) - _log_binomial(of_n.clamp(min=of_k), of_k)
    return torch.where(defined, log_share.exp(), 0.0)


def _log_binomial(n: Tensor, k: int) -> Tensor:
    n = n.double()
    return torch.lgamma(n + 1) - torch.lgamma(n - k + 1) - math.lgamma(max(k, 0) + 1)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
