"""Group-relative policy optimization, on policy or a few updates per rollout."""

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
from rlkit.parallel.model import DTYPES, forward, mesh_of, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.parallel.optim import adamw
from rlkit.parallel.weights import stream_weights
from rlkit.rollout.limits import mask_off_policy, mask_truncated
from rlkit.rollout.rollout import Env, Group, Prompt, Score, mix, single_turn
from rlkit.types import Controller, SamplingParams


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
    """Train `model` in place on rewards of its own samples; returns the folder of the exported model.

    A step samples `group_size` answers to each of `prompts_per_step` prompts, with `baseline(rewards)` as the advantage
    of all their tokens, and takes `num_minibatches * num_epochs` optimizer steps (see `grpo_update`). Groups that
    `keep_group` refuses (`success_between(0.01, 0.99)`) are replaced, at most `max_dropped` in a step (None: 20
    `prompts_per_step`). With `staleness` > 0 so many times more groups are started than a step needs; the last go on in
    the next step (partial rollout). `drop_off_policy` keeps what older weights sampled out of the loss,
    `drop_truncated` what a limit cut. With `journal` a killed run keeps what it sampled; else it samples that again.

    Differs from the GRPO paper (arXiv:2402.03300):
    1. advantages are not divided by the group's standard deviation (arXiv:2503.20783); pass `group_zscore` to do so
    2. token mean instead of the mean of sequence means, and a clip at 1.28 (both arXiv:2503.14476); other losses
       (GSPO, CISPO, ...) and means are `surrogate` and `aggregate`, see `grpo_update` and `rlkit.loops.aggregate`
    3. no KL term unless `kl_coef` > 0 (`kl_controller` may then move it); then k3 against `reference`, scaled by the
       ratio so that its gradient is that of KL(policy || reference) also off policy
    4. tokens are weighted by `correction(log pi_old / pi_rollout)` for what the engine, or older weights, did otherwise
    5. under top-p or top-k, tokens are weighted by the mass that was kept, for one forward more (with `staleness` 0)
    """
    needs_reference = bool(kl_coef or ref_sync_steps)
    verbs.check_sampling(params, needs_reference=needs_reference, reference=reference, stale=staleness > 0)
    mesh, moving = mesh_of(model), reference if ref_sync_steps else None
    policy = partial(forward, model, temperature=params.temperature, dtype=dtype)
    ref_policy = verbs.reference_policy(policy, model, reference, moves=bool(ref_sync_steps))
    with_kept = partial(with_kept_mass, model, params=params, max_tokens=max_tokens, dtype=dtype, mesh=mesh)
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
        signal, call = True, verbs.in_thread if staleness else verbs.here  # what waits is still judged meanwhile
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
                metrics = verbs.rollout_metrics(groups, version=step)
                groups = mask_truncated(groups) if drop_truncated else groups
                groups = mask_off_policy(groups, version=step) if drop_off_policy else groups
                batch = pack_with_advantages(groups, baseline=baseline)
                reference_now = ref_policy if kl_coef else None
                batch = await call(with_ref_logp, reference_now, batch, max_tokens=max_tokens, mesh=mesh)
                if num_minibatches * num_epochs > 1:
                    batch = await call(with_old_logp, policy, batch, max_tokens=max_tokens, mesh=mesh)
                batch = await call(with_kept, batch)
                clock.lap("score")
                how = {"lr": lr_at(step), "kl_coef": kl_state.coef, "seed": mix(seed, step)}
                metrics = merge(metrics, await call(update, batch, **how))
                clock.lap("train")
                done = step + 1
                await engine.update_weights(stream_weights(model, dtype=DTYPES.get(dtype)), version=done)
                if ref_sync_steps and done % ref_sync_steps == 0:
                    reference.load_state_dict(model.state_dict())
                line = finalize(metrics) | {"lr": lr_at(step), "groups/dropped": stream.num_dropped}
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
                    state={"kl": tuple(kl_state)}, reference=moving, stream=stream,
                ):  # fmt: skip
                    break
        run.plot()
        return saving.export(run, model, tokenizer)
