"""Checks of the arguments of `rl`, `grpo`, `ppo` and `distill`, before they start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from torch import nn

from rlkit._util.ranks import on_all_ranks
from rlkit.data.order import Part, Parts, check_parts
from rlkit.loops.task import Task
from rlkit.model.forward import Policy, PolicyFn
from rlkit.rollout.calling import report_once
from rlkit.rollout.groups import check_sampling, single_turn
from rlkit.rollout.saved import check_saved
from rlkit.rollout.shared import SharedEngine
from rlkit.settings import Critic, Optim, Penalties, Rollouts, Schedule
from rlkit.types import Batch, Engine

_log = logging.getLogger("rlkit.rollout")
_SETTINGS = {"task": Task, "rollouts": Rollouts, "schedule": Schedule, "optim": Optim, "penalties": Penalties}
_SETTINGS |= {"critic": Critic}


def check_settings(**settings: Any) -> None:
    """Refuse a dict, a path or another object in place of one of the settings: TypeError."""
    for name, x in settings.items():
        if not isinstance(x, kind := _SETTINGS[name]):
            raise TypeError(f"{name} must be {kind.__name__}(...), got a {type(x).__name__}")


def check_task(task: Task, tokenizer: Any) -> None:
    """Refuse a task without prompts or with functions of another form, and a tokenizer that does not decode."""
    if not len(task.prompts):
        raise ValueError("task.prompts is empty: there is nothing to train on")
    check_parts(len(task.prompts), task.parts)
    check_same_data(len(task.prompts), task.parts)
    check_sampling(task.prompts, env=task.env, score=task.score, keep_group=task.keep_group)
    check_names(task.held_out)
    for one in task.held_out.values():
        check_sampling(one.prompts, env=task.env, score=one.score or task.score)
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer must have `decode`, to show samples, got a {type(tokenizer).__name__}")


def check_same_data(num: int, parts: Parts) -> None:
    """ValueError on every rank where one has other data than rank 0, as with unequal copies of a file on two nodes.

    `num` rows in `parts`, whose sources have a number of their contents.
    """
    first, *others = on_all_ranks(lambda: [Part(*part) for part in parts] or [Part(num)])
    for rank, its in enumerate(others, start=1):
        for ours, theirs in zip_longest(first, its, fillvalue=Part(0)):
            if ours != theirs:
                (a, of_a), (b, of_b) = ((x.size, x.source.rpartition(" ")[2] or "-") for x in (ours, theirs))
                name = (ours.source or theirs.source).rpartition(" ")[0][:200] or "the data"
                fault = f"{name}: {a} rows (checksum {of_a}) on rank 0, {b} ({of_b}) on rank {rank}"
                raise ValueError(f"{fault}: give all nodes the same files")


def check_names(sets: Iterable[str]) -> None:
    """Refuse names of held-out sets that no file name and no metric can have."""
    if wrong := [name for name in sets if name and not name.isidentifier()]:
        raise ValueError(f"a held-out set has the name {wrong[0]!r}: use letters, digits and _")


def check_rewarded(task: Task) -> None:
    """Refuse a task in which nothing gives a reward: all would be 0, and nothing would train."""
    if task.score is None and task.env is single_turn:
        fix = "give scorer(reward_function, tokenizer=tokenizer, timeout_s=...), or an env that rewards its episodes"
        raise ValueError(f"task.score is None, so every reward is 0 and nothing would train: {fix}")


def _check_methods(engine: Engine) -> None:
    """Refuse an engine that lacks `generate`, `abort` or `update_weights`: TypeError on every rank, naming them."""

    def check() -> None:
        real = engine.engine if isinstance(engine, SharedEngine) else engine
        names = () if real is None else ("generate", "abort", "update_weights")  # None: SharedEngine on other ranks
        if missing := [name for name in names if not callable(getattr(real, name, None))]:
            raise TypeError(
                f"the engine {type(real).__name__} has no {' and no '.join(missing)}: it can generate for evaluation "
                "and judges, but not for training; use LocalEngine, rlkit.rollout.engines.process.launch or SGLang"
            )

    on_all_ranks(check)


def check_temperatures(rollouts: Rollouts, **policies: Any) -> None:
    """Refuse a policy whose log-probs are at another temperature than the samples: ValueError naming both."""
    for name, policy in policies.items():
        temperature = getattr(policy, "temperature", rollouts.temperature)
        if temperature != rollouts.temperature:
            raise ValueError(
                f"the {name}'s log-probs are at temperature {temperature:g}, and the rollouts sample at "
                f"{rollouts.temperature:g}: give both one value, Policy(model, temperature=rollouts.temperature)"
            )


def check_rl(
    policy: Policy,
    tokenizer: Any,
    engine: Engine,
    task: Task,
    rollouts: Rollouts,
    schedule: Schedule,
    penalties: Penalties,
    *,
    state: Mapping[str, Any],
    reference: PolicyFn | None,
) -> None:
    """All that `rlkit.loops.rl.rl` refuses, see there."""
    check_settings(task=task, rollouts=rollouts, schedule=schedule, penalties=penalties)
    _check_methods(engine)
    check_support(engine, rollouts)
    check_temperatures(rollouts, policy=policy, reference=reference)
    check_state(state, penalties)
    if rollouts.max_dropped is not None and task.keep_group is None:
        raise ValueError("`max_dropped` requires `task.keep_group`")
    if rollouts.eval_samples > 1 and not task.held_out:
        raise ValueError("`eval_samples` requires `task.eval_prompts`")
    if rollouts.overlap and getattr(engine, "model", None) is policy.model:
        raise ValueError(
            f"overlap needs an engine with weights of its own, and {type(engine).__name__} reads those that train: use "
            "rlkit.rollout.engines.process.launch or SGLang"
        )
    check_task(task, tokenizer)
    check_saved(rollouts, policy.model, tokenizer, steps=schedule.steps, resume=schedule.resume)


def check_support(engine: Engine, rollouts: Rollouts) -> None:
    """Refuse truncated samples of older weights from an engine that does not report which tokens it kept: ValueError on
    every rank. Name once what those of the current weights are corrected by."""

    def check() -> None:
        real = engine.engine if isinstance(engine, SharedEngine) else engine
        if real is None or not rollouts.params.truncates or getattr(real, "reports_support", False):
            return
        lacks = f"{type(real).__name__} does not report the tokens that `top_p`, `top_k` or `min_p` kept"
        if rollouts.max_age:
            fix = "use rlkit.rollout.engines.process.launch or LocalEngine, or neither `overlap` nor `staleness`"
            raise ValueError(f"{lacks}, and older weights kept others than the current ones: {fix}")
        what = "log-probs are of all tokens, and the loss is multiplied by the probability that the policy keeps"
        _log.warning("%s: %s (docs/losses.md)", lacks, what)

    on_all_ranks(check)


def check_state(state: Mapping[str, Any], penalties: Penalties) -> None:
    """Refuse a `state` with other names than those that checkpoints hold, and one that lacks a name."""
    if unknown := sorted(state.keys() - {"model", "optimizer", "reference"}):
        fix = "a number or tensor of your own is a buffer of a module in state['model']"
        raise ValueError(f"state holds model, optimizer and reference, got {', '.join(unknown)}: {fix}")
    needed = ["model", "optimizer", *(["reference"] if penalties.ref_sync_steps else [])]
    if missing := [name for name in needed if state.get(name) is None]:
        raise ValueError(f"state holds what is saved and restored, and has no {' and no '.join(missing)}")


def check_prepared(batch: Batch, rollouts: Rollouts) -> None:
    """Refuse a batch of truncated sampling that `prepare` has not given its kept probability mass.

    One without `old_logp` for several optimizer steps is reported once: every ratio is then 1, unless to rollout_logp.
    """
    if rollouts.params.truncates and batch.kept_mass is None:
        raise ValueError("top_p, top_k and min_p need `kept_mass`: call with_kept_mass(...) in `prepare`")
    if batch.old_logp is None and (num := rollouts.minibatches * rollouts.epochs) > 1:
        fix = ", and logp - logp.detach() is 0 in each: call with_old_logp in it, or compare with rollout_logp"
        report_once("prepare", f"fills no old_logp for {num} optimizer steps on a batch", fix)


def check_updated(model: nn.Module) -> None:
    """Report once that `update` has left gradients, which add to those of the next step."""
    if any(p.grad is not None and bool(p.grad.any()) for p in model.parameters()):
        fix = ", and they add to those of the next: end it with optimizer_step(optimizer, max_norm=...), or zero_grad()"
        report_once("update", "leaves gradients after a step", fix)
