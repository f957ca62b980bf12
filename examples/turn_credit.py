"""Credit by turn: a game of two turns whose first reward is luck, learned by `turn_returns` and not by episodes.

    python examples/turn_credit.py

A tiny model with random weights says one byte, then four. The first turn pays a lottery, whatever was said; the second
pays the share of digits. The sum is the episode's reward, in which the lottery hides the digits. The return from turn 2
on does not have the lottery in it, and is compared with the other second turns of the group. Both are `group_zscore`.

    share of digits in turn 2, of 64 episodes, after 40 steps; seeds 0, 1, 2
    episode          0.04  0.04  0.09      (10 of 263 tokens are digits: 0.04 at the start)
    gigpo            0.96  0.96  0.98
    turn_returns     0.98  0.99  1.00

In `rlkit grpo` it is `--baseline group_zscore --advantage turn_returns`. Some five minutes on one core. `answer_logp` is
the forward for `rlkit.advantages.trace_credit`.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rlkit import Trajectory, pack
from rlkit.advantages import group_zscore, turn_starts
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.estimators import gigpo, turn_returns
from rlkit.loops.grpo import grpo_sync
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Prompt, Sampler
from rlkit.segments import mean_per_seq, seq_ids
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.types import Batch

CREDITS = {"episode": None, "gigpo": gigpo, "turn_returns": turn_returns}


async def play(prompt: Prompt, sample: Sampler, *, tokenizer: Any, lottery: float, by_turn: bool) -> list[Trajectory]:
    """An episode; its score is the second turn's reward."""
    turns = Turns(prompt.ids, sample)
    await turns.sample(max_new_tokens=1)
    luck = lottery * random.gauss(0, 1)
    turns.append(tokenizer.encode("\ndigits: "))
    text = tokenizer.decode((await turns.sample()).ids)
    paid = sum(map(str.isdigit, text)) / 4
    if by_turn:
        return turns.pieces(turn_rewards=[luck, paid], score=paid, truncated=False)
    return turns.pieces(reward=luck + paid, score=paid, truncated=False)


def answer_logp(policy: Any, batch: Batch, answers: list[list[int]]) -> Tensor:
    """Mean log-prob of a gold answer per token in the context before each turn: `[S]`, for `trace_credit`.

    `answers` are token ids, one answer for each group of the batch; `policy` is the frozen reference.
    """
    starts = turn_starts(batch.mask, cu_seqlens=batch.cu_seqlens)
    boundaries = []
    for at, seq in zip(
        starts.nonzero().flatten().tolist(), seq_ids(batch.cu_seqlens, num_tokens=starts.numel())[starts]
    ):
        prefix = int(batch.prefix_ids[seq])
        prompt = batch.prefix_tokens[batch.prefix_cu[prefix] : batch.prefix_cu[prefix + 1]].tolist()
        context = [*prompt, *batch.tokens[batch.cu_seqlens[seq] : at + 1].tolist()]
        answer = answers[int(batch.group_ids[seq])]
        num = len(answer)
        boundaries.append([Trajectory(context, answer, [True] * num, [0.0] * num, [0] * num)])
    scored = pack(boundaries)
    with torch.no_grad():
        return mean_per_seq(policy(scored).logp, cu_seqlens=scored.cu_seqlens, mask=scored.mask)


def learn(credit: str, *, seed: int, steps: int, lottery: float, output: Path) -> float:
    """Train, and return the share of digits in the second turns of the last step."""
    random.seed(seed)
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    model = prepare_model(tiny_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, seed=seed))
    prompts = [Prompt(tokenizer.encode("play: "), {}, i) for i in range(8)]
    env = partial(play, tokenizer=tokenizer, lottery=lottery, by_turn=credit != "episode")
    shares = []

    async def counted(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        pieces = await env(prompt, sample)
        shares.append(pieces[-1].score)
        return pieces

    grpo_sync(
        model, tokenizer, LocalEngine(model, max_batch=64, max_len=32), Task(prompts, None, env=counted),
        Rollouts(prompts_per_step=8, group_size=8, max_new_tokens=4, print_samples_steps=0),
        Schedule(output, steps=steps, seed=seed, print_steps=steps), Optim(lr=3e-3),
        baseline=group_zscore, advantage=CREDITS[credit],
    )  # fmt: skip
    return sum(shares[-64:]) / 64


def main(steps: int = 40, seeds: int = 3, lottery: float = 3.0) -> dict[str, list[float]]:
    found = {}
    for credit in CREDITS:
        with TemporaryDirectory() as folder:
            found[credit] = [
                learn(credit, seed=seed, steps=steps, lottery=lottery, output=Path(folder) / str(seed))
                for seed in range(seeds)
            ]
        print(f"{credit:14} share of digits in turn 2: " + "  ".join(f"{x:.2f}" for x in found[credit]))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lottery", type=float, default=3.0, help="standard deviation of the first turn's reward")
    main(**vars(parser.parse_args()))
