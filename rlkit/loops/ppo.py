"""Proximal policy optimization with a critic: generalized advantage estimation over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.advantages import whiten
from rlkit.loops import coefficients
from rlkit.loops.checks import check_rewarded, check_settings
from rlkit.loops.coefficients import KlTerm
from rlkit.loops.estimators import Advantage, gae
from rlkit.loops.out_of_memory import retry_smaller
from rlkit.loops.rl import rl
from rlkit.loops.task import Step, Task
from rlkit.loops.updates import UNTRAINED, PolicyLoss, check_functions, check_streams, clipped, grpo_update, per_token
from rlkit.losses import k1, kl_in_reward, value_clip, value_huber
from rlkit.metrics import Mean, Metrics, mean, merge
from rlkit.model.families import check_is_model, runs_packed
from rlkit.model.forward import Policy, make_policy, reference_policy, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.heads import bins_of, bootstraps, classified, compute_values
from rlkit.model.heads import values as values_of
from rlkit.model.optim import learning_rate, make_optimizer, optimizer_step, set_lr
from rlkit.packing import pack, split, with_streams
from rlkit.parallel.data import rank_microbatches, reduce_metrics
from rlkit.parallel.pipeline import pipelined
from rlkit.rollout.groups import Group, mix
from rlkit.run.sync import blocking
from rlkit.settings import Critic, Optim, Penalties, Rollouts, Schedule
from rlkit.types import Batch, Engine


def with_gae(
    batch: Batch,
    *,
    values: Policy,
    critic: Critic,
    kl_coef: float,
    max_tokens: int,
    checked: Callable[[Batch], Batch] = lambda batch: batch,
    advantage: Advantage | None = None,
    kl: KlTerm = KlTerm("reward", k1),
) -> Batch:
    """The batch with the critic's `values`, their targets `returns`, and whitened `advantages`.

    `advantage` is an estimator of `rlkit.loops.estimators`; None: `gae` with the numbers of `critic`. `kl_coef` times
    the estimate of KL(old policy || reference) is subtracted from the token rewards, or from the whitened advantages
    (`kl.place`). A truncated answer ends in 0, or in the critic's value of its last state (`critic.bootstrap`).
    `checked` gets the batch with its raw `values`, and may drop sequences before the advantages are whitened over all
    of them.
    """
    check_streams(batch, **{name: f"kl_coef {kl_coef:g}" for name in ("old_logp", "ref_logp") if kl_coef})
    raw = compute_values(values.model, batch, max_tokens=max_tokens, dtype=values.dtype)
    batch = checked(replace(batch, values=raw))
    scored, mask = batch, batch.mask
    of_critic: dict[str, Any] = {"gamma": critic.gamma, "lam_policy": critic.lam_policy, "lam_value": critic.lam_value}
    minus_kl = partial(
        kl_in_reward, logp=batch.old_logp, ref_logp=batch.ref_logp, kl_coef=kl_coef, mask=mask, estimator=kl.estimator
    )
    if kl_coef and kl.place == "reward":
        scored = replace(batch, token_rewards=minus_kl(batch.token_rewards))
    ends = bootstraps(batch.values, batch) if critic.bootstrap else torch.zeros_like(batch.rewards)
    traces = gae(scored, ends, **of_critic) if advantage is None else advantage(scored, ends)
    advantages = whiten(traces.advantages, mask=mask)
    advantages = minus_kl(advantages) if kl_coef and kl.place == "advantage" else advantages
    return with_streams(batch, values=batch.values, returns=traces.returns, advantages=advantages)


def value_update(
    batch: Batch,
    *,
    values: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    optim: Optim,
    critic: Critic,
    lr: float,
    seed: int,
) -> Metrics:
    """`minibatches * epochs` optimizer steps of the critic on its clipped squared error, or with `critic.value_huber`
    on that loss, averaged over all tokens of a step. A critic with bins trains on `hl_gauss`.

    Logged under `value/`: `loss`, `mean`, `return`, `grad_norm`, `skipped_step`; `error`, the mean square of value
    minus return; and `spread`, that of return minus the batch's mean return. 1 - error / spread is the explained
    variance: 1 is perfect, 0 is no better than the mean return, below 0 is worse. With bins also `outside`, the share
    of returns outside their range, which `hl_gauss` clamps.
    """
    check_streams(batch, values="the critic's update", returns="the critic's update")
    set_lr(optimizer, lr)
    metrics: Metrics = {}
    model, mesh = values.model, values.mesh
    bins = bins_of(model.config)
    middle = batch.returns[batch.mask].mean()
    minibatches = min(rollouts.minibatches, len(batch.group_ids.unique()))

    def gradients(mini: Batch, trains: bool, max_tokens: int) -> Metrics:
        weights, new = per_token(mini), metrics
        with pipelined(mesh) as backward, torch.set_grad_enabled(trains):
            for micro, *rest in rank_microbatches((mini, weights), mesh=mesh, max_tokens=max_tokens):
                of_bins = None if bins is None else classified(model, micro, dtype=values.dtype)
                now = values_of(model, micro, dtype=values.dtype) if of_bins is None else of_bins[0]
                micro, w = micro.to(model.device), rest[0].to(model.device, non_blocking=True)
                loss = _loss(now, micro, critic) if of_bins is None else of_bins[1]
                if trains:
                    backward((w * loss).sum())
                streams = {
                    "loss": loss,
                    "mean": now,
                    "return": micro.returns,
                    "error": (now - micro.returns).square(),
                    "spread": (micro.returns - middle).square(),
                }
                if bins is not None:
                    streams["outside"] = ((micro.returns < bins["low"]) | (micro.returns > bins["high"])).float()
                new = merge(new, {f"value/{k}": mean(x, mask=micro.mask) for k, x in streams.items()})
        return new

    for mini in split(batch, minibatches, epochs=rollouts.epochs, seed=seed):
        trains = bool(mini.mask.any())  # a step without a gradient, or of zeros, would follow the momentum
        step = partial(gradients, mini, trains)
        metrics = retry_smaller(step, mini, model=model, max_tokens=optim.max_tokens)
        stepped = optimizer_step(optimizer, max_norm=optim.max_norm, model=model) if trains else UNTRAINED
        metrics = merge(metrics, {f"value/{name}": x for name, x in stepped.items()})
    return reduce_metrics(metrics, mesh=mesh)


def _loss(values: Tensor, batch: Batch, critic: Critic) -> Tensor:
    if critic.value_huber is not None:
        return value_huber(values, batch.returns, delta=critic.value_huber, mask=batch.mask)
    return value_clip(values, batch.values, batch.returns, clip=critic.value_clip, mask=batch.mask)


def with_explained(metrics: Metrics) -> Metrics:
    """The metrics of `value_update` with `value/explained`, 1 - error / spread, in place of `value/spread`.

    It is left out where all returns are equal (a spread of at most 1e-6).
    """
    error, spread = (torch.divide(*metrics[f"value/{name}"]) for name in ("error", "spread"))
    varies = (spread > 1e-6).double()
    out = {name: metric for name, metric in metrics.items() if name != "value/spread"}
    return out | {"value/explained": Mean(torch.where(varies > 0, 1 - error / spread, 0.0), varies)}


async def ppo(
    model: Any,
    value_model: Any,
    tokenizer: Any,
    engine: Engine,
    task: Task,
    rollouts: Rollouts,
    schedule: Schedule,
    optim: Optim = Optim(),
    penalties: Penalties = Penalties(),
    critic: Critic = Critic(),
    *,
    loss: PolicyLoss = PolicyLoss(partial(clipped, clip_high=0.2)),
    advantage: Advantage | None = None,
    kl_estimator: Callable[..., Tensor] | None = None,
    reference: Any = None,
) -> Path:
    """Train `model` and `value_model` (from `load_value_model`) in place; returns the folder of the exported model.

    A step samples, takes the critic's values and the whitened advantages of `advantage` (see `with_gae`), then
    `minibatches * epochs` optimizer steps of the critic, and as many of the policy on `loss`. In the first
    `critic.critic_steps` steps only the critic trains. It is exported to `critic/`. `rollouts` (with `overlap`) and
    `penalties` and `kl_estimator` work as in `rlkit.loops.grpo.grpo`, except that the KL is in the reward unless
    `kl_in` says otherwise.

    Differs from InstructGPT (arXiv:2203.02155):
    1. the critic's targets have lam_value = 1: with 0.95 a final reward is forgotten on the way to a long answer's
       start (VC-PPO, arXiv:2503.01491)
    2. a new critic starts at 0 everywhere (one with bins, `load_value_model(path, bins=...)`, in the middle of their
       range, see `hl_gauss`)
    3. critic and policy are two models, with two learning rates and separate gradient clipping
    4. tokens are weighted by `loss.correction(log pi_old / pi_rollout)` for the engine's numerics and older weights,
       and under top-p, top-k or min-p as in grpo (item 5)

    Errors: those of `rlkit.loops.grpo.grpo`, but for its baseline.
    """
    check_settings(task=task, rollouts=rollouts, schedule=schedule, optim=optim, penalties=penalties, critic=critic)
    check_functions(loss, advantage, rollouts, penalties, critic=True)
    check_rewarded(task)
    check_is_model(model)
    check_is_model(value_model, "value_model")
    if bins_of(value_model.config) is not None:
        critic.check_bins()
    has_kl = coefficients.has_kl(penalties, reference)
    kl = coefficients.kl_term(penalties, kl_estimator, default="reward")
    both = nn.ModuleDict({"policy": model, "critic": value_model})
    policy = make_policy(model, temperature=rollouts.temperature, dtype=optim.dtype)
    ref_policy = reference_policy(policy, reference, moves=bool(penalties.ref_sync_steps))
    lr_at = learning_rate(optim, num_steps=schedule.steps)
    own_lr_at = critic.critic_lr_at
    of_critic = Optim(lr_at=own_lr_at) if own_lr_at else replace(optim, lr=critic.critic_lr, lr_at=None)
    critic_lr_at = learning_rate(of_critic, num_steps=schedule.steps)
    optimizer = make_optimizer(both, optim, lr=lr_at(0))  # skips parameters without a gradient: each
    values = Policy(value_model, dtype=policy.dtype)  # update steps only the policy or only the critic
    scoring: dict[str, Any] = {"max_tokens": optim.max_tokens, "mesh": policy.mesh}

    def prepare(groups: Sequence[Group], step: Step) -> Batch:
        batch = pack(groups, share_prompts=runs_packed(model))
        batch = with_ref_logp(ref_policy if has_kl else None, batch, **scoring)
        if has_kl or advantage is not None or rollouts.minibatches * rollouts.epochs > 1:
            batch = with_old_logp(policy, batch, **scoring)
        batch = with_kept_mass(policy, batch, params=rollouts.params, on_policy=not rollouts.max_age, **scoring)
        kl_coef = 0.0 if kl.place == "loss" else step.kl_coef
        return with_gae(
            step.check(batch), values=values, critic=critic, kl_coef=kl_coef, max_tokens=optim.max_tokens,
            checked=step.check, advantage=advantage, kl=kl,
        )  # fmt: skip

    def update(batch: Batch, step: Step) -> Metrics:
        lr, critic_lr, seed = lr_at(step.index), critic_lr_at(step.index), mix(schedule.seed, step.index)
        options: dict[str, Any] = {"optimizer": optimizer, "rollouts": rollouts, "optim": optim, "seed": seed}
        metrics = with_explained(value_update(batch, values=values, critic=critic, lr=critic_lr, **options))
        if step.index >= critic.critic_steps:
            metrics |= grpo_update(
                batch, policy=policy, lr=lr, loss=loss, kl_coef=step.kl_coef * (kl.place == "loss"), kl=kl.in_loss,
                entropy_coef=step.entropy_coef, **options,
            )  # fmt: skip
        return metrics | {"lr": mean(lr), "lr/critic": mean(critic_lr)}

    state = {"model": both, "optimizer": optimizer, "reference": reference if penalties.ref_sync_steps else None}
    return await rl(
        policy, tokenizer, engine, task, rollouts, schedule, penalties, prepare=prepare, update=update, state=state,
        reference=ref_policy, max_tokens=optim.max_tokens,
    )  # fmt: skip


ppo_sync = blocking(ppo)  # a plain function, also where an event loop runs
