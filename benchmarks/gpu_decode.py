"""A decoding step of the embedded engine on a GPU beside its memory bound: recorded and fused, eager, and in fp32.

    PYTHONPATH=. python benchmarks/gpu_decode.py --out results
    PYTHONPATH=. python benchmarks/gpu_decode.py --sizes 7B --rows 64 --profile --out results
    PYTHONPATH=. python benchmarks/gpu_decode.py --rehearse --out /tmp/x          # tiny, on the CPU

Milliseconds of a token for all rows, sampling and the copy to the host included, with 512 tokens in each slot. A
recorded step is launched before the tokens of the one before it are read, as in the engine. The bound is the time in
which a copy moves the bytes that a step must read: the bf16 weights once (a tied embedding as the head), and keys and
values. `--profile` adds the device time of each kernel in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _gpu import CUDA, DEVICE, Row, machine, median_ms, reason, save
from gpu_grpo import SIZES, build

from rlkit.rollout.engines.local.decode import Decoder
from rlkit.rollout.engines.local.fused import FusedDecoder
from rlkit.rollout.sampling import sample

PLACES = 512


def main() -> None:
    """Measure each size with each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=["1.5B", "0.5B", "7B"])
    parser.add_argument("--rows", nargs="*", type=int, default=[256, 64])
    parser.add_argument("--profile", action="store_true", help="device time of each kernel")
    parser.add_argument("--only-fused", action="store_true", help="leave out what is slower")
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder of decode.json")
    args = parser.parse_args()
    if args.rehearse:
        args.sizes, args.rows = ["tiny"], [3]
    elif not CUDA:
        parser.error("no CUDA device; --rehearse runs every line on the CPU")
    speed = copy_speed()
    for name in args.sizes:
        model = build(SimpleNamespace(size=name, vocab=151_936 if CUDA else 300))
        for rows in args.rows:
            for row in measured(model, rows, speed, args):
                print(json.dumps(row), flush=True)
                save(args.out / "decode.json", name, f"{rows} {row['side']}", {"machine": machine()} | row)
        del model
        if CUDA:
            torch.cuda.empty_cache()


def copy_speed() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty(1 << 30 if CUDA else 1 << 10, dtype=torch.bfloat16, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source)))


def measured(model: Any, rows: int, speed: float, args: argparse.Namespace) -> list[Row]:
    """A row for each way to decode."""
    config, length = model.config, 768
    weights = sum(p.numel() for p in model.parameters())
    weights -= 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    place = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    bound = 1e3 * 2 * (weights + rows * PLACES * config.num_hidden_layers * place) / speed
    tokens, positions = np.zeros(rows, np.int64), np.full(rows, PLACES - 1, np.int64)
    noise = np.full(rows, 0.5)
    out: list[Row] = []

    def add(side: str, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any] | None:
        row: Row = {"side": side, "rows": rows, "bound_ms": round(bound, 3)}
        run = None
        try:
            run = make()
            ms = per_step(run)
            row |= {"ms": round(ms, 3), "tokens_s": round(1e3 * rows / ms), "of_bound": round(bound / ms, 3)}
        except Exception as error:  # the other rows are worth having
            row["error"] = reason(error)
        out.append(row)
        return run

    def fused() -> Callable[[], Any]:
        decoder = FusedDecoder(model, max_batch=rows, max_len=1024, dtype=torch.bfloat16)
        decoder.reserve(rows, length, keep=0)
        flights = [decoder.launch((tokens, positions), noise, None)]

        def step() -> None:  # as in the engine: launched before the one before it is read
            flights.append(decoder.launch((tokens, positions), noise, None))
            flights.pop(0)()

        return step

    def plain() -> Callable[[], Any]:
        decoder = Decoder(model, max_batch=rows, max_len=1024)
        decoder.reserve(rows, length, keep=0)
        ids, at, u = (torch.from_numpy(x).to(DEVICE) for x in (tokens, positions, noise))
        return lambda: sample(decoder.decode(ids, at), u).ids.cpu()

    with torch.inference_mode():
        run = add("fused", fused)
        if args.profile and run is not None and CUDA:
            out[-1]["kernels_ms"] = kernels(run)
        del run
        if not args.only_fused:
            add("in place, fp32", plain)
    return out


def per_step(run: Callable[[], Any], seconds: float = 1.0) -> float:
    """Median milliseconds of a step with its host work."""
    for _ in range(3):
        run()
    times: list[float] = []
    end = time.monotonic() + seconds * CUDA
    while len(times) < 5 or time.monotonic() < end:
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def kernels(run: Callable[[], Any], steps: int = 5) -> dict[str, float]:
    """Device milliseconds of a step by kernel, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    total: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        total[event.key[:90]] += event.self_device_time_total / 1e3 / steps
    largest = sorted(total.items(), key=lambda item: -item[1])[:14]
    return {name: round(ms, 4) for name, ms in [*largest, ("all", sum(total.values()))]}


if __name__ == "__main__":
    main()
