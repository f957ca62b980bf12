"""Numbers per token of a few samples, which the trajectories keep for the report: see `rlkit.run.samples`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlkit.model.forward import Policy, compute_tokens
from rlkit.packing import select
from rlkit.types import Batch, Trajectory

NUM_STEPS = 32  # of a run, at most, evenly spaced, of which samples keep their tokens
NUM_GROUPS = 2  # of such a step
NUM_TOKENS = 16384  # of such a step, at most, unless a single sample has more


def keeps_tokens(step: int, *, steps: int) -> bool:
    """Whether samples of this step keep the numbers of their tokens: the first, the last, and some between."""
    return step in (1, steps) or step % (-(-steps // NUM_STEPS) or 1) == 0


def chosen(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    """The places of the samples that keep their tokens, among all of `groups` in a row.

    They are those of the groups whose rewards differ most; in a group the best, the worst, the second best and so on,
    until the next one would pass `NUM_TOKENS`. All ranks choose the same.
    """
    starts = np.cumsum([0, *map(len, groups)])
    order = sorted(range(len(groups)), key=lambda i: -_spread(groups[i]))[:NUM_GROUPS]
    found: list[int] = []
    used = 0
    for i in order:
        ranked = sorted(range(len(groups[i])), key=lambda j: -groups[i][j].reward)
        for j in [x for pair in zip(ranked, reversed(ranked)) for x in pair][: len(ranked)]:
            used += len(groups[i][j].ids)
            if found and used > NUM_TOKENS:
                return found
            found.append(int(starts[i]) + j)
    return found


def token_streams(
    policy: Policy, batch: Batch, groups: Sequence[Sequence[Trajectory]], *, max_tokens: int
) -> dict[int, dict[str, Any]]:
    """What is known of each token of the `chosen` samples, by their place: lists, one number per sampled id.

        logp         log-prob under the engine that sampled, nats
        entropy      of the policy's distribution at the token, before the step's update, nats
        ratio        exp(log-prob under the policy before the update - logp): the policy over the engine
        advantage    mask      version    of the weights that sampled it

    `entropy` and `ratio` take one forward of these samples. A number of a token that the policy did not sample is 0.
    Empty for a batch of other sequences than the trajectories.
    """
    samples = [t for group in groups for t in group]
    if batch.num_seqs != len(samples):
        return {}
    places = chosen(groups)
    part = select(batch, places)
    with torch.no_grad():
        now = compute_tokens(
            lambda micro: torch.stack(policy(micro), dim=-1), part, max_tokens=max_tokens, mesh=policy.mesh
        )
    logp, entropy = now.float().cpu().unbind(-1)
    ratio = torch.where(part.mask, (logp - part.rollout_logp).clamp(max=20).exp(), 0)
    found = {}
    for i, place in enumerate(places):
        trajectory, start = samples[place], int(part.cu_seqlens[i])
        tokens = slice(start, start + len(trajectory.ids))
        found[place] = {
            "logp": np.asarray(trajectory.logp, float).tolist(), "entropy": entropy[tokens].tolist(),
            "ratio": ratio[tokens].tolist(),
            "advantage": None if part.advantages is None else part.advantages[tokens].tolist(),
            "mask": np.asarray(part.mask[tokens], int).tolist(),
            "version": np.asarray(trajectory.versions, int).tolist(),
        }  # fmt: skip
    return found


def _spread(group: Sequence[Trajectory]) -> float:
    rewards = [t.reward for t in group if math.isfinite(t.reward)]
    return max(rewards, default=0.0) - min(rewards, default=0.0)
