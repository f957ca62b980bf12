"""PPO with a critic: what a step computes against plain loops, that both learn, warm-up, resume, export."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from small import call
from transformers import AutoModelForTokenClassification

from rlkit.controllers import kl_linear
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.ppo import ppo, value_update, with_gae
from rlkit.model.forward import Policy, prepare_model
from rlkit.model.heads import load_value_model, values
from rlkit.model.optim import adamw, optimizer_step
from rlkit.packing import pack, with_streams
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import single_turn
from rlkit.settings import Bins, Critic, Optim, Rollouts
from rlkit.types import Trajectory

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(100)]


@cache
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    tiny_model(tokenizer(), **SIZES).save_pretrained(path / "policy")
    torch.manual_seed(1)
    AutoModelForTokenClassification.from_pretrained(path / "policy", num_labels=1).save_pretrained(path / "critic")
    return path


def sampled():
    """Two groups; masks with gaps, one answer cut by a limit."""
    generator = torch.Generator().manual_seed(0)

    def made(prompt, n, *, truncated=False):
        ids = torch.randint(3, 200, (n,), generator=generator).tolist()
        mask = [i % 4 != 2 for i in range(n)]
        logp = torch.randn(n, generator=generator).sub(3).tolist()
        reward = float(torch.rand((), generator=generator))
        return Trajectory(prompt, ids, mask, logp, [0] * n, reward=reward, truncated=truncated)

    return [[made([5, 6, 7], 5), made([5, 6, 7], 9, truncated=True)], [made([8], 3)]]


def test_a_step_estimates_what_plain_loops_do(folder):
    groups = sampled()
    model = AutoModelForTokenClassification.from_pretrained(folder / "critic").eval()
    batch = pack(groups)
    generator = torch.Generator().manual_seed(2)
    old, ref = (-torch.rand(batch.num_tokens, generator=generator) for _ in range(2))
    batch = with_streams(batch, old_logp=old, ref_logp=ref)
    found = with_gae(
        batch, values=Policy(load_value_model(folder / "critic")), kl_coef=0.1, max_tokens=12,
        critic=Critic(gamma=0.9, lam_policy=0.8, lam_value=0.95, bootstrap=True),
    )  # fmt: skip
    advantages, returns = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    first = 0
    for t in (t for group in groups for t in group):
        with torch.no_grad():
            v = model(torch.tensor([t.prompt_ids + t.ids])).logits[0, len(t.prompt_ids) - 1 :, 0]
        actions = [i for i, m in enumerate(t.mask) if m]
        for lam, out in ((0.8, advantages), (0.95, returns)):
            trace, after = 0.0, float(v[len(t.ids)]) if t.truncated else 0.0
            for i in reversed(actions):
                r = t.reward * (i == actions[-1]) - 0.1 * float(batch.old_logp[first + i] - batch.ref_logp[first + i])
                trace = r + 0.9 * after - float(v[i]) + 0.9 * lam * trace
                after = float(v[i])
                out[first + i] = trace + (float(v[i]) if out is returns else 0.0)
        first += len(t.ids) + t.truncated
    mask = batch.mask
    whitened = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-6) * mask
    torch.testing.assert_close(found.returns, returns, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.advantages, whitened, atol=1e-4, rtol=1e-4)
    cut = with_gae(
        batch, values=Policy(load_value_model(folder / "critic")), kl_coef=0.0, max_tokens=99,
        critic=Critic(gamma=1.0, lam_policy=1.0, lam_value=1.0),
    )  # fmt: skip
    ends = batch.rewards.repeat_interleave(batch.cu_seqlens.diff()) * mask
    torch.testing.assert_close(cut.returns, ends, atol=1e-5, rtol=1e-5)


def test_a_step_without_trained_tokens_leaves_the_critic_to_no_step_of_the_policy(folder):
    critic, policy = load_value_model(folder / "critic"), torch.nn.Linear(2, 1)
    optimizer = adamw(torch.nn.ModuleDict({"policy": policy, "critic": critic}), lr=1e-2)
    batch = pack(sampled())
    batch = with_streams(batch, values=values(critic, batch).detach(), returns=torch.ones(batch.num_tokens))
    step = partial(
        value_update, values=Policy(critic), optimizer=optimizer, rollouts=Rollouts(), lr=1e-2, seed=0, optim=Optim(),
        critic=Critic(),
    )  # fmt: skip
    step(batch)
    trained = [p.detach().clone() for p in critic.parameters()]
    step(replace(batch, mask=torch.zeros_like(batch.mask)))
    policy.weight.sum().backward()
    optimizer_step(optimizer, max_norm=1.0)
    assert all(map(torch.equal, critic.parameters(), trained))


def test_the_critic_takes_the_step_of_a_padded_one(folder):
    groups, critic = sampled(), load_value_model(folder / "critic")
    model = AutoModelForTokenClassification.from_pretrained(folder / "critic").eval()
    batch = pack(groups)
    generator = torch.Generator().manual_seed(3)
    now = values(critic, batch).detach()
    old, returns = (now + 0.2 * torch.randn(now.shape, generator=generator) for _ in range(2))
    batch = with_streams(batch, values=old, returns=returns)
    metrics = value_update(
        batch, values=Policy(critic), optimizer=adamw(critic, lr=0.0), rollouts=Rollouts(), lr=1e-2, seed=0,
        optim=Optim(max_norm=1e9, max_tokens=12), critic=Critic(value_clip=0.1),
    )  # fmt: skip

    loss, first = torch.zeros(()), 0
    for t in (t for group in groups for t in group):
        v = model(torch.tensor([t.prompt_ids + t.ids])).logits[0, len(t.prompt_ids) - 1 :, 0]
        for i in (i for i, m in enumerate(t.mask) if m):
            near = old[first + i] + (v[i] - old[first + i]).clamp(-0.1, 0.1)
            loss = loss + 0.5 * torch.maximum((v[i] - returns[first + i]) ** 2, (near - returns[first + i]) ** 2)
        first += len(t.ids) + t.truncated
    loss = loss / int(batch.mask.sum())
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).zero_grad()
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).step()
    assert float(metrics["value/loss"].total / metrics["value/loss"].count) == pytest.approx(loss.item(), rel=1e-5)
    grads = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(metrics["value/grad_norm"].total) == pytest.approx(grads.item(), rel=1e-4)
    after = values(critic, batch)
    first = 0
    for t in (t for group in groups for t in group):
        v = model(torch.tensor([t.prompt_ids + t.ids])).logits[0, len(t.prompt_ids) - 1 :, 0]
        torch.testing.assert_close(after[first : first + len(t.ids)], v[: len(t.ids)], atol=2e-3, rtol=2e-3)
        first += len(t.ids) + t.truncated


def test_a_critic_does_not_step_where_nothing_is_trained_on(folder):
    """Its momentum alone would move it; a policy without a trained token does not step either."""
    critic = load_value_model(folder / "critic")
    optimizer = adamw(critic, lr=1e-2)
    batch = pack(sampled())
    batch = with_streams(batch, values=torch.zeros(batch.num_tokens), returns=torch.ones(batch.num_tokens))
    how = {"values": Policy(critic), "optimizer": optimizer, "optim": Optim(), "critic": Critic(), "lr": 1e-2}
    value_update(batch, rollouts=Rollouts(), seed=0, **how)
    before = [p.clone() for p in critic.parameters()]
    second = batch.mask & (torch.arange(batch.num_tokens) >= batch.cu_seqlens[2])
    metrics = value_update(replace(batch, mask=second & False), rollouts=Rollouts(), seed=0, **how)
    assert all(map(torch.equal, critic.parameters(), before))
    assert float(metrics["value/grad_norm"].total) == 0
    value_update(replace(batch, mask=second), rollouts=Rollouts(minibatches=2), seed=0, **how)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {2}, "of two minibatches, one has trained tokens"


BINS = Bins((-2.0, 1.5), 9)


def test_a_critic_with_bins_takes_the_step_of_a_padded_one(folder, tmp_path):
    """Value and cross-entropy from the logits of transformers' own forward, the target from torch's Gaussian."""
    AutoModelForTokenClassification.from_pretrained(folder / "policy", num_labels=9).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"value_range": [-0.5, 1.5]}))
    groups, critic = sampled(), load_value_model(tmp_path / "m")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "m").eval()
    batch = pack(groups)
    returns = 2.5 * torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(4)) - 0.5
    batch = with_streams(batch, values=torch.zeros_like(returns), returns=returns)
    edges, loss, expected, first = torch.linspace(-0.5, 1.5, 10), torch.zeros(()), [], 0
    for t in (t for group in groups for t in group):
        logp = model(torch.tensor([t.prompt_ids + t.ids])).logits[0, len(t.prompt_ids) - 1 :].log_softmax(-1)
        expected.append(logp.exp()[: len(t.ids) + t.truncated] @ (edges[1:] + edges[:-1]) / 2)
        for i in (i for i, m in enumerate(t.mask) if m):
            cdf = torch.distributions.Normal(returns[first + i].clamp(-0.5, 1.5), 0.75 * 2 / 9).cdf(edges)
            loss = loss - (cdf.diff() / (cdf[-1] - cdf[0]) * logp[i]).sum()
        first += len(t.ids) + t.truncated
    torch.testing.assert_close(values(critic, batch), torch.cat(expected))
    metrics = value_update(
        batch, values=Policy(critic), optimizer=adamw(critic, lr=0.0), rollouts=Rollouts(), lr=1e-2, seed=0,
        optim=Optim(max_norm=1e9, max_tokens=12), critic=Critic(value_clip=0.1),
    )  # fmt: skip
    loss = loss / int(batch.mask.sum())
    loss.backward()
    grads = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    found = {name: float(x.total / x.count) for name, x in metrics.items()}
    assert found["value/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["value/grad_norm"] == pytest.approx(grads.item(), rel=1e-4)
    outside = ((returns < -0.5) | (returns > 1.5))[batch.mask].float().mean()
    assert outside > 0
    assert found["value/outside"] == pytest.approx(float(outside))


@pytest.mark.slow
def test_a_critic_with_bins_learns_and_its_export_says_the_same(folder, tmp_path):
    new = load_value_model(folder / "policy", bins=BINS)
    batch = pack(sampled())
    torch.testing.assert_close(values(new, batch), torch.full((batch.num_tokens,), -0.25))
    _, critic = run(folder, tmp_path / "run", critic=new, steps=15, prompts_per_step=32, epochs=2)
    lines = lines_of(tmp_path / "run")
    assert lines[-1]["value/error"] < 0.2 * lines[0]["value/error"]
    assert lines[-1]["value/mean"] == pytest.approx(lines[-1]["reward/mean"], abs=0.1)
    assert {line["value/outside"] for line in lines} == {0.0}
    again = load_value_model(tmp_path / "run/critic")
    torch.testing.assert_close(values(again, batch), values(critic, batch))
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "run/critic").score.weight.shape == (9, 32)
    load_value_model(tmp_path / "run/critic", bins=BINS)
    for path, bins, has in (
        (tmp_path / "run/critic", Bins((-1, 1), 9), "its head has 9 bins from -2 to 1.5, not 9 bins from -1 to 1"),
        (folder / "critic", BINS, "its head has one number, not 9 bins from -2 to 1.5: drop `value_range`, or start"),
    ):
        with pytest.raises(ValueError, match=has):
            load_value_model(path, bins=bins)
    with pytest.raises(ValueError, match="`value_clip` and `value_huber` are not part of `value_range`"):
        run(folder, tmp_path / "clip", critic=new, value_clip=0.2)


def ascii_share(completion, row):
    return sum(map(str.isascii, completion)) / max(1, len(completion))


def run(folder, output, critic=None, **changes):
    torch.manual_seed(0)
    model, critic = prepare_model(tiny_model(tokenizer(), **SIZES)), critic or load_value_model(folder / "policy")
    options = {
        "score": scorer(ascii_share, tokenizer=tokenizer(), timeout_s=30.0), "output": output, "steps": 6,
        "max_new_tokens": 6, "lr_at": lambda _: 3e-3, "critic_lr_at": lambda _: 3e-3,
        "prompts_per_step": 16, "group_size": 1, "minibatches": 2,
    }  # fmt: skip
    asyncio.run(
        call(ppo, model, critic, tokenizer(), LocalEngine(model, max_len=64), prompts=PROMPTS, **options | changes)
    )
    return model, critic


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.slow
def test_policy_and_critic_learn_and_are_exported(folder, tmp_path):
    _, critic = run(folder, tmp_path / "run", steps=25, prompts_per_step=32, epochs=2)
    lines = lines_of(tmp_path / "run")
    assert lines[0]["reward/mean"] < 0.65 < 0.9 < lines[-1]["reward/mean"]
    assert lines[-1]["value/error"] < 0.1 * lines[0]["value/error"]
    assert lines[-1]["value/mean"] == pytest.approx(lines[-1]["reward/mean"], abs=0.1)
    assert all(line["mismatch/abs_max"] < 1e-4 for line in lines)
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "run/critic")
    torch.testing.assert_close(theirs.score.weight, critic.score.weight)
    assert theirs.score.weight.abs().sum() > 0
    assert (tmp_path / "run/model/config.json").exists()


@pytest.mark.slow
def test_what_a_critic_explains(folder, tmp_path):
    """1 - error / variance; there is none where all rewards are equal, and no number of no token."""
    run(folder, tmp_path / "run", steps=1, minibatches=1)
    line = lines_of(tmp_path / "run")[0]
    rows = (tmp_path / "run/trajectories/train_000001.jsonl").read_text().splitlines()
    rewards = torch.tensor([row["reward"] for row in map(json.loads, rows) for _ in range(row["length"])])
    error = rewards.square().mean()  # a new critic says 0
    assert line["value/explained"] == pytest.approx(float(1 - error / rewards.var(correction=0)), rel=1e-4)

    equal = scorer(lambda completion, row: 0.5, tokenizer=tokenizer(), timeout_s=30.0)
    run(folder, tmp_path / "equal", steps=1, score=equal)
    line = lines_of(tmp_path / "equal")[0]
    assert all(map(math.isfinite, line.values()))
    assert "value/explained" not in line


def test_a_step_of_nothing_but_cut_answers_says_so_and_logs_no_nan(folder, tmp_path, capsys):
    async def cut(prompt, sample):
        return replace(await single_turn(prompt, sample), truncated=True)

    reference = prepare_model(tiny_model(tokenizer(), **SIZES))
    run(folder, tmp_path, steps=2, env=cut, drop_truncated=True, kl_coef=0.1, reference=reference)
    assert capsys.readouterr().out.count("no token of this step is trained on") == 1
    for line in lines_of(tmp_path):
        assert all(map(math.isfinite, line.values()))
        assert not {"entropy", "kl/ref", "value/mean", "value/explained"} & line.keys()


@pytest.mark.slow
def test_the_critic_learns_alone_at_first(folder, tmp_path):
    model, critic = run(folder, tmp_path / "run", steps=2, critic_steps=2)
    untouched = tiny_model(tokenizer(), **SIZES).state_dict()
    assert all(torch.equal(x, untouched[name]) for name, x in model.state_dict().items())
    assert critic.score.weight.abs().sum() > 0
    assert "entropy" not in lines_of(tmp_path / "run")[0]


@pytest.mark.slow
def test_the_kl_coefficient_waits_for_the_policy(folder, tmp_path):
    reference = prepare_model(tiny_model(tokenizer(), **SIZES, seed=1))
    kl = {"kl_coef": 0.05, "reference": reference, "controllers": {"kl": kl_linear(target=1e-9, rate=0.05)}}
    run(folder, tmp_path / "run", steps=4, critic_steps=2, **kl)
    assert [line["kl/coef"] for line in lines_of(tmp_path / "run")] == pytest.approx([0.05, 0.05, 0.05, 0.06])


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(folder, tmp_path):
    def kl():
        reference = prepare_model(tiny_model(tokenizer(), **SIZES, seed=1))
        return {"kl_coef": 0.05, "reference": reference, "controllers": {"kl": kl_linear(target=0.1, rate=0.05)}}

    run(folder, tmp_path / "whole", **kl())
    run(folder, tmp_path / "parts", steps=3, **kl())
    run(folder, tmp_path / "parts", resume=True, **kl())
    whole, parts = lines_of(tmp_path / "whole"), lines_of(tmp_path / "parts")
    assert whole == parts
    assert len({line["kl/coef"] for line in whole}) > 1
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
