"""examples/in_verl.py as verl loads and calls it: its registries, its actor's loss, its DataProto."""

import importlib

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="see docs/own-trainer.md for the packages that its core_algos needs")
pytestmark = pytest.mark.slow
LENS = torch.tensor([6, 2, 5, 3])


@pytest.fixture(scope="module")
def example():
    """The module, imported once by verl's own loader, as for VERL_USE_EXTERNAL_MODULES=in_verl."""
    from verl.utils.import_utils import import_external_libs

    import_external_libs(["in_verl"])
    return importlib.import_module("in_verl")


def actor(**settings):
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=2, **settings)


def draw(seed=0):
    """`old_log_prob`, `log_prob` (a leaf), `advantages`, `response_mask` [B, L], and rollout weights."""
    rng = torch.Generator().manual_seed(seed)
    old, now, advantages = (torch.randn(4, 6, generator=rng) for _ in range(3))
    weights = torch.rand(4, 6, generator=rng) + 0.5
    return old, (old + now).requires_grad_(), advantages, torch.arange(6) < LENS[:, None], weights


def differences(names, config, *, weights=None, mode="token-mean", seed=0):
    """The two losses (by name, in verl's registry) and the largest difference of their gradients."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    results = []
    for name in names:
        old, now, advantages, mask, rollout = draw(seed)
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=now, advantages=advantages, response_mask=mask, loss_agg_mode=mode,
            config=config, rollout_is_weights=rollout if weights else None,
        )  # fmt: skip
        loss.backward()
        results.append((loss.item(), now.grad, metrics["actor/ppo_kl"]))
    (a, grad_a, kl_a), (b, grad_b, kl_b) = results
    assert kl_a == pytest.approx(kl_b, rel=1e-5)
    assert grad_a.abs().max() > 1e-3
    return a, b, (grad_a - grad_b).abs().max().item()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("weights", [False, True])
def test_dual_clip_is_vanilla(example, mode, weights):
    for seed in range(5):
        config = actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=2.0)
        ours, theirs, gap = differences(["rlkit_dual_clip", "vanilla"], config, weights=weights, mode=mode, seed=seed)
        print(f"{mode}, weights {weights}: {ours:.7f}, verl {theirs:.7f}; largest difference of the gradient {gap:.1e}")
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert gap < 1e-6


def test_sapo_is_verls(example):
    ours, theirs, gap = differences(["rlkit_sapo", "sapo"], actor(), mode="seq-mean-token-mean")
    print(f"sapo: {ours:.7f}, verl {theirs:.7f}; largest difference of the gradient {gap:.1e}")
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert gap < 1e-6


@pytest.mark.parametrize(("ours", "theirs"), [("rlkit_dual_clip", "vanilla"), ("rlkit_cispo", None)])
def test_the_actors_loss_calls_it(example, ours, theirs):
    """verl's `ppo_loss` on its nested tensors, with the counts of a global batch on two ranks."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    old, _, advantages, mask, _ = draw()
    prompts = [torch.arange(n) for n in (2, 1, 3, 1)]
    values = torch.randn(sum(map(len, prompts)) + int(LENS.sum()), generator=torch.Generator().manual_seed(1))

    def nested(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    def ragged(x):
        return nested(row[:n] for row, n in zip(x, LENS, strict=True))

    results = []
    for name in filter(None, (ours, theirs)):
        data = TensorDict(
            {"prompts": nested(prompts), "responses": ragged(torch.ones(4, 6, dtype=torch.long)),
             "response_mask": ragged(mask.long()), "old_log_probs": ragged(old), "advantages": ragged(advantages)},
            batch_size=4,
        )  # fmt: skip
        tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=40, global_batch_size=8)
        leaf = values.clone().requires_grad_()
        loss, metrics = ppo_loss(actor(policy_loss=PolicyLossConfig(loss_mode=name)), {"log_probs": leaf}, data)
        loss.backward()
        assert "actor/ppo_kl" in metrics
        results.append((loss.item(), leaf.grad))
    assert results[0][1].abs().sum() > 0
    if theirs:
        gap = (results[0][1] - results[1][1]).abs().max()
        print(f"ppo_loss: {results[0][0]:.7f}, {theirs} {results[1][0]:.7f}; gradient {gap:.1e}")
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
        assert gap < 1e-6


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("rlkit_leave_one_out", "rloo"), ("rlkit_group_zscore", "grpo"), ("rlkit_group_centered", None)],
)
def test_advantages_of_a_data_proto(example, ours, theirs):
    """The estimators on a DataProto with string uids, in groups that are not consecutive."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    _, _, rewards, mask, _ = draw()
    uid = np.array(["b", "a", "b", "a"], dtype=object)
    data = DataProto.from_dict({"token_level_rewards": rewards * mask, "response_mask": mask.long()}, {"uid": uid})
    call = {
        **{k: data.batch[k] for k in ("token_level_rewards", "response_mask")},
        "index": data.non_tensor_batch["uid"],
    }
    got, returns = get_adv_estimator_fn(ours)(**call, config=None)
    assert torch.equal(got, returns)
    sums = [sum(rewards[i, : LENS[i]].tolist()) for i in range(4)]
    if theirs is None:
        expected = torch.tensor([s - (sums[i] + sums[(i + 2) % 4]) / 2 for i, s in enumerate(sums)])[:, None] * mask
    else:
        expected, _ = get_adv_estimator_fn(theirs)(**call, config=None)
    print(f"{ours}: largest difference {(got - expected).abs().max():.1e}")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_every_name_is_registered_and_main_runs(example, capsys):
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    assert {f"rlkit_{name}" for name in example.SURROGATES} <= set(POLICY_LOSS_REGISTRY)
    assert {f"rlkit_{name}" for name in example.BASELINES} <= set(ADV_ESTIMATOR_REGISTRY)
    example.main()
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines["rlkit_dual_clip"] == lines["vanilla"]
    assert len(lines) == 1 + len(example.SURROGATES)
