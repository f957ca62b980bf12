"""Generation alone: the embedded engine against Hugging Face `generate`, in turns, in one process.

    python benchmarks/generation.py

64 requests, 8 prompts of 24 tokens with 8 samples each, on two random Qwen3 models: nano (1.0 M parameters) and micro
(9.5 M). Equal lengths (32 tokens each), and log-normal ones, where a static batch waits for its longest row. A ratio is
the engine's tokens/s over those of `generate` in the same round, which samples with a dynamic cache and returns no
log-probs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from _models import build
from _timing import machine

from rlkit.rollout.engines.local import LocalEngine
from rlkit.types import SamplingParams


@dataclass
class Args:
    models: tuple[str, ...] = ("nano", "micro")
    """which of nano, micro"""
    rounds: int = 7
    """counted rounds of each pair"""
    compile: bool = True
    """measure the compiled engine as well"""
    threads: int = 2
    """of torch"""
    out: Path = Path("benchmarks/results/generation_cpu.json")
    """where the figures go"""


def lengths(kind: str) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(64).log_normal_(3.2, 0.8, generator=generator)
    return [32] * 64 if kind == "equal" else [max(1, min(256, int(x))) for x in drawn]


def measure(model: Any, kind: str, *, compiled: bool, rounds: int) -> dict[str, Any]:
    """Tokens/s of both sides, round by round."""
    limits = lengths(kind)
    prompts = torch.randint(0, 263, (8, 24), generator=torch.Generator().manual_seed(1)).repeat_interleave(8, 0)
    engine = LocalEngine(model, eos_token_ids=(), compile=compiled)
    params = [SamplingParams(max_new_tokens=n, seed=i) for i, n in enumerate(limits)]

    async def ours() -> None:
        await asyncio.gather(*(engine.generate(p, params=s) for p, s in zip(prompts.tolist(), params, strict=True)))

    def peer() -> None:
        longest = max(limits)
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, top_p=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
        )  # fmt: skip

    def rate(run: Any) -> float:
        start = time.perf_counter()
        run()
        return sum(limits) / (time.perf_counter() - start)

    sides = (lambda: asyncio.run(ours())), peer
    for run in (*sides, *sides):
        run()
    figures = [tuple(rate(run) for run in sides) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in figures)
    return {
        "lengths": kind,
        "compiled": compiled,
        "engine": statistics.median(a for a, _ in figures),
        "generate": statistics.median(b for _, b in figures),
        "ratio": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
    }


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    rows = []
    print(f"{'model':8}{'lengths':12}{'compiled':10}{'engine tok/s':>14}{'generate':>10}{'ratio':>8}   spread")
    for name in args.models:
        model = build(name)
        for compiled in (False, True) if args.compile else (False,):
            for kind in ("equal", "log-normal"):
                row = {"model": name, **measure(model, kind, compiled=compiled, rounds=args.rounds)}
                low, high = row["spread"]
                print(
                    f"{name:8}{kind:12}{compiled!s:10}{row['engine']:14.0f}{row['generate']:10.0f}{row['ratio']:8.2f}"
                    f"   {low:.2f}-{high:.2f}",
                    flush=True,
                )
                rows.append(row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
