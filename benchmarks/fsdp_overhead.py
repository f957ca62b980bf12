"""What the parallel wrapper adds to bare transformers + FSDP2: the same model, tokens, loss and optimizer.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/fsdp_overhead.py
    PYTHONPATH=. python benchmarks/fsdp_overhead.py --device cuda --dtype bf16 --num-tokens 8192 --hidden 1024

Bare is `fully_shard` on each layer and on the model, the model's own forward with `sdpa` on one document, and
`cross_entropy` on its logits. Ours is `parallelize`, `forward` and a sum of log-probs on the same document, packed.
Both take a step (forward, backward, clipping, AdamW), by turns in the same process; the figure is the median of the
paired ratios ours / bare and its 95% interval (order statistics of the pairs), in processor time of rank 0 on a CPU, in
wall time on a GPU. `--dtype` is that of forward and backward; weights, sums of gradients and optimizer are fp32. Both
losses are checked to be equal. The result goes to `--out`/fsdp_overhead_<device>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import file_name, interval, machine

from rlkit.model.forward import forward
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack
from rlkit.parallel.mesh import Parallel, make_mesh, start
from rlkit.types import Trajectory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2}  # of the loss, relative


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"num_tokens": 1024, "hidden": 256, "layers": 6, "vocab": 8192, "repeats": 15}
    for name, size in sizes.items():
        what = "counted pairs, after two that are not" if name == "repeats" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, help=what)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of forward and backward")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the result")
    return parser.parse_args()


def build(args: argparse.Namespace) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=args.hidden // 8, intermediate_size=3 * args.hidden,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(args.device)


def bare_step(args: argparse.Namespace, ids: torch.Tensor, mesh: Any) -> Callable[[], float]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(DTYPES[args.dtype], torch.float32, cast_forward_inputs=False)
    model = build(args)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=policy)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_step(args: argparse.Namespace, ids: torch.Tensor, mesh: Any) -> Callable[[], float]:
    model = parallelize(build(args), mesh, dtype=DTYPES[args.dtype])
    optimizer = adamw(model, lr=1e-4, weight_decay=0.01)
    n = ids.numel() - 1
    batch = pack(
        [[Trajectory(ids[:1].tolist(), ids[1:].tolist(), [True] * n, [0.0] * n, [0] * n)]]
    )  # on the host, as in the loops

    def step() -> float:
        loss = -forward(model, batch, dtype=args.dtype).logp.sum() / n
        (loss / mesh.dp).backward()  # every rank has the same document here
        optimizer_step(optimizer, max_norm=1.0)
        return loss.item()

    return step


def seconds(work: Callable[[], float], device: str) -> tuple[float, float]:
    dist.barrier()
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    value = work()
    if device != "cpu":
        torch.cuda.synchronize()  # the optimizer's step is not waited for by `loss.item()`
    return clock() - begin, value


def main(args: argparse.Namespace) -> None:
    start(device=args.device)
    mesh = make_mesh(Parallel(), device=args.device)
    ids = torch.randint(0, args.vocab, (args.num_tokens + 1,), generator=torch.Generator().manual_seed(1))
    bare, ours = bare_step(args, ids.to(args.device), mesh), our_step(args, ids, mesh)
    pairs = []
    for i in range(args.repeats + 2):
        order = (bare, ours) if i % 2 else (ours, bare)
        timed = {work: seconds(work, args.device) for work in order}
        (a, loss_a), (b, loss_b) = timed[bare], timed[ours]
        assert abs(loss_a - loss_b) < TOLERANCE[args.dtype] * abs(loss_a), (loss_a, loss_b)
        pairs.append((a, b))
    pairs = pairs[2:]
    ratios = [b / a for a, b in pairs]
    result = {
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "bare_s": statistics.median(a for a, _ in pairs),
        "ours_s": statistics.median(b for _, b in pairs),
        "ranks": dist.get_world_size(),
        "ratios": ratios,
    }
    if dist.get_rank() == 0:
        low, high = interval(ratios)
        print(f"ours / bare: {result['ratio']:.3f} [{low:.3f}, {high:.3f}] ({len(ratios)} pairs)")
        about = machine()
        path = args.out / f"fsdp_overhead_{'cpu' if args.device == 'cpu' else file_name(about['device'])}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        described = {"machine": about, "args": {k: v for k, v in vars(args).items() if k != "out"}}
        path.write_text(json.dumps(described | result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parsed())
