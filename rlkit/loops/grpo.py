"""Group-relative policy optimization: on policy, a few updates per rollout, or asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlkit.advantages import group_centered
from rlkit.loops import coefficients
from rlkit.loops.rl import Step, Task, check_engine, check_sampling, rl
from rlkit.loops.updates import Aggregate, Surrogate, clipped, grpo_update, per_token
from rlkit.losses import tis
from rlkit.metrics import Metrics, mean
from rlkit.model.forward import Policy, mesh_of, reference_policy, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import adamw
from rlkit.packing import pack, with_advantages
from rlkit.rollout.limits import mask_off_policy, mask_truncated
from rlkit.rollout.rollout import Env, Group, Prompt, Score, mix, single_turn
from rlkit.run.sync import blocking
from rlkit.settings import Rollouts, Schedule
from rlkit.types import Batch, SamplingParams


async def grpo(
    model: Any,
    tokenizer: Any,
    engine: Any,
    prompts: Sequence[Prompt],
    *,
    score: Score | None,
    folder: Path,
    steps: int,
    params: SamplingParams,
    lr_at: Callable[[int], float],
    env: Env = single_turn,
    prompts_per_step: int = 8,
    group_size: int = 8,
    keep_group: Callable[[Group], bool] | None = None,
    max_dropped: int | None = None,
    staleness: float = 0.0,
    overlap: bool = False,
    drop_truncated: bool = False,
    drop_off_policy: bool = False,
    journal: bool = False,
    baseline: Callable[..., Tensor] = group_centered,
    num_minibatches: int = 1,
    num_epochs: int = 1,
    surrogate: Surrogate = clipped,
    aggregate: Aggregate = per_token,
    correction: Callable[..., Tensor] = partial(tis, max_weight=2.0),
    kl_coef: float = 0.0,
    reference: Any = None,
    ref_sync_steps: int = 0,
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
    """Train `model` in place on rewards of its own samples; returns the folder of the exported model.

    A step samples `group_size` answers to each of `prompts_per_step` prompts, with `baseline(rewards)` as the advantage
    of all their tokens, and takes `num_minibatches * num_epochs` optimizer steps (see `grpo_update`). Groups that
    `keep_group` refuses (`success_between(0.01, 0.99)`) are replaced, at most `max_dropped` in a step (None: 20
    `prompts_per_step`). With `staleness` > 0 so many times more groups are started than a step needs; the last go on in
    the next step (partial rollout). `drop_off_policy` keeps what older weights sampled out of the loss,
    `drop_truncated` what a limit cut. With `journal` a killed run keeps what it sampled; else it samples that again.
    The first NaN or infinity in a stream or a gradient norm stops the run; `skip_nan` drops it (`rlkit.loops.nans`).

    With `overlap` the engine samples while a step trains. It needs weights of its own (`rlkit.rollout.engines.process`,
    `rlkit.rollout.engines.sglang`); they are replaced after every step without draining it, and each token is stamped
    with the version that sampled it. A group is trained on at most `staleness` steps (rounded up) after it was started,
    see `rlkit.rollout.stream`: with 1 the engine samples one batch while the trainer works on the one before. The loss
    is decoupled PPO: clipped against the policy at the start of the step (`old_logp`), its tokens weighted by the
    `correction`, which does not scale the KL. Which groups make up a step depends on timing, so that two such runs are
    equal in distribution, not in bits. Differs: TRL `max_staleness` discards what is too old; AReaL and verl's fully
    asynchronous recipe bound the age on average. Reference: arXiv:2505.24298 (AReaL); arXiv:2110.00641.

    Differs from the GRPO paper (arXiv:2402.03300):
    1. advantages are not divided by the group's standard deviation (arXiv:2503.20783); pass `group_zscore` to do so
    2. token mean instead of the mean of sequence means, and a clip at 1.28 (both arXiv:2503.14476); other losses
       (GSPO, CISPO, ...) and means are `surrogate` and `aggregate`, see `grpo_update` and `rlkit.loops.updates`
    3. no KL term unless `kl_coef` > 0 or `controllers` has a rule for it (`rlkit.loops.coefficients`); then k3 against
       `reference`, scaled by the ratio so that its gradient is that of KL(policy || reference) also off policy
    4. tokens are weighted by `correction(log pi_old / pi_rollout)` for what the engine, or older weights, did otherwise
    5. under top-p or top-k, tokens are weighted by the mass that was kept, for one forward more (with `staleness` 0)
    """
    has_kl = coefficients.needs_reference(controllers, kl_coef=kl_coef)
    check_engine(engine)
    check_sampling(
        params, needs_reference=has_kl or bool(ref_sync_steps), reference=reference, stale=overlap or staleness > 0
    )
    if num_minibatches > prompts_per_step:
        raise ValueError(f"{num_minibatches=} is more than the {prompts_per_step} groups of a step: no group is cut")
    mesh, policy = mesh_of(model), Policy(model, temperature=params.temperature, dtype=dtype)
    ref_policy = reference_policy(policy, reference, moves=bool(ref_sync_steps))
    optimizer = adamw(model, lr=lr_at(0), weight_decay=weight_decay)
    how: dict[str, Any] = {"max_tokens": max_tokens, "mesh": mesh}

    def prepare(groups: Sequence[Group], step: Step) -> Batch:
        groups = mask_truncated(groups) if drop_truncated else groups
        groups = mask_off_policy(groups, version=step.index) if drop_off_policy else groups
        batch = with_ref_logp(ref_policy if has_kl else None, with_advantages(pack(groups), baseline), **how)
        if num_minibatches * num_epochs > 1:
            batch = with_old_logp(policy, batch, **how)
        return with_kept_mass(model, batch, params=params, dtype=dtype, **how)

    def update(batch: Batch, step: Step) -> Metrics:
        lr, num_groups = lr_at(step.index), len(batch.group_ids.unique())
        metrics = grpo_update(
            batch, policy=policy, optimizer=optimizer, lr=lr, num_minibatches=min(num_minibatches, num_groups),
            num_epochs=num_epochs, surrogate=surrogate, aggregate=aggregate, correction=correction,
            kl_coef=step.kl_coef, entropy_coef=step.entropy_coef, max_norm=max_norm, device=model.device,
            seed=mix(seed, step.index), **how,
        )  # fmt: skip
        if ref_sync_steps and (step.index + 1) % ref_sync_steps == 0:
            reference.load_state_dict(model.state_dict())
        return metrics | {"lr": mean(lr)}

    task = Task(prompts, params, score, env=env, keep_group=keep_group, eval_prompts=eval_prompts)
    rollouts = Rollouts(
        prompts_per_step=prompts_per_step, group_size=group_size, staleness=staleness, overlap=overlap,
        max_dropped=max_dropped, journal=journal,
    )  # fmt: skip
    schedule = Schedule(
        folder=folder, steps=steps, eval_steps=eval_steps, eval_samples=eval_samples, print_steps=print_steps,
        save_steps=save_steps, keep=keep, seed=seed, resume=resume, skip_nan=skip_nan,
    )  # fmt: skip
    state = {"model": model, "optimizer": optimizer, "reference": reference if ref_sync_steps else None}
    return await rl(
        policy, tokenizer, engine, task, rollouts, schedule, prepare=prepare, update=update, state=state,
        coefs={"kl_coef": kl_coef, "entropy_coef": entropy_coef}, controllers=controllers, reference=ref_policy,
        max_tokens=max_tokens,
    )  # fmt: skip


grpo_sync = blocking(grpo)  # a plain function, also where an event loop runs
