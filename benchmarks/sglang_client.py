"""The cost of the SGLang client: sampling against SGLang's own benchmark client, weights against a raw broadcast.

    RLKIT_SGLANG_PYTHON=$(make -s sglang-cpu) python benchmarks/sglang_client.py

Sampling. One server (a Qwen3 of 1.0 M parameters on one thread), the same load from both clients in turns: random
prompts of 32 tokens, log-probs of every token, no stream, at most 64 or 512 requests at once. A ratio is the tokens/s
of `SGLang.generate` over those of `sglang.bench_serving`'s request function in the same round; `cpu_share` is the
client's processor time over the time of the round. Both run on the machine that the server runs on.

Weights. A Qwen3 of 0.5 GB in fp32; `update_weights` with `FromGroup(backend="gloo")`, whole (pause, session, all
buckets, loading, flush, continue), over a gloo broadcast of the same bytes, from a tensor that is there to one that is
there. `server_s` is what SGLang takes by itself for such an update when the bytes need not travel: the same control
requests, and loading buckets of the same size that lie in shared memory already. So `raw_s + server_s` is what a client
that costs nothing would take, and `floor` is that over `raw_s`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _cli import run_script
from _timing import machine

from rlkit._util.extras import interpreter
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.servers.tensors import Bucket, Memory, flatten, groups
from rlkit.rollout.engines.sglang import FromGroup, Server, SGLang, launch
from rlkit.rollout.engines.sglang.weights import _handle
from rlkit.types import SamplingParams

PEER = Path(__file__).parent / "peers" / "sglang_bench_client.py"
PROMPT_TOKENS = 32
LOADS = {64: (128, 32), 512: (512, 16)}  # at once: (requests, new tokens)


@dataclass
class Args:
    rounds: int = 9
    """counted rounds of each pair"""
    parts: tuple[str, ...] = ("sampling", "weights")
    """which of sampling, weights"""
    at_once: tuple[int, ...] = tuple(LOADS)
    """sampling: how many requests at once"""
    out: Path = Path("benchmarks/results/sglang_client_cpu.json")
    """where the figures go"""


def main(args: Args) -> None:
    interpreter("sglang")
    results: dict[str, Any] = {"machine": machine(), "rounds": args.rounds}
    for part in args.parts:
        results[part] = weights(args.rounds) if part == "weights" else sampling(args.rounds, args.at_once)
        print(json.dumps(results[part], indent=2))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(args.out.read_text()) if args.out.exists() else {}
    if "sampling" in results:
        results["sampling"] = old.get("sampling", {}) | results["sampling"]
    args.out.write_text(json.dumps(old | results, indent=2) + "\n")


def serve(folder: Path, **shape: int) -> tuple[Server, torch.nn.Module]:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, **shape)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return launch(folder, device="cpu", args=["--max-total-tokens", "65536"], log=folder / "log.txt"), model


def sampling(rounds: int, at_once: Sequence[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server, _ = serve(Path(folder))
        command = [interpreter("sglang"), str(PEER)]
        peer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert peer.stdout is not None
            while peer.stdout.readline().strip() != "ready":
                assert peer.poll() is None, "the peer ended"
            return {str(n): compare(server.url, peer, n, rounds) for n in at_once}
        finally:
            peer.kill()
            server.close()


def compare(url: str, peer: subprocess.Popen[str], concurrency: int, rounds: int) -> dict[str, Any]:
    requests, new_tokens = LOADS[concurrency]
    rng = random.Random(0)
    ours, theirs = [], []
    for number in range(rounds + 1):
        load = {"url": url, "new_tokens": new_tokens, "concurrency": concurrency}
        pair = [(measure_ours, ours), (measure_peer, theirs)]
        for measure, kept in pair if number % 2 else pair[::-1]:
            load["prompts"] = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
            result = measure(peer, load)
            if number:  # the first round warms up
                kept.append(result)
    tokens = requests * new_tokens
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "tokens_per_s": round(statistics.median(tokens / a["seconds"] for a in ours)),
        "peer_tokens_per_s": round(statistics.median(tokens / b["seconds"] for b in theirs)),
        "ratio": summary(ratios),
        "cpu_share": summary([a["cpu"] / a["seconds"] for a in ours]),
        "peer_cpu_share": summary([b["cpu"] / b["seconds"] for b in theirs]),
        "cpu_ms_per_request": round(1e3 * statistics.median(a["cpu"] for a in ours) / requests, 3),
        "peer_cpu_ms_per_request": round(1e3 * statistics.median(b["cpu"] for b in theirs) / requests, 3),
    }


def measure_peer(peer: subprocess.Popen[str], load: dict[str, Any]) -> dict[str, float]:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(json.dumps(load) + "\n")
    peer.stdin.flush()
    return json.loads(peer.stdout.readline())


def measure_ours(_peer: Any, load: dict[str, Any]) -> dict[str, float]:
    async def run() -> float:
        semaphore = asyncio.Semaphore(load["concurrency"])
        params = SamplingParams(max_new_tokens=load["new_tokens"])

        async def one(engine: SGLang, prompt: list[int]) -> None:
            async with semaphore:
                out = await engine.generate(prompt, params=params)
            assert len(out.ids) == load["new_tokens"]

        began = time.perf_counter()
        async with SGLang(load["url"]) as engine:
            await asyncio.gather(*(one(engine, prompt) for prompt in load["prompts"]))
            return time.perf_counter() - began

    cpu = time.process_time()
    return {"seconds": asyncio.run(run()), "cpu": time.process_time() - cpu}


def weights(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden": 1024, "layers": 10, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 3072}
        server, model = serve(Path(folder), **shape)
        num_bytes = sum(p.nbytes for p in model.parameters())
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        receiver = mp.get_context("spawn").Process(
            target=receive, args=(store.port, num_bytes, rounds + 1), daemon=True
        )
        receiver.start()
        try:
            raw_group = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), 0, 2, timedelta(seconds=300))
            syncs, raws, alone = asyncio.run(alternate(server.url, model, raw_group, rounds))
        finally:
            receiver.kill()
            server.close()
    return {
        "gigabytes": round(num_bytes / 1e9, 3),
        "sync_s": round(statistics.median(syncs), 3),
        "raw_s": round(statistics.median(raws), 3),
        "server_s": round(statistics.median(alone), 3),
        "ratio": summary([s / r for s, r in zip(syncs, raws, strict=True)]),
        "floor": summary([1 + a / r for a, r in zip(alone, raws, strict=True)]),
    }


async def alternate(url: str, model: Any, raw: Any, rounds: int) -> tuple[list[float], list[float], list[float]]:
    transport = FromGroup(backend="gloo")
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in stream_weights(model)])
    named_buckets = groups(stream_weights(model), max_bytes=transport._bucket_bytes)
    there = InPlace([flatten(named, Memory()) for named, _ in named_buckets])
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    async with SGLang(url, transport=transport) as engine, SGLang(url, transport=there) as server:
        for number in range(rounds + 1):
            began = time.perf_counter()
            raw.broadcast([flat]).wait()
            sent = time.perf_counter()
            await engine.update_weights(stream_weights(model), version=number)
            synced = time.perf_counter()
            await server.update_weights((), version=number)
            alone = time.perf_counter() - synced
            for kept, seconds in zip(times, (synced - sent, sent - began, alone), strict=True):
                if number:  # the first update makes the group
                    kept.append(seconds)
    return times


class InPlace:
    """Makes the server load buckets that already are in shared memory."""

    sessions = True

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets

    async def send(self, servers: Sequence[Any], _named_tensors: Any, *, version: int) -> None:
        for bucket in self._buckets:
            body = {"serialized_named_tensors": [_handle(bucket)], "load_format": "flattened_bucket"}
            body |= {"flush_cache": False, "weight_version": str(version)}
            await servers[0].post("/update_weights_from_tensor", body)

    async def close(self) -> None: ...


def receive(port: int, num_bytes: int, times: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
    group = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), 1, 2, timedelta(seconds=300))
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    for _ in range(times):
        group.broadcast([flat]).wait()


def summary(ratios: list[float]) -> dict[str, float]:
    """Median, and from 9 rounds on an interval that covers it with 96% or more: all but the extreme ones."""
    ordered = sorted(ratios)
    low, high = (ordered[1], ordered[-2]) if len(ordered) >= 9 else (ordered[0], ordered[-1])
    return {"median": round(statistics.median(ordered), 3), "low": round(low, 3), "high": round(high, 3)}


if __name__ == "__main__":
    run_script(main, Args, __doc__)
