"""One loop for reinforcement learning: sample, score, update, publish, evaluate, save.

An algorithm is two functions, `prepare` and `update`; GRPO, PPO and asynchronous training are settings of this loop
(`rlkit.loops.grpo`, `rlkit.loops.ppo`). docs/own-loop.md builds one from scratch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from rlkit.data.order import Leg, Parts, check_parts, is_resting, mixed_index, mixed_place, rested, resumed, to_save
from rlkit.loops import coefficients, nans, pareto, roles
from rlkit.loops.evaluate import (
    Clock,
    EvalSet,
    answer_of,
    evaluate_sets,
    is_due,
    mean_advantages,
    rollout_metrics,
)
from rlkit.loops.streams import keeps_tokens, token_streams
from rlkit.metrics import Metrics, finalize, merge
from rlkit.model.flops import peak_tokens
from rlkit.model.forward import DTYPES, Policy, PolicyFn
from rlkit.model.weights import export_hf, stream_weights
from rlkit.ranks import on_all_ranks, on_this_device
from rlkit.rollout.engines import EngineError
from rlkit.rollout.groups import Env, Group, Prompt, Score, check_sampling, single_turn
from rlkit.rollout.limits import mask_off_policy, mask_truncated
from rlkit.rollout.shared import SharedEngine, SharedStream, reached, rest, samplers_of, state_at
from rlkit.run import saving
from rlkit.run.folder import Run
from rlkit.run.plot import draw
from rlkit.run.report import report
from rlkit.run.samples import Samples
from rlkit.settings import Critic, Optim, Penalties, Rollouts, Schedule
from rlkit.types import Batch, Controller, Engine

X = TypeVar("X")
SEND_TRIES = 5


@dataclass(frozen=True)
class Step:
    """The argument of `prepare` and `update`: the step's index, from 0, and the coefficients of its controllers.

    `check(batch)` stops the run at the first NaN or infinity in a stream; with `Rollouts.skip_nan` it drops the sample.
    `averages` are the rewards of earlier steps by role, where `rl` has a `role_average`.
    """

    index: int
    kl_coef: float
    entropy_coef: float
    check: Callable[[Batch], Batch]
    averages: Mapping[str, float] = field(default_factory=dict)


Prepare = Callable[[Sequence[Group], Step], Batch]
Update = Callable[[Batch, Step], Metrics]


@dataclass(frozen=True)
class Task:
    """The prompts, the environment and the reward.

    `score` gives an episode its reward (None: the environment does). A group that `keep_group` rejects is replaced by
    another one. `eval_prompts` are never trained on, nor are those of `eval_sets`, named sets with a reward and a
    sampling of their own. `parts` are the sizes and weights of consecutive parts of the prompts, which are mixed in
    these shares; (): each prompt comes once in a pass over all.
    Of several `objectives`, names of further numbers of the reward (`reward/NAME`), evaluations keep the Pareto front,
    see `rlkit.loops.pareto`.
    """

    prompts: Sequence[Prompt]
    score: Score | None
    env: Env = single_turn
    keep_group: Callable[[Group], bool] | None = None
    eval_prompts: Sequence[Prompt] = ()
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)
    parts: Parts = ()
    objectives: Sequence[str] = ()

    @property
    def held_out(self) -> dict[str, EvalSet]:
        """All held-out sets, `eval_prompts` as the one named ""."""
        return ({"": EvalSet(self.eval_prompts)} if len(self.eval_prompts) else {}) | {**self.eval_sets}


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

    With `rollouts.overlap` the engine samples while the step trains, so it needs its own copy of the weights; `prepare`
    and `update` run in a thread.

    Args:
        state: what checkpoints hold: "model" (one `nn.Module` of all that trains), "optimizer", and "reference", a
            reference model into which the policy is copied every `penalties.ref_sync_steps` steps. Of a
            `ModuleDict({"policy": ..., "critic": ...})` the other models are exported too, by their names. A number or
            tensor of your own is a buffer of a module in "model".
        reference: log-probs of a reference model; the KL to it is then reported on `task.eval_prompts`.
        role_average: a rule for `Step.averages`, the mean reward of each role (`rlkit.loops.roles`).
        max_tokens: packed tokens per micro-batch of that KL.

    Errors: TypeError for an engine that only generates; ValueError for other names in `state`, for `overlap` with an
    engine that reads the trainer's weights, for a policy or reference at another temperature than the rollouts', for a
    batch without `kept_mass` under top-p or top-k, and at a NaN or infinity (see `rlkit.loops.nans`).
    """
    check_settings(task=task, rollouts=rollouts, schedule=schedule, penalties=penalties)
    check_engine(engine)
    check_temperatures(rollouts, policy=policy, reference=reference)
    if unknown := sorted(state.keys() - {"model", "optimizer", "reference"}):
        what = "a number or tensor of your own is a buffer of a module in state['model']"
        raise ValueError(f"state holds model, optimizer and reference, got {', '.join(unknown)}: {what}")
    if rollouts.max_dropped is not None and task.keep_group is None:
        raise ValueError("`max_dropped` requires `task.keep_group`")
    if rollouts.eval_samples > 1 and not task.held_out:
        raise ValueError("`eval_samples` requires `task.eval_prompts`")
    needed = ["model", "optimizer", *(["reference"] if penalties.ref_sync_steps else [])]
    if missing := [name for name in needed if state.get(name) is None]:
        raise ValueError(f"state holds what is saved and restored, and has no {' and no '.join(missing)}")
    if rollouts.overlap and getattr(engine, "model", None) is policy.model:
        raise ValueError(
            f"overlap needs an engine with weights of its own, and {type(engine).__name__} reads those that train: use "
            "rlkit.rollout.engines.process.launch or SGLang"
        )
    check_task(task, tokenizer)
    folder, steps, params = schedule.output, schedule.steps, rollouts.params
    staleness = float(rollouts.overlap) if rollouts.staleness is None else rollouts.staleness
    num_samples = rollouts.prompts_per_step * rollouts.group_size
    controllers = coefficients.rules(penalties, steps=steps, num_samples=num_samples)
    saved = saving.restore(folder, **state) if schedule.resume else {}
    start, first = saved.get("step", -1), max(saved.get("step", -1), 0)
    now = coefficients.start(controllers, penalties, saved=saved.get("controllers"))
    averages = roles.start(role_average, saved.get("averages"))
    publish = partial(stream_weights, policy.model, dtype=DTYPES.get(policy.dtype))
    peak = peak_tokens(state["model"], dtype=policy.dtype)
    call = run_in_thread if rollouts.overlap or staleness else run_inline  # pending samples are still scored
    with saving.open_training(schedule, start=start) as (run, stop, saver):
        run.note(rows=len(task.prompts), held_out={name: len(one.prompts) for name, one in task.held_out.items()})
        samples = Samples(run, tokenizer, engine=engine, print_steps=rollouts.print_samples_steps)
        watch = nans.Watch(run, task.prompts, tokenizer, skip=rollouts.skip_nan)

        if task.held_out and not schedule.eval_steps:
            run.say("eval_prompts are not used: eval_steps is 0")
        if penalties.ref_sync_steps > steps > 0:
            run.say(f"the reference never moves: ref_sync_steps {penalties.ref_sync_steps} is above steps {steps}")

        front = pareto.start(task.objectives, saved=saved.get("pareto"))
        leg, before, rests = resumed_order(saved, task, rollouts, engine, start=first, say=run.say)
        place = partial(mixed_place, parts=task.parts or [(len(task.prompts), 1.0)], seed=schedule.seed, leg=leg)
        no_scores: dict[str, float] = {}
        in_time = partial(saving.unless_hung, engine=engine, stop=stop, run=run)

        def save(done: int) -> bool:
            return saving.save_if_due(
                run, saver, stop, done, schedule=schedule, stream=stream, **state,
                state={
                    "controllers": coefficients.to_save(controllers, now), "pareto": pareto.to_save(front),
                    "rests": [[row, *rest] for row, rest in rests.items()],
                    "order": to_save(
                        task.parts, leg, position=reached(stream.state, num=rollouts.prompts_per_step, step=done)
                    ),
                    "averages": {role: state._asdict() for role, state in averages.items()},
                },
            )  # fmt: skip

        async def send(version: int) -> int:
            """Publish the weights; returns the bytes that the engine has read of them."""
            for left in reversed(range(SEND_TRIES)):  # a server may die under it: then to those that are up
                weights = publish()
                try:
                    await engine.update_weights(weights, version=version)
                    break
                except EngineError:
                    if not left or not hasattr(engine, "lost"):
                        raise
            return weights.num_bytes

        async def held_out(done: int) -> dict[str, float]:
            if not task.held_out or not is_due(done, schedule):
                return {}
            return await evaluate_sets(
                task.held_out, generate=engine.generate, params=params, num_samples=rollouts.eval_samples,
                env=task.env, score=task.score, seed=schedule.seed, policy=policy, reference=reference,
                max_tokens=max_tokens, mesh=policy.mesh, on_group=partial(samples.completed, step=done),
                engine=engine, resend=partial(send, done), answer=partial(answer_of, tokenizer=tokenizer),
            )  # fmt: skip

        await in_time(send(first), None)
        if start < 0 and (scores := await in_time(held_out(0), no_scores)):
            front = pareto.advance(front, scores, step=0)
            run.log(0, scores | pareto.logged(front, folder))
            saving.keep_best(run, 0, schedule=schedule, model=policy.model, tokenizer=tokenizer)
        signal = Signal()
        async with SharedStream(
            prompt_order(task.prompts, seed=schedule.seed, parts=task.parts, leg=leg), engine=engine, params=params,
            group_size=rollouts.group_size, groups_per_step=rollouts.prompts_per_step,
            staleness=staleness, seed=schedule.seed, env=task.env, score=task.score, keep=task.keep_group,
            max_dropped=rollouts.max_dropped, on_group=samples.completed, version=first, state=before,
            journal=folder / "completions" if rollouts.journal or rollouts.overlap else None,
            rests=(lambda index: is_resting(rests, *place(index))) if rollouts.max_rest else None,
        ) as stream:  # fmt: skip
            for step in range(first, steps):
                done, clock = (
                    step + 1,
                    Clock(memory=schedule.profile_memory),
                )  # `step` is also the version of the weights that sample
                stream.advance(version=step)
                if (groups := await in_time(stream.take(partial(send, step)), None)) is None:
                    if step > first:
                        save(step)
                    break
                outcomes = [(*place(index), varied) for index, varied in stream.outcomes]
                rests = rested(rests, outcomes, longest=rollouts.max_rest) if rollouts.max_rest else rests
                if not rollouts.overlap:
                    await stream.pause()
                    await in_time(rest(engine), None)
                clock.lap("wait" if rollouts.overlap else "rollout")
                by_role = {role: average.coef for role, average in averages.items()}
                this = Step(step, **coefficients.coefs(now), check=partial(watch.batch, step=done), averages=by_role)
                taken, advantages, streams = groups, dict[int, float](), dict[int, dict[str, Any]]()
                try:
                    groups = watch.groups(groups, step=done)
                    metrics = rollout_metrics(groups, version=step)
                    batch = await call(prepare, masked(groups, rollouts, version=step), this)
                    if params.truncates and batch.kept_mass is None:
                        raise ValueError("top_p and top_k need `kept_mass`: call with_kept_mass(...) in `prepare`")
                    advantages = mean_advantages(batch, groups)
                    batch = this.check(batch)
                    if keeps_tokens(done, steps=steps):
                        streams = await call(token_streams, policy, batch, groups, max_tokens=max_tokens)
                finally:  # also the samples of a step that fails
                    samples.trained(stream.prompts, taken, advantages, step=done, streams=streams)
                clock.lap("score")
                metrics = merge(metrics, await call(update, batch, this))
                if penalties.ref_sync_steps and done % penalties.ref_sync_steps == 0:
                    state["reference"].load_state_dict(policy.model.state_dict())
                clock.lap("train")
                sent = await in_time(send(done), None)
                line = finalize(metrics) | {"groups/dropped": stream.num_dropped}
                if rollouts.group_size > 1:
                    line["groups/equal"] = sum(not varied for *_, varied in outcomes) / len(outcomes)
                line |= {"prompts/resting": len(rests)} if rollouts.max_rest else {}
                line |= {"sync/bytes": sent} if sent else {}
                line |= {"groups/ready": stream.progress.ready} if rollouts.overlap else {}
                line |= watch.update(line, step=done) | coefficients.logged(controllers, now)
                now = coefficients.advance(controllers, now, line, skip_nan=rollouts.skip_nan)
                averages = roles.advance(role_average, averages, groups)
                clock.lap("sync")
                line |= await in_time(held_out(done), no_scores)
                front = pareto.advance(front, line, step=done)
                line |= pareto.logged(front, folder) if is_due(done, schedule) else {}
                clock.lap("eval")
                run.log(done, line | clock.times(num_tokens=batch.num_tokens, peak=peak, passes=rollouts.epochs))
                if is_due(done, schedule) and task.held_out:
                    saving.keep_best(run, done, schedule=schedule, model=policy.model, tokenizer=tokenizer)
                signal = report_no_signal(run, batch, before=signal)
                if save(done):
                    break
        draw(run)
        if max(start, steps) < 1:
            report(run)
            return folder
        models = state["model"].items() if isinstance(state["model"], nn.ModuleDict) else ()
        for name, model in models:
            if hasattr(model, "save_pretrained") and model is not policy.model:
                export_hf(model, tokenizer, run.folder / name, dtype=saving.dtype_of(schedule))
        exported = saving.export(run, policy.model, tokenizer, schedule=schedule)
        report(run)
        return exported


_SETTINGS = {"task": Task, "rollouts": Rollouts, "schedule": Schedule, "optim": Optim, "penalties": Penalties}
_SETTINGS |= {"critic": Critic}


def check_settings(**given: Any) -> None:
    """Refuse a dict, a path or another object in place of one of the settings: TypeError."""
    for name, x in given.items():
        if not isinstance(x, kind := _SETTINGS[name]):
            raise TypeError(f"{name} must be {kind.__name__}(...), got a {type(x).__name__}")


def check_task(task: Task, tokenizer: Any) -> None:
    """Refuse a task without prompts or with functions of another form, and a tokenizer that does not decode."""
    if not len(task.prompts):
        raise ValueError("task.prompts is empty: there is nothing to train on")
    check_parts(len(task.prompts), task.parts)
    check_sampling(task.prompts, env=task.env, score=task.score, keep_group=task.keep_group)
    for one in task.held_out.values():
        check_sampling(one.prompts, env=task.env, score=one.score or task.score)
    if not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer must have `decode`, to show samples, got a {type(tokenizer).__name__}")


def check_rewarded(task: Task) -> None:
    """Refuse a task in which nothing gives a reward: all would be 0, and nothing would train."""
    if task.score is None and task.env is single_turn:
        fix = "give scorer(reward_function, tokenizer=tokenizer, timeout_s=...), or an env that rewards its episodes"
        raise ValueError(f"task.score is None, so every reward is 0 and nothing would train: {fix}")


def check_engine(engine: Engine) -> None:
    """Refuse an engine that lacks `generate`, `abort` or `update_weights`: TypeError on every rank, naming them."""

    def check() -> None:
        real = engine.engine if isinstance(engine, SharedEngine) else engine
        names = () if real is None else ("generate", "abort", "update_weights")  # None: SharedEngine on other ranks
        if missing := [name for name in names if not callable(getattr(real, name, None))]:
            raise TypeError(
                f"the engine {type(real).__name__} has no {' and no '.join(missing)}: it can generate for evaluation "
                "and judges, but not for training; use LocalEngine, rlkit.rollout.engines.process.launch or SGLang"
            )

    on_all_ranks(check)


def check_temperatures(rollouts: Rollouts, **policies: Any) -> None:
    """Refuse a policy whose log-probs are at another temperature than the samples: ValueError naming both."""
    for name, policy in policies.items():
        temperature = getattr(policy, "temperature", rollouts.temperature)
        if temperature != rollouts.temperature:
            raise ValueError(
                f"the {name}'s log-probs are at temperature {temperature:g}, and the rollouts sample at "
                f"{rollouts.temperature:g}: give both one value, Policy(model, temperature=rollouts.temperature)"
            )


def masked(groups: Sequence[Group], rollouts: Rollouts, *, version: int) -> Sequence[Group]:
    """The groups with mask False where `drop_truncated` and `drop_off_policy` exclude tokens from the loss."""
    groups = mask_truncated(groups) if rollouts.drop_truncated else groups
    return mask_off_policy(groups, version=version) if rollouts.drop_off_policy else groups


def resumed_order(
    saved: Mapping[str, Any], task: Task, rollouts: Rollouts, engine: Engine, *, start: int, say: Callable[[str], None]
) -> tuple[Leg, Any, dict[int, tuple[int, int]]]:
    """Where a resumed run goes on in the data, the state of its stream, and the prompts that rest.

    Where the files have changed (`rlkit.data.order.resumed`), groups in flight and rests of prompts that are gone are
    dropped.
    """
    state, num = saved.get("stream"), rollouts.prompts_per_step
    rests = {row: (length, back) for row, length, back in saved.get("rests", ())}
    place = reached(state, num=num, step=start)
    leg, kept, said = resumed(saved.get("order"), task.parts, position=place, names=saved.get("files"))
    for text in said:
        say(text)
    if said:
        state = state_at(place, samplers=len(samplers_of(engine)[:num]), num=num)
        rests = {row - a + b: x for a, size, b in kept for row, x in rests.items() if a <= row < a + size}
    return leg, state, rests


def prompt_order(
    prompts: Sequence[Prompt], *, seed: int, parts: Parts = (), leg: Leg = Leg()
) -> Callable[[int], Prompt]:
    """Index in an endless stream -> prompt: each epoch visits all prompts, in its own order. A pure function.

    With `parts` they are mixed by their weights, see `rlkit.data.order.mixed_index`.
    """
    check_parts(len(prompts), parts)
    return lambda index: prompts[mixed_index(index, parts=parts or [(len(prompts), 1.0)], seed=seed, leg=leg)]


async def run_inline(function: Callable[..., X], *args: Any, **kwargs: Any) -> X:
    """Call `function` in this thread: the event loop waits for it."""
    return function(*args, **kwargs)


async def run_in_thread(function: Callable[..., X], *args: Any, **kwargs: Any) -> X:
    """Call `function` in a thread, while the event loop keeps sampling and scoring.

    A cancelled call still waits for the function to return, so that no caller sees a model inside an optimizer step.
    """
    call = partial(on_this_device(function), *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None, call)  # no task: Ctrl-C cancels those
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class Signal(NamedTuple):
    """Whether the last step had an advantage other than 0, and the range of all rewards so far."""

    present: bool = True
    low: float = math.inf
    high: float = -math.inf
    num_reports: int = 0


def report_no_signal(run: Run, batch: Batch, *, before: Signal) -> Signal:
    """Report the first of consecutive steps whose advantages are all 0, unless the cause is success.

    Success: every reward of the step equals the highest one so far, and a lower one was seen before. Returns the state
    for the next step.
    """
    rewards = batch.rewards.tolist()
    low, high = min([before.low, *rewards]), max([before.high, *rewards])
    now = Signal(bool((batch.advantages != 0).any()), low, high, before.num_reports)
    if not before.present or now.present or batch.teachers is not None:  # a teacher's loss needs no advantage
        return now
    if batch.num_tokens == int(batch.truncated.sum()):  # only the last token that a truncated sequence keeps
        run.say("no token of this step is trained on: no episode asked the policy for an answer")
    elif not batch.mask.any():
        run.say("no token of this step is trained on: a limit cut every answer, or all are older than allowed")
    elif min(rewards) < now.high or now.low == now.high:
        low, high = min(rewards), max(rewards)
        shown = f"all {low:g}" if low == high else f"between {low:g} and {high:g}"
        never = "compare answers and gold in trajectories/ (the reward may match never, or always); " * (
            now.low == now.high
        )
        critic = batch.values is not None  # which compares with no group
        groups = [0] * len(rewards) if critic else batch.group_ids.tolist()
        differ = len({*zip(groups, rewards)}) > len({*groups})
        what = f"every advantage is 0 (rewards {shown})"
        what = what if critic or differ else f"all rewards are equal in every group ({shown})"
        larger = "" if critic else "a larger group_size "
        fix = f"{never}easier, harder or more varied prompts, {larger}or a finer reward would help"
        if differ:
            fix = "the rewards differ, so it is the estimator of the advantages that gives 0"
        now = now._replace(num_reports=before.num_reports + 1)
        times = "" if now.num_reports == 1 else f" ({now.num_reports} times so far)"
        if now.num_reports.bit_count() == 1:  # the first, second, fourth, eighth ... time
            run.say(f"{what}: no learning signal in this step{times}. Training goes on; {fix}")
    return now
