"""linear_logp against the materialised computation on a CPU, fp32, in one run.

    python benchmarks/linear_logp_cpu.py --out benchmarks/results/linear_logp_cpu.json

Forward and backward of sum(a * logp + c * entropy). "materialised" is log_softmax and its entropy on stored logits,
which is what TRL does without its chunked head; "three products" is the least that any method can do. Ratios are to
"materialised" in the same round; peak memory is the growth of the resident set, inputs not counted. A second table has
a small problem, where overhead counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first call of a custom operator imports it, and so does AdamW: 150 MB that are nobody's here
from _cli import run_script
from _timing import Variants, interleaved, peak_megabytes, report
from torch import Tensor

from rlkit.kernels.linear_logp import linear_logp
from rlkit.types import LogProbs


@dataclass
class Args:
    """Sizes of the problem and where the results go."""

    rows: int = 4096
    dim: int = 512
    vocab: int = 32768
    small_rows: int = 600
    small_dim: int = 128
    small_vocab: int = 263
    repeats: int = 3
    threads: int = 2
    memory: bool = True
    out: Path | None = Path("benchmarks/results/linear_logp_cpu.json")


def materialised(hidden: Tensor, weight: Tensor, targets: Tensor) -> LogProbs:
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    return LogProbs(log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))


def per_token(out: LogProbs, advantages: Tensor) -> Tensor:
    return -advantages * out.logp - 0.01 * out.entropy


def make(rows: int, dim: int, vocab: int, threads: int) -> Variants:
    """Closures over one set of inputs."""
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=g).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=g) / dim**0.5).requires_grad_()
    targets, advantages = torch.randint(vocab, (rows,), generator=g), torch.randn(rows, generator=g)
    half = torch.where(torch.arange(rows) % 2 == 0, advantages, 0.0)

    def train(logps: Any, advantages: Tensor = advantages, entropy: bool = True) -> None:
        hidden.grad = weight.grad = None
        out = logps(hidden, weight, targets)
        (per_token(out, advantages) if entropy else -advantages * out.logp).sum().backward()

    @torch.no_grad()
    def score(logps: Any) -> None:
        logps(hidden, weight, targets)

    @torch.no_grad()
    def products() -> None:
        z = hidden @ weight.T
        z.T @ hidden, z @ weight

    return {
        "materialised": partial(train, materialised),
        "three products alone": products,
        "linear_logp": partial(train, linear_logp),
        "linear_logp, no entropy in the loss": partial(train, linear_logp, entropy=False),
        "linear_logp, half of the rows without gradient": partial(train, linear_logp, half, entropy=False),
        "linear_logp, reference": partial(train, partial(linear_logp, impl="reference")),
        "scoring, materialised": partial(score, materialised),
        "scoring, linear_logp": partial(score, linear_logp),
    }


def main(args: Args) -> None:
    """Both tables."""
    large = partial(make, args.rows, args.dim, args.vocab, args.threads)
    few = partial(make, args.small_rows, args.small_dim, args.small_vocab, args.threads)
    variants = large()
    memory = {name: peak_megabytes(large, name) for name in variants} if args.memory else {}
    sizes = {k: v for k, v in asdict(args).items() if isinstance(v, int)}
    times = interleaved(variants, repeats=args.repeats)
    report(times, baseline="materialised", sizes=sizes, memory=memory, out=args.out)
    print(f"\n{args.small_rows} rows, dim {args.small_dim}, {args.small_vocab} entries")
    small_out = None if args.out is None else args.out.with_stem(args.out.stem + "_small")
    times = interleaved(few(), repeats=20 * args.repeats)
    report(times, baseline="materialised", sizes=sizes, memory={}, out=small_out)


if __name__ == "__main__":
    run_script(main, Args, __doc__)
