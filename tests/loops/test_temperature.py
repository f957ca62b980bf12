"""Samples and training log-probs have one temperature: two that differ are refused, in rl and in other loops."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from rlkit.advantages import group_centered
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.checks import check_prepared
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task, rl
from rlkit.loops.updates import PolicyLoss, grpo_update
from rlkit.losses import reinforce
from rlkit.metrics import finalize
from rlkit.model.forward import Policy, prepare_model, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import optimizer_step
from rlkit.packing import microbatches, pack, select, unpack, with_advantages
from rlkit.rewards.scoring import scorer
from rlkit.rollout import calling, rollout
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import Optim, Penalties, Rollouts, SamplingParams, Schedule

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
TOKENIZER = tiny_tokenizer()
PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(4)]
SCORE = scorer(lambda text, row: float(sum(map(ord, text)) % 7), tokenizer=TOKENIZER, timeout_s=60)


def small_model(seed=0):
    return prepare_model(tiny_model(TOKENIZER, seed=seed, **SIZES))


def sampled(model, **params):
    engine = LocalEngine(model, max_len=64)
    options = {"params": SamplingParams(max_new_tokens=6, **params), "group_size": 2, "seed": 0, "score": SCORE}
    return asyncio.run(rollout(PROMPTS, generate=engine.generate, **options))


def own_loop(folder, policy, *, reference=None, end=partial(optimizer_step, max_norm=1.0), **changes):
    """docs/own-loop.md in short; `end` is the end of its update."""
    optimizer = torch.optim.SGD(policy.model.parameters())

    def prepare_batch(groups, step):
        return with_advantages(pack(groups), group_centered)

    def update(batch, step):
        reinforce(policy(batch).logp, batch.advantages).sum().backward()
        end(optimizer)
        return {}

    rollouts = Rollouts(prompts_per_step=4, group_size=2, max_new_tokens=6, **changes)
    return asyncio.run(
        rl(
            policy, TOKENIZER, LocalEngine(policy.model, max_len=64), Task(PROMPTS, SCORE), rollouts,
            Schedule(folder, steps=1), prepare=prepare_batch, update=update, reference=reference,
            state={"model": policy.model, "optimizer": optimizer},
        )
    )  # fmt: skip


@pytest.mark.parametrize(("policy", "reference"), [(1.0, 0.7), (0.7, 1.0), (1.0, None)])
def test_rl_refuses_two_temperatures_before_it_samples(tmp_path, policy, reference):
    model = small_model()
    ref = None if reference is None else Policy(small_model(1), temperature=reference)
    owner = "policy" if policy != 0.7 else "reference"
    with pytest.raises(ValueError, match=f"the {owner}'s log-probs are at temperature 1, and the rollouts .* at 0.7"):
        own_loop(tmp_path / "run", Policy(model, temperature=policy), reference=ref, temperature=0.7)
    assert not (tmp_path / "run").exists()


def test_rl_trains_at_one_temperature(tmp_path):
    own_loop(tmp_path / "run", Policy(small_model(), temperature=0.7), temperature=0.7)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


def test_a_loop_of_ones_own_refuses_a_batch_of_another_temperature():
    """Wherever log-probs are taken: README's loop, old and reference log-probs, kept mass, the fused loss, `split`s."""
    model = small_model()
    policy, batch = Policy(model), with_advantages(pack(sampled(model, temperature=0.7)), group_centered)
    micro = next(iter(microbatches((select(batch, [5, 2]),), max_tokens=999)))[0]
    nucleus = SamplingParams(temperature=1.0, top_p=0.9)
    for refused in (
        lambda: policy(batch),
        lambda: policy(micro),
        lambda: policy(batch.to("cpu")),
        lambda: policy(pack(unpack(batch))),
        lambda: with_old_logp(policy, batch, max_tokens=16),
        lambda: with_ref_logp(Policy(small_model(1)), batch, max_tokens=16),
        lambda: with_kept_mass(policy, batch, params=nucleus, max_tokens=16),
    ):
        with pytest.raises(ValueError, match=r"sampled at temperature 0.7.*Policy\(model, temperature=0.7\)"):
            refused()
    right = Policy(model, temperature=0.7)(batch)
    assert (right.logp - batch.rollout_logp).abs().max() < 1e-4
    assert (policy(replace(batch, temperature=None)).logp - batch.rollout_logp).abs().max() > 0.01


def test_greedy_samples_have_the_log_probs_of_temperature_1():
    model = small_model()
    batch = pack(sampled(model, temperature=0.0))
    assert (Policy(model)(batch).logp - batch.rollout_logp).abs().max() < 1e-4
    with pytest.raises(ValueError, match="sampled at temperature 1,"):
        Policy(model, temperature=0.5)(batch)


def test_trajectories_of_two_temperatures_are_not_packed():
    model = small_model()
    with pytest.raises(ValueError, match=r"temperatures 0\.5, 1: pack those of one temperature"):
        pack([*sampled(model), *sampled(model, temperature=0.5)])


def test_a_nucleus_needs_its_kept_mass_in_an_own_loop(tmp_path):
    """Which the embedded engine reports; of another engine it is computed."""
    rollouts = Rollouts(top_p=0.5)
    with pytest.raises(ValueError, match=r"`kept_mass`: call with_kept_mass\(...\) in `prepare`"):
        check_prepared(pack(sampled(small_model())), rollouts)
    check_prepared(pack(sampled(small_model(), top_p=0.5)), rollouts)
    own_loop(tmp_path / "run", Policy(small_model()), top_p=0.5)


def test_several_steps_of_an_own_loop_without_old_log_probs_are_named(tmp_path, caplog):
    own_loop(tmp_path / "one", Policy(small_model()))
    assert "old_logp" not in caplog.text
    own_loop(tmp_path / "six", Policy(small_model()), minibatches=2, epochs=3)
    assert "prepare fills no old_logp for 6 optimizer steps on a batch, and logp - logp.detach() is 0" in caplog.text


def step(model, batch, *, lr=1.0, kl_coef=0.0, **changes):
    rollouts = Rollouts(prompts_per_step=4, group_size=2, max_new_tokens=6, **changes)
    return finalize(
        grpo_update(
            batch, policy=Policy(model), optimizer=torch.optim.SGD(model.parameters()), loss=PolicyLoss(),
            rollouts=rollouts, optim=Optim(max_tokens=64), lr=lr, kl_coef=kl_coef, entropy_coef=0.0, seed=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{"minibatches": 2}, {"epochs": 2}, {"minibatches": 2, "epochs": 3}])
def test_several_steps_on_a_batch_need_its_old_log_probs(changes):
    """Without them the log-probs of each step were its own old ones: every ratio was 1, and nothing was clipped."""
    model = small_model()
    batch = with_advantages(pack(sampled(model)), group_centered)
    with pytest.raises(ValueError, match=r"optimizer steps on a batch needs `old_logp`.*with_old_logp"):
        step(model, batch, **changes)
    batch = with_old_logp(Policy(model), batch, max_tokens=64)
    moved = step(model, batch, **changes)
    assert moved["ratio/kl_old_k3"] > 1e-6
    assert step(small_model(), batch)["ratio/kl_old_k3"] < 1e-9, "one step: old and current policy are one"


@pytest.mark.parametrize(
    ("changes", "name"), [({"kl_coef": 0.1}, "ref_logp"), ({"top_p": 0.9}, "kept_mass"), ({}, "advantages")]
)
def test_a_stream_that_a_setting_needs_is_asked_for(changes, name):
    model = small_model()
    batch = pack(sampled(model))
    batch = batch if name == "advantages" else with_advantages(batch, group_centered)
    with pytest.raises(ValueError, match=f"needs `{name}`, and the batch has none: batch = with_"):
        step(model, batch, **changes)


def test_tokens_are_excluded_in_an_own_loop_too(tmp_path):
    """`drop_truncated` and `drop_off_policy` are settings of `rl`, whatever `prepare` does."""
    seen = []

    def prepare_batch(groups, step):
        seen.extend(t for group in groups for t in group)
        return with_advantages(pack(groups), group_centered)

    model = small_model()
    engine = LocalEngine(model, max_len=64, eos_token_ids=())
    rollouts = Rollouts(prompts_per_step=4, group_size=2, max_new_tokens=6, drop_truncated=True)
    run = rl(
        Policy(model), TOKENIZER, engine, Task(PROMPTS, SCORE), rollouts, Schedule(tmp_path, steps=1),
        prepare=prepare_batch, update=lambda batch, step: {},
        state={"model": model, "optimizer": torch.optim.SGD(model.parameters())},
    )  # fmt: skip
    asyncio.run(run)
    assert seen
    assert all(t.truncated for t in seen)
    assert not any(any(t.mask) for t in seen)


@pytest.mark.parametrize(("sync", "state"), [(0, ["model"]), (0, ["optimizer"]), (1, ["model", "optimizer"])])
def test_rl_asks_for_what_it_saves_before_it_samples(tmp_path, sync, state):
    model = small_model()
    whole = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "reference": small_model(1)}
    missing = next(name for name in whole if name not in state)
    run = rl(
        Policy(model), TOKENIZER, LocalEngine(model, max_len=64), Task(PROMPTS, SCORE), Rollouts(prompts_per_step=4),
        Schedule(tmp_path / "run", steps=1), Penalties(ref_sync_steps=sync), prepare=None, update=None,
        state={name: whole[name] for name in state},
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"has no {missing}"):
        asyncio.run(run)


def test_grpo_still_evaluates_greedily_at_its_temperature(tmp_path):
    model, reference = small_model(), small_model(1)
    task = Task(PROMPTS, SCORE, eval_prompts=PROMPTS[:2])
    rollouts = Rollouts(prompts_per_step=4, group_size=2, max_new_tokens=6, temperature=0.5, minibatches=2)
    schedule, engine = Schedule(tmp_path, steps=1, eval_steps=1), LocalEngine(model, max_len=64)
    asyncio.run(grpo(model, TOKENIZER, engine, task, rollouts, schedule, Optim(lr=1e-3), reference=reference))
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/kl"] > 0
    assert last["mismatch/abs_max"] < 1e-4
    assert "eval/greedy" in last


@pytest.mark.parametrize(
    "end", [lambda optimizer: None, lambda optimizer: optimizer.step()], ids=["no step", "no zero"]
)
def test_gradients_that_an_update_leaves_are_named(tmp_path, caplog, end, monkeypatch):
    monkeypatch.setattr(calling, "_reported", set())
    own_loop(tmp_path / "right", Policy(small_model()))
    own_loop(tmp_path / "zeroed", Policy(small_model()), end=lambda optimizer: optimizer.zero_grad(set_to_none=False))
    assert "leaves gradients" not in caplog.text
    own_loop(tmp_path / "left", Policy(small_model()), end=end)
    assert "update leaves gradients after a step, and they add to those of the next: end it with opti" in caplog.text
