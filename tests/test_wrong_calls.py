"""A wrong call is refused at the entry of the function, by the name of the argument, and with what to pass instead."""

from __future__ import annotations

import asyncio
import re
import warnings
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
    n_step,
    opo,
    optimal_token_baseline,
    pass_at_k,
    vtrace,
    whiten,
)
from rlkit.kernels.logits_logp import logits_logp
from rlkit.losses import (
    bapo_clip_range,
    batch_normalized,
    bradley_terry,
    dppo,
    dppo_kl,
    dual_clip,
    entropy_from_logits,
    forward_kl,
    kl_from_logits,
    kl_in_reward,
    m2po,
    opd_advantages,
    opsm,
    orpo,
    reverse_kl,
    select_between,
    simpo,
    top_entropy_mask,
    value_clip,
    value_mse,
)
from rlkit.model.forward import Policy, with_old_logp
from rlkit.rollout.groups import sampler
from rlkit.segments import broadcast_to_tokens, cumulative, seq_lens
from rlkit.types import Completion, LogProbs, SamplingParams, Trajectory


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
    refused(lambda: tis(torch.zeros(4), max_weight=None), "it must be at least 1, got None", ValueError)
    refused(lambda: ppo_clip(torch.zeros(4), torch.ones(4), clip_low=None), "clip_low must be at least 0, got None")


def test_a_reversed_ratio_and_data_with_gradients_are_refused():
    leaf, old, advantages = torch.zeros(4, requires_grad=True), torch.zeros(4), torch.ones(4)
    logp = leaf + 0
    refused(lambda: ppo_clip(old - logp, advantages), "its sign is logp - old_logp", ValueError)
    refused(lambda: k3(logp, logp), "log-probs of a reference, need .detach()", ValueError)
    for right in (logp - old, logp - logp.detach(), -(old - logp), leaf, old, old - logp.detach()):
        ppo_clip(right, advantages)


def test_values_of_another_kind_are_told_by_their_sign_or_sum():
    logp = -torch.rand(40) - 0.01
    refused(lambda: k3(logp.exp(), logp), "logp is above 0 at all 40 tokens: are these probabilities?", ValueError)
    refused(lambda: top_entropy_mask(logp, top=0.2), "entropy is below 0 at all 40 tokens: are these log-probs?")
    logits, ids = torch.randn(3, 7), torch.tensor([0, 1, 2])
    refused(lambda: logits_logp(logits.softmax(-1), ids), "give the values before the softmax", ValueError)
    ratio = 1 + 0.1 * torch.rand(100)
    ends, flat = {"mask": ratio > 0, "cu_seqlens": torch.tensor([0, 100])}, torch.zeros(100)
    refused(lambda: vtrace(flat, flat, ratio, **ends), "is it a ratio?", ValueError)
    vtrace(flat, flat, ratio.log(), **ends)
    mask = torch.arange(40) < 4
    k3(-logp, logp, mask=mask)  # few
    k3(torch.cat([logp, logp.new_full((1,), 1e-6)]), torch.zeros(41))
    logits_logp(logits.log_softmax(-1), ids)
    logits_logp(torch.eye(3, 7) * 9, ids)


def test_clip_distances_that_look_like_bounds_are_named():
    for low, high, said in (
        (0.8, 1.2, r"clip_low 0.8 and clip_high 1.2: .* to \[0.2, 2.2\]; for a bound of the ratio give 0.2 and 0.2"),
        (0.2, 1.28, r"clip_high 1.28: .* to \[0.8, 2.28\]; for a bound of the ratio give 0.28"),
        (0.8, 0.28, r"clip_low 0.8: .* to \[0.2, 1.28\]; for a bound of the ratio give 0.2"),
    ):
        with pytest.warns(UserWarning, match=said):
            ppo_clip(torch.zeros(4), torch.ones(4), clip_low=low, clip_high=high)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for low, high in ((0.2, 0.28), (0.2, 4.0), (1.0, 1.0), (float("inf"), float("inf")), (0.8, 0.8)):
            ppo_clip(torch.zeros(4), torch.ones(4), clip_low=low, clip_high=high)


@pytest.mark.parametrize(
    "function",
    [entropy_from_logits, lambda p: kl_from_logits(torch.zeros(4, 5), p), lambda p: forward_kl(torch.zeros(4, 5), p)],
)
def test_probabilities_are_no_logits(function):
    logits = torch.arange(20.0).view(4, 5)
    with pytest.raises(ValueError, match="logits are probabilities, whose rows sum to 1: give logits"):
        function(logits.softmax(-1))
    for fine in (logits, logits.log_softmax(-1), torch.eye(5)[:4]):
        function(fine)


def test_values_with_a_gradient_before_rewards_without_are_refused():
    rewards, values = torch.zeros(4), torch.zeros(4, requires_grad=True)
    of = {"mask": torch.ones(4, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 4])}
    with pytest.raises(
        ValueError, match=r"rewards has a gradient and values has none: the order is \(rewards, values\)"
    ):
        gae(values, rewards, **of)
    gae(rewards, values, **of)


def test_samples_of_several_prompts_in_one_group_are_named():
    def groups(**fields):
        return [[trajectory(prompt_ids=[1, 2 + prompt, 3], **fields) for _ in range(2)] for prompt in range(3)]

    with pytest.warns(UserWarning, match="the one group has 3 prompts of 2 trajectories each"):
        pack([[t for group in groups() for t in group]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack(groups())
        pack([[group[0] for group in groups()]])  # an environment that opens each episode in its own way
        pack([[t for group in groups(role="a") for t in group]])


def test_groups_of_one_are_named_where_their_advantages_are_0():
    def one_of_each(num):
        return pack([[trajectory(prompt_ids=[1, 2 + prompt], reward=float(prompt))] for prompt in range(num)])

    with pytest.warns(UserWarning, match="each of the 3 trajectories is a group of its own, and all advantages are 0"):
        with_advantages(one_of_each(3), group_centered)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_advantages(one_of_each(1), group_centered)
        with_advantages(one_of_each(3), lambda rewards, *, group_ids: rewards - rewards.mean())
        with_advantages(pack([[trajectory(), trajectory()]]), group_centered)


def test_sums_of_log_probs_are_no_averages():
    average = torch.tensor([-1.5, -0.4])  # a model that diverges has the others, too
    for function in (simpo, orpo):
        with pytest.warns(UserWarning, match="must be averages over tokens"):
            function(average * 100, average * 90, beta=1.0)
        function(average, average - 1, beta=1.0)


def test_a_shape_that_broadcasts_is_told_how_it_is_squeezed():
    refused(lambda: ppo_clip(torch.zeros(4), torch.ones(4, 1)), "; use advantages.squeeze(-1)", ValueError)


def test_a_target_with_a_gradient_before_a_prediction_without_is_refused():
    x, y, logits = torch.zeros(4, requires_grad=True), torch.ones(4), torch.zeros(4, 3, requires_grad=True)
    refused(lambda: value_mse(y, x), "values has no gradient, and what follows it has one", ValueError)
    refused(lambda: value_clip(y, y, x, clip=0.2), "values is the first argument", ValueError)
    refused(lambda: reverse_kl(logits.detach(), logits), "student_logits is the first argument", ValueError)
    refused(lambda: value_clip(x, x, y, clip=0.2), "old_values is values, with its gradient", ValueError)
    for right in ((x, y), (y, y), (x, x * 2)):
        value_mse(*right)
    reverse_kl(logits, logits * 2)


def test_a_negative_kl_coef_is_refused():
    mask, last = torch.tensor([True, True, False]), torch.tensor([0.0, 0.0, 1.0])
    refused(lambda: kl_in_reward(last, -last, -last, kl_coef=-0.1, mask=mask), "kl_coef must be at least 0, got -0.1")


def test_an_engine_without_log_probs_is_refused():
    def of(logp):
        return pack([[trajectory(ids=[4] * 16, mask=[True] * 16, logp=[logp] * 16, versions=[0] * 16)]])

    def policy(batch):
        return LogProbs(torch.full(batch.mask.shape, -5.0) * batch.mask, torch.zeros(batch.mask.shape))

    refused(
        lambda: with_old_logp(policy, of(0.0), max_tokens=99), "rollout_logp is 0 at all 16 tokens, and old_logp -5 on"
    )
    assert with_old_logp(policy, of(-0.001), max_tokens=99).old_logp.sum() == -80


def test_a_finish_reason_that_no_engine_has_is_refused():
    async def generate(prompt_ids, *, params):
        return Completion(ids=[1], logp=[-1.0], versions=[0], finish_reason=params.stop[0])

    def ended(reason):
        return asyncio.run(sampler(generate, SamplingParams(stop=(reason,)), (0,))([1]))

    refused(lambda: ended("eos_token"), "finish_reason must be one of ('stop', 'length', 'abort'), got 'eos_token'")
    assert ended("stop").ids == [1]


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


L, X, A = torch.zeros(3), torch.full((3,), -1.0), torch.ones(3)
ALL, CU = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
PACKED_ARGS = {"mask": ALL, "cu_seqlens": CU}
OUTSIDE = {  # numbers that gave a plausible result, and the entry that names them
    "batch_normalized": (lambda: batch_normalized(A, mean=0.0), "mean must be positive where a weight is, got 0"),
    "m2po": (lambda: m2po(L, A, cutoff=-1.0), "cutoff must be at least 0, got -1"),
    "select_between": (lambda: select_between(A, low=2.0, high=1.0), "low must be below high, got low 2.0, high 1.0"),
    "opsm": (lambda: opsm(L, A, delta=-1.0, **PACKED_ARGS), "delta must be at least 0, got -1"),
    "seq_lens": (lambda: seq_lens(torch.tensor([0, 4, 3])), "cu_seqlens must be non-decreasing"),
    "seq_lens of lengths": (lambda: seq_lens(torch.tensor([4, 3, 3])), "cu_seqlens must start at 0, got 4"),
    "cumulative": (lambda: cumulative([4, 3]), "lens must be a tensor, got list [4, 3]; use torch.as_tensor(lens)"),
    "cumulative of -1": (lambda: cumulative(torch.tensor([4, -1])), "lens must be at least 0, got -1"),
    "broadcast": (lambda: broadcast_to_tokens([1.0], cu_seqlens=CU), "x must be a tensor, got list [1.0]"),
    "dppo": (lambda: dppo(L, A, old_logp=-X), "old_logp must be log-probs, at most 0, got 1"),
    "dppo_kl": (lambda: dppo_kl(L, A, old_logp=-X), "old_logp must be log-probs, at most 0, got 1"),
    "bapo": (lambda: bapo_clip_range(L, A, old_logp=-X), "old_logp must be log-probs, at most 0, got 1"),
    "bapo bounds": (lambda: bapo_clip_range(L, A, old_logp=X, low=(0.9, 0.6)), "got low=(0.9, 0.6), high=(1.2, 3.0)"),
    "bapo step": (lambda: bapo_clip_range(L, A, old_logp=X, step_low=0.0), "step_low must be positive, got 0"),
    "opd": (lambda: opd_advantages(X, -X), "teacher_logp must be log-probs, at most 0, got 1"),
    "otb": (
        lambda: optimal_token_baseline(A, -X, A, group_ids=torch.zeros(1, dtype=torch.long), **PACKED_ARGS),
        "logp must be log-probs, at most 0, got 1",
    ),
    "dual_clip": (lambda: dual_clip(L, A, clip_c=None), "clip_c must be above 1, the on-policy ratio, got None"),
    "pass_at_k": (lambda: pass_at_k(A, group_ids=torch.zeros(3).long(), k=True), "k must be a whole number of"),
    "n_step": (lambda: n_step(A, A, n=1.5, **PACKED_ARGS), "n must be a whole number of at least 1, got 1.5"),
    "bradley_terry": (lambda: bradley_terry(A, A, margin=[1.0] * 3), "margin must be a tensor, got list"),
    "microbatches": (
        lambda: list(microbatches((batch(),), max_tokens=None)), "max_tokens must be a whole number of at least 1, got",
    ),
    "Policy": (lambda: Policy(torch.nn.Linear(1, 1), temperature="1"), "temperature must be a number above 0, got str"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_number_or_a_list_that_cannot_be_meant_is_named(name):
    call, message = OUTSIDE[name]
    refused(call, message)


def test_weights_that_are_all_0_keep_a_mean_of_0():
    assert batch_normalized(0 * A, mean=0.0).tolist() == [0.0, 0.0, 0.0]


def test_a_model_in_train_mode_with_dropout_is_refused_by_the_layer():
    from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    gpt2 = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16, "n_positions": 8, "attn_pdrop": 0.0}
    opt = {"hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}
    models = {
        "h.0.attn.resid_dropout": GPT2LMHeadModel(GPT2Config(**gpt2, embd_pdrop=0.0)),
        "decoder": OPTForCausalLM(OPTConfig(**opt, word_embed_proj_dim=8, dropout=0.1)),  # an attribute
    }
    for place, model in models.items():
        refused(lambda m=model: Policy(m.train())(batch()), f"in train mode and has dropout ({place}): ")
        refused(lambda m=model: Policy(m.eval())(batch()), "is not set up for training")  # the check after it
    without = GPT2LMHeadModel(GPT2Config(**gpt2, embd_pdrop=0.0, resid_pdrop=0.0)).train()
    refused(lambda: Policy(without)(batch()), "is not set up for training")
    critic = GPT2ForTokenClassification(GPT2Config(**gpt2, embd_pdrop=0.0, resid_pdrop=0.0, classifier_dropout=0.1))
    refused(lambda: Policy(critic.train())(batch()), "is not set up for training")  # its head's is not applied
