"""Every controller, by its flags, in every loop: the coefficients follow its equation from the logged metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import math

import pytest
from small import SIZES, CopyEngine, async_grpo, call, small_model, tokenizer, unchanged
from torch import nn

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model
from rlkit.loops.coefficients import advance, rules, start
from rlkit.loops.grpo import grpo
from rlkit.loops.ppo import ppo
from rlkit.model.checkpoint import latest_checkpoint, load_checkpoint
from rlkit.model.heads import load_value_model
from rlkit.model.optim import adamw
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.scripts.cli import spelled
from rlkit.scripts.grpo import Args
from rlkit.settings import Penalties

PROMPTS = [Prompt([20 + i, 60], {}, i) for i in range(40)]
STEPS, SAMPLES, COEF, TARGET, HORIZON = 4, 16, 0.05, 0.02, 100.0
LIMITS = {"kl_limit": 0.01, "entropy_limit": 5.6, "entropy_target": 5.5, "entropy_coef": 0.01, "limit_rate": 0.3}
RULES = {
    "fixed": {"kl_controller": "fixed"},
    "linear": {"kl_target": TARGET},
    "exponential": {"kl_target": TARGET, "kl_controller": "exponential", "kl_horizon": HORIZON},
    "pid": {"kl_target": TARGET, "kl_controller": "pid"},
    "decay": {"kl_controller": "decay"},
    "cosine": {"kl_controller": "cosine"},
}


def clip(x, low, high):
    return max(low, min(high, x))


def kl_path(rule, kls):
    """The coefficient of each step from the KL of the steps before, by the published equations."""
    coef, integral = [COEF], 0.0
    for n, kl in enumerate(kls, start=1):
        error = clip(kl / TARGET - 1, -0.2, 0.2)
        integral = max(-COEF / (0.1 * COEF / TARGET), integral + kl - TARGET)
        done = min(1.0, n / (STEPS - 1))
        says = {
            "linear": max(0.0, coef[-1] + COEF * error),
            "exponential": coef[-1] * (1 + error * SAMPLES / HORIZON),
            "pid": max(0.0, COEF + COEF / TARGET * (kl - TARGET) + 0.1 * COEF / TARGET * integral),
            "decay": COEF * (1 - done),
            "cosine": COEF * (1 + math.cos(math.pi * done)) / 2,
        }
        coef.append(says.get(rule, COEF))
    return coef[:-1]


def multiplier_path(violations):
    rises = itertools.accumulate(violations, lambda m, v: max(0.0, m + LIMITS["limit_rate"] * v), initial=0.0)
    return [*rises][:-1]


def entropy_path(entropies):
    """TRL's adaptive entropy: the gate, and the walk behind it."""
    ungated, out = LIMITS["entropy_coef"], [0.0]
    for x in entropies:
        low = x <= LIMITS["entropy_target"]
        ungated = clip(ungated + (0.005 if low else -0.005), 0.0, 1.0)
        out.append(ungated if low else 0.0)
    return out[:-1]


def both_entropy_rules(penalties):
    """The rules of the flags; `Penalties` takes a target or a limit of the entropy, `controllers` takes both."""
    made = {}
    for left_out in ("entropy_target", "entropy_limit"):
        given = Penalties(**{name: x for name, x in penalties.items() if name != left_out})
        made |= rules(given, steps=STEPS, num_samples=SAMPLES)
    return made


def run(loop, folder, penalties, *, steps, resume=False):
    """The first `steps` steps, with the rules of a run of STEPS steps."""
    model = small_model()
    engine = CopyEngine() if loop is async_grpo else LocalEngine(model, max_len=64)
    options = {
        "score": scorer(lambda text, row: sum(map(str.isascii, text)) / 6, tokenizer=tokenizer(), timeout_s=30.0),
        "output": folder, "steps": steps, "max_new_tokens": 6, "lr_at": lambda step: 3e-3,
        "prompts_per_step": 4, "group_size": 4, "reference": small_model(seed=1), "resume": resume,
        "kl_coef": penalties["kl_coef"], "entropy_coef": penalties["entropy_coef"],
        "controllers": both_entropy_rules(penalties),
    }  # fmt: skip
    models = [model]
    if loop is ppo:
        tiny_model(tokenizer(), **SIZES).save_pretrained(folder.parent / "critic")
        models.append(load_value_model(folder.parent / "critic"))
        options["critic_lr_at"] = options["lr_at"]
    if loop is async_grpo:
        options["staleness"] = 0.0
    asyncio.run(call(loop, *models, tokenizer(), engine, prompts=PROMPTS, **options))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def column(lines, name):
    return [line[name] for line in lines]


EACH_RULE_AND_LOOP = [
    ("fixed", ppo), ("linear", grpo), ("exponential", ppo), ("pid", async_grpo), ("decay", async_grpo), ("cosine", grpo)
]  # fmt: skip
LOOPS = [
    pytest.param(rule, loop, marks=[] if (rule, loop) in EACH_RULE_AND_LOOP else pytest.mark.slow)
    for rule in RULES
    for loop in (grpo, ppo, async_grpo)
]


@pytest.mark.slow_cases("exponential-ppo", "fixed-ppo", "decay-grpo1", "pid-grpo1", "linear-grpo0")
@pytest.mark.parametrize(("rule", "loop"), LOOPS)
def test_a_controller_moves_its_coefficient_and_goes_on_after_a_resume(tmp_path, rule, loop):
    """In two parts: so what a rule remembers (a sum, a count, a gate) is there again, or its equation breaks."""
    args = {"kl_coef": COEF, **RULES[rule], **LIMITS}
    run(loop, tmp_path / "run", args, steps=2)
    run(loop, tmp_path / "run", args, steps=STEPS, resume=True)
    lines = lines_of(tmp_path / "run")
    assert len(lines) == STEPS
    kls, entropies = column(lines, "kl/ref"), column(lines, "entropy")
    assert len({*kls}) == len({*entropies}) == STEPS
    exact = {"rel": 1e-12, "abs": 1e-12}
    assert column(lines, "kl/coef") == pytest.approx(kl_path(rule, kls), **exact)
    rises = multiplier_path([kl - LIMITS["kl_limit"] for kl in kls])
    assert column(lines, "kl_limit/coef") == pytest.approx(rises, **exact)
    assert rises[-1] > 0
    rises = multiplier_path([LIMITS["entropy_limit"] - x for x in entropies])
    assert column(lines, "entropy_limit/coef") == pytest.approx(rises, **exact)
    assert rises[-1] > 0
    assert column(lines, "entropy/coef") == pytest.approx(entropy_path(entropies), **exact)
    if rule != "fixed":
        assert len({*column(lines, "kl/coef")}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("loop", [grpo, ppo])
def test_a_resumed_run_has_the_same_bits_in_every_controller(tmp_path, loop):
    args = {"kl_coef": COEF, **RULES["pid"], **LIMITS}
    run(loop, tmp_path / "whole", args, steps=STEPS)
    run(loop, tmp_path / "parts", args, steps=2)
    run(loop, tmp_path / "parts", args, steps=STEPS, resume=True)
    drop_times = [
        [{k: x for k, x in line.items() if not k.startswith("time/")} for line in lines_of(tmp_path / name)]
        for name in ("whole", "parts")
    ]
    assert drop_times[0] == drop_times[1]
    saved = []
    for name in ("whole", "parts"):
        model = small_model()
        both = (
            nn.ModuleDict({"policy": model, "critic": load_value_model(tmp_path / "critic")}) if loop is ppo else model
        )
        path = latest_checkpoint(tmp_path / name / "checkpoints")
        saved.append(load_checkpoint(path, model=both, optimizer=adamw(both, lr=0.0))["controllers"])
    assert saved[0] == saved[1]
    assert {*saved[0]} == {"kl", "kl_limit", "entropy", "entropy_limit"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kl_controller": "pid", "kl_coef": 0.1}, "--kl-controller pid requires --kl-target"),
        (
            {"kl_controller": "cosine", "kl_coef": 0.1, "kl_target": 0.1},
            "--kl-controller cosine excludes --kl-target: drop it, or",
        ),
        ({"kl_controller": "cosine"}, "--kl-controller requires --kl-coef above 0"),
        ({"kl_horizon": 10.0}, "--kl-horizon is for --kl-controller exponential"),
        (
            {"kl_controller": "exponential", "kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 3.0},
            "--kl-horizon must be above 3.2, a fifth of the samples of a step",
        ),
        ({"limit_rate": 0.5}, "--limit-rate requires --kl-limit or --entropy-limit"),
        ({"entropy_target": 1.0, "entropy_coef": -0.1}, "--entropy-target starts from --entropy-coef"),
        ({"kl_limit": 0.0}, "--kl-limit must be above 0, got 0.0"),
    ],
)
def test_flags_that_do_not_fit_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match="`") as refused:
        rules(Penalties(**flags), steps=STEPS, num_samples=SAMPLES)
    assert spelled(str(refused.value), Args).startswith(message)


def test_a_metric_that_is_not_finite_stops_a_controller_or_with_skip_nan_keeps_its_state():
    penalties = Penalties(kl_coef=COEF, kl_target=TARGET)
    controllers = rules(penalties, steps=STEPS, num_samples=SAMPLES)
    states = start(controllers, penalties)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"measured must be finite"):
            advance(controllers, states, {"kl/ref": bad})
        assert advance(controllers, states, {"kl/ref": bad}, skip_nan=True) == states
    for how in ({}, {"skip_nan": True}):
        assert advance(controllers, states, {"kl/ref": 2 * TARGET}, **how)["kl"].coef > COEF
    assert advance(controllers, states, {}) == states


@pytest.mark.parametrize("rule", ["decay", "cosine"])
def test_a_schedule_ends_at_0_though_some_steps_train_no_token_of_the_policy(rule):
    """PPO's critic trains alone at first, and a step whose groups were all dropped measures nothing."""
    penalties = Penalties(kl_coef=COEF, kl_controller=rule)
    controllers = rules(penalties, steps=5, num_samples=SAMPLES)
    states = start(controllers, penalties)
    for line in ({}, {}, {"kl/ref": 0.1}, {"kl/ref": math.nan}):
        before = states["kl"].coef
        states = advance(controllers, states, line, skip_nan=True)
        assert 0 <= states["kl"].coef < before
    assert states["kl"].coef == pytest.approx(0, abs=1e-12)


def test_a_controller_of_an_unknown_name_is_refused(tmp_path):
    model = small_model()
    options = {
        "score": unchanged, "output": tmp_path, "steps": 1, "controllers": {"kl_coef": None}, "prompts": PROMPTS,
    }  # fmt: skip
    with pytest.raises(ValueError, match="controllers must be named kl, kl_limit, entropy, entropy_limit; got kl_coef"):
        asyncio.run(call(grpo, model, tokenizer(), LocalEngine(model), **options))
