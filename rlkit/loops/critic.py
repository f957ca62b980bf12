"""The critic's part of a PPO step: advantages from its values, and its own update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlkit.advantages import gae_decoupled, whiten
from rlkit.loops.aggregate import per_token
from rlkit.losses import kl_in_reward, value_clip
from rlkit.metrics import Mean, Metrics, mean, merge
from rlkit.model.heads import bootstraps, score_values, values
from rlkit.model.optim import optimizer_step, set_lr
from rlkit.packing import split, with_streams
from rlkit.parallel.data import rank_microbatches, reduce_metrics
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.pipeline import pipelined
from rlkit.types import Batch


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
