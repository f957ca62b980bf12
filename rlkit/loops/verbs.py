"""What the loops share, as plain functions: what to log, evaluation, resuming, saving."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from rlkit.data.order import batch_indices
from rlkit.losses import k3
from rlkit.metrics import Metrics, largest, mean, merge
from rlkit.model.forward import Policy, PolicyFn, with_old_logp, with_ref_logp
from rlkit.model.lora import adapters, without_adapter
from rlkit.packing import pack
from rlkit.parallel.mesh import Mesh
from rlkit.ranks import on_this_device, together, world_size
from rlkit.rollout.limits import score_of
from rlkit.rollout.rollout import Env, Prompt, Score, last_pieces, mix, rollout, single_turn
from rlkit.rollout.shared import SharedEngine, SharedStream, from_first
from rlkit.rollout.stream import GroupStream
from rlkit.run.folder import Run
from rlkit.types import Batch, Generate, SamplingParams, Trajectory

X = TypeVar("X")


class Clock:
    """Laps of a step in seconds, under `time/...`: the only fields of a metric line that differ between equal runs."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `time/{name}`."""
        now = time.perf_counter()
        self._laps[f"time/{name}"] = self._laps.get(f"time/{name}", 0.0) + now - self._last
        self._last = now

    def times(self, *, num_tokens: int) -> dict[str, float]:
        """All laps, the whole step, and tokens per second of the whole step."""
        step = time.perf_counter() - self._start
        return {**self._laps, "time/step": step, "time/tokens_per_s": num_tokens / step}


def rollout_metrics(groups: Sequence[Sequence[Trajectory]], *, version: int) -> Metrics:
    """What was sampled: rewards (with whatever else the reward function reported), lengths, truncations, by episode.

    `staleness/` is how many steps older than `version`, the weights now, those were that sampled a token.
    """
    samples = [t for group in groups for t in group]
    ends = [t for group in groups for t in last_pieces(group)]
    reported = [(f"reward/{k}", v) for t in ends for k, v in t.info.get("metrics", {}).items()]
    scores = [("score/mean", t.score) for t in ends if t.score is not None]
    rewards = torch.tensor([t.reward for t in ends])
    lengths = torch.tensor([sum(t.mask) for t in samples])
    ages = torch.tensor([version - v for t in samples for v, m in zip(t.versions, t.mask, strict=True) if m])
    return merge(*({name: mean(value)} for name, value in [*scores, *reported])) | {
        "reward/mean": mean(rewards),
        "reward/std": mean(rewards.std(correction=0) if ends else torch.zeros(())),
        "length/mean": mean(lengths),
        "length/max": largest(lengths),
        "truncated": mean(torch.tensor([t.truncated for t in ends])),
        "staleness/mean": mean(ages),
        "staleness/max": largest(ages),
    }


def prompt_order(prompts: Sequence[Prompt], *, seed: int) -> Callable[[int], Prompt]:
    """The prompt of every place of an endless stream: all of them in a new order each epoch, a pure function."""
    return lambda place: prompts[batch_indices(len(prompts), batch_size=1, seed=seed, step=place)[0]]


def open_stream(prompt_at: Callable[[int], Prompt], **options: Any) -> GroupStream | SharedStream:
    """A `GroupStream`; on many ranks rank 0's, of which every rank takes the groups."""
    make = partial(GroupStream, prompt_at, **options)
    return make() if world_size() == 1 else SharedStream(make)


def check_engine(engine: Any) -> None:
    """Refuses, before anything runs, an engine that cannot be trained with: it must generate, abort and take weights.

    Raises TypeError, on every rank, with what is missing.
    """

    def check() -> None:
        real = engine.engine if isinstance(engine, SharedEngine) else engine
        names = () if real is None else ("generate", "abort", "update_weights")  # None: of the ranks but the first
        if missing := [name for name in names if not callable(getattr(real, name, None))]:
            raise TypeError(
                f"the engine {type(real).__name__} has no {' and no '.join(missing)}: it can generate for evaluation "
                "and judges, but not for training; use LocalEngine, rlkit.rollout.engines.process.launch or SGLang"
            )

    together(check)


def check_sampling(params: SamplingParams, *, needs_reference: bool, reference: Any, stale: bool = False) -> None:
    """Refuses, before anything runs, what would bias every ratio of the loss or make all samples of a group alike.

    Truncated sampling is corrected for by the mass it kept (`with_kept_mass`), which only the weights that sampled
    can tell: not where samples may be `stale`.
    """
    if needs_reference and reference is None:
        raise ValueError("kl_coef, a KL controller and ref_sync_steps need a reference model")
    if params.temperature == 0:
        raise ValueError("params.temperature is 0: greedy samples of a group are all alike; use e.g. 1.0")
    truncation = f"params.top_p={params.top_p}, params.top_k={params.top_k}"
    if params.truncates and stale:
        raise ValueError(
            f"{truncation}: what truncated sampling keeps is known of the weights of now, not of older ones that may "
            "have sampled here; use top_p=1.0 and top_k=0, or sample and train in turn (grpo with staleness 0)"
        )
    if params.top_p < 1 and params.top_k:
        raise ValueError(f"{truncation}: engines differ in what the two keep together; use one of them")


def reference_policy(policy: Policy, reference: Any, *, moves: bool = False) -> PolicyFn | None:
    """`policy` of another model; where `reference` is the policy's own model, that without its adapter.

    Raises:
        ValueError: `reference` is the model, which has no adapter to leave out, or the reference `moves`.
    """
    if reference is None:
        return None
    if reference is not policy.model:
        return replace(policy, model=reference)
    if moves or not adapters(reference):
        raise ValueError(
            "reference is the model that trains, which works where it has an adapter (rlkit.model.lora) and "
            "ref_sync_steps is 0; give a second model"
        )
    return without_adapter(policy, reference)


async def here(function: Callable[..., X], *args: Any, **kwargs: Any) -> X:
    """Call it as `in_thread` would, but in this thread: the event loop waits for it."""
    return function(*args, **kwargs)


async def in_thread(function: Callable[..., X], *args: Any, **kwargs: Any) -> X:
    """Call it beside the event loop, which goes on sampling and scoring meanwhile.

    A cancelled call ends when the function does: nobody may look at a model in the middle of an optimizer step.
    """
    call = partial(on_this_device(function), *args, **kwargs)
    work = asyncio.get_running_loop().run_in_executor(None, call)  # no task: Ctrl-C cancels those
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    generate: Generate,
    params: SamplingParams,
    score: Score | None,
    seed: int,
    num_samples: int = 1,
    env: Env = single_turn,
    policy: PolicyFn | None = None,
    reference: PolicyFn | None = None,
    max_tokens: int = 16384,
    on_group: Callable[..., None] | None = None,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Mean score (the reward, where a reward function gives no score) on held-out prompts, sampled and greedy.

    `num_samples` of each prompt are sampled; with several, `eval/best` is the mean over prompts of the best (pass@n,
    where scores are 0 and 1). A sample that could not be judged does not count. With `policy` and `reference`, also
    `eval/kl`: the k3 estimate of KL(policy || reference) in nats per sampled token.
    """
    out = {}
    for name, how, n in (("sampled", params, num_samples), ("greedy", replace(params, temperature=0.0), 1)):
        sample = partial(
            rollout,
            prompts,
            generate=generate,
            params=how,
            group_size=n,
            seed=mix(seed),
            env=env,
            score=score,
            on_group=None if on_group is None else partial(on_group, kind=f"eval_{name}"),
        )
        groups = await from_first(sample)
        scores = [found for group in groups if (found := _scores(group))]
        out[f"eval/{name}"] = sum(sum(found) / len(found) for found in scores) / max(1, len(scores))
        if n > 1:
            best = [max(found, key=lambda x: (math.isnan(x), x)) for found in scores]  # NaN, where there is one
            out["eval/best"] = sum(best) / max(1, len(best))
        if name == "sampled" and policy is not None and reference is not None:
            batch = with_old_logp(policy, pack(groups), max_tokens=max_tokens, mesh=mesh)
            batch = with_ref_logp(reference, batch, max_tokens=max_tokens, mesh=mesh)
            kl = mean(k3(batch.old_logp, batch.ref_logp), mask=batch.mask)
            out["eval/kl"] = float(kl.total / kl.count)
    return out


def _scores(group: Sequence[Trajectory]) -> list[float]:
    """Of the episodes that could be judged."""
    return [score_of(t) for t in last_pieces(group) if not t.info.get("metrics", {}).get("failed")]


class Signal(NamedTuple):
    """Whether the last step had an advantage to learn from, and the range of all rewards so far."""

    present: bool = True
    low: float = math.inf
    high: float = -math.inf


def say_if_no_signal(run: Run, batch: Batch, *, before: Signal) -> Signal:
    """Report the first step in a row in which every advantage is 0, unless the cause is success.

    Success is that every reward of the step equals the highest one so far, and a lower one has been seen: there is
    nothing left to learn from these prompts. Returns the state for the next step.
    """
    rewards = batch.rewards.tolist()
    now = Signal(bool((batch.advantages != 0).any()), min([before.low, *rewards]), max([before.high, *rewards]))
    if not before.present or now.present:
        return now
    if not batch.mask.any():
        run.say("no token of this step is trained on: a limit cut every answer, or all are older than allowed")
    elif min(rewards) < now.high or now.low == now.high:
        low, high = min(rewards), max(rewards)
        shown = f"all {low:g}" if low == high else f"between {low:g} and {high:g}"
        run.say(
            f"all rewards are equal in every group ({shown}): no learning signal in this step. Training goes on; "
            "easier, harder or more varied prompts, a larger group_size or a finer reward would help"
        )
    return now


def is_due(step: int, *, every: int, steps: int) -> bool:
    """Whether to evaluate after `step` of `steps`: after every so many (0: never), and after the last."""
    return every != 0 and (step % every == 0 or step == steps)


async def evaluate_if_due(
    step: int,
    prompts: Sequence[Prompt],
    *,
    every: int,
    steps: int,
    dump: Callable[..., None],
    **how: Any,
) -> dict[str, float]:
    """`evaluate` at step 0 and where it `is_due`; else, or without prompts, {}."""
    if not prompts or not is_due(step, every=every, steps=steps):
        return {}
    return await evaluate(prompts, on_group=partial(dump, step=step), **how)
