"""Group-relative policy optimization, on policy or a few updates per rollout."""

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
from rlkit.model.forward import DTYPES, forward, mesh_of, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import adamw
from rlkit.model.weights import stream_weights
from rlkit.packing import pack, with_advantages
from rlkit.rollout.limits import mask_off_policy, mask_truncated
from rlkit.rollout.rollout import Env, Group, Prompt, Score, mix, single_turn
from rlkit.run import saving
from rlkit.types import SamplingParams


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

    Differs from the GRPO paper (arXiv:2402.03300):
    1. advantages are not divided by the group's standard deviation (arXiv:2503.20783); pass `group_zscore` to do so
    2. token mean instead of the mean of sequence means, and a clip at 1.28 (both arXiv:2503.14476); other losses
       (GSPO, CISPO, ...) and means are `surrogate` and `aggregate`, see `grpo_update` and `rlkit.loops.aggregate`
    3. no KL term unless `kl_coef` > 0 or `controllers` has a rule for it (`rlkit.loops.coefficients`); then k3 against
       `reference`, scaled by the ratio so that its gradient is that of KL(policy || reference) also off policy
    4. tokens are weighted by `correction(log pi_old / pi_rollout)` for what the engine, or older weights, did otherwise
    5. under top-p or top-k, tokens are weighted by the mass that was kept, for one forward more (with `staleness` 0)
    """
    has_kl = coefficients.needs_reference(controllers, kl_coef=kl_coef)
    needs_reference = has_kl or bool(ref_sync_steps)
    verbs.check_engine(engine)
    verbs.check_sampling(params, needs_reference=needs_reference, reference=reference, stale=staleness > 0)
    mesh, moving = mesh_of(model), reference if ref_sync_steps else None
    policy = partial(forward, model, temperature=params.temperature, dtype=dtype)
    ref_policy = verbs.reference_policy(policy, model, reference, moves=bool(ref_sync_steps))
    with_kept = partial(with_kept_mass, model, params=params, max_tokens=max_tokens, dtype=dtype, mesh=mesh)
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
        signal = verbs.Signal()
        call = verbs.in_thread if staleness else verbs.here  # pending rollouts are still judged meanwhile
        async with verbs.open_stream(
            verbs.prompt_order(prompts, seed=seed), generate=engine.generate, abort=engine.abort, params=params,
            group_size=group_size, groups_per_step=prompts_per_step, staleness=staleness, seed=seed, env=env,
            score=score, keep=keep_group, max_dropped=max_dropped, on_group=dump,
            journal=folder / "completions" if journal else None, version=first, state=state.get("stream"),
        ) as stream:  # fmt: skip
            for step in range(first, steps):
                clock = verbs.Clock()
                stream.advance(version=step)
                groups = await stream.take()
                await stream.pause()
                clock.lap("rollout")
                groups = watch.groups(groups, step=step + 1)
                metrics = verbs.rollout_metrics(groups, version=step)
                groups = mask_truncated(groups) if drop_truncated else groups
                groups = mask_off_policy(groups, version=step) if drop_off_policy else groups
                batch = with_advantages(pack(groups), baseline)
                reference_now = ref_policy if has_kl else None
                batch = await call(with_ref_logp, reference_now, batch, max_tokens=max_tokens, mesh=mesh)
                if num_minibatches * num_epochs > 1:
                    batch = await call(with_old_logp, policy, batch, max_tokens=max_tokens, mesh=mesh)
                batch = watch.batch(await call(with_kept, batch), step=step + 1)
                clock.lap("score")
                how: dict[str, Any] = {"lr": lr_at(step), "seed": mix(seed, step), **coefficients.coefs(coefs)}
                how["num_minibatches"] = watch.at_most_groups(num_minibatches, batch)
                metrics = merge(metrics, await call(update, batch, **how))
                clock.lap("train")
                done = step + 1
                await engine.update_weights(stream_weights(model, dtype=DTYPES.get(dtype)), version=done)
                if ref_sync_steps and done % ref_sync_steps == 0:
                    reference.load_state_dict(model.state_dict())
                line = finalize(metrics) | {"lr": lr_at(step), "groups/dropped": stream.num_dropped}
                line |= watch.update(line, step=done) | coefficients.logged(controllers, coefs)
                coefs = coefficients.advance(controllers, coefs, line, skip_nan=skip_nan)
                clock.lap("sync")
                line |= await evaluate(done)
                clock.lap("eval")
                run.log(done, line | clock.times(num_tokens=batch.num_tokens))
                signal = verbs.say_if_no_signal(run, batch, before=signal)
                if saving.save_if_due(
                    run, saver, stop, done, steps=steps, every=save_steps, model=model, optimizer=optimizer,
                    state={"controllers": coefficients.to_save(controllers, coefs)}, reference=moving, stream=stream,
                ):  # fmt: skip
                    break
        run.plot()
        return saving.export(run, model, tokenizer)


grpo_sync = blocking(grpo)  # a plain function, also where an event loop runs
