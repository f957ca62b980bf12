"""Throughput of two SGLang servers against one, on CPUs, each server on a core of its own.

    RLKIT_SGLANG_PYTHON=$(make -s sglang-cpu) python benchmarks/servers.py

128 requests of 64 tokens to servers of a model of one million weights, through one client that chooses the server with
the fewest requests. Beside it what the machine allows: the same servers, each with half of the requests and a client of
its own. A ratio is tokens per second over those of one server, within a round.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _cli import NoFlags, run_script
from _timing import machine

from rlkit._util.extras import interpreter
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.rollout.engines.sglang import SGLang, launch
from rlkit.types import SamplingParams

REQUESTS, TOKENS, ROUNDS = 128, 64, 5


async def sample(urls: list[str], count: int) -> None:
    """`count` requests at once."""
    async with SGLang(urls) as engine:
        params = SamplingParams(max_new_tokens=TOKENS)
        await asyncio.gather(*(engine.generate([5, 6, 7 + i % 9], params=params) for i in range(count)))


def run(urls: list[str], count: int) -> None:
    """`sample` in this process."""
    asyncio.run(sample(urls, count))


def seconds(urls: list[str], *, clients: int = 1) -> float:
    """Of all requests, by one client of all servers or one client for each."""
    start = time.perf_counter()
    if clients == 1:
        run(urls, REQUESTS)
        return time.perf_counter() - start
    context = multiprocessing.get_context("fork")
    parts = [context.Process(target=run, args=([url], REQUESTS // clients)) for url in urls]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
    return time.perf_counter() - start


def main(_: Any) -> None:
    """Print a line for each way."""
    interpreter("sglang")
    print(json.dumps(machine()), flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, tokenizer = Path(name) / "model", tiny_tokenizer()
        model = tiny_model(tokenizer, hidden=128, layers=4, intermediate=512)
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        servers = []
        for core in range(2):
            os.sched_setaffinity(0, {core})
            args = ["--max-total-tokens", "32768"]
            log = Path(name) / f"{core}.log"
            server = launch(folder, device="cpu", args=args, env={"OMP_NUM_THREADS": "1"}, log=log)
            servers.append(stack.enter_context(server).url)
        os.sched_setaffinity(0, {0, 1})
        times: dict[str, list[float]] = {"one": [], "two": [], "two apart": []}
        for number in range(ROUNDS + 1):
            for key, found in (
                ("one", seconds(servers[:1])), ("two", seconds(servers)), ("two apart", seconds(servers, clients=2)),
            ):  # fmt: skip
                times[key] += [found] if number else []
    print(f"one server: {REQUESTS * TOKENS / statistics.median(times['one']):.0f} tokens/s")
    for key in ("two", "two apart"):
        ratios = sorted(a / b for a, b in zip(times["one"], times[key], strict=True))
        print(f"{key}: {statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    run_script(main, NoFlags, __doc__)
