"""Measures the constants of the Triton kernels on this device, and prints the best as lines to paste.

    PYTHONPATH=. python benchmarks/gpu_tune.py --seconds 420
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_tune.py --rehearse --out /tmp/x   # without a device

Each group of constants has workloads; a configuration's score is its time over that of the shipped constants,
averaged over them (below 1 is better). Groups share the time equally. A configuration that fails is reported and costs
nothing else.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu import CUDA, DEVICE, lost, machine, median_ms, reason, save

from rlkit.kernels.linear_logp import fused_loss, linear_logp, triton
from rlkit.kernels.linear_scan import linear_scan
from rlkit.kernels.linear_scan import triton as scan
from rlkit.kernels.logits_logp import logits_logp

ROWS, DIM, VOCAB, TOKENS = (8192, 4096, 151_936, 1 << 23) if CUDA else (2, 8, 40, 512)
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter is slow in bf16
MB = 1 << 20
Choices = dict[tuple[Any, str], list[Any]]  # (module, constant): values
Workloads = dict[str, Callable[[], Any]]


def rows(now: dict[str, Any], registers: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Values of STATS (with limits on `registers`) or GRADIENT, which are `now`."""
    out = [now | {"BLOCK": b, "num_warps": w} for b in (2048, 4096, 8192) for w in (4, 8, 16)]
    return [row | {"maxnreg": n} for row in out for n in registers] if registers else out


def groups() -> dict[str, tuple[Choices, Callable[[], Workloads]]]:
    heights, widths = [512, 1024, 2048, 4096], [4096, 8192, 16_384, 32_768]
    sizes = [64 * MB, 128 * MB, 256 * MB, 512 * MB]
    stats, gradient = rows(triton.STATS, (64, 80, 128)), rows(triton.GRADIENT)
    scanning: Choices = {(scan, "BLOCK"): [512, 1024, 2048, 4096], (scan, "NUM_WARPS"): [2, 4, 8]}
    return {
        "statistics": ({(triton, "STATS"): stats}, lambda: from_logits(False) | from_hidden(False)),
        "gradient": ({(triton, "GRADIENT"): gradient}, lambda: from_logits(True) | from_hidden(True)),
        "forward": ({(triton, "HEIGHT"): heights, (triton, "WIDTH"): widths}, partial(from_hidden, False)),
        "backward": ({(triton, "BLOCK_BYTES"): [16 * MB, 32 * MB, 64 * MB, 256 * MB],
                      (triton, "GRADIENT_BYTES"): sizes}, partial(from_hidden, True)),
        "fused": ({(triton, "CHUNK_BYTES"): [n << 10 for n in (MB, 2 * MB, 4 * MB, 8 * MB)]}, fused),
        "scan": (scanning, scans),
    }  # fmt: skip


def head(dim: int = DIM) -> tuple[torch.Tensor, ...]:
    h, w = (torch.randn(n, dim, device=DEVICE, dtype=DTYPE) / dim**0.25 for n in (ROWS, VOCAB))
    return h.requires_grad_(), w.requires_grad_(), torch.randint(VOCAB, (ROWS,), device=DEVICE)


def from_hidden(gradient: bool) -> Workloads:
    """At the usual width, and at one so small that the host may be slower than the device."""

    def make(dim: int) -> Callable[[], Any]:
        h, w, t = head(dim)
        run = partial(linear_logp, h, w, t, impl="triton")
        both = lambda: torch.autograd.grad(sum(x.sum() for x in run()), (h, w))  # noqa: E731
        return both if gradient else torch.no_grad()(run)

    return {f"linear_logp, {dim} wide": make(dim) for dim in (DIM, DIM // 4)}


def from_logits(gradient: bool) -> Workloads:
    z = torch.randn(ROWS, VOCAB, device=DEVICE, dtype=DTYPE).requires_grad_(gradient)
    run = partial(logits_logp, z, torch.zeros(ROWS, dtype=torch.long, device=DEVICE), impl="triton")
    out = run()
    both = partial(torch.autograd.grad, out, z, [x.detach() for x in out], retain_graph=True)
    return {"logits_logp": both if gradient else run}


def fused() -> Workloads:
    h, w, t = head()
    run = partial(fused_loss, h, w, t, loss_fn=lambda out: -out.logp, impl="triton")
    return {"fused_loss": lambda: torch.autograd.grad(run().loss, (h, w))}


def scans() -> Workloads:
    a, b = torch.rand(TOKENS, device=DEVICE), torch.randn(TOKENS, device=DEVICE)
    run = partial(linear_scan, a, b, cu_seqlens=torch.arange(0, TOKENS + 1, 256, device=DEVICE), impl="triton")
    return {"in reverse": run, "forward in time": partial(run, reverse=False)}


def tried(choices: Choices, make: Callable[[], Workloads], *, seconds: float) -> Iterator[dict[str, Any]]:
    """The shipped constants first, then all others, until the time is over. Leaves the shipped ones in place."""
    shipped = {key: getattr(*key) for key in choices}
    every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    workloads, end, baseline = make(), time.monotonic() + seconds, {}
    for settings in [shipped, *(s for s in every if s != shipped)][: None if CUDA else 2]:
        for key, value in settings.items():
            setattr(*key, value)
        row: dict[str, Any] = {"set": {f"{module.__name__}.{name}": v for (module, name), v in settings.items()}}
        try:
            row["ms"] = {name: round(median_ms(run, seconds=0.5, rounds=7), 4) for name, run in workloads.items()}
            baseline = baseline or row["ms"]
            row["score"] = round(statistics.mean(row["ms"][k] / baseline[k] for k in baseline), 4)
        except Exception as error:
            row["error"] = reason(error)
        yield row
        if time.monotonic() > end:
            break
    for key, value in shipped.items():
        setattr(*key, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0, help="for all groups together")
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes, few configurations")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of tuning.json")
    args = parser.parse_args()
    if not CUDA and not args.rehearse:
        parser.error("no CUDA device; see --rehearse above")
    best = []
    for name, (choices, make) in groups().items():
        found: list[dict[str, Any]] = []
        try:
            found.extend(tried(choices, make, seconds=args.seconds / len(groups())))
        except Exception as error:
            found.append({"error": reason(error)})
        save(args.out / "tuning.json", name, "results", {"machine": machine(), "rows": found})
        good = sorted((row for row in found if "score" in row), key=lambda row: row["score"])
        bad = [row for row in found if "error" in row]
        print(f"{name}: {len(good)} ran, {len(bad)} failed", *good[:3], *bad[:2], sep="\n  ", flush=True)
        best += [f"{key} = {value}  # {good[0]['score']}" for key, value in (good[0]["set"] if good else {}).items()]
        gc.collect()
        if lost():
            print("the device is lost; what is left: start again")
            break
        if CUDA:
            torch.cuda.empty_cache()
    print("\nbest:", *best, sep="\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
