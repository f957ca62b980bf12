"""A NaN stops a run in one line that names the stream and the prompt; with skip_nan it is dropped and counted."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small import SIZES, CopyEngine, async_grpo, call, small_model, tokenizer
from transformers import AutoModelForTokenClassification

from rlkit import losses
from rlkit._util.text import Explained
from rlkit.data.examples import Example, Labelled, Pair
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model
from rlkit.loops.distill import distill
from rlkit.loops.grpo import grpo
from rlkit.loops.nans import ORIGIN
from rlkit.loops.ppo import ppo
from rlkit.loops.preference import dpo, kto
from rlkit.loops.sft import sft
from rlkit.loops.updates import clipped
from rlkit.loops.watch import Watch
from rlkit.model.forward import Policy
from rlkit.model.heads import load_value_model
from rlkit.model.teachers import LocalTeacher
from rlkit.packing import pack, with_streams
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import single_turn
from rlkit.rollout.limits import success_between
from rlkit.types import Batch, Trajectory

PROMPTS = [Prompt([65 + i, 60], {}, i) for i in range(4)]
LOSSES = {dpo: losses.dpo, kto: losses.kto_unpaired}
FIRST_TOKEN = PROMPTS[2].ids[0]


@pytest.fixture(autouse=True)
def without_plots(monkeypatch):
    """Each would import matplotlib and draw, and nothing here looks at one."""
    monkeypatch.setattr("rlkit.run.saving.draw", lambda run: None)


def with_broken_token(model):
    """The model with a NaN in the embedding, which does not train, of a token that only the third prompt has."""
    with torch.no_grad():
        model.get_input_embeddings().weight.requires_grad_(False)[FIRST_TOKEN, 0] = math.nan
    return model


async def rewarded(prompt, sample):
    """Half of the answers get 1, the rest 0, so every group has a signal."""
    t = await single_turn(prompt, sample)
    return replace(t, reward=float(sum(t.ids) % 2))


async def nan_reward(prompt, sample):
    t = await rewarded(prompt, sample)
    return replace(t, reward=math.nan) if prompt.index == 2 and t.ids[0] % 2 else t


def run(loop, folder, **changes):
    model = small_model()
    engine = CopyEngine() if loop is async_grpo else LocalEngine(model, max_len=64)
    options = {
        "env": rewarded, "score": None, "output": folder, "steps": 2, "max_new_tokens": 5,
        "lr_at": lambda step: 1e-3, "prompts_per_step": 4, "group_size": 4, "prompts": PROMPTS,
    }  # fmt: skip
    options |= changes
    critic = options.pop("critic", None)
    models = (model, *{ppo: [critic], distill: [LocalTeacher(Policy(small_model(seed=2)), 64)]}.get(loop, []))
    if loop is ppo:
        options["critic_lr_at"] = options["lr_at"]
    asyncio.run(call(loop, *models, tokenizer(), engine, **options))
    return model


def failed_groups(*failed):
    """Groups of one step, a sample for each of `failed`."""
    infos = [{"metrics": {"failed": float(bad)}, **({"error": "no tools"} if bad else {})} for bad in failed]
    return [[Trajectory([1], [2], [not bad], [0.0], [0], info=info) for bad, info in zip(failed, infos, strict=True)]]


def test_a_step_in_which_every_episode_failed_is_said_and_ends_the_run():
    said = []

    def watch():
        return Watch(SimpleNamespace(say=said.append), PROMPTS, tokenizer(), skip=False)

    with pytest.raises(Explained, match="all 4 episodes of step 1 failed, and nothing is trained on: no tools"):
        watch().groups(failed_groups(1, 1, 1, 1), step=1)
    one = watch()
    one.groups(failed_groups(1, 0, 1, 1), step=1)
    assert not said
    for step in range(2, 9):
        one.groups(failed_groups(1, 1, 1, 1), step=step)
    assert said[0] == "all 4 episodes of step 2 failed, and nothing is trained on: no tools"
    assert len(said) == 7
    with pytest.raises(Explained, match="of step 9 failed"):
        one.groups(failed_groups(1, 1, 1, 1), step=9)


def critic_from(folder):
    """A critic with a random head, so that its values carry the NaN."""
    tiny_model(tokenizer(), **SIZES).save_pretrained(folder / "policy")
    torch.manual_seed(1)
    AutoModelForTokenClassification.from_pretrained(folder / "policy", num_labels=1).save_pretrained(folder / "critic")
    return load_value_model(folder / "critic")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def sound(folder):
    """The lines of the run, of which every number is finite."""
    lines = lines_of(folder)
    assert all(math.isfinite(x) for line in lines for x in line.values())
    return lines


@pytest.mark.slow_cases("grpo1")
@pytest.mark.parametrize("loop", [grpo, async_grpo])
def test_a_reward_that_is_nan(tmp_path, capsys, loop):
    with pytest.raises(ValueError, match=r"step 1: rewards \(made by the reward function or the environment\)") as told:
        run(loop, tmp_path / "stops", env=nan_reward)
    assert "nan in " in str(told.value)
    assert "row 3 of the data, 'C<'" in str(told.value)
    assert "--skip-nan" in str(told.value)
    run(loop, tmp_path / "skips", env=nan_reward, skip_nan=True, minibatches=2)
    lines = sound(tmp_path / "skips")
    dropped = sum(line["nan/dropped"] for line in lines)
    rows = [json.loads(x) for f in (tmp_path / "skips/trajectories").glob("train*") for x in f.read_text().splitlines()]
    broken = sum(math.isnan(row["reward"]) for row in rows)
    assert 0 < dropped <= broken
    assert loop is async_grpo or dropped == broken, "the asynchronous loop has sampled ahead"
    assert "row 3 of the data" in capsys.readouterr().out
    assert all(line["grad_norm"] > 0 for line in lines)


def test_dynamic_sampling_does_not_hide_a_reward_that_is_nan(tmp_path):
    async def always(prompt, sample):
        return replace(await single_turn(prompt, sample), reward=math.nan if prompt.index == 2 else 0.5)

    with pytest.raises(ValueError, match=r"rewards .* has nan in 4 of 16 samples"):
        run(grpo, tmp_path, env=always, keep_group=success_between(0.1, 0.9))


def test_a_critic_with_one_nan_does_not_train_on_nothing(tmp_path):
    """Its NaN would make the advantages of the whole batch NaN by the whitening, and once made them 0."""
    with pytest.raises(ValueError, match=r"step 1: values \(made by the critic's forward\) has nan in 4 of 16 samples"):
        run(ppo, tmp_path / "stops", critic=with_broken_token(critic_from(tmp_path)))
    critic = with_broken_token(critic_from(tmp_path))
    before = critic.score.weight.clone()
    run(ppo, tmp_path / "skips", critic=critic, skip_nan=True)
    lines = sound(tmp_path / "skips")
    assert lines[0]["nan/dropped"] == 4.0 <= lines[1]["nan/dropped"]  # an answer may hold the token too
    assert all(line["grad_norm"] > 0 < line["value/grad_norm"] for line in lines)
    assert critic.score.weight.isfinite().all()
    assert not torch.equal(critic.score.weight, before)


@pytest.mark.parametrize("loop", [grpo, async_grpo])
def test_a_reference_with_one_nan(tmp_path, loop):
    kl = {"kl_coef": 0.1, "reference": with_broken_token(small_model(seed=1))}
    match = r"step 1: ref_logp \(made by the reference model's forward\) has nan in 4 of 16 samples.* row 3 of the data"
    with pytest.raises(ValueError, match=match):
        run(loop, tmp_path / "stops", **kl)
    run(loop, tmp_path / "skips", skip_nan=True, **kl)
    lines = sound(tmp_path / "skips")
    assert lines[0]["nan/dropped"] == 4.0 <= lines[1]["nan/dropped"]


@pytest.mark.parametrize("loop", [grpo, distill])
def test_a_nan_of_one_sample_is_not_in_the_baseline_of_its_group(tmp_path, loop):
    """The KL is in the rewards that a group is compared by."""
    seen = []

    async def once(prompt, sample):
        t = await rewarded(prompt, sample)
        seen.append(prompt.index)
        broken = prompt.index == 1 and seen.count(1) == 1
        return replace(t, ids=[FIRST_TOKEN, *t.ids[1:]] if broken else [20 if x == FIRST_TOKEN else x for x in t.ids])

    kl = {"kl_coef": 0.1, "kl_in": "reward", "reference": with_broken_token(small_model(seed=1))}
    run(
        loop, tmp_path, skip_nan=True, steps=1, env=once, prompts=[*PROMPTS[:2], *PROMPTS[3:]], prompts_per_step=3, **kl
    )
    assert sound(tmp_path)[0]["nan/dropped"] == 1.0


def test_where_nothing_is_left_the_run_stops_all_the_same(tmp_path):
    async def always(prompt, sample):
        return replace(await single_turn(prompt, sample), reward=math.inf)

    with pytest.raises(ValueError, match=r"rewards .* has inf in 16 of 16 samples.* no sample of the step is left"):
        run(grpo, tmp_path, env=always, skip_nan=True)


def test_a_gradient_that_is_not_finite_is_never_applied(tmp_path):
    """A loss of the user's own, log(A) at A <= 0, which would be refused if it were tried."""

    def surrogate(log_ratio, batch):
        return clipped(log_ratio, batch) + log_ratio * batch.advantages.log()

    match = "step 1: the gradient norm of the policy is nan.* the gradient was not applied.*--skip-nan"
    with pytest.raises(ValueError, match=match):
        run(grpo, tmp_path / "stops", surrogate=surrogate, loss_unchecked=True)
    model = run(grpo, tmp_path / "skips", surrogate=surrogate, loss_unchecked=True, skip_nan=True)
    fresh = small_model().state_dict()
    assert all(torch.equal(x, fresh[name]) for name, x in model.state_dict().items())
    assert [line["skipped_step"] for line in lines_of(tmp_path / "skips")] == [1.0, 1.0]


class Rash(torch.optim.AdamW):
    """An optimizer of the user's own, with a learning rate of its own."""

    def __init__(self, groups, lr):
        super().__init__(groups, fused=True)
        self.own = lr

    def step(self):
        for group in self.param_groups:
            group["lr"] = self.own
        super().step()


@pytest.mark.slow_cases("grpo")
@pytest.mark.parametrize("loop", [grpo, sft, dpo, kto])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, loop):
    """The third step takes the weights past fp32: the checkpoint and the export of the second stay as they were."""
    fixed = {
        sft: [Example([65, 66, 67 + i], [False, True, True]) for i in range(4)],
        dpo: [Pair([65], [66, 67 + i], [68]) for i in range(4)],
        kto: [Labelled([65], [66, 67 + i], i % 2 == 0) for i in range(4)],
    }
    out = tmp_path / "run"

    def train(steps, lr, **more):
        if loop is grpo:
            return run(grpo, out, steps=steps, lr_at=lambda step: lr if step >= 2 else 1e-3, **more)
        own = {"loss": partial(LOSSES[loop], beta=0.1), "reference": small_model()} if loop in LOSSES else {}
        own |= {"make_optimizer": lambda groups: Rash(groups, lr), "warmup_steps": 0, "batch_size": 4}
        return call(loop, small_model(), tokenizer(), fixed[loop], output=out, steps=steps, **own, **more)

    train(2, 1e-3)
    before = (out / "model/model.safetensors").read_bytes()
    match = r"^after step 3 weights are NaN or infinite: \d+ of \d+ tensors, such as .*; they are not saved, and "
    with pytest.raises(Explained, match=match):
        train(3, 1e39, resume=True)
    assert (out / "model/model.safetensors").read_bytes() == before
    assert [file.name for file in (out / "checkpoints").glob("step*")] == ["step_00000002"]


def batch_of(**streams):
    """Two groups of two answers; the third answer is cut by a limit."""
    from rlkit.loops.nans import finite_batch

    t = [
        Trajectory([5, 6 + i], [7, 8, 9], [True, False, True], [-1.0] * 3, [0] * 3, truncated=i == 2) for i in range(4)
    ]
    batch = pack([t[:2], t[2:]])
    ones = torch.ones(batch.num_tokens)
    batch = with_streams(batch, old_logp=-ones, ref_logp=-ones, values=ones, returns=ones, advantages=ones)
    return finite_batch, replace(
        batch, **{name: ones.index_fill(0, torch.tensor(at), bad) for name, (at, bad) in streams.items()}
    )


STREAMS = ["token_rewards", "rollout_logp", "old_logp", "ref_logp", "kept_mass", "values", "returns", "advantages"]


def test_every_float_stream_has_its_origin():
    kinds = {field.name: str(field.type) for field in fields(Batch)}
    assert {*ORIGIN} == {name for name, kind in kinds.items() if kind.startswith("Float")}
    assert {*STREAMS} == {*ORIGIN} - {"rewards", "teacher_logp"}


def test_a_nan_of_a_teacher_is_told_and_its_padding_is_not():
    finite_batch, batch = batch_of()
    logp = torch.full((batch.num_tokens, 2), -1.0)
    logp[5, 1] = -math.inf  # a teacher that gave one candidate
    padded = replace(batch, teacher_logp=logp)
    assert finite_batch(padded, step=7, describe=str, skip=False).num_dropped == 0
    logp[5, 1] = math.nan
    with pytest.raises(ValueError, match=r"step 7: teacher_logp \(made by the teacher\) has nan in 1 of 4 samples"):
        finite_batch(padded, step=7, describe=str, skip=False)


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_of_a_batch_is_watched_at_its_trained_places(name):
    how = {"step": 7, "describe": lambda ids: f"prompt {ids}"}
    finite_batch, batch = batch_of(**{name: ([5], math.inf)})
    with pytest.raises(
        ValueError, match=rf"step 7: {name} .* has inf in 1 of 4 samples; the first is of prompt \[5, 7\]"
    ):
        finite_batch(batch, skip=False, **how)
    kept, num, note, places = finite_batch(batch, skip=True, **how)
    assert places == [0, 2, 3]
    assert num == 1
    assert name in note
    assert kept.num_seqs == 3
    assert getattr(kept, name).isfinite().all()
    assert kept.group_ids.tolist() == [0, 1, 1]
    finite_batch, batch = batch_of(**{name: ([1, 4, 11], math.nan)})  # masked places are free
    assert finite_batch(batch, skip=False, **how) == (batch, 0, "", range(4))


def test_a_value_counts_where_it_is_a_bootstrap():
    finite_batch, batch = batch_of(values=([9], math.nan))  # the place after the last token of the third answer
    assert not batch.mask[9]
    with pytest.raises(ValueError, match=r"values .* in 1 of 4 samples"):
        finite_batch(batch, step=1, describe=str, skip=False)


def test_an_episode_in_pieces_is_dropped_as_a_whole():
    from rlkit.loops.nans import finite_groups

    def piece(reward, *, continues=False, logp=-1.0):
        return Trajectory([5], [6, 7], [True, True], [logp, -1.0], [0, 0], reward=reward, continues=continues)

    groups = [[piece(1.0), piece(1.0, continues=True, logp=math.nan), piece(0.0)], [piece(2.0)]]
    kept, num, note, places = finite_groups(groups, step=1, describe=str, skip=True)
    assert kept == [[groups[0][2]], groups[1]]
    assert places == [2, 3]
    assert num == 1
    assert "rollout_logp (made by the rollout engine) has nan in 1 of 3 samples" in note


def test_a_skipped_update_names_the_other_metrics_that_are_not_finite():
    from rlkit.loops.nans import check_norms

    line = {"reward/mean": 1.0, "entropy": math.inf, "skipped_step": 1.0, "grad_norm": math.nan, "value/loss": math.nan}
    check_norms(line, step=3, skip=True)
    check_norms(line | {"skipped_step": 0.0}, step=3, skip=False)
    with pytest.raises(ValueError, match=r"of the policy is nan \(also not finite: entropy, value/loss\); all inputs"):
        check_norms(line, step=3, skip=False)
    only = {"loss": 1.0, "value/skipped_step": 0.5, "value/grad_norm": math.inf}
    with pytest.raises(ValueError, match=r"^step 3: the gradient norm of the critic is inf; all inputs"):
        check_norms(only, step=3, skip=False)
