"""Wrong calls of the loops, of a rollout and of the model's functions: refused by name, before anything is sampled."""

from __future__ import annotations

import asyncio
import re
import warnings

import pytest
import torch
from small import call, small_model, tokenizer

from rlkit import losses
from rlkit.advantages import Gae, gae, group_zscore
from rlkit.data.load import load_rows
from rlkit.data.prompts import Prompt, rl_prompts
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.loops.preference import dpo, kto
from rlkit.loops.reward_model import reward_model
from rlkit.loops.rl import Task
from rlkit.loops.sft import sft
from rlkit.loops.updates import PolicyLoss
from rlkit.losses import ppo_clip
from rlkit.model.forward import Policy, make_policy, prepare_model, with_old_logp, with_ref_logp
from rlkit.model.optim import adamw, muon, optimizer_step
from rlkit.packing import pack, split, with_advantages
from rlkit.rewards.scoring import scorer
from rlkit.rollout import rollout
from rlkit.rollout.engines.local import LocalEngine
from rlkit.segments import group_mean
from rlkit.settings import Rollouts, SamplingParams, Schedule
from rlkit.types import Trajectory

PROMPTS = [Prompt(ids=[1, 2, 3], row={}, index=i) for i in range(2)]


async def zero(_prompt, trajectories):
    return trajectories


def trajectory(**fields):
    base = {"prompt_ids": [1, 2, 3], "ids": [4, 5], "mask": [True, True], "logp": [-1.0, -1.0], "versions": [0, 0]}
    return Trajectory(**base | fields)


def reward(completion, row):
    return 1.0


LOOP = [
    ({"loss": losses.ppo_clip}, "loss must be a PolicyLoss, e.g. PolicyLoss(ppo_clip), got function"),
    ({"loss": "ppo_clip"}, "loss must be a PolicyLoss, e.g. PolicyLoss(ppo_clip), got str"),
    ({"baseline": "group_zscore"}, "baseline must be a function, called as baseline(rewards, group_ids=group_ids)"),
    ({"baseline": gae}, "baseline is called as baseline(rewards, group_ids=group_ids), which gae does not take"),
    ({"reference": Policy, "kl_coef": 0.1}, "reference is a Policy: give its model, reference.model"),
    ({"reference": "m", "kl_coef": 0.1}, "reference is a path: give load_model('m')"),
    ({"prompts": []}, "task.prompts is empty"),
    ({"prompts": ["a"]}, "prompts[0] must be a Prompt, got str 'a': rl_prompts(rows, tokenizer=tokenizer"),
    ({"eval_prompts": [{"prompt": "a"}], "eval_steps": 1}, "prompts[0] must be a Prompt, got dict"),
    ({"score": None}, "task.score is None, so every reward is 0 and nothing would train: give scorer(reward_function"),
    ({"score": reward}, "score is a reward function: give scorer(score, tokenizer=tokenizer, timeout_s=...)"),
    ({"score": lambda prompt: prompt}, "score is called as score(prompt, trajectories), which <lambda> does not take"),
    ({"keep_group": 0.5}, "keep_group must be a function, called as keep_group(group), got float 0.5"),
    ({"env": "tools"}, "env must be a function, called as env(prompt, sample), got str 'tools'"),
    ({"tokenizer": None}, "tokenizer must have `decode`, to show samples, got a NoneType"),
    ({"model": "../m"}, "model is a path: give load_model('../m')"),
]


@pytest.mark.parametrize(("wrong", "message"), LOOP)
def test_grpo_names_a_wrong_argument_before_the_run_folder_is_made(wrong, message, tmp_path):
    model = small_model()
    wrong = dict(wrong)
    models = [wrong.pop("model", model), wrong.pop("tokenizer", tokenizer())]
    if wrong.get("reference") is Policy:
        wrong["reference"] = Policy(model)
    options = {"prompts": PROMPTS, "score": zero, "output": tmp_path / "run", "steps": 1, "max_new_tokens": 2}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        asyncio.run(call(grpo, *models, LocalEngine(model), **options | wrong))
    assert not (tmp_path / "run").exists()


def backwards(batch, bootstrap):
    return Gae(-batch.token_rewards, batch.token_rewards)


def of_values(batch, bootstrap):
    return Gae(batch.token_rewards - batch.values, batch.token_rewards)


def old(log_ratio, batch):
    return -log_ratio.exp() * batch.advantages + 0 * batch.old_logp


def group_means(rewards, *, group_ids):
    return group_mean(rewards, group_ids=group_ids)


def of_two(rewards, *, group_ids):
    return (rewards.view(-1, 2) - rewards.view(-1, 2).mean(1, keepdim=True)).flatten()


def test_grpo_tries_functions_of_yours_with_the_streams_of_the_run(tmp_path, caplog):
    model = small_model()

    def said(**wrong):
        caplog.clear()
        options = {"prompts": PROMPTS, "score": zero, "output": tmp_path / "run", "steps": 1, "keep_group": 0.5}
        with pytest.raises((TypeError, ValueError)) as error:  # in the end for `keep_group`
            asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model), **options | wrong))
        return [record.getMessage() for record in caplog.records] or [str(error.value)]

    nothing = said()
    assert nothing[0].startswith("keep_group must be a function")
    (line,) = said(loss=PolicyLoss(old))
    assert line.startswith(
        "the loss needs `batch.old_logp`, which this run does not have: it requires `minibatches` or"
    )
    assert said(loss=PolicyLoss(old), minibatches=2) == nothing
    (line,) = said(advantage=of_values)
    assert "of_values needs `batch.values`, which this run does not have: it requires a critic" in line
    (line,) = said(advantage=backwards)
    assert "backwards: its advantages fall where the rewards rise" in line
    (line,) = said(baseline=group_means)
    assert "group_means: its advantages are equal for all answers to a prompt" in line
    assert said(baseline=of_two) == said(baseline=group_zscore) == nothing


def test_grpo_names_a_dict_in_place_of_settings(tmp_path):
    model, output = small_model(), tmp_path / "run"
    task, schedule = Task(PROMPTS, zero), Schedule(output, steps=1)
    with pytest.raises(TypeError, match=re.escape("optim must be Optim(...), got a dict")):
        asyncio.run(grpo(model, tokenizer(), LocalEngine(model), task, Rollouts(), schedule, {"lr": 1e-6}))
    assert not output.exists()


def test_ppo_names_its_value_model(tmp_path):
    model = small_model()
    options = {"prompts": PROMPTS, "score": zero, "output": tmp_path / "run", "steps": 1}
    with pytest.raises(TypeError, match=re.escape("value_model is a path: give load_model('c')")):
        asyncio.run(call(ppo, model, "c", tokenizer(), LocalEngine(model), **options))


@pytest.mark.parametrize(
    ("loop", "maker"),
    [(sft, "sft_examples"), (dpo, "preference_pairs"), (kto, "labelled_examples"), (reward_model, "preference_pairs")],
)
def test_a_loop_over_data_names_rows_that_are_not_tokenized_and_no_rows(loop, maker, tmp_path):
    schedule, options = Schedule(tmp_path / "run", steps=1), {"reference": small_model(seed=1)} if loop is kto else {}
    for rows, message in (
        ([{"prompt": "a", "completion": "b"}], rf"\[0\] is a dict without `\w+`: \w+ = {maker}\(rows, tokenizer="),
        (["a"], r"\[0\] is a str without"),
        ([], "is empty: there is nothing to train on"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            loop(small_model(), tokenizer(), rows, schedule, **options)
    assert not (tmp_path / "run").exists()


def test_rollout_names_a_wrong_argument():
    engine = LocalEngine(small_model())
    right = {"generate": engine.generate, "params": SamplingParams(max_new_tokens=2), "group_size": 1, "seed": 0}
    for wrong, message in (
        ({"generate": engine}, "generate is the engine, a LocalEngine: give engine.generate"),
        ({"params": {"max_new_tokens": 2}}, "params must be SamplingParams(max_new_tokens=..., ...), got a dict"),
        ({"score": reward}, "score is a reward function: give scorer(score"),
        ({"score": lambda prompt, group: group}, "score must be an async function of (prompt, trajectories)"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            asyncio.run(rollout(PROMPTS, **right | wrong))
    with pytest.raises(TypeError, match=re.escape("prompts[0] must be a Prompt, got str 'a'")):
        asyncio.run(rollout(["a"], **right))
    with pytest.raises(TypeError, match=re.escape("prompts[0].ids must be token ids, got str '2+2'")):
        asyncio.run(rollout([Prompt(ids="2+2", row={}, index=0)], **right))
    with pytest.raises(
        TypeError, match=re.escape("prompts[0].ids must be a list of token ids, got a Tensor: give ids")
    ):
        asyncio.run(rollout([Prompt(ids=torch.tensor([1]), row={}, index=0)], **right))
    greedy = {"params": SamplingParams(max_new_tokens=2, temperature=0.0), "group_size": 2}
    with pytest.warns(UserWarning, match="temperature 0: all samples of a group"):
        asyncio.run(rollout(PROMPTS, **right | greedy))
    with pytest.warns(UserWarning, match="top_k 1: all samples of a group"):
        asyncio.run(rollout(PROMPTS, **right | greedy | {"params": SamplingParams(max_new_tokens=2, top_k=1)}))
    [[t], _] = asyncio.run(rollout(PROMPTS, **right | {"score": zero}))
    assert len(t.ids) == 2


def test_a_model_in_another_form_is_named():
    model, batch = small_model(), pack([[trajectory()]])
    for wrong, message in (
        (lambda: Policy("../m"), "model is a path: give load_model('../m')"),
        (lambda: make_policy("../m"), "model is a path"),
        (lambda: prepare_model("../m"), "model is a path"),
        (lambda: LocalEngine("../m"), "model is a path"),
        (lambda: LocalEngine(Policy(model)), "model is a Policy: give its model, model.model"),
        (lambda: Policy(None), "model must be a model, e.g. load_model(path), got a NoneType"),
        (lambda: adamw(model.parameters(), lr=1e-3), "model must be a model, e.g. load_model(path), got a generator"),
        (
            lambda: optimizer_step(model, max_norm=1.0),
            "optimizer must be an optimizer, e.g. adamw(model, lr=1e-6)",
        ),
        (lambda: Policy(model)(torch.ones(1, 2)), "batch must be a Batch, e.g. pack(groups), got a Tensor"),
        (lambda: with_old_logp(model, batch, max_tokens=9), "policy must be a Policy or another function of a batch"),
        (
            lambda: with_ref_logp(batch, Policy(model), max_tokens=9),
            "batch must be a Batch, e.g. pack(groups)",
        ),
        (
            lambda: with_advantages([[trajectory()]], group_zscore),
            "batch must be a Batch, e.g. pack(groups), got a list",
        ),
        (lambda: [*split([[trajectory()]], 2)], "batch must be a Batch, e.g. pack(groups), got a list"),
        (
            lambda: rl_prompts("train.jsonl", tokenizer=tokenizer(), max_prompt_tokens=9),
            "rows must be dicts, got 'train.js",
        ),
        (
            lambda: rl_prompts(["2+2"], tokenizer=tokenizer(), max_prompt_tokens=9),
            "rows must be dicts, got '2+2': load_rows(",
        ),
        (lambda: PolicyLoss("ppo_clip"), "surrogate must be a function of (log_ratio, batch), e.g. ppo_clip, got str"),
        (lambda: scorer("r.py:f", tokenizer=tokenizer(), timeout_s=5), "function must be a reward function of (comp"),
        (
            lambda: scorer(reward, tokenizer="a/b", timeout_s=5),
            "tokenizer must be the model's tokenizer, got str 'a/b': ",
        ),
        (lambda: load_rows([{"prompt": "a"}]), "path_or_id must be a path or hub id, or a list of them, got a list of"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            wrong()


@pytest.mark.parametrize("wrong", [9999, -1])
def test_a_prompt_id_outside_the_vocabulary_is_named_with_the_range(wrong):
    model = small_model()
    vocab, ids = model.config.vocab_size, [1, wrong, 3]
    message = re.escape(f"must be in [0, {vocab}), the model's vocabulary, got {wrong}")
    with pytest.raises(ValueError, match=message):
        Policy(model)(pack([[trajectory(prompt_ids=ids)]]))
    with pytest.raises(ValueError, match=f"prompt_ids {message}"):
        asyncio.run(LocalEngine(model).generate(ids, params=SamplingParams(max_new_tokens=2)))


def test_an_optimizer_step_without_backward_warns_and_a_loop_without_a_signal_does_not(tmp_path):
    model = small_model()
    optimizer = adamw(model, lr=1e-3)
    with pytest.warns(UserWarning, match=re.escape("no parameter has a gradient, so nothing trains: call loss.back")):
        optimizer_step(optimizer, max_norm=1.0)
    options = {"prompts": PROMPTS, "score": zero, "output": tmp_path / "run", "steps": 1, "max_new_tokens": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="optimizer_step")
        Policy(model)(pack([[trajectory()]])).logp.sum().backward()
        optimizer_step(optimizer, max_norm=1.0)
        asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model), group_size=2, **options))


def test_gradients_of_exactly_zero_warn_in_the_first_step_of_an_own_loop():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(detached, **options):
        logp = model(torch.ones(3, 2)).flatten()
        ppo_clip(logp - (logp.detach() if detached else logp), torch.ones(3)).sum().backward()
        optimizer_step(optimizer, max_norm=1.0, **options)

    with pytest.warns(UserWarning, match=r"every gradient is exactly 0.*old log-probs need \.detach\(\)"):
        step(detached=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(detached=True)
        step(detached=False)  # no step without a signal later on


@pytest.mark.parametrize("make", [adamw, muon])
def test_a_learning_rate_as_text_is_refused(make):
    model = small_model()
    with pytest.raises(TypeError, match=r"^lr must be a number, got str '1e-5'; use float\(lr\)$"):
        make(model, lr="1e-5")
    with pytest.raises(ValueError, match=r"^lr must be from 0 to 1, got 1000000.0"):
        make(model, lr=1e6)
    with pytest.raises(TypeError, match=r"^weight_decay must be a number, got NoneType None$"):
        make(model, lr=1e-5, weight_decay=None)
