"""Cost per token as sequences grow to 128k, with context parallelism: counted from FLOPs and bytes moved.

    python benchmarks/context.py                 # the table for Qwen3-8B
    python benchmarks/context.py --model Qwen2.5-72B --tp 8

COMPUTED, NOT MEASURED. A training step (forward, backward, layers computed again) of sequences of one length L over
`cp` ranks that hold L / cp tokens each, on GPUs that reach `tflops` in matrix products and `bandwidth` in collectives:

    dense       8 * parameters FLOPs a token (2 forward, 2 again, 4 backward), the same for every L
    attention   (2 + 2 + 5) * L * heads * head_dim a layer: causal, half of all pairs; grows with L, and stays even over
                ranks because each holds one early and one late chunk
    gather      keys and values of the other ranks, per layer and token of this rank (cp - 1) * 2 * kv_heads * head_dim
                elements, three times (forward, again, and their gradients back)
    ulysses     q, k, v and the output change ranks: (cp - 1) / cp * (2 * heads + 2 * kv_heads) * head_dim elements,
                three times

Nothing is taken as hidden behind computation; what tensor parallel and FSDP move does not depend on L.
`tests/distributed/test_context_volume.py` counts the bytes that four ranks really move, and they are these.
"""

from __future__ import annotations

from dataclasses import dataclass

from _cli import run_script
from memory import MODELS, Shape


@dataclass
class Args:
    """The model and the machine."""

    model: str = "Qwen3-8B"
    tp: int = 1
    tflops: float = 400.0
    """TFLOP/s that a GPU reaches in bf16 matrix products"""
    bandwidth: float = 300.0
    """GB/s per GPU inside a node (8 GPUs, tensor parallel ranks included)"""
    across: float = 40.0
    """GB/s per GPU between nodes"""


def flops(shape: Shape, length: int) -> tuple[float, float]:
    """(dense, attention) FLOPs of one token in a training step with checkpointed layers."""
    used = (
        shape.layer_parameters
        - shape.expert_parameters
        + shape.expert_parameters * shape.active / max(1, shape.experts)
    )
    dense = 8 * shape.layers * used + 6 * shape.vocab * shape.hidden
    return dense, 9.0 * shape.layers * length * shape.heads * shape.head_dim


def moved(shape: Shape, cp: int, *, ulysses: bool, size: int = 2, again: bool = True) -> float:
    """Bytes that reach a rank for one of its tokens in a training step, over all layers; `again`: checkpointing."""
    if ulysses:
        elements = (cp - 1) / cp * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    else:
        elements = (cp - 1) * 2 * shape.kv_heads * shape.head_dim
    return (3 if again else 2) * shape.layers * elements * size


def seconds(args: Args, length: int, cp: int) -> dict[str, float]:
    """GPU seconds per million tokens, by what they go to."""
    shape = MODELS[args.model]
    dense, attention = flops(shape, length)
    speed = 1e9 * (args.bandwidth if cp * args.tp <= 8 else args.across)
    parts = {"dense": dense / (1e12 * args.tflops), "attention": attention / (1e12 * args.tflops)}
    parts["gather"] = moved(shape, cp, ulysses=False) / speed
    fits = shape.kv_heads % (cp * args.tp) == 0
    parts["ulysses"] = moved(shape, cp, ulysses=True) / speed if fits else float("nan")
    return {k: 1e6 * v for k, v in parts.items()}


def main(args: Args) -> None:
    """Print the table: each length with enough ranks to keep 16k tokens on each, and with fewer and more."""
    print(f"computed: {args.model}, tp {args.tp}, GPU seconds per million tokens (nan: cp * tp must divide kv heads)")
    print(f"{'length':>8}{'cp':>4}{'dense':>9}{'attention':>11}{'gather':>9}{'ulysses':>9}{'total':>9}{'vs 4k':>7}")
    base = None
    for length in (4096, 8192, 16384, 32768, 65536, 131072):
        for cp in sorted({max(1, length // 32768), max(1, length // 16384), max(1, length // 8192)}):
            row = seconds(args, length, cp)
            best = min(x for x in (row["gather"], row["ulysses"]) if x == x)
            total = row["dense"] + row["attention"] + best
            base = base or total
            cells = f"{row['dense']:9.1f}{row['attention']:11.1f}{row['gather']:9.2f}{row['ulysses']:9.2f}"
            print(f"{length:8d}{cp:4d}{cells}{total:9.1f}{total / base:7.2f}")


if __name__ == "__main__":
    run_script(main, Args, __doc__)
