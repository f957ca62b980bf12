"""Peak memory and time of one update on one sequence, from 8k tokens up: plain, and with activation checkpointing.

    PYTHONPATH=. python benchmarks/gpu_context.py --size 1.5B --out results
    PYTHONPATH=. python benchmarks/gpu_context.py --rehearse --out /tmp/x          # tiny, on the CPU

GRPO's update of the model as `rlkit grpo` builds it (fp32 master weights, bf16 compute, AdamW); each way goes on until
a length does not fit. A line per length in `--out`/context.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from _gpu import CUDA, DEVICE, Row, machine
from gpu_grpo import SIZES, build, now, peak_gb

from rlkit.loops.updates import PolicyLoss, grpo_update
from rlkit.model.forward import make_policy, prepare_model
from rlkit.model.optim import adamw
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack, with_streams
from rlkit.parallel.mesh import Parallel, make_mesh, start
from rlkit.settings import Optim, Rollouts
from rlkit.types import Trajectory

PROMPT = 512


def main() -> None:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="1.5B")
    parser.add_argument("--lengths", nargs="*", type=int, default=[8192, 16_384, 32_768, 65_536, 131_072])
    parser.add_argument("--rehearse", action="store_true", help="without a device: tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder of context.jsonl")
    args = parser.parse_args()
    if args.rehearse:
        args.size, args.lengths = "tiny", [600, 700]
    elif not CUDA:
        parser.error("no CUDA device; --rehearse runs every line on the CPU")
    args.out.mkdir(parents=True, exist_ok=True)
    start(device=DEVICE)
    for checkpointing in (True, False):
        for length in args.lengths:
            row = update(args.size, length, checkpointing=checkpointing)
            row |= {"size": args.size, "tokens": length, "checkpointing": checkpointing, "device": machine()["device"]}
            print(json.dumps(row), flush=True)
            with (args.out / "context.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
            if "error" in row:
                break


def update(size: str, length: int, *, checkpointing: bool) -> Row:
    """Seconds of the second update, and the peak of both."""
    try:
        model = build(SimpleNamespace(size=size, vocab=151_936 if CUDA else 300))
        model.config.max_position_embeddings = length
        half = torch.bfloat16 if CUDA else torch.float32
        options = {"dtype": half, "activation_checkpointing": checkpointing}
        model = parallelize(prepare_model(model), make_mesh(Parallel(), device=DEVICE), **options)
        policy, optimizer = make_policy(model), adamw(model, lr=1e-6)
        ids = torch.randint(300, (length,), generator=torch.manual_seed(0)).tolist()
        answer = ids[PROMPT:]
        logp = -math.log(model.config.vocab_size)
        one = Trajectory(ids[:PROMPT], answer, [True] * len(answer), [logp] * len(answer), [0] * len(answer))
        batch = pack([[one]])
        batch = with_streams(batch, advantages=torch.randn(batch.num_tokens))
        peak_gb()
        for _ in range(2):
            began = now()
            grpo_update(
                batch, policy=policy, optimizer=optimizer, loss=PolicyLoss(), rollouts=Rollouts(),
                optim=Optim(max_tokens=length), lr=1e-6, kl_coef=0.0, entropy_coef=0.0, seed=0,
            )  # fmt: skip
        return {"seconds": round(now() - began, 3), "peak_gb": round(peak_gb(), 1)}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


if __name__ == "__main__":
    main()
