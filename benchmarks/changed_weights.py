"""The share of bf16 values that an RL step changes: whether sending only those would make a weight sync shorter.

    make smollm && python benchmarks/changed_weights.py

GRPO on SmolLM2-135M-Instruct with fp32 master weights and AdamW. Before each step and after it, the weights are rounded
to bf16, as an engine gets them, and compared. Printed for each learning rate: the share of changed values of each step,
of all matrices, of the embedding and of the norms; and the bytes of a sparse update over those of all values, where
each changed value costs its two bytes and its distance from the one before in one byte (a distance of 255 or more: two
more bytes each 255). Exact zeros in the gradient change nothing: the share depends on the data, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _cli import run_script
from _models import build
from _timing import machine
from torch import Tensor
from transformers import AutoTokenizer

from rlkit._util.files import cache_folder
from rlkit.data.prompts import Prompt
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.types import Trajectory

KINDS = ("all", "matrices", "embedding", "norms")


@dataclass
class Args:
    lrs: tuple[float, ...] = (1e-6, 3e-6, 1e-5)
    steps: int = 12
    rounded: bool = True
    """start from bf16 values, as most checkpoints are published; off: those of the file, which were 4-bit ones, of
    which many lie in the middle between two bf16 values"""
    prompts_per_step: int = 8
    group_size: int = 4
    new_tokens: int = 48
    """at most, of an answer"""
    out: Path = Path("benchmarks/results/changed_weights.json")


class Compared(LocalEngine):
    """The embedded engine, which compares the bf16 values of each update with those of the one before."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._before: dict[str, Tensor] = {}
        self.steps: list[dict[str, float]] = []

    async def update_weights(self, weights: Any = None, *, version: int) -> None:
        """Count, then do as the engine does."""
        now = {name: x.detach().bfloat16().view(torch.int16) for name, x in self.model.named_parameters()}
        if self._before:
            self.steps.append(counts(self._before, now))
        self._before = now
        await super().update_weights(weights, version=version)


def counts(before: dict[str, Tensor], now: dict[str, Tensor]) -> dict[str, float]:
    """Shares of changed values by kind, and the bytes of a sparse update over those of all values."""
    changed, total, sparse = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), 0
    for name, x in now.items():
        places = (x != before[name]).reshape(-1).nonzero()[:, 0]
        kind = "embedding" if "embed" in name else "matrices" if x.ndim == 2 else "norms"
        for key in ("all", kind):
            changed[key] += len(places)
            total[key] += x.numel()
        distances = places.diff(prepend=places.new_zeros(1))
        sparse += 3 * len(places) + 2 * int((distances // 255).sum())
    return {k: changed[k] / total[k] for k in KINDS} | {"bytes": sparse / (2 * total["all"])}


async def digits(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
    """The share of an answer's tokens that are the prompt's own: a reward that differs within nearly every group."""
    asked = set(prompt.ids)
    return [replace(t, reward=sum(i in asked for i in t.ids) / len(t.ids)) for t in group]


def prompts_of(tokenizer: Any, number: int) -> list[Prompt]:
    """Sums to add, as chats."""
    asked = [f"What is {17 * i % 83} + {29 * i % 71}? Answer with the sum." for i in range(number)]
    chats = [[{"role": "user", "content": text}] for text in asked]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    return [Prompt(x, {}, i) for i, x in enumerate(ids)]


async def measure(lr: float, args: Args) -> list[dict[str, float]]:
    """A run: what each of its steps changed."""
    tokenizer = AutoTokenizer.from_pretrained(cache_folder() / "SmolLM2-135M-Instruct")
    model = build("smollm")
    model = prepare_model(model.bfloat16().float() if args.rounded else model)
    engine = Compared(model, tokenizer=tokenizer, max_len=256)
    rollouts = Rollouts(args.prompts_per_step, args.group_size, max_new_tokens=args.new_tokens)
    task = Task(prompts_of(tokenizer, 256), digits)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        await grpo(model, tokenizer, engine, task, rollouts, Schedule(Path(folder), steps=args.steps), Optim(lr=lr))
    return engine.steps


def main(args: Args) -> None:
    """Print and write the table."""
    found = {}
    for lr in args.lrs:
        found[f"{lr:g}"] = steps = asyncio.run(measure(lr, args))
        for number, step in enumerate(steps, 1):
            print(f"lr {lr:g} step {number}: " + ", ".join(f"{k} {x:.2%}" for k, x in step.items()), flush=True)
        means = {k: sum(step[k] for step in steps) / len(steps) for k in steps[0]}
        print(f"lr {lr:g} mean: " + ", ".join(f"{k} {x:.2%}" for k, x in means.items()), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "args": asdict(args), "steps": found}
    args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
