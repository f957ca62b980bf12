"""Proximal policy optimization with a critic: generalized advantage estimation over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.advantages import gae_decoupled, whiten
from rlkit.loops import coefficients
from rlkit.loops.rl import Step, Task, check_engine, check_sampling, rl
from rlkit.loops.updates import clipped, grpo_update, per_token
from rlkit.losses import kl_in_reward, tis, value_clip
from rlkit.metrics import Mean, Metrics, mean, merge
from rlkit.model.forward import Policy, mesh_of, reference_policy, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.heads import bootstraps, score_values, values
from rlkit.model.optim import adamw, optimizer_step, set_lr
from rlkit.packing import pack, split, with_streams
from rlkit.parallel.data import rank_microbatches, reduce_metrics
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.rollout.limits import mask_truncated
from rlkit.rollout.rollout import Env, Group, Prompt, Score, mix, single_turn
from rlkit.run.sync import blocking
from rlkit.settings import Rollouts, Schedule
from rlkit.types import Batch, SamplingParams


def with_gae(
    batch: Batch,
    *,
    critic: Any,
    gamma: float,
    lam_policy: float,
    lam_value: float,
    bootstrap: bool,
    kl_coef: float,
    max_tokens: int,
    dtype: str,
    mesh: Mesh | None = None,
    checked: Callable[[Batch], Batch] = lambda batch: batch,
) -> Batch:
    """The batch with the critic's `values`, their targets `returns`, and whitened `advantages`.

    Token rewards are lowered by `kl_coef` times the k1 estimate of KL(old policy || reference), where that is not 0. An
    answer that a limit cut ends in the critic's value of what it came to (`bootstrap`), or in 0. `checked` gets the
    batch with its raw `values`, and may drop sequences before the advantages are whitened over all of them.
    """
    batch = checked(replace(batch, values=score_values(critic, batch, max_tokens=max_tokens, dtype=dtype, mesh=mesh)))
    found = batch.values
    rewards, mask = batch.token_rewards, batch.mask
    if kl_coef:
        rewards = kl_in_reward(rewards, batch.old_logp, batch.ref_logp, kl_coef=kl_coef, mask=mask)
    traces = gae_decoupled(
        rewards, found, mask=mask, cu_seqlens=batch.cu_seqlens, gamma=gamma, lam_policy=lam_policy,
        lam_value=lam_value, bootstrap=bootstraps(found, batch) if bootstrap else None,
    )  # fmt: skip
    advantages = whiten(traces.advantages, mask=mask)
    return with_streams(batch, values=found, returns=traces.returns, advantages=advantages)


def value_update(
    batch: Batch,
    *,
    critic: Any,
    optimizer: torch.optim.Optimizer,
    lr: float,
    num_minibatches: int,
    num_epochs: int,
    clip: float,
    max_norm: float,
    max_tokens: int,
    dtype: str,
    seed: int,
    mesh: Mesh | None = None,
) -> Metrics:
    """`num_minibatches * num_epochs` optimizer steps of the critic: the clipped error of its values, averaged over all
    tokens of a step.

    Logged under `value/`: `loss`, `mean`, `return`, `grad_norm`, `skipped_step`, and `error` and `spread`, mean squares
    over the batch: of value minus return, and of return minus the batch's mean return. So 1 - error / spread is the
    share of the returns' variance that the values explain: 0 is what their mean would, below 0 is worse.
    """
    set_lr(optimizer, lr)
    metrics: Metrics = {}
    middle = batch.returns[batch.mask].mean()
    for mini in split(batch, num_minibatches, epochs=num_epochs, seed=seed):
        weights = per_token(mini)
        with pipelined(mesh) as backward:
            for micro, *rest in rank_microbatches((mini, weights), mesh=mesh, max_tokens=max_tokens):
                now = values(critic, micro, dtype=dtype)
                micro, w = micro.to(critic.device), rest[0].to(critic.device, non_blocking=True)
                loss = value_clip(now, micro.values, micro.returns, clip=clip, mask=micro.mask)
                backward((w * loss).sum())
                shown = {
                    "loss": loss,
                    "mean": now,
                    "return": micro.returns,
                    "error": (now - micro.returns).square(),
                    "spread": (micro.returns - middle).square(),
                }
                metrics = merge(metrics, {f"value/{k}": mean(x, mask=micro.mask) for k, x in shown.items()})
        step = optimizer_step(optimizer, max_norm=max_norm)
        metrics = merge(metrics, {f"value/{name}": x for name, x in step.items()})
    return reduce_metrics(metrics, mesh=mesh)


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
    critic: Any,
    tokenizer: Any,
    engine: Any,
    prompts: Sequence[Prompt],
    *,
    score: Score | None,
    folder: Path,
    steps: int,
    params: SamplingParams,
    lr_at: Callable[[int], float],
    critic_lr_at: Callable[[int], float],
    critic_steps: int = 0,
    env: Env = single_turn,
    prompts_per_step: int = 64,
    group_size: int = 1,
    drop_truncated: bool = False,
    journal: bool = False,
    gamma: float = 1.0,
    lam_policy: float = 0.95,
    lam_value: float = 1.0,
    bootstrap: bool = True,
    num_minibatches: int = 1,
    num_epochs: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.5,
    correction: Callable[..., Tensor] = partial(tis, max_weight=2.0),
    kl_coef: float = 0.0,
    reference: Any = None,
    entropy_coef: float = 0.0,
    controllers: coefficients.Controllers = MappingProxyType({}),
    skip_nan: bool = False,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
    max_tokens: int = 16384,
    dtype: str = "fp32",
    eval_prompts: Sequence[Prompt] = (),
    eval_steps: int = 0,
    eval_samples: int = 1,
    print_steps: int = 1,
    save_steps: int = 0,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
) -> Path:
    """Train `model` and `critic` (from `load_value_model`) in place; returns the folder of the exported model.

    A step samples, takes the critic's values, `gae_decoupled(lam_policy, lam_value)` and whitened advantages (see
    `with_gae`), then `num_minibatches * num_epochs` optimizer steps of the critic, and as many of the policy on the
    clipped surrogate. In the first `critic_steps` steps the critic learns alone. The critic is exported to `critic/`.
    `controllers` move the coefficients (`rlkit.loops.coefficients`), `skip_nan` is that of `rlkit.loops.nans`.

    Differs from InstructGPT (arXiv:2203.02155), TRL and verl:
    1. the critic's targets have lam_value = 1: with 0.95 a final reward is forgotten on the way to a long answer's
       start (VC-PPO, arXiv:2503.01491)
    2. a new critic starts at 0 everywhere, and an answer cut by a limit ends in its value, not in 0 (`bootstrap`)
    3. critic and policy have two models and two learning rates, and gradients clipped apart
    4. tokens are weighted by `correction(log pi_old / pi_rollout)` for what the engine did otherwise, and under top-p
       or top-k by the mass that was kept (one forward more)
    """
    has_kl = coefficients.needs_reference(controllers, kl_coef=kl_coef)
    check_engine(engine)
    check_sampling(params, needs_reference=has_kl, reference=reference)
    if num_minibatches > prompts_per_step:
        raise ValueError(f"{num_minibatches=} is more than the {prompts_per_step} groups of a step: no group is cut")
    mesh, both = mesh_of(model), nn.ModuleDict({"policy": model, "critic": critic})
    policy = Policy(model, temperature=params.temperature, dtype=dtype)
    ref_policy = reference_policy(policy, reference)
    optimizer = adamw(both, lr=lr_at(0), weight_decay=weight_decay)  # it steps what has gradients: one of the two
    how: dict[str, Any] = {"max_tokens": max_tokens, "mesh": mesh}
    surrogate = partial(clipped, clip_low=clip_low, clip_high=clip_high)
    of_critic: dict[str, Any] = {"critic": critic, "dtype": dtype, **how}

    def prepare(groups: Sequence[Group], step: Step) -> Batch:
        batch = pack(mask_truncated(groups) if drop_truncated else groups)
        batch = with_ref_logp(ref_policy if has_kl else None, batch, **how)
        if has_kl or num_minibatches * num_epochs > 1:
            batch = with_old_logp(policy, batch, **how)
        batch = step.check(with_kept_mass(model, batch, params=params, dtype=dtype, **how))
        return with_gae(
            batch, gamma=gamma, lam_policy=lam_policy, lam_value=lam_value, bootstrap=bootstrap,
            kl_coef=step.kl_coef, checked=step.check, **of_critic,
        )  # fmt: skip

    def update(batch: Batch, step: Step) -> Metrics:
        lr, critic_lr = lr_at(step.index), critic_lr_at(step.index)
        times: dict[str, Any] = {
            "num_minibatches": min(num_minibatches, len(batch.group_ids.unique())), "num_epochs": num_epochs,
            "max_norm": max_norm, "seed": mix(seed, step.index), "optimizer": optimizer,
        }  # fmt: skip
        metrics = with_explained(value_update(batch, lr=critic_lr, clip=value_clip, **times, **of_critic))
        if step.index >= critic_steps:
            metrics |= grpo_update(
                batch, policy=policy, lr=lr, surrogate=surrogate,
                correction=correction, kl_coef=0.0, entropy_coef=step.entropy_coef, device=model.device,
                **times, **how,
            )  # fmt: skip
        return metrics | {"lr": mean(lr), "lr/critic": mean(critic_lr)}

    task = Task(prompts, params, score, env=env, eval_prompts=eval_prompts)
    rollouts = Rollouts(prompts_per_step=prompts_per_step, group_size=group_size, journal=journal)
    schedule = Schedule(
        folder=folder, steps=steps, eval_steps=eval_steps, eval_samples=eval_samples, print_steps=print_steps,
        save_steps=save_steps, keep=keep, seed=seed, resume=resume, skip_nan=skip_nan,
    )  # fmt: skip
    return await rl(
        policy, tokenizer, engine, task, rollouts, schedule, prepare=prepare, update=update,
        state={"model": both, "optimizer": optimizer}, coefs={"kl_coef": kl_coef, "entropy_coef": entropy_coef},
        controllers=controllers, reference=ref_policy, exports={"critic": critic}, max_tokens=max_tokens,
    )  # fmt: skip


ppo_sync = blocking(ppo)  # a plain function, also where an event loop runs
