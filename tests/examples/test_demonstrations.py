"""examples/demonstrations.py: its losses by loops over the samples, and a form that no sample of the start has."""

from __future__ import annotations

import math

import demonstrations
import pytest
import torch

from rlkit import Trajectory, pack
from rlkit.advantages import group_centered
from rlkit.loops.supervised import response
from rlkit.packing import with_advantages

REWARDS = [[0.0, 1.0], [0.25, 0.75]]
SHOWN = 0.8


def batch_of(*, inside):
    """Two groups of two samples, of two and three tokens, and a demonstration of one or two tokens of each."""
    groups = [
        [Trajectory([7, 5 + g], [9] * (2 + i), [True] * (2 + i), [-1.0] * (2 + i), [3] * (2 + i), reward=r)
         for i, r in enumerate(rewards)]
        for g, rewards in enumerate(REWARDS)
    ]  # fmt: skip

    def demonstration(prompt_ids):
        return response([*prompt_ids], [11] * (prompt_ids[-1] - 4), reward=SHOWN)

    return with_advantages(
        pack(demonstrations.with_demonstrations(groups, demonstration, inside=inside)), group_centered
    )


def log_ratios(batch):
    x = -torch.rand(batch.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.requires_grad_()


def test_chord_is_the_sum_of_two_means():
    batch = batch_of(inside=False)
    assert demonstrations.demonstrated(batch).tolist() == [False] * 10 + [True] * 3
    x, mu = log_ratios(batch), 0.3
    loss = (demonstrations.mean_of_each(batch) * demonstrations.chord(x, batch, mu=mu)).sum()
    advantages = [-0.5] * 2 + [0.5] * 3 + [-0.25] * 2 + [0.25] * 3
    policy = sum(
        max(-a * math.exp(y), -a * min(max(math.exp(y), 0.8), 1.2)) for a, y in zip(advantages, x.tolist()[:10])
    )
    nll = -sum(x.tolist()[10:])
    assert loss.item() == pytest.approx((1 - mu) * policy / 10 + mu * nll / 3, rel=1e-6)
    assert torch.autograd.grad(loss, x)[0][10:].tolist() == pytest.approx([-mu / 3] * 3)


def test_a_demonstration_of_luffy_is_a_sample_of_its_group():
    batch = batch_of(inside=True)
    demo = demonstrations.demonstrated(batch)
    assert demo.tolist() == [False] * 5 + [True] + [False] * 5 + [True] * 2
    means = [(sum(rewards) + SHOWN) / 3 for rewards in REWARDS]
    assert batch.advantages[demo].tolist() == pytest.approx([SHOWN - means[0], *[SHOWN - means[1]] * 2], abs=1e-6)
    x, gamma = log_ratios(batch), 0.1
    gradient = torch.autograd.grad(demonstrations.luffy(x, batch).sum(), x)[0]
    for i in demo.nonzero().flatten().tolist():
        p, a = math.exp(x[i].item()), batch.advantages[i].item()
        assert gradient[i].item() == pytest.approx(-a * gamma * p / (p + gamma) ** 2, rel=1e-5, abs=1e-12)


@pytest.mark.slow
def test_both_learn_what_neither_the_reward_nor_the_demonstrations_teach_alone():
    found = demonstrations.main(seeds=1)
    assert found["reward"][0] == 0
    assert found["demonstrations"][0] < 0.3
    assert found["chord"][0] > 0.8
    assert found["luffy"][0] > 0.8
