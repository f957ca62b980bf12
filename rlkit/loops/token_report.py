"""Log-prob, entropy, ratio and advantage of each token of a few samples, for the report (`rlkit.run.samples`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlkit.model.forward import Policy, compute_tokens
from rlkit.packing import select
from rlkit.types import Batch, Trajectory

NUM_STEPS = 32  # about the number of steps with per-token numbers, evenly spaced
NUM_GROUPS = 2  # groups in such a step
NUM_TOKENS = 16384  # maximum number of tokens in such a step; a single sample may have more


def keeps_tokens(step: int, *, steps: int) -> bool:
    """Whether samples of this step keep per-token numbers: at the first step, the last one, and some between."""
    return step in (1, steps) or step % (-(-steps // NUM_STEPS) or 1) == 0


def chosen(groups: Sequence[Sequence[Trajectory]]) -> list[int]:
    """The indices of the samples that keep per-token numbers, among all samples of `groups`.

    Groups whose rewards differ most come first; in a group the best sample, the worst, the second best and so on, until
    the next one would exceed `NUM_TOKENS`. All ranks choose the same samples.
    """
    starts = np.cumsum([0, *map(len, groups)])
    order = sorted(range(len(groups)), key=lambda i: -_spread(groups[i]))[:NUM_GROUPS]
    indices: list[int] = []
    used = 0
    for i in order:
        ranked = sorted(range(len(groups[i])), key=lambda j: -groups[i][j].reward)
        for j in [x for pair in zip(ranked, reversed(ranked)) for x in pair][: len(ranked)]:
            used += len(groups[i][j].ids)
            if indices and used > NUM_TOKENS:
                return indices
            indices.append(int(starts[i]) + j)
    return indices


def token_streams(
    policy: Policy, batch: Batch, groups: Sequence[Sequence[Trajectory]], *, max_tokens: int
) -> dict[int, dict[str, Any]]:
    """Per-token numbers of the `chosen` samples, by the sample's index: lists, one number per sampled id.

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
        per_token = compute_tokens(
            lambda micro: torch.stack(policy(micro), dim=-1), part, max_tokens=max_tokens, mesh=policy.mesh
        )
    logp, entropy = per_token.float().cpu().unbind(-1)
    ratio = torch.where(part.mask, (logp - part.rollout_logp).clamp(max=20).exp(), 0)
    numbers = {}
    for i, place in enumerate(places):
        trajectory, end = samples[place], int(part.cu_seqlens[i + 1]) - int(part.truncated[i])
        tokens = slice(end - len(trajectory.ids), end)  # unshared, the prompt stands before them
        numbers[place] = {
            "logp": np.asarray(trajectory.logp, float).tolist(), "entropy": entropy[tokens].tolist(),
            "ratio": ratio[tokens].tolist(),
            "advantage": None if part.advantages is None else part.advantages[tokens].tolist(),
            "mask": np.asarray(part.mask[tokens], int).tolist(),
            "version": np.asarray(trajectory.versions, int).tolist(),
        }  # fmt: skip
    return numbers


def _spread(group: Sequence[Trajectory]) -> float:
    rewards = [t.reward for t in group if math.isfinite(t.reward)]
    return max(rewards, default=0.0) - min(rewards, default=0.0)
