"""Group-relative policy optimization, sampling and training at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkit.advantages import group_centered
from rlkit.controllers import fixed
from rlkit.loops import saving, verbs
from rlkit.loops.aggregate import per_token
from rlkit.loops.dump import dump_to
from rlkit.loops.updates import Aggregate, Surrogate, clipped, grpo_update, pack_with_advantages
from rlkit.losses import tis
from rlkit.metrics import finalize, merge
from rlkit.parallel.model import DTYPES, forward, mesh_of, with_old_logp, with_ref_logp
from rlkit.parallel.optim import adamw
from rlkit.parallel.weights import stream_weights
from rlkit.rollout.limits import mask_truncated
from rlkit.rollout.rollout import Env, Group, Prompt, Score, mix, single_turn
from rlkit.types import Controller, SamplingParams


async def async_grpo(
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
    staleness: float = 1.0,
    keep_group: Callable[[Group], bool] | None = None,
    max_dropped: int | None = None,
    drop_truncated: bool = False,
    baseline: Callable[..., Tensor] = group_centered,
    num_minibatches: int = 1,
    num_epochs: int = 1,
    surrogate: Surrogate = clipped,
    aggregate: Aggregate = per_token,
    correction: Callable[..., Tensor] = partial(tis, max_weight=2.0),
    kl_coef: float = 0.0,
    kl_controller: Controller = fixed(),
    reference: Any = None,
    ref_sync_steps: int = 0,
    entropy_coef: float = 0.0,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
    max_tokens: int = 16384,
    dtype: str = "fp32",
    eval_prompts: Sequence[Prompt] = (),
    eval_steps: int = 0,
    eval_samples: int = 1,
    save_steps: int = 0,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
) -> Path:
    """`rlkit.loops.grpo` with an engine that never waits: while a step is trained on, it samples for the next ones.

    `engine` has weights of its own (`rlkit.rollout.process`, `rlkit.rollout.sglang`). They are replaced after every
    step without draining it: what is in flight goes on, and each token is stamped with the weights that made it. A
    group is trained on at most `staleness` steps (rounded up) after it was started; see `rlkit.rollout.stream`. With 1
    the engine samples one batch while the trainer works on the one before.

    The loss is decoupled PPO: clipped against the policy at the start of the step (`old_logp`), its tokens weighted by
    `correction(old_logp - rollout_logp)`, detached: `tis` truncates the weight of what older weights sampled, `icepop`
    drops what they would hardly sample now. With one update per step no forward is spent on `old_logp`. The correction
    does not scale the KL to `reference`.

    Every completion is on disk when it is made (`completions/`), so a run that is killed loses nothing but what was in
    the middle of a request, and `resume` goes on from the last checkpoint with it. Which groups make up a step depends
    on timing, so two runs are equal in distribution, not in bits.

    Differs: AReaL and verl's fully asynchronous recipe bound the age on average or discard what is too old, see
    `GroupStream`; TRL samples one step ahead in a thread.
    Reference: arXiv:2505.24298 (AReaL); arXiv:2110.00641 (decoupled PPO).
    """
    needs_reference = bool(kl_coef or ref_sync_steps)
    verbs.check_sampling(params, needs_reference=needs_reference, reference=reference, stale=True)
    mesh, moving = mesh_of(model), reference if ref_sync_steps else None
    policy = partial(forward, model, temperature=params.temperature, dtype=dtype)
    ref_policy = verbs.reference_policy(policy, model, reference, moves=bool(ref_sync_steps))
    optimizer = adamw(model, lr=lr_at(0), weight_decay=weight_decay)
    update = partial(
        grpo_update, policy=policy, optimizer=optimizer, num_minibatches=num_minibatches, num_epochs=num_epochs,
        surrogate=surrogate, aggregate=aggregate, correction=correction, entropy_coef=entropy_coef, max_norm=max_norm,
        max_tokens=max_tokens, device=model.device, mesh=mesh,
    )  # fmt: skip
    state = saving.restore(folder, model=model, optimizer=optimizer, reference=moving) if resume else {}
    start, first, kl_state = state.get("step", -1), max(state.get("step", -1), 0), kl_controller.init(kl_coef)
    kl_state = type(kl_state)(*state.get("kl", kl_state))
    with saving.open_training(folder, steps=steps, start=start, resume=resume, keep=keep) as (run, stop, saver):
        dump = dump_to(run, tokenizer, engine=engine)
        evaluate = partial(
            verbs.evaluate_if_due, prompts=eval_prompts, every=eval_steps, steps=steps, dump=dump, params=params,
            num_samples=eval_samples, generate=engine.generate, env=env, score=score, seed=seed, policy=policy,
            reference=ref_policy, max_tokens=max_tokens, mesh=mesh,
        )  # fmt: skip
        await engine.update_weights(stream_weights(model, dtype=DTYPES.get(dtype)), version=first)
        if start < 0 and (scores := await evaluate(0)):
            run.log(0, scores)
        async with verbs.open_stream(
            verbs.prompt_order(prompts, seed=seed), generate=engine.generate, abort=engine.abort, params=params,
            group_size=group_size, groups_per_step=prompts_per_step, staleness=staleness, seed=seed, env=env,
            score=score, keep=keep_group, max_dropped=max_dropped, on_group=dump,
            journal=folder / "completions", version=first, state=state.get("stream"),
        ) as stream:  # fmt: skip
            signal = True
            for step in range(first, steps):
                clock = verbs.Clock()
                stream.advance(version=step)
                groups = await stream.take()
                metrics = verbs.rollout_metrics(groups, version=step)
                clock.lap("wait")
                groups = mask_truncated(groups) if drop_truncated else groups
                batch = pack_with_advantages(groups, baseline=baseline)
                if kl_coef:
                    batch = await verbs.in_thread(with_ref_logp, ref_policy, batch, max_tokens=max_tokens, mesh=mesh)
                if num_minibatches * num_epochs > 1:
                    batch = await verbs.in_thread(with_old_logp, policy, batch, max_tokens=max_tokens, mesh=mesh)
                how = {"lr": lr_at(step), "kl_coef": kl_state.coef, "seed": mix(seed, step)}
                metrics = merge(metrics, await verbs.in_thread(update, batch, **how))
                clock.lap("train")
                done = step + 1
                await engine.update_weights(stream_weights(model, dtype=DTYPES.get(dtype)), version=done)
                if ref_sync_steps and done % ref_sync_steps == 0:
                    reference.load_state_dict(model.state_dict())
                line = finalize(metrics) | {"lr": lr_at(step), "groups/dropped": stream.num_dropped}
                line["groups/ready"] = stream.progress.ready
                if kl_coef:
                    line["kl/coef"] = kl_state.coef
                    if "kl/ref" in line:  # some token was trained on
                        kl_state = kl_controller.update(kl_state, line["kl/ref"])
                clock.lap("sync")
                line |= await evaluate(done)
                clock.lap("eval")
                run.log(done, line | clock.times(num_tokens=batch.num_tokens))
                signal = verbs.say_if_no_signal(run, batch, before=signal)
                if saving.save_if_due(
                    run, saver, stop, done, steps=steps, every=save_steps, model=model, optimizer=optimizer,
                    reference=moving, stream=stream, state={"kl": tuple(kl_state)},
                ):  # fmt: skip
                    break
        run.plot()
        return saving.export(run, model, tokenizer)
