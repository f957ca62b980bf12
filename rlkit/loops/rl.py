"""One loop for reinforcement learning: sample, prepare, update, publish, evaluate, log, save.

An algorithm is two functions, `prepare` and `update`; GRPO, PPO and asynchronous training are settings of this loop
(`rlkit.loops.grpo`, `rlkit.loops.ppo`). docs/own-loop.md builds one from scratch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rlkit.data.order import Leg, resumed, to_save
from rlkit.loops import carried, pareto
from rlkit.loops.checks import check_prepared, check_rl, check_updated
from rlkit.loops.evaluate import Clock, answer_of, evaluate_sets, is_due, joined, mean_advantages, rollout_metrics
from rlkit.loops.task import Prepare, Step, Task, Update, prompt_order
from rlkit.loops.token_report import keeps_tokens, token_streams
from rlkit.loops.watch import Watch
from rlkit.metrics import finalize
from rlkit.model.flops import peak_tokens
from rlkit.model.forward import DTYPES, Policy, PolicyFn
from rlkit.model.weights import stream_weights
from rlkit.rollout.groups import Group
from rlkit.rollout.limits import mask_off_policy, mask_truncated
from rlkit.rollout.saved import SavedStream
from rlkit.rollout.shared import SharedStream, publish, reached, samplers_of, state_at
from rlkit.run import saving
from rlkit.run.folder import Run
from rlkit.run.samples import Samples
from rlkit.run.sync import run_in_thread, run_inline
from rlkit.settings import Penalties, Rollouts, Schedule
from rlkit.types import Controller, Engine

Send = Callable[..., Awaitable[object]]  # `publish` with all but the version of the weights


async def rl(
    policy: Policy,
    tokenizer: Any,
    engine: Engine,
    task: Task,
    rollouts: Rollouts,
    schedule: Schedule,
    penalties: Penalties = Penalties(),
    *,
    prepare: Prepare,
    update: Update,
    state: Mapping[str, Any],
    reference: PolicyFn | None = None,
    role_average: Controller | None = None,
    max_tokens: int = 16384,
) -> Path:
    """Train `policy.model` in place on rewards of its own samples; returns the folder of the exported model.

    With `schedule.steps` 0 it only evaluates, exports nothing and returns `schedule.output`.

    Each step takes `rollouts.prompts_per_step` groups of `rollouts.group_size` episodes, and calls

        batch   = prepare(groups, step)
        metrics = update(batch, step)

    `prepare` packs the groups and fills in advantages and the log-probs that the loss needs; `update` takes the
    optimizer steps. `step` is a `Step`, with the coefficients of `penalties` (`rlkit.loops.coefficients`). The tokens
    that `drop_truncated` and `drop_off_policy` exclude already have mask False. `minibatches` and `epochs` are for
    `update` to read.

    With `rollouts.overlap` the engine samples while the step trains, so it needs its own copy of the weights; there,
    and with `rollouts.staleness`, `prepare` and `update` run in a thread.

    Args:
        state: what checkpoints hold: "model" (one `nn.Module` of all that trains), "optimizer", and "reference", a
            reference model into which the policy is copied every `penalties.ref_sync_steps` steps. Of a
            `ModuleDict({"policy": ..., "critic": ...})` the other models are exported too, by their names. A number or
            tensor of your own is a buffer of a module in "model".
        reference: log-probs of a reference model; the KL to it is then reported on held-out sets without a sampling of
            their own.
        role_average: a rule for `Step.averages`, the mean reward of each role (`rlkit.loops.roles`).
        max_tokens: packed tokens per micro-batch of that KL.

    Errors: TypeError for an engine that only generates; ValueError for other names in `state`, for `overlap` with an
    engine that reads the trainer's weights, for a policy or reference at another temperature than the rollouts', for a
    batch of truncated sampling without `kept_mass`, and at a NaN or infinity (see `rlkit.loops.nans`).
    """
    check_rl(policy, tokenizer, engine, task, rollouts, schedule, penalties, state=state, reference=reference)
    saved = saving.restore(schedule.output, **state) if schedule.resume else {}
    start, first = saved.get("step", -1), max(saved.get("step", -1), 0)
    rules = carried.rules(penalties, rollouts, steps=schedule.steps, role_average=role_average)
    now = carried.start(rules, penalties, saved=saved)
    peak = peak_tokens(state["model"], dtype=policy.dtype)
    send = partial(publish, engine, partial(stream_weights, policy.model, dtype=DTYPES.get(policy.dtype)))
    call = run_in_thread if rollouts.overlap or rollouts.max_age else run_inline  # pending samples are still scored
    with saving.open_training(schedule, start=start) as job:
        note_task(job.run, task, schedule, penalties, rollouts)
        samples = Samples(job.run, tokenizer, engine=engine, rollouts=rollouts)
        watch = Watch(job.run, task.prompts, tokenizer, skip=rollouts.skip_nan)
        leg, before = resumed_order(saved, task, rollouts, engine, start=first, say=job.run.say)
        in_time = partial(saving.unless_hung, engine=engine, stop=job.stop, run=job.run)
        log = partial(saving.log, job, model=policy.model, tokenizer=tokenizer)
        look = partial(
            held_out_scores, task, engine, rollouts, schedule, samples=samples, send=send, policy=policy,
            reference=reference, max_tokens=max_tokens,
        )  # fmt: skip

        def save(done: int) -> bool:
            order = to_save(task.parts, leg, position=reached(stream.state, num=rollouts.prompts_per_step, step=done))
            states = carried.to_save(rules, now) | {"order": order}
            return saving.save_if_due(job, done, stream=stream, **state, state=states)

        await in_time(send(version=first))
        if start < 0 and (evals := await in_time(look(0))):
            log(0, evals)
        async with stream_of(task, engine, rollouts, schedule, samples, leg, version=first, state=before) as stream:
            for index in range(first, schedule.steps):  # `index` is also the version of the weights that sample
                done, clock = index + 1, Clock(memory=schedule.profile_memory)
                stream.advance(version=index)
                groups = await in_time(stream.take(partial(send, version=index)))
                if groups is None:  # the engine hangs, and a stop was requested
                    save(index)
                    break
                clock.lap("wait" if rollouts.overlap else "rollout")
                step = Step(index, **carried.of_step(now), check=partial(watch.batch, step=done))
                with samples.training(stream.prompts, groups, step=done) as record:
                    groups, record.places = watch.groups(groups, step=done)
                    batch = await call(prepare, masked(groups, rollouts, version=index), step)
                    check_prepared(batch, rollouts)
                    record.advantages = mean_advantages(batch, num_samples=len(record.places))
                    batch = step.check(batch)
                    if keeps_tokens(done, steps=schedule.steps):
                        record.tokens = await call(token_streams, policy, batch, groups, max_tokens=max_tokens)
                clock.lap("score")
                metrics = joined(rollout_metrics(groups, version=index), await call(update, batch, step))
                check_updated(state["model"])
                move_reference(state, policy, penalties, done=done)
                clock.lap("train")
                line = finalize(metrics) | stream.facts() | (await in_time(send(version=done)) or {})
                line |= watch.update(line, step=done) | carried.logged(rules, now)
                now = carried.after(rules, now, line, groups)
                clock.lap("sync")
                evals = await in_time(look(done)) or {}
                clock.lap("eval")
                log(done, line | evals | clock.times(num_tokens=batch.num_tokens, peak=peak, passes=rollouts.epochs))
                watch.signal(batch)
                if save(done):
                    break
        return saving.finish(job, policy.model, tokenizer, others=others_of(state, policy))


def stream_of(
    task: Task, engine: Engine, rollouts: Rollouts, schedule: Schedule, samples: Samples, leg: Leg, **options: Any
) -> SharedStream | SavedStream:
    """The groups of the task's prompts in their order, sampled as the settings say, or those of `from_rollouts`."""
    if rollouts.from_rollouts is not None:
        num = rollouts.prompts_per_step
        return SavedStream(rollouts.from_rollouts, num_groups=num, on_group=samples.completed)
    return SharedStream(
        prompt_order(task.prompts, seed=schedule.seed, parts=task.parts, leg=leg), engine=engine,
        params=rollouts.params, group_size=rollouts.group_size, groups_per_step=rollouts.prompts_per_step,
        staleness=rollouts.max_age, turns=not rollouts.overlap, seed=schedule.seed, env=task.env, score=task.score,
        keep=task.keep_group, max_dropped=rollouts.max_dropped, on_group=samples.completed, tokenizer=samples.tokenizer,
        journal=schedule.output / "completions" if rollouts.journal or rollouts.overlap else None, **options,
    )  # fmt: skip


async def held_out_scores(
    task: Task, engine: Engine, rollouts: Rollouts, schedule: Schedule, done: int, *, samples: Samples, send: Send,
    **options: Any,
) -> dict[str, float]:  # fmt: skip
    """`evaluate_sets` on the task's held-out prompts where it is due after `done` steps, and its Pareto front."""
    if not task.held_out or not is_due(done, schedule):
        return {}
    evals = await evaluate_sets(
        task.held_out, generate=engine.generate, params=rollouts.params, num_samples=rollouts.eval_samples,
        env=task.env, score=task.score, seed=schedule.seed,
        on_group=partial(samples.completed, step=done), engine=engine, resend=partial(send, version=done),
        answer=partial(answer_of, tokenizer=samples.tokenizer), **options,
    )  # fmt: skip
    return evals | pareto.logged(task.objectives, evals, schedule.output, step=done)


def move_reference(state: Mapping[str, Any], policy: Policy, penalties: Penalties, *, done: int) -> None:
    """Copy the policy into the reference where `penalties.ref_sync_steps` says so after `done` steps."""
    if penalties.ref_sync_steps and done % penalties.ref_sync_steps == 0:
        state["reference"].load_state_dict(policy.model.state_dict())


def others_of(state: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """The models beside the policy that are exported too, by their names."""
    models = state["model"].items() if isinstance(state["model"], nn.ModuleDict) else ()
    return {name: model for name, model in models if hasattr(model, "save_pretrained") and model is not policy.model}


def masked(groups: Sequence[Group], rollouts: Rollouts, *, version: int) -> Sequence[Group]:
    """The groups with mask False where `drop_truncated` and `drop_off_policy` exclude tokens from the loss."""
    groups = mask_truncated(groups) if rollouts.drop_truncated else groups
    return mask_off_policy(groups, version=version) if rollouts.drop_off_policy else groups


def note_task(run: Run, task: Task, schedule: Schedule, penalties: Penalties, rollouts: Rollouts) -> None:
    """Note the numbers of rows for the report; report settings without effect."""
    run.note(rows=len(task.prompts), held_out={name: len(one.prompts) for name, one in task.held_out.items()})
    if rollouts.from_rollouts is not None:
        run.say(
            f"from_rollouts: trains on the steps in {rollouts.from_rollouts}; nothing is sampled but for evaluations"
        )
    if task.held_out and not schedule.eval_steps:
        run.say("eval_prompts are not used: eval_steps is 0")
    if penalties.ref_sync_steps > schedule.steps > 0:
        late = f"ref_sync_steps {penalties.ref_sync_steps} is above steps {schedule.steps}"
        run.say(f"the reference never moves: {late}")
    one = rollouts.minibatches * rollouts.epochs == 1 or penalties.kl_in in ("reward", "advantage")
    if penalties.ref_sync_steps == 1 and penalties.has_kl and one:
        run.say(
            "the KL is 0 from the first copy on: with ref_sync_steps 1 the reference is the policy before each update"
        )


def resumed_order(
    saved: Mapping[str, Any], task: Task, rollouts: Rollouts, engine: Engine, *, start: int, say: Callable[[str], None]
) -> tuple[Leg, Any]:
    """Where a resumed run goes on in the data, and the state of its stream.

    Where the files have changed (`rlkit.data.order.resumed`), groups in flight are dropped.
    """
    state, num = saved.get("stream"), rollouts.prompts_per_step
    place = reached(state, num=num, step=start)
    leg, changes = resumed(saved.get("order"), task.parts, position=place, names=saved.get("files"))
    for text in changes:
        say(text)
    if changes:
        state = state_at(place, samplers=len(samplers_of(engine)[:num]), num=num)
    return leg, state
