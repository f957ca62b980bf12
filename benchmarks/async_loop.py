"""The asynchronous GRPO loop against the synchronous one, on the same engine: the gain of overlapping.

    python benchmarks/async_loop.py

In both modes the engine is a process pinned to one core, the trainer is pinned to another, and a step samples and
trains on the same number of tokens. Synchronous: one works, then the other. Asynchronous (staleness 1): both at once.
The limit is (generation + training) / (the longer of both), as the synchronous run has them: 2 where they take equally
long. One pair after another, the order within a pair alternating; a pair's ratio is the median time between the ends of
two steps of one over that of the other, from the third step on. Printed is the median of the pairs' ratios with its 95%
interval (order statistics of the pairs). The default is 12 pairs of 16 seconds, and no pair begins after `seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _cli import run_script
from _timing import interval, machine
from transformers.utils import logging

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import load_model
from rlkit.rollout.engines.process import launch
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.types import Trajectory

SKIP = 2  # the pipeline fills, memory is touched for the first time


@dataclass
class Args:
    pairs: int = 11
    """counted pairs, after one that is not"""
    seconds: float = 420.0
    """no further pair begins after so long"""
    steps: int = 8
    """of a run, the first two not counted"""
    prompts_per_step: int = 4
    group_size: int = 4
    prompt_tokens: int = 24
    new_tokens: int = 96
    """of every answer"""
    epochs: int = 1
    """passes of the trainer: raise it where training is faster than generation"""
    hidden: int = 256
    """of the model (4 layers)"""
    cores: tuple[int, int] = (0, 1)
    """of the engine and the trainer"""
    out: Path = Path("benchmarks/results/async_loop_cpu.json")


async def coin(_prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
    """A reward that differs within every group, at no cost."""
    return [replace(t, reward=float(i % 2)) for i, t in enumerate(group)]


async def seconds_per_step(overlap: bool, args: Args, engine: Any, path: Path) -> dict[str, float]:
    """One run: seconds from the end of a step to the end of the next, and their parts (medians)."""
    prompts = [Prompt([(7 * i + j) % 250 for j in range(args.prompt_tokens)], {}, i) for i in range(64)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        rollouts = Rollouts(
            args.prompts_per_step, args.group_size, epochs=args.epochs, max_new_tokens=args.new_tokens, overlap=overlap
        )
        schedule = Schedule(Path(folder), steps=args.steps)
        await grpo(load_model(path), tiny_tokenizer(), engine, Task(prompts, coin), rollouts, schedule, Optim(lr=1e-7))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    counted = lines[SKIP:]
    times = {k: statistics.median(line[k] for line in counted) for k in counted[0] if k.startswith("time/")}
    ends = [line["time/unix"] for line in lines[SKIP - 1 :]]
    times["step"] = statistics.median(b - a for a, b in itertools.pairwise(ends))
    return times


async def measure(args: Args, path: Path) -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = []
    start = time.monotonic()
    limit = args.prompt_tokens + args.new_tokens
    size = args.prompts_per_step * args.group_size
    async with await launch(path, max_batch=size, max_len=limit, eos_token_ids=(), cpus=args.cores[:1]) as engine:
        for number in range(args.pairs + 1):
            if pairs and time.monotonic() - start > args.seconds:
                break
            order = [("sync", False), ("async", True)][:: 1 if number % 2 else -1]
            pair = {name: await seconds_per_step(overlap, args, engine, path) for name, overlap in order}
            ratio = pair["sync"]["step"] / pair["async"]["step"]
            rollout, train = pair["sync"]["time/rollout"], pair["sync"]["time/train"] + pair["sync"]["time/score"]
            balance, most = rollout / train, (rollout + train) / max(rollout, train)
            print(
                f"pair {number:2}: sync {pair['sync']['step']:.3f} s (generation {rollout:.3f}, training {train:.3f}), "
                f"async {pair['async']['step']:.3f} s (waiting {pair['async']['time/wait']:.3f}): {ratio:.2f}x "
                f"of {most:.2f}x",
                flush=True,
            )
            if number:
                pairs.append({**pair, "ratio": ratio, "balance": balance, "limit": most})
    return pairs


def main(args: Args) -> None:
    os.sched_setaffinity(0, {args.cores[1]})
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(
            tokenizer, hidden=args.hidden, heads=4, kv_heads=2, head_dim=64, intermediate=4 * args.hidden
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        pairs = asyncio.run(measure(args, Path(folder)))
    ratios = [p["ratio"] for p in pairs]
    balance, most = (statistics.median(p[key] for p in pairs) for key in ("balance", "limit"))
    low, high = interval(ratios)
    print(
        f"asynchronous over synchronous: {statistics.median(ratios):.2f}x [{low:.2f}, {high:.2f}] "
        f"of at most {most:.2f}x ({len(ratios)} pairs; generation / training = {balance:.2f})"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "args": asdict(args), "median": statistics.median(ratios), "interval": [low, high]}
    result |= {"balance": balance, "limit": most, "pairs": pairs}
    args.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
