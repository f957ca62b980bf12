"""A wrong call is refused at the entry of the function, by the name of the argument, and with what to pass instead."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch

from rlkit import k3, microbatches, pack, ppo_clip, tis, token_mean, unbiased_kl, with_advantages
from rlkit.advantages import (
    gae,
    group_centered,
    group_mean_batch_std,
    group_zscore,
    max_rl,
    opo,
    pass_at_k,
    whiten,
)
from rlkit.types import Trajectory


def trajectory(**fields):
    base = {"prompt_ids": [1, 2, 3], "ids": [4, 5], "mask": [True, True], "logp": [-1.0, -1.0], "versions": [0, 0]}
    return Trajectory(**base | fields)


def batch():
    return pack([[trajectory(reward=1.0), trajectory()]])


def refused(call, message, kind=(TypeError, ValueError)):
    with pytest.raises(kind, match=re.escape(message)):
        call()


PACKED = [
    ({"ids": [4.7, 5.2]}, "groups[0][1]: ids[0] must be an integer, got float 4.7"),
    ({"prompt_ids": ["a"]}, "groups[0][1]: prompt_ids[0] must be an integer, got str 'a'"),
    ({"ids": "ab"}, "groups[0][1]: ids must be a list, got a str"),
    ({"ids": np.array([4, 5])}, "groups[0][1]: ids must be a list, got a ndarray of shape [2]; use ids.tolist()"),
    ({"mask": None}, "groups[0][1]: mask must be a list, got a none"),
    ({"versions": [0.5, 1]}, "groups[0][1]: versions[0] must be an integer, got float 0.5"),
    ({"logp": [None, -1.0]}, "groups[0][1]: logp[0] must be a number, got NoneType None"),
    ({"logp": [-1.0, 0.9]}, "groups[0][1]: logp[1] is 0.9, above 0 at a trained token"),
    ({"reward": None}, "groups[0][1]: reward must be a number, got NoneType None"),
    ({"reward": "1"}, "groups[0][1]: reward must be a number, got str '1'"),
    ({"token_rewards": ["x", 0.0]}, "groups[0][1]: token_rewards[0] must be a number, got str 'x'"),
]


@pytest.mark.parametrize(("fields", "message"), PACKED)
def test_pack_names_the_trajectory_and_its_field(fields, message):
    refused(lambda: pack([[trajectory(), trajectory(**fields)]]), message)


async def groups_later():
    return [[trajectory()]]


def test_pack_names_what_is_not_a_list_of_groups():
    refused(lambda: pack(trajectory()), "got a Trajectory; use pack([[trajectory]])")
    refused(lambda: pack(["a"]), "groups[0] must be a list of trajectories, one list per prompt, got a str")
    refused(lambda: pack([["a"]]), "groups[0][0] must be a Trajectory, got str 'a'")
    refused(lambda: pack([[{"ids": [1]}]]), "groups[0][0] must be a Trajectory, got dict")
    later = groups_later()
    refused(lambda: pack(later), "await it: groups = await rollout(...)")
    later.close()


def test_pack_reads_iterators_and_numpy_numbers():
    lists = [[trajectory(reward=1.0), trajectory()], [trajectory()]]
    truth = pack(lists)
    for groups in (iter(lists), ((t for t in group) for group in lists)):
        got = pack(groups)
        assert torch.equal(got.targets, truth.targets)
        assert torch.equal(got.rewards, truth.rewards)
    numpy = trajectory(ids=[np.int64(4), np.int32(5)], logp=[np.float32(-1), np.float64(-1)], mask=list(np.ones(2) > 0))
    assert torch.equal(pack([[numpy]]).targets, pack([[trajectory()]]).targets)


def test_a_stream_that_is_none_is_named_with_the_function_that_fills_it():
    b, logp = batch(), torch.zeros(4)
    bounds = {"mask": b.mask, "cu_seqlens": b.cu_seqlens}
    refused(lambda: ppo_clip(logp, b.advantages), "advantages is None: batch = with_advantages(batch, group_centered)")
    refused(lambda: k3(logp, b.ref_logp), "ref_logp is None: batch = with_ref_logp(reference, batch, max_tokens=...)")
    refused(lambda: unbiased_kl(logp, b.ref_logp, logp), "ref_logp is None: batch = with_ref_logp(")
    refused(lambda: gae(b.token_rewards, b.values, **bounds), "values is None: batch = with_gae(batch, ...)")


def test_a_number_that_is_none_is_named():
    refused(lambda: tis(torch.zeros(4), max_weight=None), "max_weight must be positive, got None", ValueError)
    refused(lambda: ppo_clip(torch.zeros(4), torch.ones(4), clip_low=None), "clip_low must be at least 0, got None")


def test_a_baseline_of_another_form_is_refused_by_its_call():
    call = "baseline is called as baseline(rewards, group_ids=group_ids), which"
    refused(lambda: with_advantages(batch(), gae), f"{call} gae does not take: ")
    refused(lambda: with_advantages(batch(), lambda rewards: rewards), f"{call} <lambda> does not take: ")
    refused(lambda: with_advantages(batch(), "group_centered"), "baseline must be a function, called as baseline(")
    assert with_advantages(batch(), partial(group_centered)).advantages.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_microbatches_name_the_tuple():
    b = batch()
    refused(lambda: list(microbatches(b, max_tokens=9)), "streams must be a tuple that starts with a Batch")
    refused(lambda: list(microbatches((b.mask, b), max_tokens=9)), "(batch, weights), got (Tensor, Batch)")


def test_negative_numbers_that_would_turn_signs_are_refused():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    for estimator in (group_zscore, max_rl, group_mean_batch_std, partial(pass_at_k, k=1)):
        refused(lambda f=estimator: f(rewards, group_ids=ids, eps=-0.5), "eps must be at least 0, got -0.5")
    refused(lambda: whiten(rewards, eps=float("nan")), "eps must be at least 0, got nan")
    refused(lambda: opo(rewards, lengths=torch.tensor([-1, 2, 3, 4]), group_ids=ids), "lengths must be at least 0")
    mask = torch.tensor([True, True])
    refused(lambda: token_mean(mask, num_tokens=torch.tensor(-3)), "num_tokens must be at least 0, got -3")
    refused(lambda: token_mean(mask, num_tokens=torch.tensor(0)), "num_tokens is 0, and this mask alone has 2")
