"""Proximal policy optimization with a critic: generalized advantage estimation over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from rlkit.loops import coefficients, nans, verbs
from rlkit.loops.critic import value_update, with_gae
from rlkit.loops.dump import dump_to
from rlkit.loops.sync import blocking
from rlkit.loops.updates import clipped, grpo_update
from rlkit.losses import tis
from rlkit.metrics import finalize, merge
from rlkit.model.forward import DTYPES, forward, mesh_of, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import adamw
from rlkit.model.weights import export_hf, stream_weights
from rlkit.packing import pack
from rlkit.rollout.limits import mask_truncated
from rlkit.rollout.rollout import Env, Prompt, Score, mix, single_turn
from rlkit.run import saving
from rlkit.types import SamplingParams


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
    verbs.check_engine(engine)
    verbs.check_sampling(params, needs_reference=has_kl, reference=reference)
    mesh, both = mesh_of(model), nn.ModuleDict({"policy": model, "critic": critic})
    policy = partial(forward, model, temperature=params.temperature, dtype=dtype)
    ref_policy = verbs.reference_policy(policy, model, reference)
    optimizer = adamw(both, lr=lr_at(0), weight_decay=weight_decay)  # it steps what has gradients: one of the two
    many: dict[str, Any] = {"num_epochs": num_epochs, "max_norm": max_norm}
    how: dict[str, Any] = {"max_tokens": max_tokens, "mesh": mesh}
    update: Any = partial(
        grpo_update, policy=policy, surrogate=partial(clipped, clip_low=clip_low, clip_high=clip_high),
        correction=correction, kl_coef=0.0, device=model.device, optimizer=optimizer,
        **many, **how,
    )  # fmt: skip
    how |= {"critic": critic, "dtype": dtype}
    estimate: Any = partial(
        with_gae, gamma=gamma, lam_policy=lam_policy, lam_value=lam_value, bootstrap=bootstrap, **how
    )
    learn_values: Any = partial(value_update, clip=value_clip, optimizer=optimizer, **many, **how)
    state = saving.restore(folder, model=both, optimizer=optimizer, reference=None) if resume else {}
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
            group_size=group_size, groups_per_step=prompts_per_step, seed=seed, env=env, score=score, on_group=dump,
            journal=folder / "completions" if journal else None, version=first, state=state.get("stream"),
        ) as stream:  # fmt: skip
            signal = verbs.Signal()
            for step in range(first, steps):
                clock = verbs.Clock()
                stream.advance(version=step)
                groups = await stream.take()
                await stream.pause()
                clock.lap("rollout")
                groups = watch.groups(groups, step=step + 1)
                metrics = verbs.rollout_metrics(groups, version=step)
                batch = pack(mask_truncated(groups) if drop_truncated else groups)
                batch = with_ref_logp(ref_policy if has_kl else None, batch, max_tokens=max_tokens, mesh=mesh)
                if has_kl or num_minibatches * num_epochs > 1:
                    batch = with_old_logp(policy, batch, max_tokens=max_tokens, mesh=mesh)
                batch = with_kept_mass(model, batch, params=params, max_tokens=max_tokens, dtype=dtype, mesh=mesh)
                now, checked = coefficients.coefs(coefs), partial(watch.batch, step=step + 1)
                batch = checked(estimate(checked(batch), kl_coef=now["kl_coef"], checked=checked))
                clock.lap("score")
                how = {"seed": mix(seed, step), "num_minibatches": watch.at_most_groups(num_minibatches, batch)}
                metrics = merge(metrics, learn_values(batch, lr=critic_lr_at(step), **how))
                if step >= critic_steps:
                    metrics = merge(metrics, update(batch, lr=lr_at(step), entropy_coef=now["entropy_coef"], **how))
                clock.lap("train")
                done = step + 1
                await engine.update_weights(stream_weights(model, dtype=DTYPES.get(dtype)), version=done)
                line = finalize(metrics) | {"lr": lr_at(step), "lr/critic": critic_lr_at(step)}
                if (spread := line.pop("value/spread", 0.0)) > 1e-6:  # else all returns are equal
                    line["value/explained"] = 1 - line["value/error"] / spread
                line |= watch.update(line, step=done) | coefficients.logged(controllers, coefs)
                coefs = coefficients.advance(controllers, coefs, line, skip_nan=skip_nan)
                clock.lap("sync")
                line |= await evaluate(done)
                clock.lap("eval")
                run.log(done, line | clock.times(num_tokens=batch.num_tokens))
                signal = verbs.say_if_no_signal(run, batch, before=signal)
                if saving.save_if_due(
                    run, saver, stop, done, steps=steps, every=save_steps, model=both, optimizer=optimizer,
                    state={"controllers": coefficients.to_save(controllers, coefs)}, stream=stream,
                ):  # fmt: skip
                    break
        run.plot()
        export_hf(critic, tokenizer, run.folder / "critic")
        return saving.export(run, model, tokenizer)


ppo_sync = blocking(ppo)  # a plain function, also where an event loop runs
