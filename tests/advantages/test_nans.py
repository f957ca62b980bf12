"""NaN is never turned into plausible numbers, and is ignored at masked positions."""

import math

import pytest
import torch

from rlkit import advantages as A
from rlkit import losses as L
from rlkit.objectives import dominates

NAN = math.nan
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
BROKEN = torch.tensor([1.0, NAN, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
BY_GROUP = {
    "group_zscore": A.group_zscore,
    "group_centered": A.group_centered,
    "leave_one_out": A.leave_one_out,
    "max_rl": A.max_rl,
    "pass_at_k": lambda rewards, group_ids: A.pass_at_k(rewards, group_ids=group_ids, k=2),
    "normalize_then_sum": lambda rewards, group_ids: A.normalize_then_sum(rewards[:, None], group_ids=group_ids),
}
BY_BATCH = {
    "group_mean_batch_std": A.group_mean_batch_std,
    "gdpo": lambda rewards, group_ids: A.gdpo(rewards[:, None], group_ids=group_ids),
}


@pytest.mark.parametrize("name", BY_GROUP)
def test_nan_stays_in_its_group_and_other_groups_are_unchanged(name):
    got = BY_GROUP[name](BROKEN, group_ids=GROUPS)
    alone = BY_GROUP[name](BROKEN[3:], group_ids=GROUPS[3:])
    assert got[:3].isnan().all()
    torch.testing.assert_close(got[3:], alone)
    assert alone.any()


@pytest.mark.parametrize("name", BY_BATCH)
def test_a_batch_with_nan_is_nan(name):
    assert BY_BATCH[name](BROKEN, group_ids=GROUPS).isnan().all()


def test_whitening_propagates_nan_unless_masked():
    x, mask = torch.tensor([1.0, NAN, 0.0, 5.0]), torch.tensor([True, False, True, True])
    assert A.whiten(x).isnan().all()
    want = (x[mask] - 2) / (math.sqrt(7) + 1e-6)
    got = A.whiten(x, mask=mask)
    torch.testing.assert_close(got[mask], want)
    assert got[1] == 0
    torch.testing.assert_close(A.whiten(torch.full((3,), 0.1)), torch.zeros(3))
    cut = A.whiten(torch.tensor([1.0, NAN, 0.0]), mask=torch.tensor([True, True, False]))
    assert cut[:2].isnan().all()
    assert cut[2] == 0, "a masked place is 0 beside a NaN too"


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_reinforce_pp_propagates_nan_rewards(bad):
    cu, mask = torch.tensor([0, 2, 4]), torch.ones(4, dtype=torch.bool)
    rewards = torch.tensor([0.0, bad, 0.0, 1.0])
    assert A.reinforce_pp(rewards, mask=mask, cu_seqlens=cu).isnan().any()
    ids = torch.tensor([0, 0])
    assert A.reinforce_pp_baseline(rewards[[1, 3]], group_ids=ids, mask=mask, cu_seqlens=cu).isnan().any()


def test_weights_propagate_nan():
    weights, cu = torch.tensor([1.0, NAN, 3.0]), torch.tensor([0, 2, 3])
    assert L.effective_sample_size(weights).isnan()
    assert L.effective_sample_size(weights, mask=torch.tensor([True, False, True])) == pytest.approx(16 / 10)
    assert L.batch_normalized(weights).isnan().all()
    x = weights.log()
    assert L.keep_ratio(x, low=0.5, high=2.0).isnan().tolist() == [False, True, False]
    assert L.veto(x, mask=None, cu_seqlens=cu).isnan().tolist() == [True, True, False]
    assert L.opsm(x, torch.ones(3), mask=None, cu_seqlens=cu).isnan().tolist() == [True, True, False]


def test_a_sorted_loss_propagates_nan_with_masked_pairs():
    x, zeros = torch.tensor([0.5, NAN, 1.0]), torch.zeros(3)
    mask = torch.tensor([False, True, True])
    assert L.aot(x, zeros, beta=0.1, mask=mask).isnan().sum() == 1
    assert L.aot(x, zeros, beta=0.1, mask=torch.tensor([True, False, True])).isfinite().all()


def test_a_nan_statistic_propagates_to_the_loss():
    x, a = torch.tensor([0.1, 0.3]), torch.tensor([1.0, NAN])
    assert L.m2_cutoff(x, a).isnan()
    assert L.m2po(x, torch.ones(2), cutoff=L.m2_cutoff(x, a)).isnan().all()
    clip = L.bapo_clip_range(x, a, old_logp=torch.zeros(2))
    assert clip.clip_low.isnan() and clip.clip_high.isnan()  # noqa: PT018
    assert L.ppo_clip(x, torch.ones(2), **clip._asdict()).isnan().all()


def test_comparisons_that_cannot_return_nan_raise():
    with pytest.raises(ValueError, match="a must not be NaN"):
        dominates(torch.tensor([1.0, NAN]), torch.zeros(2))
    with pytest.raises(ValueError, match="entropy must not be NaN"):
        L.top_entropy_mask(torch.tensor([1.0, NAN]))
