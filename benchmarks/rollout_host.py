"""Host time of the rank that samples, between the last token of a step and its first forward, with a synthetic engine.

    OMP_NUM_THREADS=1 python benchmarks/rollout_host.py --prompts 64 --group-size 16 --tokens 8192

One step: an engine that answers at once with tokens made beforehand, the stream, what another rank would receive
(pickled and read back, as a broadcast does), metrics, checks, packing, and the step's `trajectories/` file with a real
tokenizer. Times are per token of the step, so that a step of another size can be told from one that fits this machine;
memory is the growth of the process's peak, per token. Nothing is decoded or scored.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _cli import run_script
from transformers import AutoTokenizer

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.loops.evaluate import rollout_metrics
from rlkit.loops.nans import finite_groups
from rlkit.packing import pack
from rlkit.rollout.stream import GroupStream
from rlkit.run.samples import trajectory_row
from rlkit.types import Completion, SamplingParams


@dataclass
class Args:
    """Sizes."""

    prompts: int = 64
    group_size: int = 16
    tokens: int = 8192
    model: str | None = None
    """a folder with a tokenizer; None: the tests' byte tokenizer, without the file of samples"""
    out: Path | None = None


def gib() -> float:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


async def step(args: Args, times: dict[str, float]) -> None:
    """Time the phases of one step."""
    draw = random.Random(0)
    texts = [[draw.randrange(1000, 40_000) for _ in range(args.tokens)] for _ in range(8)]
    logps = [[-draw.random() for _ in range(args.tokens)] for _ in range(8)]

    one_by_one = asyncio.Lock()

    async def generate(_prompt_ids: list[int], **_: Any) -> Completion:
        async with one_by_one:  # groups end one after another, as they do behind servers
            await asyncio.sleep(0)
        which = draw.randrange(8)  # a reply that was parsed has objects of its own
        ids = [x + 0 for x in texts[which]]
        return Completion(ids, [x * 1.0 for x in logps[which]], [3] * args.tokens, "stop")

    async def abort(_rid: str | None = None) -> int:
        return 0

    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[name], last = now - last, now

    stream = GroupStream(
        lambda i: Prompt([5] * 512, {"question": str(i)}, i), generate=generate, abort=abort,
        params=SamplingParams(max_new_tokens=args.tokens), group_size=args.group_size, groups_per_step=args.prompts,
        seed=0, version=3,
    )  # fmt: skip
    async with stream:
        stream.advance(version=3)
        groups: Any = await stream.take()
    lap("sample")
    sent = pickle.dumps(groups)
    lap("send")
    times["bytes"] = len(sent)
    del sent
    rollout_metrics(groups, version=3)
    lap("metrics")
    finite_groups(groups, step=1, describe=str, skip=False)
    lap("check")
    pack(groups)
    lap("pack")
    if args.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        with tempfile.TemporaryFile("w") as file:
            last = time.perf_counter()
            for group in groups:
                for t in group:
                    row = trajectory_row(t, decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
                    file.write(json.dumps(row))
            lap("file")


def main(args: Args) -> None:
    """Print nanoseconds and bytes per token."""
    tiny_tokenizer()
    times: dict[str, float] = {}
    before = gib()
    asyncio.run(step(args, times))
    num = args.prompts * args.group_size * args.tokens
    found = {f"{name}_ns": round(x / num * 1e9, 1) for name, x in times.items() if name != "bytes"}
    found |= {"sent_bytes": round(times["bytes"] / num, 1), "peak_bytes": round((gib() - before) * 2**30 / num, 1)}
    print(json.dumps({"tokens": num, **found}))
    if args.out is not None:
        args.out.write_text(json.dumps({"tokens": num, **found}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
