"""Packed against padded training on a log-normal mix of lengths, and how evenly tokens fall on ranks.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

One forward and backward over the same sequences with the same model and the same loss over the same real tokens, in
micro-batches of one token budget: rows padded to the longest of their micro-batch, in random order and sorted by
length, against packed streams. Lengths are log-normal (sigma 1, at most 16 times the median). A ratio compares the same
round. The balance is counted, not timed: groups of 8 share a prompt as long as the median, and tokens of the fullest
rank stand over an even share in which every prompt counts once, or the longest sequence: what no partition can beat.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cli import run_script
from _timing import interleaved, report

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.kernels.linear_logp import linear_logp
from rlkit.model.forward import forward, prepare_model
from rlkit.packing import microbatches, pack
from rlkit.packing.balancing import plan_microbatches
from rlkit.parallel.attention import as_inference
from rlkit.segments import seq_lens
from rlkit.types import Batch, Trajectory

ATTENTION = 3.6e-5  # `rlkit.model.flops.attention_share` of Qwen3-8B
LONG = ((8, 256, 2048), (8, 256, 6144), (16, 512, 6144), (32, 256, 6144))  # ranks, sequences, median


@dataclass
class Args:
    """Sizes."""

    sequences: int = 32
    median: int = 48
    max_tokens: int = 2048
    hidden: int = 192
    layers: int = 4
    repeats: int = 9
    seed: int = 0
    out: Path = Path("benchmarks/results/packing_cpu.json")


def lengths(n: int, *, median: int, seed: int) -> list[int]:
    """Log-normal, sigma 1, at most 16 times the median; the longest possible is among them."""
    draws = torch.randn(n, generator=torch.Generator().manual_seed(seed)).exp() * median
    found = [max(2, int(x)) for x in draws.clamp(max=16 * median)]
    return [16 * median, *found[1:]]


def sequence(length: int, *, prompt: int = 1, seed: int = 0) -> Trajectory:
    """`length` tokens after a prompt that depends on the seed."""
    ids = [(7 * i + length) % 250 for i in range(length)]
    return Trajectory([seed % 250 + i % 5 for i in range(prompt)], ids, [True] * length, [-1.0] * length, [0] * length)


def packed_step(model: Any, batch: Batch, *, max_tokens: int) -> float:
    """Sum of log-probs, forward and backward."""
    total = 0.0
    for (micro,) in microbatches((batch,), max_tokens=max_tokens):
        loss = -forward(model, micro).logp.sum()
        loss.backward()
        total += loss.item()
    model.zero_grad()
    return total


def padded_step(model: Any, rows: list[list[int]], *, max_tokens: int) -> float:
    """The same on padded rows: as many in a micro-batch as keep rows * longest inside the budget."""
    total, parts = 0.0, [[]]
    for row in rows:
        if parts[-1] and (len(parts[-1]) + 1) * max(map(len, [*parts[-1], row])) > max_tokens:
            parts.append([])
        parts[-1].append(row)
    for part in parts:
        longest = max(map(len, part))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in part])
        real = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
        with as_inference(model):
            model.set_attn_implementation("sdpa")
            hidden = model.base_model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
            model.set_attn_implementation("eager")
        used = real[:, 1:].bool()
        loss = -linear_logp(hidden[:, :-1][used], model.lm_head.weight, ids[:, 1:][used]).logp.sum()
        loss.backward()
        total += loss.item()
    model.zero_grad()
    return total


def grouped(*, sequences: int, median: int, group_size: int, seed: int) -> Batch:
    """Groups of log-normal lengths, each with a prompt as long as the median."""
    lens = lengths(sequences, median=median, seed=seed)
    return pack(
        [
            [sequence(n, prompt=median, seed=g) for n in lens[i : i + group_size]]
            for g, i in enumerate(range(0, sequences, group_size))
        ]
    )


def long_contexts(*, ranks: int, sequences: int, median: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """Work of the rank that works longest in each micro-batch, over an even share of the work or its largest part: bins
    ordered by tokens, and by work, with the attention of a model of 8 B parameters."""
    batch = grouped(sequences=sequences, median=median, group_size=8, seed=seed)
    before, own = median - 1, seq_lens(batch.cu_seqlens).tolist()

    def work(members: list[int]) -> float:
        prompts = len({int(batch.prefix_ids[i]) for i in members})
        seen = sum(own[i] * (1 + ATTENTION * (before + own[i] / 2)) for i in members)
        return seen + prompts * before * (1 + ATTENTION * before / 2)

    waits = {}
    for name, attention in (("tokens", 0.0), ("work", ATTENTION)):
        plan = plan_microbatches(batch, max_tokens=max_tokens, ranks=ranks, attention=attention)
        works = [work(members) for members in plan.bins]
        waits[name] = sum(max(works[i : i + ranks]) for i in range(0, len(works), ranks))
    ideal = max(work([*range(len(own))]) / ranks, max(work([i]) for i in range(len(own))))
    sizes = {"ranks": ranks, "sequences": sequences, "median": median, "longest": max(own) + before}
    return {**sizes, "max tokens": max_tokens, **{f"by {name} / bound": x / ideal for name, x in waits.items()}}


def balance(*, ranks: int, sequences: int, median: int, group_size: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """Over an even share of the batch with every prompt once: tokens of the fullest rank, and with what ranks wait for
    the fullest of each micro-batch."""
    lens = lengths(sequences, median=median, seed=seed)
    batch = grouped(sequences=sequences, median=median, group_size=group_size, seed=seed)
    begin = time.process_time()
    plan = plan_microbatches(batch, max_tokens=max_tokens, ranks=ranks)
    seconds = time.process_time() - begin
    own, prefix = seq_lens(batch.cu_seqlens).tolist(), seq_lens(batch.prefix_cu).tolist()
    ids = batch.prefix_ids.tolist()
    loads = [sum(own[i] for i in b) + sum(prefix[p] for p in {ids[i] for i in b}) for b in plan.bins]
    per_rank = [sum(loads[r::ranks]) for r in range(ranks)]
    waits = sum(max(loads[i : i + ranks]) for i in range(0, len(loads), ranks))
    ideal = max((batch.num_tokens + batch.prefix_tokens.numel()) / ranks, max(lens) + median - 1)
    return {
        "ranks": ranks,
        "sequences": sequences,
        "micro-batches": len(loads) // ranks,
        "fullest rank / bound": max(per_rank) / ideal,
        "with waits / bound": waits / ideal,
        "fullest micro-batch / bound": plan.makespan / plan.bound,
        "planned in ms": 1e3 * seconds,
    }


def main(args: Args) -> None:
    """Time, count and write."""
    torch.manual_seed(args.seed)
    sizes = {"hidden": args.hidden, "layers": args.layers, "heads": 4, "kv_heads": 2, "head_dim": 32}
    model = prepare_model(tiny_model(tiny_tokenizer(), **sizes, intermediate=3 * args.hidden))
    lens = lengths(args.sequences, median=args.median, seed=args.seed)
    samples = [sequence(n) for n in lens]
    rows, batch = [t.prompt_ids + t.ids for t in samples], pack([[t] for t in samples])
    ordered = sorted(rows, key=len)
    steps = {
        "packed": partial(packed_step, model, batch, max_tokens=args.max_tokens),
        "padded, random order": partial(padded_step, model, rows, max_tokens=args.max_tokens),
        "padded, sorted by length": partial(padded_step, model, ordered, max_tokens=args.max_tokens),
    }
    values = {name: step() for name, step in steps.items()}
    assert all(abs(v / values["packed"] - 1) < 1e-4 for v in values.values()), values
    times = interleaved(steps, repeats=args.repeats)
    described = {**{k: str(v) for k, v in vars(args).items()}, "tokens": sum(lens), "longest": max(lens)}
    report(times, baseline="packed", sizes=described, memory={}, out=args.out)
    rows_ = []
    for ranks, sequences in ((2, 64), (4, 128), (8, 256), (8, 1024), (64, 2048)):
        sizes_ = {"median": 512, "group_size": 8, "max_tokens": 16384, "seed": args.seed}
        rows_.append(balance(ranks=ranks, sequences=sequences, **sizes_))
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows_[-1].items()))
    long = [
        long_contexts(ranks=ranks, sequences=sequences, median=median, max_tokens=20 * median, seed=args.seed)
        for ranks, sequences, median in LONG
    ]
    for row in long:
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    found = json.loads(args.out.read_text())
    args.out.write_text(json.dumps({**found, "balance": rows_, "long contexts": long}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
