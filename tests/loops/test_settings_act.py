"""Every field of the settings changes what a run logs, writes or prints, or is refused where it could not act."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small import call, small_model, tokenizer, unchanged

from rlkit.advantages import whiten
from rlkit.data.prompts import Prompt
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.loops.rl import note_task
from rlkit.model.heads import load_value_model
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.scripts.grpo import Loss
from rlkit.scripts.unusual import warn_of_clip
from rlkit.settings import Critic, Optim, Penalties, Rollouts, Schedule

PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(4)]
BASE = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6, "max_tokens": 64, "lr": 0.05}
KL = {"kl_coef": 0.5, "reference": 7}
EVAL = {"eval_prompts": PROMPTS[:2], "eval_steps": 1}
TWO = {"minibatches": 2}
AT = lambda step: 0.3

# field -> (what a run has with it, what it has on both sides)
ACTS = {
    Rollouts: {
        "prompts_per_step": (3, {}), "group_size": (3, {}), "minibatches": (2, {}), "epochs": (2, {}),
        "max_new_tokens": (4, {}), "temperature": (0.5, {}), "top_p": (0.5, {}), "top_k": (3, {}), "min_p": (0.5, {}),
        "stop": (tuple("abcdefghijklmnopqrstuvwxyz ."), {}), "stop_token_ids": (tuple(range(100)), {}),
        "drop_truncated": (True, {}), "staleness": (1.0, {}), "skip_nan": (True, {}), "eval_samples": (3, EVAL),
        "drop_off_policy": (True, {"staleness": 1.0, "steps": 4}), "journal": (True, {}),
        "print_samples_steps": (0, {}),
    },
    Schedule: {
        "steps": (3, {}), "eval_steps": (1, {"eval_prompts": PROMPTS[:2]}), "print_steps": (2, {}),
        "save_steps": (1, {}), "keep": (1, {"save_steps": 1, "steps": 3}), "seed": (5, {}),
        "profile_steps": ((2, 2), {}), "keep_best": ("eval/sampled", EVAL | {"eval_samples": 3, "lr": 0.3}),
        "profile_memory": (True, {}),
    },
    Optim: {
        "lr": (0.3, {}), "lr_schedule": ("linear", {}), "warmup_steps": (2, {}), "weight_decay": (5.0, {}),
        "max_norm": (1e-3, {}), "dtype": ("bf16", {}), "lr_at": (AT, {"lr": None}),
        "optimizer": ("muon", {}), "make_optimizer": (torch.optim.SGD, {}),
    },
    Penalties: {
        "kl_coef": (3.0, KL), "kl_target": (1e-4, KL), "kl_controller": ("decay", KL | {"steps": 3}),
        "kl_horizon": (50.0, KL | {"kl_target": 1e-4, "kl_controller": "exponential"}), "kl_limit": (1e-6, KL),
        "kl_in": ("reward", KL),
        "ref_sync_steps": (1, KL), "entropy_coef": (0.5, {}), "entropy_target": (9.0, {}),
        "entropy_limit": (9.0, {}), "limit_rate": (3.0, {"entropy_limit": 9.0}),
        "controllers": ("kl", KL),
    },
    Critic: {
        "critic_lr": (0.1, {}), "critic_steps": (1, {}), "gamma": (0.5, {}), "lam_policy": (0.1, {}),
        "lam_value": (0.1, {}), "bootstrap": (True, {"critic_lr": 0.1}),
        "value_clip": (1e-4, {"critic_lr": 0.1, **TWO}), "critic_lr_at": (AT, {}),
        "value_huber": (1e-4, {"critic_lr": 0.1}),
    },
}  # fmt: skip
ELSEWHERE = {  # field -> the test that has it
    (Rollouts, "overlap"): "test_grpo_loops.py", (Rollouts, "max_dropped"): "below",
    (Rollouts, "save_rollouts"): "test_saved_rollouts.py", (Rollouts, "from_rollouts"): "test_saved_rollouts.py",
    (Schedule, "output"): "every test", (Schedule, "resume"): "test_resume.py",
    (Schedule, "keep_best_checkpoints"): "tests/run/test_best_checkpoints.py",
    (Schedule, "on_save"): "tests/run/test_on_save.py", (Schedule, "dtype_export"): "tests/model/test_source.py",
    **{(Schedule, name): "tests/run/test_trackers.py" for name in ("track", "track_project", "track_model")},
    (Optim, "max_tokens"): "memory only: gradients are equal, see test_updates.py",
}  # fmt: skip
ROWS = [(kind, name) for kind, table in ACTS.items() for name in table]


def length_and_digits(completion, row):
    return float(sum(map(ord, completion)) % 7)


@pytest.fixture(scope="module")
def critic_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    small_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def without():
    """The outcomes of runs without the setting, by what they have on both sides."""
    return {}


def outcome(kind, folder, capsys, critic_folder, **flat):
    """All that a run leaves but times: its metric lines, its files, its screen."""
    flat = {name: x for name, x in (BASE | flat).items() if not (name == "lr" and x is None)}
    if flat.get("controllers") == "kl":
        from rlkit.controllers import schedule_linear

        flat["controllers"] = {"kl": schedule_linear(end=3.0, num_updates=1)}
    if "reference" in flat:
        flat["reference"] = small_model(flat["reference"])
    flat |= {
        "output": folder,
        "prompts": PROMPTS,
        "score": scorer(length_and_digits, tokenizer=tokenizer(), timeout_s=60),
    }
    model = small_model()
    engine = LocalEngine(model, max_len=64, tokenizer=tokenizer())
    models = (model, load_value_model(critic_folder)) if kind is Critic else (model,)
    asyncio.run(call(ppo if kind is Critic else grpo, *models, tokenizer(), engine, **flat))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.suffix != ".png")
    screen = [line for line in capsys.readouterr().out.splitlines() if "s/step" not in line and "tok/s" not in line]
    return kept, files, len(screen)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[f"{kind.__name__}-{name}" for kind, name in ROWS])
def test_a_setting_acts(kind, name, tmp_path, capsys, critic_folder, without):
    value, both = ACTS[kind][name]
    run = partial(outcome, kind, capsys=capsys, critic_folder=critic_folder)
    same = kind is Critic, repr(both)
    if same not in without:
        without[same] = run(tmp_path / "without", **both)
    assert run(tmp_path / "with", **both | {name: value}) != without[same]


def test_the_table_has_every_field():
    for kind, table in ACTS.items():
        elsewhere = {name for owner, name in ELSEWHERE if owner is kind}
        assert {f.name for f in fields(kind)} == table.keys() | elsewhere
        assert not table.keys() & elsewhere


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_dropped": 3}, "`max_dropped` requires `task.keep_group`"),
        ({"eval_samples": 3}, "`eval_samples` requires `task.eval_prompts`"),
        ({"group_size": 1}, "`group_size` 1: the baseline compares the samples of a group"),
        ({"lr_at": AT, "lr": 0.1, "warmup_steps": 2}, "`lr_at` excludes `lr` and `warmup_steps`: it replaces"),
        ({"kl_coef": 0.1, "kl_controller": "decay", "controllers": {"kl": None}}, "a rule kl, and so do"),
        ({"entropy_limit": 0.1, "controllers": {"entropy_limit": None}}, "a rule entropy_limit, and so do"),
        ({"kl_coef": 0.1}, "need a reference model"),
    ],
)
def test_a_setting_that_could_not_act_is_refused(changes, message, tmp_path):
    model = small_model()
    task = {"prompts": PROMPTS, "score": unchanged, "output": tmp_path / "run"}
    with pytest.raises(ValueError, match=message):
        asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model, max_len=64), **BASE | task | changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_whose_first_model_was_best_says_that_it_keeps_none(tmp_path, capsys):
    score = scorer(length_and_digits, tokenizer=tokenizer(), timeout_s=60)
    model, flat = small_model(), BASE | EVAL | {"prompts": PROMPTS, "score": score, "output": tmp_path}
    flat |= {"lr": 1e-12, "keep_best": "eval/greedy"}  # the rewards stay as they are
    asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model, max_len=64), **flat))
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["eval/greedy"]
    said = f"keep_best eval/greedy: no evaluation was better than the first ({first:.4g}), so best/ has no model"
    assert said in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "best").exists()


def test_a_critic_has_one_learning_rate():
    with pytest.raises(ValueError, match="`critic_lr_at` excludes `critic_lr`: drop one"):
        Critic(critic_lr=0.1, critic_lr_at=AT)


def test_a_baseline_over_the_batch_takes_single_samples(tmp_path):
    def over_batch(rewards, *, group_ids):
        return whiten(rewards, mask=group_ids >= 0)

    model = small_model()
    score = scorer(length_and_digits, tokenizer=tokenizer(), timeout_s=60)
    flat = BASE | {"group_size": 1, "prompts": PROMPTS, "score": score, "output": tmp_path, "baseline": over_batch}
    asyncio.run(call(partial(grpo), model, tokenizer(), LocalEngine(model, max_len=64), **flat))
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["grad_norm"] > 0


@pytest.mark.parametrize(("flags", "steps"), [({"clip_high": 0.3}, 1), ({"clip_high": 0.3}, 2), ({}, 1)])
def test_a_clip_that_cannot_act_is_named(flags, steps, caplog):
    """With one optimizer step on a batch every ratio is 1."""
    warn_of_clip(Loss(**flags), Rollouts(epochs=steps))
    assert ("--clip-high: nothing is clipped" in caplog.text) == (bool(flags) and steps == 1)


@pytest.mark.parametrize(
    ("kl", "rollouts", "zero"),
    [({}, {}, True), ({}, {"epochs": 2}, False), ({"kl_in": "reward"}, {"epochs": 2}, True),
     ({"ref_sync_steps": 2}, {}, False), ({"kl_coef": 0.0, "ref_sync_steps": 0}, {}, False)],
)  # fmt: skip
def test_a_reference_that_is_always_the_policy_is_named(kl, rollouts, zero, tmp_path, capsys):
    task, schedule = SimpleNamespace(prompts=[], held_out={}), Schedule(tmp_path, steps=3)
    penalties = Penalties(**{"kl_coef": 0.5, "ref_sync_steps": 1} | kl)
    run = SimpleNamespace(note=lambda **_: None, say=print)
    note_task(run, task, schedule, penalties, Rollouts(**rollouts))
    assert ("the KL is 0 from the first copy on: with ref_sync_steps 1" in capsys.readouterr().out) == zero


def test_what_a_run_does_not_use_is_named_on_the_screen(tmp_path, capsys):
    model, reference = small_model(), small_model(1)
    score = scorer(length_and_digits, tokenizer=tokenizer(), timeout_s=60)
    flat = BASE | {"prompts": PROMPTS, "score": score, "eval_prompts": PROMPTS[:1], "ref_sync_steps": 9, "kl_coef": 0.1}
    engine = LocalEngine(model, max_len=64)
    asyncio.run(call(grpo, model, tokenizer(), engine, output=tmp_path, reference=reference, **flat))
    out = " ".join(capsys.readouterr().out.split())
    assert "eval_prompts are not used: eval_steps is 0" in out
    assert "the reference never moves: ref_sync_steps 9 is above steps 2" in out
