"""Rollout metrics, step times, and evaluation on held-out prompts."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlkit.losses import k3
from rlkit.metrics import Mean, Metrics, largest, mean, merge
from rlkit.model.forward import PolicyFn, with_old_logp, with_ref_logp
from rlkit.packing import pack
from rlkit.rewards.scoring import completion_of
from rlkit.rewards.text import final_answer
from rlkit.rollout.groups import Env, Prompt, Score, is_judged, last_pieces, mix, single_turn, with_totals
from rlkit.rollout.limits import episode_scores
from rlkit.rollout.shared import Resend, shared_rollout
from rlkit.run.profile import mark_phase
from rlkit.segments import mean_per_seq
from rlkit.settings import Schedule, refuse_if
from rlkit.types import Batch, Generate, SamplingParams, Trajectory


class Clock:
    """Wall-clock times of a step's phases in seconds, under `time/`; a metric line's other fields are reproducible.

    Each phase is an event of torch's profiler, where that runs (`rlkit.run.profile`). With `memory` also the peak of
    each phase, `memory/PHASE` in GiB: of the tensors on the GPU, or without a GPU the process's resident memory, as
    Linux reports it.
    """

    def __init__(self, *, memory: bool = False) -> None:
        mark_phase("between steps")
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._memory = memory
        if memory:
            _peak_memory()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `time/{name}`."""
        mark_phase(name)
        now = time.perf_counter()
        self._laps[f"time/{name}"] = self._laps.get(f"time/{name}", 0.0) + now - self._last
        self._last = now
        if self._memory:
            self._peaks[f"memory/{name}"] = max(_peak_memory(), self._peaks.get(f"memory/{name}", 0.0))

    def times(self, *, num_tokens: int, peak: float | None = None, passes: int = 1) -> dict[str, float]:
        """The time of each phase and of the whole step, the step's tokens per second, and the peaks of memory.

        With `peak` (`rlkit.model.flops.peak_tokens`) and `passes` over the tokens also the share of it in the lap
        "train", the model FLOPs utilization.
        """
        train = self._laps.get("time/train", 0.0)
        mfu = {"time/mfu": num_tokens * passes / (train * peak)} if peak and train else {}
        step = time.perf_counter() - self._start
        memory = self._peaks
        if torch.cuda.is_available() and torch.cuda.is_initialized() and not self._memory:
            memory = {"memory/peak": torch.cuda.max_memory_allocated() / 2**30}
        return {**self._laps, "time/step": step, "time/tokens_per_s": num_tokens / step, **mfu, **memory}


def _peak_memory() -> float:
    """The largest memory in GiB since the last call, which starts a new peak."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 2**30
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is again what is resident now
    return kib / 2**20


def rollout_metrics(groups: Sequence[Sequence[Trajectory]], *, version: int) -> Metrics:
    """Rewards, other metrics of the reward function and truncations per episode, and lengths per trajectory.

    Rewards (with those of turns) and scores are those of episodes whose reward function did not fail.
    `staleness/` is the age of a sampled token's weights, in steps before `version`, the current weights.
    """
    samples = [t for group in groups for t in group]
    ends = [end for group in groups for end in with_totals(group)]
    roles = {t.role for t, _ in ends}
    reported = [(f"reward/{_own_name(k, roles)}", v) for t, _ in ends for k, v in t.info.get("metrics", {}).items()]
    judged = [(t, total) for t, total in ends if is_judged(t)]
    reported += [(f"reward/{_own_name(t.role)}", total) for t, total in judged if t.role]
    scores = [("score/mean", t.score) for t, _ in judged if t.score is not None]
    rewards = torch.tensor([total for _, total in judged])
    lengths = torch.tensor([np.count_nonzero(t.mask) for t in samples])
    sampled = [np.asarray(t.versions)[np.asarray(t.mask, bool)] for t in samples]  # from arrays: 4 bytes a token
    ages = torch.tensor([len(x) * version - int(x.sum(dtype=np.int64)) for x in sampled])
    oldest = torch.tensor([version - int(x.min()) for x in sampled if len(x)])
    return merge(*({name: mean(value)} for name, value in [*scores, *reported])) | {
        "reward/mean": mean(rewards),
        "reward/std": mean(rewards.std(correction=0) if judged else torch.zeros(())),
        "length/mean": mean(lengths),
        "length/max": largest(lengths),
        "truncated": mean(torch.tensor([t.truncated for t, _ in ends])),
        "staleness/mean": Mean(ages.double().sum(), lengths.double().sum()),
        "staleness/max": largest(oldest),
    }


def _own_name(name: str, roles: Collection[str] = ()) -> str:
    """The name of a number of the reward function or environment beside `reward/mean`, `reward/std` and the rewards of
    `roles`."""
    return f"own/{name}" if name in ("mean", "std", *roles) else name


def joined(own: Metrics, returned: Metrics) -> Metrics:
    """Both; ValueError for a name that both have, whose numbers `merge` would mix."""
    both = min(own.keys() & returned.keys(), default=None)
    refuse_if(both, f"`update` returned {both!r}, a metric of rlkit's own: give it another name")
    return merge(own, returned)


def mean_advantages(batch: Batch, *, num_samples: int) -> list[float]:
    """The mean advantage of each sample's trained tokens; [] without advantages, or for another number of sequences."""
    if batch.advantages is None or batch.num_seqs != num_samples:
        return []
    means: list[float] = mean_per_seq(batch.advantages, mask=batch.mask, cu_seqlens=batch.cu_seqlens).tolist()
    return means


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts with a reward and a sampling of their own; None: those of the run."""

    prompts: Sequence[Prompt]
    score: Score | None = None
    params: SamplingParams | None = None
    num_samples: int | None = None


async def evaluate_sets(
    sets: Mapping[str, EvalSet], *, params: SamplingParams, num_samples: int = 1, score: Score | None, **options: Any
) -> dict[str, float]:
    """`evaluate` on each set, as `eval/NAME/...`; the set named "" has its numbers as `eval/...`.

    Without a set named "", `eval/sampled`, `eval/greedy` and `eval/reward/...` are the means over the sets, which
    count the same.
    """
    metrics: dict[str, float] = {}
    for name, one in sets.items():
        metrics |= await evaluate(
            one.prompts, name=name, score=one.score or score, params=one.params or params,
            num_samples=one.num_samples or num_samples,
            **options if one.params is None else options | {"reference": None},  # the KL is that of the run's sampling
        )  # fmt: skip
    parts = {key.split("/", 2)[2] for key in metrics if "/reward/" in key}
    return metrics | over_sets(metrics, sets, names=("sampled", "greedy", *sorted(parts)))


def over_sets(metrics: Mapping[str, float], sets: Mapping[str, Any], *, names: Sequence[str]) -> dict[str, float]:
    """The means over named sets of some metrics, as `eval/METRIC`; none where a set has no name."""
    if not sets or "" in sets:
        return {}
    every = {key: [metrics[f"eval/{name}/{key}"] for name in sets if f"eval/{name}/{key}" in metrics] for key in names}
    return {f"eval/{key}": sum(values) / len(values) for key, values in every.items() if values}


async def evaluate(
    prompts: Sequence[Prompt],
    *,
    generate: Generate,
    params: SamplingParams,
    score: Score | None,
    seed: int,
    name: str = "",
    num_samples: int = 1,
    answer: Callable[[Trajectory], str | None] | None = None,
    env: Env = single_turn,
    policy: PolicyFn | None = None,
    reference: PolicyFn | None = None,
    max_tokens: int = 16384,
    on_group: Callable[..., None] | None = None,
    engine: Any = None,
    resend: Resend | None = None,
) -> dict[str, float]:
    """Mean score (the reward, where a reward function gives no score) on held-out prompts, sampled and greedy.

    `eval/sampled` averages `num_samples` samples per prompt (mean@n), `eval/greedy` takes one. With several samples,
    `eval/pass@k` for k = 2, 4, 8 ... is the expected best of k (see `best_of`), and `eval/best` that of all; with
    `answer`, `eval/majority` is the score of a prompt's most frequent answer (see `majority`). Each has its standard
    error over the prompts, `eval/sampled_se` and so on (missing for a single prompt). Samples whose reward function
    failed are not counted, and where all failed there is no number. With `policy` and `reference`, `eval/kl` is the k3
    estimate of KL(policy || reference) in nats per sampled token. With a `name` the keys are `eval/NAME/...`. `engine`
    and `resend`: see `rlkit.rollout.shared.shared_rollout`.
    """
    prefix, suffix = f"eval/{name}/" if name else "eval/", f"_{name}" if name else ""
    out: dict[str, float] = {}
    for kind, options, n in (("sampled", params, num_samples), ("greedy", replace(params, temperature=0.0), 1)):
        groups = await shared_rollout(
            prompts, engine=engine, resend=resend, generate=generate, params=options, group_size=n, seed=mix(seed),
            env=env, score=score, on_group=None if on_group is None else partial(on_group, kind=f"eval_{kind}{suffix}"),
        )  # fmt: skip
        ends = [counted for group in groups if (counted := _counted(group))]
        scores = [[value for _, value in episodes] for episodes in ends]
        out |= _with_error(prefix + kind, [sum(x) / len(x) for x in scores])
        if n > 1:
            for k in [2**i for i in range(1, n.bit_length())]:
                out |= _with_error(f"{prefix}pass@{k}", [best_of(x, min(k, len(x))) for x in scores])
            out |= _with_error(f"{prefix}best", [best_of(x, len(x)) for x in scores])
        if n > 1 and answer is not None:
            votes = [majority(x, [answer(t) for t, _ in episodes]) for x, episodes in zip(scores, ends, strict=True)]
            out |= _with_error(f"{prefix}majority", votes)
        if kind == "sampled":
            out |= _parts(groups, prefix)
        if kind == "sampled" and policy is not None and reference is not None:
            scoring: dict[str, Any] = {"max_tokens": max_tokens, "mesh": getattr(policy, "mesh", None)}
            batch = with_ref_logp(reference, with_old_logp(policy, pack(groups), **scoring), **scoring)
            kl = mean(k3(batch.old_logp, batch.ref_logp), mask=batch.mask)
            out[f"{prefix}kl"] = float(kl.total / kl.count)
    return out


def _counted(group: Sequence[Trajectory]) -> list[tuple[Trajectory, float]]:
    """The last piece and the score of each episode, without those whose reward function failed."""
    return [(t, value) for t, value in zip(last_pieces(group), episode_scores(group), strict=True) if is_judged(t)]


def _with_error(key: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of one value per prompt, and its standard error; nothing without values."""
    out = {key: sum(values) / len(values)} if values else {}
    if len(values) > 1:
        with np.errstate(invalid="ignore"):  # an infinite score
            out[f"{key}_se"] = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return out


def best_of(scores: Sequence[float], k: int) -> float:
    """The expected best of k of n scores, drawn without replacement:

        sum_i s_(i) C(i - 1, k - 1) / C(n, k)          s_(1) <= ... <= s_(n), i = k .. n

    Limits:    k = 1 is the mean, k = n the maximum; for scores of 0 and 1, c of them 1, 1 - C(n - c, k) / C(n, k).
               NaN is the largest.
    Reference: Chen et al. 2021, arXiv:2107.03374, eq. 1
    """
    ordered, n = sorted(scores, key=lambda x: (math.isnan(x), x)), len(scores)
    return sum(ordered[i - 1] * (math.comb(i - 1, k - 1) / math.comb(n, k)) for i in range(k, n + 1))


def majority(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """The mean score of the samples with the most frequent answer (maj@n); None is no answer, and no vote.

    Of several that are as frequent, the mean: the expectation where the tie is broken at random. Without any answer,
    the mean of all scores.
    Reference: arXiv:2203.11171 (self-consistency)
    """
    by_answer = defaultdict(list)
    for value, answer in zip(scores, answers, strict=True):
        if answer is not None:
            by_answer[answer].append(value)
    most = max(map(len, by_answer.values()), default=0)
    means = [sum(x) / most for x in by_answer.values() if len(x) == most] or [sum(scores) / len(scores)]
    return sum(means) / len(means)


def answer_of(trajectory: Trajectory, *, tokenizer: Any) -> str | None:
    """The answer to vote with: the text `answer` that the reward function returned, else `final_answer` of its text."""
    note = trajectory.info.get("notes", {}).get("answer")
    return note if note is not None else final_answer(completion_of(tokenizer, trajectory))


def _parts(groups: Sequence[Sequence[Trajectory]], prefix: str) -> dict[str, float]:
    """The mean of each further number of the reward function over the sampled answers, as `prefix` + `reward/NAME`."""
    ends = [end for group in groups for end in with_totals(group)]
    roles = {t.role for t, _ in ends}
    own = [{f"own/{k}" if k in roles else k: x for k, x in t.info.get("metrics", {}).items()} for t, _ in ends]
    metrics = [
        numbers | ({t.role: total} if t.role and is_judged(t) else {})
        for numbers, (t, total) in zip(own, ends, strict=True)
    ]
    names = dict.fromkeys(name for numbers in metrics for name in numbers if name != "failed")
    parts = {name: [numbers[name] for numbers in metrics if name in numbers] for name in names}
    return {f"{prefix}reward/{name}": sum(values) / len(values) for name, values in parts.items()}


def is_due(step: int, schedule: Schedule) -> bool:
    """Whether to evaluate after `step` steps: every `eval_steps` steps (0: never), and after the last one."""
    return schedule.eval_steps != 0 and (step % schedule.eval_steps == 0 or step == schedule.steps)
