"""linear_scan against the loops and scans that are at hand on a CPU, fp32, in one run.

    python benchmarks/linear_scan_cpu.py --out benchmarks/results/linear_scan_cpu.json

The peers: the loop over columns of a padded [B, L] tensor (TRL, verl, OpenRLHF), torch's associative_scan, and
doubling. All compute x_t = a_t x_{t+1} + b_t over the same segments, of equal length: padding costs the loop nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _cli import run_script
from _timing import Variants, interleaved, report
from torch import Tensor

from rlkit.kernels.linear_scan import linear_scan


@dataclass
class Args:
    """Sizes and where the result goes."""

    num_tokens: int = 1 << 20
    num_seqs: int = 512
    repeats: int = 7
    threads: int = 2
    out: Path | None = Path("benchmarks/results/linear_scan_cpu.json")


def columns(a: Tensor, b: Tensor) -> Tensor:
    """The loop over a padded batch."""
    x, out = torch.zeros_like(b[:, 0]), torch.empty_like(b)
    for t in reversed(range(b.shape[1])):
        x = a[:, t] * x + b[:, t]
        out[:, t] = x
    return out


def doubling(a: Tensor, b: Tensor) -> Tensor:
    """log2 L passes, each joining every token with one twice as far away."""
    step = 1
    while step < b.shape[1]:
        b = torch.cat([b[:, :-step] + a[:, :-step] * b[:, step:], b[:, -step:]], 1)
        a = torch.cat([a[:, :-step] * a[:, step:], torch.zeros_like(a[:, -step:])], 1)
        step *= 2
    return b


def associative(a: Tensor, b: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    def join(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return right[0] * left[0], right[0] * left[1] + right[1]

    return associative_scan(join, (a, b), dim=1, reverse=True, combine_mode="generic")[1]


def make(num_tokens: int, num_seqs: int) -> Variants:
    g = torch.Generator().manual_seed(0)
    a = 0.9 + 0.1 * torch.rand(num_tokens, generator=g)
    b = torch.randn(num_tokens, generator=g)
    cu = torch.arange(num_seqs + 1) * (num_tokens // num_seqs)
    a2, b2 = a.view(num_seqs, -1), b.view(num_seqs, -1)
    leaf = b.clone().requires_grad_()
    want = linear_scan(a.double(), b.double(), cu_seqlens=cu, impl="reference")
    for run in (columns, doubling, associative):
        torch.testing.assert_close(run(a2, b2).flatten().double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear_scan(a, b, cu_seqlens=cu).double(), want, rtol=1e-4, atol=1e-4)
    return {
        "linear_scan": lambda: linear_scan(a, b, cu_seqlens=cu),
        "linear_scan, forward in time": lambda: linear_scan(a, b, cu_seqlens=cu, reverse=False),
        "linear_scan and its gradient": lambda: linear_scan(a, leaf, cu_seqlens=cu).sum().backward(),
        "linear_scan, reference": lambda: linear_scan(a, b, cu_seqlens=cu, impl="reference"),
        "loop over columns": lambda: columns(a2, b2),
        "doubling": lambda: doubling(a2, b2),
        "associative_scan": lambda: associative(a2, b2),
    }


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    sizes = {k: v for k, v in asdict(args).items() if isinstance(v, int)}
    times = interleaved(make(args.num_tokens, args.num_seqs), repeats=args.repeats)
    report(times, baseline="linear_scan", sizes=sizes, memory={}, out=args.out)
    for length in (128, 1024, 4096):
        print(f"\n{length} tokens, one segment")
        times = interleaved(make(length, 1), repeats=10 * args.repeats)
        report(times, baseline="linear_scan", sizes=sizes, memory={}, out=None)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
