"""Group-relative policy optimization, sampling and training at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlkit.advantages import group_centered
from rlkit.loops import coefficients, nans, verbs
from rlkit.loops.aggregate import per_token
from rlkit.loops.dump import dump_to
from rlkit.loops.sync import blocking
from rlkit.loops.updates import Aggregate, Surrogate, clipped, grpo_update
from rlkit.losses import tis
from rlkit.metrics import finalize, merge
from rlkit.model.forward import DTYPES, forward, mesh_of, with_old_logp, with_ref_logp
from rlkit.model.optim import adamw
from rlkit.model.weights import stream_weights
from rlkit.packing import pack, with_advantages
from rlkit.rollout.limits import mask_truncated
from rlkit.rollout.rollout import Env, Group, Prompt, Score, mix, single_turn
from rlkit.run import saving
from rlkit.types import SamplingParams


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
    """`rlkit.loops.grpo` with an engine that never waits: while a step is trained on, it samples for the next ones.

    `engine` has weights of its own (`rlkit.rollout.engines.process`, `rlkit.rollout.engines.sglang`). They are replaced
    after every step without draining it: what is in flight goes on, and each token is stamped with the weights that
    made it. A group is trained on at most `staleness` steps (rounded up) after it was started; see
    `rlkit.rollout.stream`. With 1 the engine samples one batch while the trainer works on the one before.

    The loss is decoupled PPO: clipped against the policy at the start of the step (`old_logp`), its tokens weighted by
    `correction(old_logp - rollout_logp)`, detached: `tis` truncates the weight of what older weights sampled, `icepop`
    drops what they would hardly sample now. With one update per step no forward is spent on `old_logp`. The correction
    does not scale the KL to `reference`.

    Every completion is on disk when it is made (`completions/`), so a run that is killed loses nothing but what was in
    the middle of a request, and `resume` goes on from the last checkpoint with it. Which groups make up a step depends
    on timing, so two runs are equal in distribution, not in bits.

    Differs: TRL `max_staleness` discards what is too old; AReaL and verl's fully asynchronous recipe bound the age on
    average, see `GroupStream`.
    Reference: arXiv:2505.24298 (AReaL); arXiv:2110.00641 (decoupled PPO).
    """
    has_kl = coefficients.needs_reference(controllers, kl_coef=kl_coef)
    verbs.check_engine(engine)
    verbs.check_sampling(params, needs_reference=has_kl or bool(ref_sync_steps), reference=reference, stale=True)
    mesh, moving = mesh_of(model), reference if ref_sync_steps else None
    policy = partial(forward, model, temperature=params.temperature, dtype=dtype)
    ref_policy = verbs.reference_policy(policy, model, reference, moves=bool(ref_sync_steps))
    optimizer = adamw(model, lr=lr_at(0), weight_decay=weight_decay)
    update = partial(
        grpo_update, policy=policy, optimizer=optimizer, num_epochs=num_epochs, surrogate=surrogate,
        aggregate=aggregate, correction=correction, max_norm=max_norm, max_tokens=max_tokens, device=model.device,
        mesh=mesh,
    )  # fmt: skip
    state = saving.restore(folder, model=model, optimizer=optimizer, reference=moving) if resume else {}
    start, first = state.get("step", -1), max(state.get("step", -1), 0)
    starts = {"kl_coef": kl_coef, "entropy_coef": entropy_coef}
    coefs = coefficients.start(controllers, **starts, saved=state.get("controllers"))
    training = saving.open_training(folder, steps=steps, start=start, resume=resume, keep=keep, print_steps=print_steps)
    with training as (run, stop, saver):
        dump = dump_to(run, tokenizer, engine=engine)
        watch = nans.Watch(run, prompts, tokenizer, skip=skip_nan)
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
            signal = verbs.Signal()
            for step in range(first, steps):
                clock = verbs.Clock()
                stream.advance(version=step)
                groups = await stream.take()
                groups = watch.groups(groups, step=step + 1)
                metrics = verbs.rollout_metrics(groups, version=step)
                clock.lap("wait")
                groups = mask_truncated(groups) if drop_truncated else groups
                batch = with_advantages(pack(groups), baseline)
                if has_kl:
                    batch = await verbs.in_thread(with_ref_logp, ref_policy, batch, max_tokens=max_tokens, mesh=mesh)
                if num_minibatches * num_epochs > 1:
                    batch = await verbs.in_thread(with_old_logp, policy, batch, max_tokens=max_tokens, mesh=mesh)
                batch = watch.batch(batch, step=step + 1)
                how: dict[str, Any] = {"lr": lr_at(step), "seed": mix(seed, step), **coefficients.coefs(coefs)}
                how["num_minibatches"] = watch.at_most_groups(num_minibatches, batch)
                metrics = merge(metrics, await verbs.in_thread(update, batch, **how))
                clock.lap("train")
                done = step + 1
                await engine.update_weights(stream_weights(model, dtype=DTYPES.get(dtype)), version=done)
                if ref_sync_steps and done % ref_sync_steps == 0:
                    reference.load_state_dict(model.state_dict())
                line = finalize(metrics) | {"lr": lr_at(step), "groups/dropped": stream.num_dropped}
                line["groups/ready"] = stream.progress.ready
                line |= watch.update(line, step=done) | coefficients.logged(controllers, coefs)
                coefs = coefficients.advance(controllers, coefs, line, skip_nan=skip_nan)
                clock.lap("sync")
                line |= await evaluate(done)
                clock.lap("eval")
                run.log(done, line | clock.times(num_tokens=batch.num_tokens))
                signal = verbs.say_if_no_signal(run, batch, before=signal)
                if saving.save_if_due(
                    run, saver, stop, done, steps=steps, every=save_steps, model=model, optimizer=optimizer,
                    reference=moving, stream=stream, state={"controllers": coefficients.to_save(controllers, coefs)},
                ):  # fmt: skip
                    break
        run.plot()
        return saving.export(run, model, tokenizer)


async_grpo_sync = blocking(async_grpo)  # a plain function, also where an event loop runs
