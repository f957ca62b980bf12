"""Rollout metrics, step times, and evaluation on held-out prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rlkit.losses import k3
from rlkit.metrics import Mean, Metrics, largest, mean, merge
from rlkit.model.forward import PolicyFn, with_old_logp, with_ref_logp
from rlkit.packing import pack
from rlkit.parallel.mesh import Mesh
from rlkit.rollout.limits import score_of
from rlkit.rollout.rollout import Env, Prompt, Score, last_pieces, mix, single_turn
from rlkit.rollout.shared import Resend, shared_rollout
from rlkit.run.profile import mark_phase
from rlkit.segments import mean_per_seq
from rlkit.settings import Schedule
from rlkit.types import Batch, Generate, SamplingParams, Trajectory


class Clock:
    """Wall-clock times of a step's phases in seconds, under `time/`; a metric line's other fields are reproducible.

    Each phase is an event of torch's profiler, where that runs (`rlkit.run.profile`).
    """

    def __init__(self) -> None:
        mark_phase("between steps")
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `time/{name}`."""
        mark_phase(name)
        now = time.perf_counter()
        self._laps[f"time/{name}"] = self._laps.get(f"time/{name}", 0.0) + now - self._last
        self._last = now

    def times(self, *, num_tokens: int, peak: float | None = None, passes: int = 1) -> dict[str, float]:
        """The time of each phase and of the whole step, the step's tokens per second, and the peak of GPU memory.

        With `peak` (`rlkit.model.flops.peak_tokens`) and `passes` over the tokens also the share of it in the lap
        "train", the model FLOPs utilization.
        """
        train = self._laps.get("time/train", 0.0)
        mfu = {"time/mfu": num_tokens * passes / (train * peak)} if peak and train else {}
        step = time.perf_counter() - self._start
        memory = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            memory["memory/peak"] = torch.cuda.max_memory_allocated() / 2**30
        return {**self._laps, "time/step": step, "time/tokens_per_s": num_tokens / step, **mfu, **memory}


def rollout_metrics(groups: Sequence[Sequence[Trajectory]], *, version: int) -> Metrics:
    """Rewards, other metrics of the reward function and truncations per episode, and lengths per trajectory.

    `staleness/` is the age of a sampled token's weights, in steps before `version`, the current weights.
    """
    samples = [t for group in groups for t in group]
    ends = [t for group in groups for t in last_pieces(group)]
    reported = [(f"reward/{k}", v) for t in ends for k, v in t.info.get("metrics", {}).items()]
    scores = [("score/mean", t.score) for t in ends if t.score is not None]
    rewards = torch.tensor([t.reward for t in ends])
    lengths = torch.tensor([np.count_nonzero(t.mask) for t in samples])
    sampled = [np.asarray(t.versions)[np.asarray(t.mask, bool)] for t in samples]  # from arrays: 4 bytes a token
    ages = torch.tensor([len(x) * version - int(x.sum(dtype=np.int64)) for x in sampled])
    oldest = torch.tensor([version - int(x.min()) for x in sampled if len(x)])
    return merge(*({name: mean(value)} for name, value in [*scores, *reported])) | {
        "reward/mean": mean(rewards),
        "reward/std": mean(rewards.std(correction=0) if ends else torch.zeros(())),
        "length/mean": mean(lengths),
        "length/max": largest(lengths),
        "truncated": mean(torch.tensor([t.truncated for t in ends])),
        "staleness/mean": Mean(ages.double().sum(), lengths.double().sum()),
        "staleness/max": largest(oldest),
    }


def mean_advantages(batch: Batch, groups: Sequence[Sequence[Trajectory]]) -> dict[int, float]:
    """The mean advantage of each trajectory's trained tokens, by the trajectory's `id`.

    Empty for a batch without advantages, or of other sequences than the trajectories.
    """
    samples = [t for group in groups for t in group]
    if batch.advantages is None or batch.cu_seqlens.numel() != len(samples) + 1:
        return {}
    means = mean_per_seq(batch.advantages, mask=batch.mask, cu_seqlens=batch.cu_seqlens).tolist()
    return {id(t): x for t, x in zip(samples, means, strict=True)}


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
    engine: Any = None,
    resend: Resend | None = None,
) -> dict[str, float]:
    """Mean score (the reward, where a reward function gives no score) on held-out prompts, sampled and greedy.

    `eval/sampled` averages `num_samples` samples per prompt, `eval/greedy` takes one; `eval/sampled_se` and
    `eval/greedy_se` are their standard errors over the prompts (missing for a single prompt). With several samples,
    `eval/best` is the mean over prompts of the best score (pass@n, where scores are 0 and 1). Samples whose reward
    function failed are not counted. With `policy` and `reference`, `eval/kl` is the k3 estimate of KL(policy ||
    reference) in nats per sampled token. `engine` and `resend`: see `rlkit.rollout.shared.shared_rollout`.
    """
    out = {}
    for name, options, n in (("sampled", params, num_samples), ("greedy", replace(params, temperature=0.0), 1)):
        groups = await shared_rollout(
            prompts,
            engine=engine,
            resend=resend,
            on_group=None if on_group is None else partial(on_group, kind=f"eval_{name}"),
            generate=generate,
            params=options,
            group_size=n,
            seed=mix(seed),
            env=env,
            score=score,
        )
        scores = [per_prompt for group in groups if (per_prompt := _scores(group))]
        means = [sum(x) / len(x) for x in scores]
        out[f"eval/{name}"] = sum(means) / max(1, len(means))
        if len(means) > 1:
            with np.errstate(invalid="ignore"):  # an infinite score
                out[f"eval/{name}_se"] = float(np.std(means, ddof=1)) / math.sqrt(len(means))
        if n > 1:
            best = [max(per_prompt, key=lambda x: (math.isnan(x), x)) for per_prompt in scores]  # NaN is the largest
            out["eval/best"] = sum(best) / max(1, len(best))
        if name == "sampled" and policy is not None and reference is not None:
            batch = with_old_logp(policy, pack(groups), max_tokens=max_tokens, mesh=mesh)
            batch = with_ref_logp(reference, batch, max_tokens=max_tokens, mesh=mesh)
            kl = mean(k3(batch.old_logp, batch.ref_logp), mask=batch.mask)
            out["eval/kl"] = float(kl.total / kl.count)
    return out


def _scores(group: Sequence[Trajectory]) -> list[float]:
    """The scores of a group's episodes, without those whose reward function failed."""
    return [score_of(t) for t in last_pieces(group) if not t.info.get("metrics", {}).get("failed")]


def is_due(step: int, schedule: Schedule) -> bool:
    """Whether to evaluate after `step` steps: every `eval_steps` steps (0: never), and after the last one."""
    return schedule.eval_steps != 0 and (step % schedule.eval_steps == 0 or step == schedule.steps)
