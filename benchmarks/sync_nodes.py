"""Weights to a running SGLang server over a process group: our update against the plain requests of the server's API.

    python benchmarks/sync_nodes.py --model FOLDER --url http://node-1:30000 --host node-0

`ours` is `update_weights`: it pauses, opens the server's session, gathers and checks the tensors, sends them in buckets
and resumes. `plain` is one request with all names and one broadcast for each tensor, in a session, through the same
group. A ratio is of two updates that follow one another. `--host` is this machine's address as the server sees it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _cli import run_script
from _timing import machine
from transformers import AutoModelForCausalLM

from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.sglang import FromGroup, SGLang


@dataclass
class Args:
    """Where."""

    model: Path
    url: str
    host: str = "127.0.0.1"
    backend: str = "gloo"
    rounds: int = 6


async def plain(engine: SGLang, transport: FromGroup, named: list[tuple[str, torch.Tensor]]) -> None:
    """What the server's documentation does."""
    body = {
        "names": [name for name, _ in named], "shapes": [list(x.shape) for _, x in named],
        "dtypes": [str(x.dtype).removeprefix("torch.") for _, x in named],
        "group_name": transport._name, "flush_cache": True,
    }  # fmt: skip
    server = engine._servers.all[0]
    await engine._api.begin(server)
    post = asyncio.ensure_future(server.post("/update_weights_from_distributed", body))
    await asyncio.to_thread(transport._broadcast, [x for _, x in named])
    await post
    await engine._api.end(server)


async def compare(args: Args) -> None:
    """Print the ratio of each pair."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    transport = FromGroup(backend=args.backend, host=args.host)
    ratios, ours = [], []
    async with SGLang(args.url, transport=transport) as engine:
        for number in range(args.rounds + 1):  # the first one makes the group
            weights = stream_weights(model)
            start = time.perf_counter()
            await engine.update_weights(weights, version=number)
            middle = time.perf_counter()
            await plain(engine, transport, [*stream_weights(model)])
            if number:
                ours.append(middle - start)
                ratios.append((middle - start) / (time.perf_counter() - middle))
    found = {"mb": round(weights.num_bytes / 1e6), "ours_s": round(statistics.median(ours), 2)}
    print(json.dumps({**found, "ratios": [round(x, 2) for x in sorted(ratios)]}))


def main(args: Args) -> None:
    """Print a line."""
    print(json.dumps(machine()), flush=True)
    asyncio.run(compare(args))


if __name__ == "__main__":
    run_script(main, Args, __doc__)
