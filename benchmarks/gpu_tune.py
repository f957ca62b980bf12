"""Measures the constants of the Triton kernels on this device, and prints the best as lines to paste.

    PYTHONPATH=. python benchmarks/gpu_tune.py --seconds 420
    PYTHONPATH=. python benchmarks/gpu_tune.py --seconds 270 --groups statistics backward
    PYTHONPATH=. python benchmarks/gpu_tune.py --rehearse --out /tmp/x   # without a device, in Triton's interpreter

Each group of constants has workloads; a configuration's score is its time over that of the shipped constants,
averaged over them (below 1 is better). The time that is left is shared equally by the groups that are left. A
configuration that fails is reported and costs nothing else. `--out`/tuning.json has all of them, and as `best` the
fastest, or the shipped ones where those are at most 2% slower. The best are set for the next groups, and used by
`gpu_kernels.py` and `gpu_training.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--rehearse" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

import torch
from _gpu import CUDA, DEVICE, lost, machine, median_ms, reason, save

from rlkit.kernels.linear_logp import linear_logp, triton
from rlkit.kernels.linear_scan import linear_scan
from rlkit.kernels.linear_scan import triton as scan
from rlkit.kernels.logits_logp import logits_logp

ROWS, DIM, VOCAB, TOKENS = (8192, 4096, 151_936, 1 << 23) if CUDA else (2, 8, 40, 512)
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter is slow in bf16
MB = 1 << 20
GAIN = 0.98  # a score above it is noise
Choices = dict[tuple[Any, str], list[Any]]  # (module, constant): values
Workloads = dict[str, Callable[[], Any]]


def rows(now: dict[str, Any], registers: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Values of STATS (with limits on `registers`, and whole lanes in each thread) or GRADIENT, which are `now`."""
    sizes = [(b, w) for b in (2048, 4096, 8192) for w in (4, 8, 16)]
    if not registers:
        return [now | {"BLOCK": b, "num_warps": w} for b, w in sizes]
    whole = [(b, w) for b, w in sizes if 512 * w <= b < 2048 * w]  # whole lanes; more columns a thread spill
    return [now | {"BLOCK": b, "num_warps": w, "maxnreg": n} for b, w in whole for n in registers]


def groups() -> dict[str, tuple[Choices, Callable[[], Workloads]]]:
    heights, widths = [512, 1024, 2048, 4096], [4096, 8192, 16_384, 32_768]
    backward: Choices = {
        (triton, "BLOCK_BYTES"): [16 * MB, 32 * MB, 64 * MB, 256 * MB],
        (triton, "GRADIENT_BYTES"): [64 * MB, 128 * MB, 512 * MB],  # at 256 MB there are MAX_WIDTH columns already
        (triton, "NARROW"): [1024, 2048, 4096],  # of the forward too
    }
    stats, gradient = rows(triton.STATS, (64, 80, 128)), rows(triton.GRADIENT)
    scanning: Choices = {(scan, "BLOCK"): [512, 1024, 2048, 4096], (scan, "NUM_WARPS"): [2, 4, 8]}
    return {
        "statistics": ({(triton, "STATS"): stats}, lambda: from_logits(False) | from_hidden(False)),
        "gradient": ({(triton, "GRADIENT"): gradient}, lambda: from_logits(True) | from_hidden(True)),
        "forward": ({(triton, "HEIGHT"): heights, (triton, "WIDTH"): widths}, partial(from_hidden, False)),
        "backward": (backward, partial(from_hidden, True)),
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


def best_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest constants, or the shipped ones, which come first, where the gain is no more than noise."""
    good = [row for row in found if "score" in row]
    fastest = min(good, key=lambda row: row["score"], default=None)
    if fastest is None:
        return {}
    return fastest["set"] if fastest["score"] <= GAIN else good[0]["set"]


def use(folder: Path) -> dict[str, Any]:
    """Set the best constants that `folder`/tuning.json has for this device, and return them.

    Those that this version of the kernels lacks, or has in another form, stay as shipped, and are named.
    """
    path = folder / "tuning.json"
    found = json.loads(path.read_text()).values() if path.exists() else []
    ours = [group["results"] for group in found if group["results"]["machine"]["device"] == machine()["device"]]
    return {k: v for result in ours for k, v in result.get("best", {}).items() if was_set(k, v)}


def was_set(name: str, value: Any) -> bool:
    """Set the constant `package.module.NAME`; False if there is none of this kind."""
    home, _, constant = name.rpartition(".")
    module = importlib.import_module(home)
    now = getattr(module, constant, None)
    fits = type(now) is type(value) and (not isinstance(now, dict) or now.keys() == value.keys())
    if fits:
        setattr(module, constant, value)
    else:
        print(f"{name} = {value} is left out: it was tuned for another version of the kernels", flush=True)
    return fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0, help="for all groups together")
    parser.add_argument("--groups", nargs="*", choices=list(groups()), default=list(groups()), help="which, in order")
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes, few configurations")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of tuning.json")
    args = parser.parse_args()
    if not CUDA and not args.rehearse:
        parser.error("no CUDA device; see --rehearse above")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("without a device the kernels run in Triton's interpreter only: set TRITON_INTERPRET=1")
    best, ran, end = [], 0, time.monotonic() + args.seconds
    for i, name in enumerate(args.groups):
        choices, make = groups()[name]
        found: list[dict[str, Any]] = []
        try:
            found.extend(tried(choices, make, seconds=(end - time.monotonic()) / (len(args.groups) - i)))
        except Exception as error:
            found.append({"error": reason(error)})
        result = {"machine": machine(), "best": best_of(found), "rows": found}
        save(args.out / "tuning.json", name, "results", result)
        best += [f"{key} = {value}" for key, value in result["best"].items() if was_set(key, value)]
        good = sorted((row for row in found if "score" in row), key=lambda row: row["score"])
        bad = [row for row in found if "error" in row]
        print(f"{name}: {len(good)} ran, {len(bad)} failed", *good[:3], *bad[:2], sep="\n  ", flush=True)
        ran += len(good)
        gc.collect()
        if lost():
            print("the device is lost; what is left: start again")
            break
        if CUDA:
            torch.cuda.empty_cache()
    if not ran:
        raise SystemExit("error: no configuration ran")
    print("\nbest:", *best, sep="\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
