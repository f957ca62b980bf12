"""Ranks get about the same number of tokens."""

import pytest
import torch

from rlkit.balancing import plan_microbatches
from rlkit.packing import pack, select
from rlkit.types import Trajectory


def batch(num_groups: int, group_size: int, *, prompt: int, seed: int):
    draws = (torch.randn(num_groups, group_size, generator=torch.Generator().manual_seed(seed)).exp() * 40).long()
    groups = []
    for g, lens in enumerate(draws.clamp(2, 640).tolist()):
        groups.append([Trajectory([g] * prompt, [1] * n, [True] * n, [-1.0] * n, [0] * n) for n in lens])
    return pack(groups)


def tokens(whole, members) -> int:
    part = select(whole, members)
    return part.num_tokens + part.prefix_tokens.numel()


def test_ranks_are_even_where_whole_groups_would_not_be():
    for ranks, num_groups, seed in [(2, 8, 0), (4, 16, 1), (8, 64, 2), (8, 64, 3)]:
        whole = batch(num_groups, 8, prompt=20, seed=seed)
        plan = plan_microbatches(whole, max_tokens=1280, ranks=ranks)
        assert sorted(i for b in plan.bins for i in b) == list(range(whole.num_seqs))
        loads = [tokens(whole, b) for b in plan.bins]
        assert max(loads) <= 1280
        waits = sum(max(loads[i : i + ranks]) for i in range(0, len(loads), ranks))
        alone = whole.num_tokens + whole.prefix_tokens.numel()
        assert waits < 1.12 * alone / ranks, (ranks, waits / (alone / ranks))


def test_a_group_that_ranks_can_share_is_cut():
    whole = batch(1, 8, prompt=1, seed=0)
    plan = plan_microbatches(whole, max_tokens=4096, ranks=4)
    loads = [tokens(whole, b) for b in plan.bins]
    longest = int(whole.cu_seqlens.diff().max())
    assert len(loads) == 4
    assert max(loads) <= max(longest, 1.3 * whole.num_tokens / 4)


def test_whole_groups_are_never_cut_however_many_ranks():
    whole = batch(8, 2, prompt=20, seed=1)
    pairs = {(2 * g, 2 * g + 1) for g in range(8)}
    for ranks in (1, 2, 4, 8):
        bins = plan_microbatches(whole, max_tokens=2000, ranks=ranks, whole_groups=True).bins
        assert len(bins) % ranks == 0
        assert {pair for b in bins for pair in zip(b[0::2], b[1::2], strict=True)} == pairs
    with pytest.raises(ValueError, match="less than one whole group"):
        plan_microbatches(whole, max_tokens=int(whole.cu_seqlens.diff().max()) + 20, whole_groups=True)
