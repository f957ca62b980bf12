"""NaN and infinities in a training step: stop and name the first one, or drop its samples and count them.

All checks read data that is on the host anyway: trajectories, the packed batch, and the metrics of a finished step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from rlkit.packing import select
from rlkit.rollout.groups import Group, Prompt
from rlkit.segments import sum_per_seq
from rlkit.types import Batch, Trajectory

ORIGIN = {
    "rewards": "the reward function or the environment",
    "token_rewards": "the environment",
    "rollout_logp": "the rollout engine",
    "old_logp": "the policy's forward",
    "ref_logp": "the reference model's forward",
    "kept_mass": "the policy's forward",
    "values": "the critic's forward",
    "returns": "the trace of rewards and values",
    "advantages": "the advantage estimator",
    "teacher_logp": "the teacher",
}
Describe = Callable[[Sequence[int]], str]
X = TypeVar("X")


class Finite(NamedTuple, Generic[X]):
    """The finite part, the number of samples dropped from it, and one line that names them ("" for none).

    `places` are those of the samples in `finite` among all that were given.
    """

    finite: X
    num_dropped: int
    note: str
    places: Sequence[int]


def describe_prompt(prompts: Sequence[Prompt], tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt for an error message: the row (from 1) whose prompt `ids` start with, and the start of its text."""
    text = repr(tokenizer.decode(list(ids), skip_special_tokens=True)[:40])
    row = next((p.index + 1 for p in prompts if p.ids == list(ids[: len(p.ids)])), None)
    return f"the prompt {text}" if row is None else f"row {row} of the data, {text}"


def finite_groups(groups: Sequence[Group], *, step: int, describe: Describe, skip: bool) -> Finite[list[Group]]:
    """The groups without the episodes that have a non-finite reward, token reward or rollout log-prob.

    Only tokens with mask True count. All pieces of an episode are dropped together, and so are groups without an
    episode left.

    Errors: ValueError where there is such an episode and not `skip`, or where no other one is left.
    """
    first = next(((t, *broken) for group in groups for t in group if (broken := _broken(t))), None)
    if first is None:
        return Finite(list(groups), 0, "", range(sum(map(len, groups))))
    place = count()
    episodes = [[[(next(place), t) for t in e] for e in _episodes(group)] for group in groups]
    whole = [[e for e in group if not any(_broken(t) for _, t in e)] for group in episodes]
    total, left = sum(map(len, episodes)), sum(map(len, whole))
    t, name, value = first
    note = f"step {step}: {_what(name, value, total - left, total)}; the first is of {describe(t.prompt_ids)}"
    if not skip or not left:
        raise ValueError(note + _fix(skip))
    finite = [[pair for e in group for pair in e] for group in whole if group]
    places = [i for group in finite for i, _ in group]
    return Finite([[t for _, t in group] for group in finite], total - left, note, places)


def _episodes(group: Group) -> list[Group]:
    """The trajectories of a group by episode."""
    starts = [*(i for i, t in enumerate(group) if not t.continues), len(group)]
    return [group[a:b] for a, b in pairwise(starts)]


def _broken(t: Trajectory) -> tuple[str, float] | None:
    """The first stream of a trajectory with a non-finite number where the mask is True, and that number."""
    if not math.isfinite(t.reward):
        return "rewards", t.reward
    on = np.asarray(t.mask, bool)
    for name, stream in (("token_rewards", t.token_rewards), ("rollout_logp", t.logp)):
        x = np.asarray(() if stream is None else stream, np.float64)[: len(on)]
        broken = on[: len(x)] & ~np.isfinite(x)
        if broken.any():
            return name, float(x[broken.argmax()])
    return None


def finite_batch(batch: Batch, *, step: int, describe: Describe, skip: bool) -> Finite[Batch]:
    """The batch without the sequences in which a float stream is not finite at a trained token.

    `values` also count at the last token of a truncated sequence, which holds the bootstrap value.

    Errors: ValueError where there is such a sequence and not `skip`, or where no other one is left.
    """
    ends = torch.zeros_like(batch.mask)
    ends[batch.cu_seqlens[1:][batch.truncated] - 1] = True
    streams = {name: x for name in ORIGIN if name != "rewards" and (x := getattr(batch, name)) is not None}
    streams = {name: x if x.ndim == 1 else x.amax(-1) for name, x in streams.items()}  # -inf pads a teacher's top k
    bad = {name: ~x.isfinite() & (batch.mask | (ends & (name == "values"))) for name, x in streams.items()}
    if not any(x.any() for x in bad.values()):
        return Finite(batch, 0, "", range(batch.num_seqs))
    broken = sum_per_seq(torch.stack([*bad.values()]).any(0).float(), cu_seqlens=batch.cu_seqlens) > 0
    name = next(name for name, x in bad.items() if x.any())
    index = int(bad[name].int().argmax())
    prompt = describe(_prompt_ids(batch, int((batch.cu_seqlens <= index).sum()) - 1))
    num, value = int(broken.sum()), float(streams[name][index])
    note = f"step {step}: {_what(name, value, num, batch.num_seqs)}; the first is of {prompt}"
    if not skip or num == batch.num_seqs:
        raise ValueError(note + _fix(skip))
    left = (~broken).nonzero().flatten()
    return Finite(select(batch, left), num, note, left.tolist())


def _prompt_ids(batch: Batch, sequence: int) -> list[int]:
    """The prompt of a sequence of a batch that shares prompts."""
    start, stop = batch.prefix_cu[batch.prefix_ids[sequence] :][:2].tolist()
    return [*batch.prefix_tokens[start:stop].tolist(), int(batch.tokens[batch.cu_seqlens[sequence]])]


def check_norms(line: Mapping[str, float], *, step: int, skip: bool) -> None:
    """Raise after a step that skipped an optimizer step for a non-finite gradient norm, unless `skip`.

    Parameters and optimizer states are unchanged by a skipped step; `skipped_step` is the share of such steps.
    Errors: ValueError that also names the other non-finite metrics of the step, which show the cause.
    """
    for prefix, model in (("", "policy"), ("value/", "critic")):
        if line.get(f"{prefix}skipped_step") and not skip:
            norm = f"{prefix}grad_norm"
            others = [name for name, x in line.items() if not math.isfinite(x) and name != norm]
            also = f" (also not finite: {', '.join(others)})" if others else ""
            raise ValueError(
                f"step {step}: the gradient norm of the {model} is {line[norm]}{also}; all inputs were "
                "finite, so the model's forward or the loss produced it; the gradient was not applied. Try a lower "
                "learning rate or --dtype fp32, or skip such optimizer steps with --skip-nan (skip_nan=True)"
            )


def _what(name: str, value: float, num: int, of: int) -> str:
    return f"{name} (made by {ORIGIN[name]}) has {value} in {num} of {of} samples"


def _fix(skip: bool) -> str:
    if skip:
        return "; no sample of the step is left to train on"
    return "; fix it there, or drop such samples with --skip-nan (skip_nan=True)"
