"""linear_logp, logits_logp and linear_scan on a CUDA device, against other libraries and the bare products.

    PYTHONPATH=. python benchmarks/gpu_kernels.py --seconds 300          # the first shapes, within the time
    PYTHONPATH=. python benchmarks/gpu_kernels.py --seconds 540 --rest   # those that are not in the file yet

Everything of one shape, the bare products too, runs in turn, round by round, in one process, so that clocks and
temperature affect all equally, and nothing is in the L2 cache when a run begins. A run that leaves the device unusable
(an illegal access in some library) is left out, and a fresh process continues.
Floors are the bare products with the operands of the real ones: 1 for scoring, 4 where any loss may follow, 3 where the
loss is known in advance; written in bf16, and in fp32 as rlkit's logits are. "peaked" inputs are as in a trained model,
where most of the softmax is below 2^-12: apple CCE leaves such gradients out. `extra_mb` is the peak over the inputs,
less the gradients that are handed out. The constants that `gpu_tune.py` found best and left in `--out` are used. The
results, with the device's name, versions, commit and these constants, are written after every shape to
`--out`/<device>.json. A first run (which may compile) is broken off after 40 s, or at the end of `--seconds`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import gpu_peers as peers
import torch
from _gpu import CUDA, DEVICE, WITHOUT, Budget, DeviceLost, Row, lost, machine, median_ms, reason, save, time_all
from gpu_tune import use
from torch import Tensor

from rlkit.kernels.linear_logp import linear_logp
from rlkit.kernels.linear_logp.chunked import product_into
from rlkit.kernels.linear_scan import linear_scan
from rlkit.kernels.logits_logp import logits_logp

SHAPES = {  # rows, hidden size, vocabulary
    "qwen3-8b 16k": (16_384, 4096, 151_936),
    "qwen3-8b 8k": (8192, 4096, 151_936),
    "llama-3.1-8b 4k": (4096, 4096, 128_256),
    "gemma-2-2b 8k": (8192, 2304, 256_000),
    "llama-3.1-70b 2k": (2048, 8192, 128_256),
    "mistral-7b 16k": (16_384, 4096, 32_000),
    "qwen3-0.6b 64k": (65_536, 1024, 151_936),
    "qwen3-1.7b 32k": (32_768, 2048, 151_936),
    "gemma-3-4b 8k": (8192, 2560, 262_144),
    "llama-3.1-70b 8k": (8192, 8192, 128_256),
    "odd vocabulary 8k": (8192, 4096, 32_003),
    "qwen3-8b 64k": (65_536, 4096, 151_936),
}
MAIN = "qwen3-8b 16k"
COMPILED = (MAIN, "llama-3.1-8b 4k")  # shapes at which torch.compile is asked too
PRODUCT_ROWS = 8192  # of a bare product: its result is written over and over
REHEARSAL = {MAIN: (70, 24, 300), "odd vocabulary 8k": (70, 24, 127)}


def summarised(rows: dict[str, Row], floors: dict[str, float], fp32: dict[str, float] | None = None) -> list[Row]:
    """Median, spread, and the ratios to the floors (with bf16 and `fp32` products) whose names begin the row's."""
    out = []
    for row in rows.values():
        if times := row.pop("ms", None):
            row |= {"median_ms": round(statistics.median(times), 4), "runs": len(times)}
            row |= {"fastest_ms": round(min(times), 4), "slowest_ms": round(max(times), 4)}
            for key, of in (("ratio_to_floor", floors), ("ratio_to_fp32_floor", fp32 or {})):
                if floor := next((v for k, v in of.items() if row["name"].startswith(k)), None):
                    row[key] = round(row["median_ms"] / floor, 3)
        out.append(row)
        cells = [f"{row.get(k, '-'):>12}" for k in ("median_ms", "slowest_ms", "ratio_to_floor", "extra_mb")]
        print(f"  {row['name']:52}{''.join(cells)}  {row.get('error', '')}", flush=True)
    return out


def linear(name: str, *, seconds: float, peaked: bool = False) -> dict[str, Any]:
    """All heads at one shape, in bf16.

    Logits are standard normal, or `peaked`: the target's is 6 to 26, the others have a standard deviation of 1.5.
    """
    num_rows, dim, vocab = SHAPES[name] if CUDA else REHEARSAL[name]
    hidden = torch.randn(num_rows, dim, device=DEVICE, dtype=torch.bfloat16)
    weight = (torch.randn(vocab, dim, device=DEVICE, dtype=torch.bfloat16) / dim**0.5).requires_grad_()
    targets = torch.randint(vocab, (num_rows,), device=DEVICE)
    if peaked:
        height = torch.rand(num_rows, 1, device=DEVICE, dtype=torch.bfloat16) * 20 + 6
        hidden = 1.5 * hidden + height * weight.detach()[targets]
    hidden.requires_grad_()
    runs = {
        **products(hidden, weight),
        **scoring(hidden, weight, targets),
        **any_loss(hidden, weight, targets),
        **known_loss(hidden, weight, targets),
    }
    if name not in COMPILED or not CUDA:
        runs.pop("any loss, materialised, torch.compile")
    rows = time_all(dict(sorted(runs.items(), key=lambda run: urgency(run[0]))), seconds=seconds)
    floors, fp32 = sums_of_products(rows, "bf16"), sums_of_products(rows, "fp32")
    gradients = {
        "product": 0,
        "score": 0,
        "any loss": hidden.nbytes + weight.nbytes,
        "known loss": hidden.nbytes + weight.nbytes,
    }
    for run, row in rows.items():
        handed_out = next(v for k, v in gradients.items() if run.startswith(k))
        if "peak_mb" in row:
            row["extra_mb"] = round(row.pop("peak_mb") - handed_out / 2**20, 1)
    about = {
        "rows": num_rows,
        "dim": dim,
        "vocab": vocab,
        "peaked": peaked,
        "floors_ms": floors,
        "fp32_floors_ms": fp32,
    }
    return about | {"results": summarised(rows, floors, fp32)}


def urgency(run: str) -> int:
    """Ours and the floors first, and last what takes a minute to compile: time may run out, or a library hang."""
    return 0 if run.startswith("product") or "rlkit" in run else 2 if "torch.compile" in run else 1


def products(hidden: Tensor, weight: Tensor) -> dict[str, Callable[[], Any]]:
    """The bare matrix products of 16-bit operands, over chunks of rows, written in bf16 and in fp32."""
    h, w = hidden.detach(), weight.detach()
    z = torch.empty(min(PRODUCT_ROWS, h.shape[0]), w.shape[0], device=DEVICE, dtype=h.dtype).normal_()

    def each(product: Callable[[Tensor, Tensor, Tensor], Any], like: Tensor, dtype: torch.dtype) -> None:
        out = torch.empty_like(like, dtype=dtype)
        for top in range(0, h.shape[0], z.shape[0]):
            part = h[top : top + z.shape[0]]
            product(part, z[: part.shape[0]], out)

    runs: dict[str, Callable[[], Any]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        runs |= {
            f"product, logits, {name}": partial(
                each, lambda part, _, out: product_into(out[: len(part)], part, w.T), z, dtype
            ),
            f"product, d_hidden, {name}": partial(
                each, lambda part, z, out: product_into(out[: len(part)], z, w), h, dtype
            ),
            f"product, d_weight, {name}": partial(each, lambda part, z, out: product_into(out, z.T, part), w, dtype),
        }
    return runs


def sums_of_products(rows: dict[str, Row], out: str) -> dict[str, float]:
    """Milliseconds of the products of each kind of run, written as `out`; empty where one of them failed."""
    kinds = [rows.get(f"product, {kind}, {out}", {}).get("ms") for kind in ("logits", "d_hidden", "d_weight")]
    if not all(kinds):
        return {}
    z, d_h, d_w = (statistics.median(ms) for ms in kinds if ms)
    return {"score": z, "any loss": 2 * z + d_h + d_w, "known loss": z + d_h + d_w}


def scoring(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], Any]]:
    """Log-prob and entropy without a gradient."""
    heads = {"rlkit linear_logp": linear_logp, **usable(peers.heads()), "materialised": materialised}
    return {f"score, {k}": torch.no_grad()(partial(head, hidden, weight, targets)) for k, head in heads.items()}


def any_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], Any]]:
    """Log-prob and entropy, a loss of both, and the gradients."""
    g = torch.randn(2, hidden.shape[0], device=DEVICE)
    half = torch.arange(hidden.shape[0], device=DEVICE) % 2 == 0

    def train(head: peers.Head, weights: Tensor = g, entropy: bool = True) -> None:
        logp, ent = head(hidden, weight, targets)
        loss = (weights[0] * logp).sum() + ((weights[1] * ent).sum() if entropy else 0)
        torch.autograd.grad(loss, (hidden, weight))

    compiled = torch.compile(materialised, dynamic=False)
    named = {f"any loss, {k}": partial(train, head) for k, head in usable(peers.heads()).items()}
    return {
        "any loss, rlkit linear_logp": partial(train, linear_logp),
        "any loss, rlkit linear_logp, no entropy": partial(train, linear_logp, entropy=False),
        "any loss, rlkit linear_logp, half of the rows masked": partial(train, partial(linear_logp, mask=half)),
        "any loss, rlkit linear_logp, half without gradient": partial(train, linear_logp, g * half),
        **named,
        "any loss, materialised": partial(train, materialised),
        "any loss, materialised, torch.compile": partial(train, compiled),
    }


def known_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], Any]]:
    """Mean cross entropy and the gradients."""

    def train(loss: peers.Loss) -> None:
        torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))

    def generic(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return -linear_logp(h, w, t).logp.mean()

    def plain(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((h @ w.T).float(), t)

    losses = {"rlkit linear_logp": generic, **usable(peers.losses()), "materialised": plain}
    return {f"known loss, {k}": partial(train, loss) for k, loss in losses.items()}


def materialised(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits, in the model's dtype, and their log-softmax in fp32."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def usable(found: dict[str, Any]) -> dict[str, Any]:
    """Those that are there."""
    return {k: v for k, v in found.items() if callable(v)}


def ceilings(side: int, *, seconds: float) -> dict[str, Any]:
    """What this device reaches: a copy of `side`^2 fp32 numbers 4 times over, and a product of `side`^3 in bf16."""
    a, b = torch.randn(2, side, side, device=DEVICE, dtype=torch.bfloat16)
    source = torch.zeros(4, side, side, device=DEVICE)
    copied, fp32 = torch.empty_like(source), torch.empty_like(source[0])
    product = f"product of {side}^3"
    runs: dict[str, Callable[[], Any]] = {
        "copy": lambda: copied.copy_(source),
        f"{product}, bf16": partial(product_into, torch.empty_like(a), a, b),
        f"{product}, fp32": partial(product_into, fp32, a, b),
    }
    results = summarised(time_all(runs, seconds=seconds), {})
    for row in results:
        if "median_ms" in row:
            amount, unit = (2 * source.nbytes, "gb_per_s") if row["name"] == "copy" else (2 * side**3 / 1e3, "tflops")
            row[unit] = round(amount / row["median_ms"] / 1e6, 1)
            print(f"  {row['name']}: {row[unit]} {unit}", flush=True)
    return {"side": side, "results": results}


def logits(num_rows: int, vocab: int, *, seconds: float) -> dict[str, Any]:
    """From given bf16 logits; the floor is the time in which a copy moves as many bytes."""
    x = torch.randn(num_rows, vocab, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    targets, out = torch.randint(vocab, (num_rows,), device=DEVICE), torch.empty_like(x)
    g = torch.randn(2, num_rows, device=DEVICE)
    copy = median_ms(lambda: out.copy_(x.detach()))

    def plain(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(z.float(), -1)
        return log_p.gather(1, t[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def train(head: Callable[..., Any]) -> None:
        logp, entropy = head(x, targets)
        torch.autograd.grad((g[0] * logp).sum() + (g[1] * entropy).sum(), x)

    def in_place() -> None:
        logp, entropy = logits_logp(x.detach().requires_grad_() * 1, targets, inplace_backward=True)
        ((g[0] * logp).sum() + (g[1] * entropy).sum()).backward()

    heads = {"rlkit logits_logp": logits_logp, **usable(peers.from_logits()), "log_softmax": plain}
    runs = {f"forward, {k}": torch.no_grad()(partial(head, x, targets)) for k, head in heads.items()}
    runs |= {f"both, {k}": partial(train, head) for k, head in heads.items()}
    runs["forward (with a copy), both, rlkit logits_logp, in place"] = in_place
    floors = {"forward,": copy / 2, "both": 1.5 * copy, "forward (with": 2.5 * copy}
    return {
        "rows": num_rows,
        "vocab": vocab,
        "copy_ms": copy,
        "results": summarised(time_all(runs, seconds=seconds), floors),
    }


def scan(num_tokens: int, *, seconds: float) -> dict[str, Any]:
    """Segments of 1 to 8191 tokens in fp32; the floor is the time of reading two streams and writing one."""
    lens = torch.randint(1, 8192, (num_tokens,)).cumsum(0)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lens[lens < num_tokens], torch.tensor([num_tokens])]).to(DEVICE)
    a, b = torch.rand(num_tokens, device=DEVICE), torch.randn(num_tokens, device=DEVICE).requires_grad_()
    plain = b.detach()
    floor = {"": median_ms(lambda: torch.add(a, plain))}
    runs: dict[str, Callable[[], Any]] = {"linear_scan": lambda: linear_scan(a, plain, cu_seqlens=cu)}
    if CUDA:
        runs["linear_scan in a CUDA graph"] = recorded(runs["linear_scan"])
    runs |= {
        "linear_scan, forward in time": lambda: linear_scan(a, plain, cu_seqlens=cu, reverse=False),
        "linear_scan and its gradient": lambda: torch.autograd.grad(linear_scan(a, b, cu_seqlens=cu).sum(), b),
        "linear_scan, torch operations": lambda: linear_scan(a, plain, cu_seqlens=cu, impl="blocked"),
    }
    rows = time_all(runs, seconds=seconds, rounds=50)
    return {"tokens": num_tokens, "segments": cu.numel() - 1, "results": summarised(rows, floor)}


def recorded(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same from a CUDA graph, which is recorded when it is first asked for."""
    graph = torch.cuda.CUDAGraph()

    @cache
    def record() -> None:
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()

    def replay() -> None:
        record()
        graph.replay()

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after this long; finished results are kept")
    parser.add_argument("--cap", type=float, default=22.0, help="seconds of timing per shape")
    parser.add_argument("--rest", action="store_true", help="only what the file does not have yet")
    parser.add_argument("--only", nargs="*", help="names of shapes; all if not given")
    parser.add_argument("--without", nargs="*", default=[], help="names of runs to leave out")
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    if not CUDA and not args.rehearse:
        parser.error("no CUDA device; --rehearse --out SOMEWHERE runs every line on the CPU")
    Budget.end = end = time.monotonic() + args.seconds
    constants = use(args.out)
    print(*(f"{key} = {value}" for key, value in constants.items()), sep="\n", flush=True)
    about = {"machine": machine() | peers.about() | {"constants": constants}}
    WITHOUT.update(args.without)
    gc.freeze()  # each run collects garbage first: not among what the imports left
    path = args.out / (re.sub(r"[^a-z0-9]+", "_", about["machine"]["device"].lower()).strip("_") + ".json")
    done = json.loads(path.read_text()) if args.rest and path.exists() else {}
    todo = [
        (section, name, job)
        for section, name, job in jobs(args.cap)
        if name not in done.get(section, {}) and (args.only is None or name in args.only)
    ]
    for i, (section, name, job) in enumerate(todo):
        if time.monotonic() + args.cap + 40 > end:
            print(f"no time left for {section}, {name}: run again with --rest")
            continue
        print(f"{section}, {name}", flush=True)
        try:
            save(path, section, name, about | job())
        except Exception as error:  # the other shapes are worth having
            print(f"  failed: {reason(error)}", flush=True)
            if lost():
                WITHOUT.update([str(error)] if isinstance(error, DeviceLost) else [])
                left = todo[i:] if isinstance(error, DeviceLost) else todo[i + 1 :]
                limits = [f"--seconds={end - time.monotonic():.0f}", f"--cap={args.cap}", f"--out={args.out}"]
                names = ["--without", *WITHOUT, "--only", *(name for _, name, _ in left)]
                os.execv(sys.executable, [sys.executable, __file__, *limits, *names])
            if args.rehearse:
                raise
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def jobs(cap: float) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """(section, name, measurement), the most wanted first."""
    if not CUDA:
        return [
            ("ceilings", "tiny", partial(ceilings, 64, seconds=0.1)),
            *(("linear_logp", k, partial(linear, k, seconds=0.1)) for k in REHEARSAL),
            ("linear_logp", f"{MAIN}, peaked", partial(linear, MAIN, seconds=0.1, peaked=True)),
            ("logits_logp", "tiny", partial(logits, 40, 300, seconds=0.1)),
            ("linear_scan", "tiny", partial(scan, 20_000, seconds=0.1)),
        ]
    return [
        ("ceilings", "8192", partial(ceilings, 8192, seconds=2.0)),
        ("linear_logp", MAIN, partial(linear, MAIN, seconds=cap)),
        ("logits_logp", "8192 x 151936", partial(logits, 8192, 151_936, seconds=5.0)),
        ("linear_scan", "8.4M tokens", partial(scan, 1 << 23, seconds=3.0)),
        ("linear_logp", f"{MAIN}, peaked", partial(linear, MAIN, seconds=cap, peaked=True)),
        *(("linear_logp", k, partial(linear, k, seconds=cap)) for k in SHAPES if k != MAIN),
        ("logits_logp", "16384 x 32003", partial(logits, 16_384, 32_003, seconds=5.0)),
        ("linear_scan", "1M tokens", partial(scan, 1 << 20, seconds=3.0)),
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
