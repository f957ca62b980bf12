"""Group-relative policy optimization: on policy, a few updates per rollout, or asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit._util.tensors import check_call
from rlkit.advantages import Gae, group_centered
from rlkit.loops import coefficients, roles
from rlkit.loops.checks import check_rewarded, check_settings
from rlkit.loops.estimators import Advantage, told_below_zero, with_estimates
from rlkit.loops.rl import rl
from rlkit.loops.task import Step, Task
from rlkit.loops.trial import try_advantage
from rlkit.loops.updates import PolicyLoss, check_functions, grpo_update
from rlkit.metrics import Metrics, mean
from rlkit.model.families import runs_packed
from rlkit.model.forward import make_policy, reference_policy, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import learning_rate, make_optimizer
from rlkit.packing import pack, with_advantages
from rlkit.rewards.failures import is_ours
from rlkit.rollout.groups import Group, mix
from rlkit.run.sync import blocking
from rlkit.settings import Optim, Penalties, Rollouts, Schedule
from rlkit.types import Batch, Controller, Engine

Baseline = Callable[..., Tensor] | Controller


async def grpo(
    model: Any,
    tokenizer: Any,
    engine: Engine,
    task: Task,
    rollouts: Rollouts,
    schedule: Schedule,
    optim: Optim = Optim(),
    penalties: Penalties = Penalties(),
    *,
    loss: PolicyLoss = PolicyLoss(),
    baseline: Baseline = group_centered,
    advantage: Advantage | None = None,
    kl_estimator: Callable[..., Tensor] | None = None,
    reference: Any = None,
) -> Path:
    """Train `model` in place on rewards of its own samples; returns the folder of the exported model.

    A step samples `group_size` answers to each of `prompts_per_step` prompts, with `baseline(rewards)` as the advantage
    of all their tokens, and takes `minibatches * epochs` optimizer steps on `loss` (see `grpo_update`). Groups that
    `task.keep_group` rejects (`success_between(0.01, 0.99)`) are replaced, at most `max_dropped` in a step. The first
    NaN or infinity in a stream or a gradient norm stops the run; `skip_nan` drops it (`rlkit.loops.nans`).
    A `baseline` that is a controller, `moving_average(decay=0.95)`, is RAE: each role's mean reward in earlier steps.
    `advantage` is an estimator per token of `rlkit.loops.estimators` that needs no critic; None: the baseline's value
    on all tokens. `penalties.kl_in` puts the KL into the loss, the reward or the advantage; `kl_estimator` is its
    estimator `f(logp, ref_logp)` at each token, as `rlkit.losses.k3`, where None is `unbiased_kl` in the loss and `k1`
    elsewhere.

    With `rollouts.overlap` the engine samples while a step trains. It needs its own copy of the weights
    (`rlkit.rollout.engines.process`, `rlkit.rollout.engines.sglang`), which each step replaces without draining the
    engine; each token is stamped with the version that sampled it. A group is trained on at most `staleness` steps
    (rounded up) after it was started, see `rlkit.rollout.stream`: with 1 the engine samples one batch while the trainer
    works on the previous one. The loss is decoupled PPO: clipped against the policy at the start of the step
    (`old_logp`), its tokens weighted by `loss.correction`, which does not scale the KL. Timing decides which groups
    make up a step, so two such runs are equal in distribution, not in bits. Differs: TRL `max_staleness` discards
    samples that are too old; AReaL and verl's fully asynchronous recipe bound the age on average.
    Reference: arXiv:2505.24298 (AReaL); arXiv:2110.00641.

    Differs from the GRPO paper (arXiv:2402.03300):
    1. advantages are not divided by the group's standard deviation (arXiv:2503.20783); pass `group_zscore` to do so
    2. token mean instead of the mean of sequence means, and a clip at 1.28 (both arXiv:2503.14476); other losses
       (GSPO, CISPO, ...) and means are fields of `loss`, see `PolicyLoss`
    3. no KL term unless `penalties` has a `kl_coef` or a controller for it; then k3 against `reference`, scaled by the
       ratio to the policy that sampled (see `sampler_logp`), so that its gradient is that of KL(policy || reference)
       also off policy
    4. tokens are weighted by `loss.correction(log pi_old / pi_rollout)` for the engine's numerics and older weights
    5. under top-p, top-k or min-p, log-probs are renormalised over the tokens that the engine reports to have kept;
       without that, tokens are weighted by the kept probability mass, which costs one more forward

    Errors: ValueError if `penalties` need a `reference` and it is None, and for a `group_size` of 1 with a baseline
    that compares the samples of a group; those of `rlkit.loops.rl.rl`.
    """
    check_settings(task=task, rollouts=rollouts, schedule=schedule, optim=optim, penalties=penalties)
    check_functions(loss, advantage, rollouts, penalties)
    check_rewarded(task)
    baseline = checked_baseline(baseline, group_size=rollouts.group_size)
    has_kl, kl = coefficients.has_kl(penalties, reference), coefficients.kl_term(penalties, kl_estimator)
    policy = make_policy(model, temperature=rollouts.temperature, dtype=optim.dtype)
    ref_policy = reference_policy(policy, reference, moves=bool(penalties.ref_sync_steps))
    lr_at = learning_rate(optim, num_steps=schedule.steps)
    optimizer = make_optimizer(model, optim, lr=lr_at(0))
    scoring: dict[str, Any] = {"max_tokens": optim.max_tokens, "mesh": policy.mesh}

    def prepare(groups: Sequence[Group], step: Step) -> Batch:
        batch = pack(groups, share_prompts=runs_packed(model))
        batch = with_ref_logp(ref_policy if has_kl else None, batch, **scoring)
        if rollouts.minibatches * rollouts.epochs > 1 or kl.place != "loss":
            batch = with_old_logp(policy, batch, **scoring)
        if kl.place == "reward" and not isinstance(baseline, Controller):
            batch = step.check(batch)  # before the KL of one sample is in the baseline of all
        compare = roles.against(step.averages, groups) if isinstance(baseline, Controller) else baseline
        batch = with_estimates(batch, baseline=compare, advantage=advantage, kl=kl, kl_coef=step.kl_coef)
        return with_kept_mass(policy, batch, params=rollouts.params, on_policy=not rollouts.max_age, **scoring)

    def update(batch: Batch, step: Step) -> Metrics:
        lr = lr_at(step.index)
        metrics = grpo_update(
            batch, policy=policy, optimizer=optimizer, loss=loss, rollouts=rollouts, optim=optim, lr=lr,
            kl_coef=step.kl_coef * (kl.place == "loss"), entropy_coef=step.entropy_coef, kl=kl.in_loss,
            seed=mix(schedule.seed, step.index),
        )  # fmt: skip
        return metrics | {"lr": mean(lr)}

    state = {"model": model, "optimizer": optimizer, "reference": reference if penalties.ref_sync_steps else None}
    return await rl(
        policy, tokenizer, engine, task, rollouts, schedule, penalties, prepare=prepare, update=update, state=state,
        reference=ref_policy, max_tokens=optim.max_tokens,
        role_average=baseline if isinstance(baseline, Controller) else None,
    )  # fmt: skip


def checked_baseline(baseline: Baseline, *, group_size: int) -> Baseline:
    """`told_below_zero`, which refuses a function of another form, and one that gives every group of one advantage 0.

    The laws of `rlkit.loops.trial.try_advantage` that one of yours breaks are logged.
    """
    if isinstance(baseline, Controller):
        return baseline
    check_call("baseline", baseline, "baseline(rewards, group_ids=group_ids)")
    if group_size == 1 and not baseline(torch.tensor([0.0, 1.0, 3.0]), group_ids=torch.arange(3)).any():
        raise ValueError(
            "`group_size` 1: the baseline compares the samples of a group, so that a single one has advantage 0 and "
            "nothing would train; use at least 2, or a baseline over the batch"
        )
    if not is_ours(baseline):

        @wraps(baseline)
        def estimator(batch: Batch, _bootstrap: Tensor) -> Gae:
            advantages = with_advantages(batch, baseline).advantages
            return Gae(advantages, advantages)

        with suppress(ValueError):  # of one that takes groups of one size only
            try_advantage(estimator, values=False)
    return told_below_zero(baseline)


grpo_sync = blocking(grpo)  # a plain function, also where an event loop runs
