"""The settings that docs/migrating.md names have the losses of the others.

The policy is one table of logits. The loop's own update moves it, and a loop over samples with the others' formula.
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit import losses
from rlkit.advantages import group_centered, group_zscore
from rlkit.loops import updates as aggregate
from rlkit.loops.updates import PolicyLoss, clipped, grpo_update
from rlkit.model.forward import Policy
from rlkit.packing import pack, with_advantages, with_streams
from rlkit.settings import Optim, Rollouts
from rlkit.types import Batch, LogProbs, Trajectory

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
V = 6


def logp_of(theta: Tensor, state: int, action: int) -> Tensor:
    row = theta[state]
    return row[action] - row.exp().sum().log()


class Table(Policy):
    """A policy whose model has a table of logits as its one parameter."""

    def __post_init__(self) -> None:
        """It is no model of transformers."""

    def __call__(self, batch: Batch) -> LogProbs:
        return policy(next(self.model.parameters()), batch)


class Logits(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self, theta: torch.nn.Parameter) -> None:
        super().__init__()
        self.theta = theta


def policy(theta: Tensor, batch: Batch) -> LogProbs:
    logits = theta[batch.tokens]
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, batch.targets[:, None])[:, 0]
    return LogProbs(torch.where(batch.mask, chosen, 0), torch.where(batch.mask, -(logp.exp() * logp).sum(-1), 0))


ANSWERS = [[(1, 2, 3), (4,), (5, 5, 0, 1), (2, 2)], [(0, 1), (3, 4, 5), (1,), (2, 0, 3, 3, 3)]]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, -1.0, 0.25, 2.0]]


def batch_of(theta: Tensor, ref: Tensor, baseline: Any) -> Batch:
    """Two groups of four; the engine's log-probs are those of the table, as the embedded one's are the model's."""
    groups = []
    for answers, rewards in zip(ANSWERS, REWARDS, strict=True):
        group = []
        for ids, reward in zip(answers, rewards, strict=True):
            logp = [float(logp_of(theta, a, b)) for a, b in zip((0, *ids[:-1]), ids, strict=True)]
            group.append(Trajectory([5, 0], list(ids), [True] * len(ids), logp, [0] * len(ids), reward=reward))
        groups.append(group)
    batch = with_advantages(pack(groups), baseline)
    old = policy(theta.detach(), batch).logp
    batch = dataclasses.replace(batch, rollout_logp=old, advantages=batch.advantages.double())
    return with_streams(batch, old_logp=old, ref_logp=policy(ref, batch).logp)


def their_loss(
    theta: Tensor,
    old: Tensor,
    ref: Tensor,
    *,
    eps: float = math.nan,
    beta: float = 0.0,
    mean: str = "tokens",
    clip_c: float = math.inf,
) -> Tensor:
    """The loss as TRL 1.16 adds up `loss_type="dapo"` and "grpo", over 2 processes of 2 micro-batches of 2 completions.

    "tokens": a micro-batch's sum is divided by the generation batch's tokens over the number of processes. "sequences":
    its sequence means are averaged, over the number of micro-batches. Micro-batches add up, processes average.
    `eps` nan: advantages are not divided by the standard deviation. `clip_c`: verl's bound where A < 0.
    """
    samples = []
    for answers, rewards in zip(ANSWERS, REWARDS, strict=True):
        center = sum(rewards) / 4
        std = (sum((r - center) ** 2 for r in rewards) / 3) ** 0.5
        scale = 1 if math.isnan(eps) else std + eps
        samples += [(ids, (r - center) / scale) for ids, r in zip(answers, rewards, strict=True)]
    num_items = sum(len(ids) for ids, _ in samples)
    processes = []
    for process in (samples[:4], samples[4:]):
        accumulated = torch.zeros((), dtype=torch.float64)
        for micro in (process[:2], process[2:]):
            for ids, advantage in micro:
                for state, action in zip((0, *ids[:-1]), ids, strict=True):
                    logp = logp_of(theta, state, action)
                    ratio = (logp - logp_of(old, state, action)).exp()
                    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    if advantage < 0:
                        loss = loss.clamp(max=-advantage * clip_c)
                    d = logp_of(ref, state, action) - logp
                    loss = loss + beta * (d.exp() - d - 1) * ratio
                    accumulated = accumulated + loss / (num_items / 2 if mean == "tokens" else len(ids) * 2 * 2)
        processes.append(accumulated)
    return sum(processes) / 2  # type: ignore[return-value]


TRL = partial(group_zscore, eps=1e-4)
DUAL = lambda x, b: losses.dual_clip(x, b.advantages, clip_low=0.2, clip_high=0.2, clip_c=1.01)


@pytest.mark.parametrize(
    ("baseline", "options", "theirs"),
    [
        pytest.param(TRL, {}, {"eps": 1e-4}, id="TRL"),
        pytest.param(TRL, {"kl_coef": 0.3}, {"eps": 1e-4, "beta": 0.3}, id="TRL with beta"),
        pytest.param(group_zscore, {}, {"eps": 1e-6}, id="verl but for its dual clip, OpenRLHF group_norm"),
        pytest.param(group_zscore, {"surrogate": DUAL}, {"eps": 1e-6, "clip_c": 1.01}, id="verl with its dual clip"),
        pytest.param(
            group_zscore, {"aggregate": aggregate.per_episode}, {"eps": 1e-6, "mean": "sequences"}, id="slime"
        ),
        pytest.param(group_centered, {}, {}, id="RL2, OpenRLHF dr_grpo"),
    ],
)
def test_the_update_has_the_loss_that_the_page_states(
    baseline: Any, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Three updates per rollout, so that ratios leave 1 and the clip takes part; the same parameters in fp64."""
    g = torch.Generator().manual_seed(0)
    start, ref = (torch.randn(V, V, dtype=torch.float64, generator=g) for _ in range(2))
    theta, lr = torch.nn.Parameter(start.clone()), 2.0
    kl_coef = options.get("kl_coef", 0.0)
    loss = {"surrogate": partial(clipped, clip_low=0.2, clip_high=0.2), **options}
    loss.pop("kl_coef", None)
    grpo_update(
        batch_of(start, ref, baseline), policy=Table(Logits(theta)), optimizer=torch.optim.SGD([theta], lr=lr), lr=lr,
        loss=PolicyLoss(**loss), rollouts=Rollouts(epochs=3), optim=Optim(max_norm=float("inf"), max_tokens=8),
        kl_coef=kl_coef, entropy_coef=0.0, seed=0,
    )  # fmt: skip
    found = three_updates(start, ref, lr=lr, **theirs)
    tokens = [(s, a) for answers in ANSWERS for ids in answers for s, a in zip((0, *ids[:-1]), ids, strict=True)]
    ratios = [float((logp_of(found, s, a) - logp_of(start, s, a)).exp()) for s, a in tokens]
    assert sum(not 0.8 < ratio < 1.2 for ratio in ratios) >= 3
    for option in theirs.items() - {("eps", 1e-6)}:  # each changes what comes out
        without = three_updates(start, ref, lr=lr, **dict(theirs.items() - {option}))
        assert (without - found).abs().max() > 1e-5, option
    torch.testing.assert_close(theta.detach(), found, rtol=0, atol=1e-7)


def three_updates(start: Tensor, ref: Tensor, *, lr: float, **theirs: Any) -> Tensor:
    theta = start.clone()
    for _ in range(3):
        theta.requires_grad_()
        (grad,) = torch.autograd.grad(their_loss(theta, start, ref, **theirs), theta)
        theta = (theta - lr * grad).detach()
    return theta


def test_the_difference_from_trls_std_matches_the_page() -> None:
    (low, high) = (float(x) / 100 for x in re.findall(r"1e-6 here: ([\d.]+)% to ([\d.]+)%", PAGE)[0])
    for right in range(1, 8):
        rewards = torch.tensor([1.0] * right + [0.0] * (8 - right), dtype=torch.float64)
        ids = torch.zeros(8, dtype=torch.long)
        ours, theirs = group_zscore(rewards, group_ids=ids), group_zscore(rewards, group_ids=ids, eps=1e-4)
        assert low - 5e-5 < float((ours / theirs - 1).abs().max()) < high + 5e-5
