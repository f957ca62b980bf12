"""Demonstrations beside RL: two batches in one update, of samples with their rewards and of answers of somebody else.

    python examples/demonstrations.py

A tiny model with random weights answers in four bytes. The reward is 0 unless all four are digits, which no sample is at
the start, and then the share of sevens. The demonstrations are four random digits: they show the form, and not what is
best. The reward alone has nothing to learn from, the demonstrations alone end at their own reward, both reach the best.

    mean reward of 64 answers after 80 steps; seeds 0, 1, 2
    reward              0.00  0.00  0.00
    demonstrations      0.11  0.09  0.15
    chord               1.00  1.00  0.98
    luffy               1.00  1.00  1.00

chord (arXiv:2508.11408): (1 - mu) policy loss + mu NLL of the demonstrations, each the mean over its own tokens; mu falls
from 1 to 0 in the first half. luffy (arXiv:2504.14945): a demonstration is one more sample of its prompt's group, with its
reward and pi / (pi + 0.1) in place of the ratio; it loses its advantage where the policy does better.

Each is a `prepare` that adds the demonstrations to the step's batch, and a loss for `grpo_update`. They are the tokens
of version -1, with an old log-prob of 0, so that `log_ratio` is the policy's log-prob. Some five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from rlkit import Trajectory, pack, ppo_clip
from rlkit.advantages import group_centered
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.rl import rl
from rlkit.loops.supervised import response
from rlkit.loops.task import Step, Task
from rlkit.loops.updates import PolicyLoss, grpo_update, per_token
from rlkit.metrics import Metrics
from rlkit.model.forward import Policy, prepare_model, with_old_logp
from rlkit.model.optim import adamw
from rlkit.packing import with_advantages, with_streams
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import Group, Prompt, Sampler, single_turn
from rlkit.run.sync import run_sync
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.types import Batch


def reward(text: str) -> float:
    """The share of sevens among four digits; 0 for anything else."""
    return text.count("7") / 4 if len(text) == 4 and text.isdigit() else 0.0


def demonstrated(batch: Batch) -> Tensor:
    """Whether a token is of a demonstration: no version of the weights has sampled it."""
    return batch.mask & (batch.versions < 0)


def chord(log_ratio: Tensor, batch: Batch, *, mu: float) -> Tensor:
    """(1 - mu) policy loss of samples, mu NLL of demonstrations."""
    policy = ppo_clip(log_ratio, batch.advantages)
    return torch.where(demonstrated(batch), -mu * log_ratio, (1 - mu) * policy)


def luffy(log_ratio: Tensor, batch: Batch, *, gamma: float = 0.1) -> Tensor:
    """The policy loss, with f(pi) = pi / (pi + gamma) in place of the ratio of a demonstration, without a clip."""
    p = log_ratio.exp()
    shaped = -batch.advantages * p / (p + gamma)
    return torch.where(demonstrated(batch), shaped, ppo_clip(log_ratio, batch.advantages))


def mean_of_each(batch: Batch) -> Tensor:
    """The mean over the samples' tokens and that over the demonstrations'."""
    demo = demonstrated(batch)
    both = [per_token(replace(batch, mask=mask)) for mask in (batch.mask & ~demo, demo)]
    return both[0] + both[1]


def with_demonstrations(
    groups: Sequence[Group], demonstration: Callable[[Sequence[int]], Trajectory], *, inside: bool
) -> list[list[Trajectory]]:
    """The groups with a demonstration of each prompt: `inside` its group, or in a group of its own."""
    shown = [demonstration(group[0].prompt_ids) for group in groups]
    if inside:
        return [[*group, one] for group, one in zip(groups, shown, strict=True)]
    return [*groups, *([one] for one in shown)]


def learn(how: str, *, seed: int, steps: int, output: Path) -> float:
    """Train, and return the mean reward of the answers of the last step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer, optim = tiny_tokenizer(), Optim(lr=3e-3)
    model = prepare_model(tiny_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, seed=seed))
    policy, optimizer = Policy(model), adamw(model, lr=optim.lr)
    prompts = [Prompt(tokenizer.encode(f"{letter}="), {}, i) for i, letter in enumerate("abcdefgh")]
    rollouts = Rollouts(prompts_per_step=8, group_size=8, max_new_tokens=4, print_samples_steps=0)
    rewards: list[float] = []

    async def answer(prompt: Prompt, sample: Sampler) -> Trajectory:
        said = await single_turn(prompt, sample)
        rewards.append(reward(tokenizer.decode(said.ids)))
        return replace(said, reward=rewards[-1])

    def demonstration(prompt_ids: Sequence[int]) -> Trajectory:
        text = f"{rng.randrange(10_000):04}"
        return replace(response([*prompt_ids], tokenizer.encode(text), reward=reward(text)), temperature=1.0)

    def prepare(groups: Sequence[Group], step: Step) -> Batch:  # noqa: ARG001
        more = groups if how == "reward" else with_demonstrations(groups, demonstration, inside=how == "luffy")
        batch = with_old_logp(policy, with_advantages(pack(more), group_centered), max_tokens=optim.max_tokens)
        return with_streams(batch, old_logp=batch.old_logp.masked_fill(demonstrated(batch), 0.0))

    def update(batch: Batch, step: Step) -> Metrics:
        mu = {"reward": 0.0, "demonstrations": 1.0}.get(how, max(0.0, 1 - 2 * step.index / steps))
        surrogate = luffy if how == "luffy" else partial(chord, mu=mu)
        aggregate = per_token if how == "luffy" else mean_of_each
        return grpo_update(
            batch, policy=policy, optimizer=optimizer, loss=PolicyLoss(surrogate, aggregate, loss_unchecked=True),
            rollouts=rollouts, optim=optim, lr=optim.lr, kl_coef=0.0, entropy_coef=0.0, seed=step.index,
        )  # fmt: skip

    run_sync(rl(
        policy, tokenizer, LocalEngine(model, max_batch=64, max_len=32), Task(prompts, None, env=answer), rollouts,
        Schedule(output, steps=steps, seed=seed, print_steps=steps), prepare=prepare, update=update,
        state={"model": model, "optimizer": optimizer},
    ))  # fmt: skip
    return sum(rewards[-64:]) / 64


def main(steps: int = 80, seeds: int = 3) -> dict[str, list[float]]:
    """Train each of the four with each seed, and return their rewards."""
    found: dict[str, list[float]] = {}
    for how in ("reward", "demonstrations", "chord", "luffy"):
        for seed in range(seeds):
            with TemporaryDirectory() as folder:
                found.setdefault(how, []).append(learn(how, seed=seed, steps=steps, output=Path(folder) / "run"))
    for how, rewards in found.items():
        print(f"{how:18} mean reward: " + "  ".join(f"{x:.2f}" for x in rewards))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
