"""Self-distillation: the model, shown the answer, teaches itself what it never samples without it.

    python examples/self_distillation.py

A tiny model first learns to copy: "4831 a=" is answered by 4831, and "a=" by four random digits. Each of eight questions
then has a secret of four digits, of which one answer in 10000 is right. A reward for the right answer has nothing to
learn from. As its own teacher the model reads "{secret} {question}" in place of "{question}": with its initial weights,
its current weights, or an average that follows it.

    share of right answers, of 64, after 60 steps; seeds 0, 1, 2
    reward              0.00  0.00  0.00
    initial weights     0.98  0.55  0.88
    current weights     0.00  0.00  0.00      (the teacher moves with what it teaches, and both end at noise)
    average, 0.002      0.92  0.58  0.66

In `rlkit distill` they are `--teacher MODEL`, `--teacher self` and `--teacher self --teacher-ema 0.002`, each with
`--teacher-prompt "{secret} {prompt}" --loss forward_kl`. Some five minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

from rlkit import Trajectory
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.distill import Distillation, distill_sync
from rlkit.loops.grpo import grpo_sync
from rlkit.loops.rl import Task
from rlkit.losses.distillation import forward_kl_rows
from rlkit.model.forward import Policy, prepare_model
from rlkit.model.teachers import LocalTeacher
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.groups import Prompt, Sampler, single_turn
from rlkit.settings import Optim, Rollouts, Schedule


def copying_model(tokenizer: Any, *, seed: int, steps: int) -> Any:
    """A model that copies the digits of its prompt, and answers a prompt without any by random ones."""
    model = tiny_model(tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        digits = torch.randint(48, 58, (64, 4), generator=random)
        letter = torch.randint(97, 123, (64, 1), generator=random)
        space, equals = torch.full((64, 1), 32), torch.full((64, 1), 61)
        with_hint = torch.cat([digits, space, letter, equals, digits], 1)
        for ids in (with_hint, torch.cat([letter, equals, digits], 1)):
            logits = model(input_ids=ids).logits[:, -5:-1]
            F.cross_entropy(logits.flatten(0, 1), digits.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return prepare_model(model)


def learn(how: str, start: Any, *, seed: int, steps: int, output: Path) -> float:
    """Train a copy of `start`, and return the share of right answers in the last step."""
    torch.manual_seed(seed)
    tokenizer, model = tiny_tokenizer(), copy.deepcopy(start)
    secrets = torch.randint(1000, 10000, (8,), generator=torch.Generator().manual_seed(100 + seed)).tolist()
    rows = [{"prompt": f"{letter}=", "secret": str(secret)} for letter, secret in zip("abcdefgh", secrets)]
    prompts = [Prompt(tokenizer.encode(row["prompt"]), row, i) for i, row in enumerate(rows)]
    right: list[float] = []

    async def answer(prompt: Prompt, sample: Sampler) -> Trajectory:
        said = await single_turn(prompt, sample)
        right.append(float(tokenizer.decode(said.ids) == prompt.row["secret"]))
        return replace(said, reward=right[-1] if how == "reward" else 0.0)

    def with_secret(prompt: Prompt, _answer: Trajectory) -> Sequence[int]:
        return tokenizer.encode("{secret} {prompt}".format(**prompt.row))

    settings = (
        LocalEngine(model, max_batch=64, max_len=32), Task(prompts, None, env=answer),
        Rollouts(prompts_per_step=8, group_size=8, max_new_tokens=4, print_samples_steps=0),
        Schedule(output, steps=steps, seed=seed, print_steps=steps), Optim(lr=2e-3),
    )  # fmt: skip
    if how == "reward":
        grpo_sync(model, tokenizer, *settings)
    else:
        teacher = LocalTeacher(Policy(model if how == "current weights" else start, 1.0))
        distillation = Distillation(forward_kl_rows, prompt=with_secret, ema=0.002 * (how == "average"))
        distill_sync(model, teacher, tokenizer, *settings, distillation=distillation)
    return sum(right[-64:]) / 64


def main(steps: int = 60, seeds: int = 3, copy_steps: int = 400) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {how: [] for how in ("reward", "initial weights", "current weights", "average")}
    for seed in range(seeds):
        start = copying_model(tiny_tokenizer(), seed=seed, steps=copy_steps)
        for how, shares in found.items():  # the average, which moves `start`, is the last
            with TemporaryDirectory() as folder:
                shares.append(learn(how, start, seed=seed, steps=steps, output=Path(folder) / "run"))
    for how, shares in found.items():
        print(f"{how:18} share of right answers: " + "  ".join(f"{x:.2f}" for x in shares))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--copy-steps", type=int, default=400, help="steps of supervised learning at first")
    main(**vars(parser.parse_args()))
