"""What fits where, before anything starts: a model on some GPUs, training and sampling by turns. Counted, not measured.

    rlkit plan --model Qwen/Qwen3-32B --nodes 2
    rlkit plan --model Qwen/Qwen3-8B --gpus 4 --gpu-memory 48 --max-tokens 8192

Reads the model's config only. The last lines are the flags of the first layout that fits, and its collectives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlkit.run.console import wrapped
from rlkit.scripts.cli import run
from rlkit.settings import Above1, Count, Positive, check

if TYPE_CHECKING:
    from rlkit.model.memory import Layout, Shape

GIB = 2**30
SMALLEST_CACHE = 0.1  # of a GPU, for an engine that keeps its memory during updates


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: str
    """path or hub id"""
    nodes: Count = 1
    """machines"""
    gpus: Count = 8
    """GPUs of each machine"""
    gpu_memory: Positive = 80.0
    """GiB of each GPU"""
    max_tokens: Count = 16384
    """tokens of a micro-batch over one data parallel place, at least those of the longest sequence"""

    yarn: Above1 | None = None
    """times by which YaRN extends the model's context, as --yarn of the run"""

    def __post_init__(self) -> None:
        check(self)


@dataclass
class Row:
    """What a GPU of each pipeline stage holds, in bytes, and the cache of an engine there, in tokens per server."""

    layout: Layout
    stages: list[dict[str, float]]
    room: float
    engine_tp: int
    engine: float
    per_token: float

    def __post_init__(self) -> None:
        totals = [sum(parts.values()) for parts in self.stages]
        self.fullest = totals.index(max(totals))  # the stage that holds most
        self.parts = self.stages[self.fullest]
        self.total = totals[self.fullest]  # bytes of training at its fullest moment
        self.states = max(parts["states"] for parts in self.stages)  # that remain on a GPU between updates
        self.fits = self.total <= self.room  # training alone

    def cache(self, *, release: bool) -> int:
        """Tokens of keys and values beside training, or with `release` while only its states are there."""
        left = self.room - (self.states if release else self.total) - self.engine
        return max(0, int(left * self.engine_tp / self.per_token))


def main(args: Args) -> None:
    """Print the table and the flags."""
    from rlkit.model.memory import shape_of
    from rlkit.model.parallelize import check_model
    from rlkit.model.positions import positions
    from rlkit.model.pretrained import load_config
    from rlkit.model.yarn import yarn_config

    config = load_config(args.model)
    config = config if args.yarn is None else yarn_config(config, args.yarn)
    check_model(config)
    shape, out = shape_of(config), sys.stdout
    rows = [row_of(shape, layout, args) for layout in layouts(shape, args)]
    size = f"{shape.parameters / 1e9:.1f} B parameters on {args.nodes} x {args.gpus} GPUs of {args.gpu_memory:g} GiB"
    if limit := positions(config, packed=True):
        size += f", {limit:,} positions"
    text = f"{args.model}: {size}, {args.max_tokens:,} tokens. GiB per GPU, counted; cache: thousands of tokens of an "
    out.write(wrapped(f"{text}engine on the same GPUs, beside training and with --engine-release", out) + "\n\n")
    out.write(f"{'layout':26}{'states':>7}{'layers':>7}{'tokens':>7}{'total':>7} fits{'cache':>8}{'release':>8}\n")
    for row in rows:
        states, total = row.parts["states"], row.total
        working = row.parts["activations"] + row.parts["loss"]
        cells = "".join(f"{x / GIB:7.1f}" for x in (states, row.parts["gathered"], working, total))
        caches = "".join(f"{row.cache(release=release) / 1000:8.0f}" for release in (False, True))
        out.write(f"{named(row.layout):26}{cells} {'yes' if row.fits else 'no':>4}{caches}\n")
    usable = [row for row in rows if row.fits and row.cache(release=True)]
    if not usable:
        raise ValueError("no layout fits: take more GPUs, a smaller `max_tokens`, or an adapter (`--lora-rank`)")
    out.write("\n" + command(usable[0], args) + "\n\n" + traffic(shape, usable[0]) + "\n")


def layouts(shape: Shape, args: Args) -> Iterator[Layout]:
    """The usual choices, the simplest first; each later one trades communication for memory, but for zero-2."""
    from rlkit.model.memory import Layout

    total = args.nodes * args.gpus
    plain = Layout(total, tokens=args.max_tokens)
    yield replace(plain, checkpointing=False)
    if total > 1:
        yield replace(plain, checkpointing=False, reshard_after_forward=False)
    yield plain
    sizes = [n for n in (2, 4, 8) if args.gpus % n == 0]
    if shape.experts:
        yield from (replace(plain, ep=n) for n in sizes if shape.experts % n == 0)
    else:
        yield from (replace(plain, tp=n) for n in sizes if shape.kv_heads % n == 0 and shape.intermediate % n == 0)
    yield from (replace(plain, cp=n) for n in sizes)
    yield from (replace(plain, pp=n) for n in (2, 4, 8) if total % n == 0 and n <= shape.layers)
    yield replace(plain, offload=True)


def row_of(shape: Shape, layout: Layout, args: Args) -> Row:
    """The count for one layout, with the smallest server whose weights take at most half of its GPUs."""
    from rlkit.model.memory import USABLE, engine_bytes, step_bytes

    memory = args.gpu_memory * GIB
    sizes = [n for n in (1, 2, 4, 8) if args.gpus % n == 0]
    tp = next((n for n in sizes if engine_bytes(shape, engine_tp=n) < memory / 2), sizes[-1])
    stages = step_bytes(shape, layout)
    return Row(layout, stages, USABLE * memory, tp, engine_bytes(shape, engine_tp=tp), shape.kv_bytes())


def named(layout: Layout) -> str:
    """The layout in a few words."""
    shard = layout.gpus // (layout.pp * layout.tp * layout.cp)
    sizes = {"shard": shard, "pp": layout.pp, "tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    words = [f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "shard"]
    zero2 = ["zero-2"] * (not layout.reshard_after_forward)
    return " ".join([*words, *zero2, *["ckpt"] * layout.checkpointing, *["offload"] * layout.offload])


def command(row: Row, args: Args) -> str:
    """The command of a row: `rlkit grpo` over its GPUs, with an engine on the same ones."""
    layout, memory = row.layout, args.gpu_memory * GIB
    sizes: dict[str, Any] = {"pp": layout.pp, "tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    flags = [f"--parallel.{name} {n}" for name, n in sizes.items() if n > 1]
    flags += ["--parallel.no-reshard-after-forward"] * (not layout.reshard_after_forward)
    flags += ["--parallel.activation-checkpointing"] * layout.checkpointing + ["--parallel.offload"] * layout.offload
    release = row.room - row.total - row.engine < SMALLEST_CACHE * memory
    taken = row.room - (row.states if release else row.total)
    free = memory - row.states / 4  # when servers start, of the states only the fp32 weights are there
    flags += [f"--engine-tp {row.engine_tp}"] * (row.engine_tp > 1) + ["--engine-release"] * release
    nodes = f"--nnodes {args.nodes} ... " if args.nodes > 1 else ""
    lines = [
        f"torchrun {nodes}--nproc-per-node {args.gpus} -m rlkit.scripts.grpo \\",
        f"    --model {args.model}{f' --yarn {args.yarn:g}' if args.yarn else ''} --data ... --reward ... \\",
        f"    --device cuda --dtype bf16 --max-tokens {args.max_tokens} \\",
        *[f"    {flag} \\" for flag in flags],
        f"    --engine sglang --engine-memory {max(0.05, min(0.95, taken / free)):.2f}",
    ]
    return "\n".join(lines)


def traffic(shape: Shape, row: Row) -> str:
    """The collectives of one micro-batch on the fullest stage."""
    from rlkit.model.traffic import microbatch_traffic

    moved = microbatch_traffic(shape.stages(row.layout.pp)[row.fullest], row.layout)
    where = f" of stage {row.fullest + 1} of {row.layout.pp}" if row.layout.pp > 1 else ""
    lines = [f"Collectives of a micro-batch, and what a GPU{where} receives{':' if moved else ': none'}"]
    lines += [f"{num:8} {kind + 's' * (num > 1):15}{size / GIB:9.3g} GiB" for kind, (num, size) in moved.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main, Args, __doc__)
