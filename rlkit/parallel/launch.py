"""From the flags of a script to a model on many ranks.

    torchrun --nproc-per-node 8 examples/grpo.py --parallel.tp 2 --parallel.cp 2 ...
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT examples/grpo.py ...

`python examples/grpo.py ...` is one process, and without parallel flags a plain model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rlkit.parallel.flags import ParallelArgs
from rlkit.parallel.heads import load_reward_model, load_value_model
from rlkit.parallel.lora import adapters, add_lora
from rlkit.parallel.mesh import Mesh, make_mesh, start
from rlkit.parallel.model import DTYPES, load_model
from rlkit.parallel.parallelize import load_parallel, parallelize

X = TypeVar("X")


def load_policy(
    path: str | os.PathLike[str], args: ParallelArgs, *, device: str = "cpu", dtype: str = "fp32", lora_rank: int = 0
) -> Any:
    """The model of a script's flags: cut over the ranks by `load_parallel`, or in a plain process by `load_model`.

    With `lora_rank` adapters of that rank are all that trains (alpha is twice the rank).
    """
    mesh = open_mesh(args, device=device)
    if mesh is not None:
        return load_parallel(path, mesh, lora_rank=lora_rank, **_options(args, dtype))
    model = load_model(path, device=device)
    return add_lora(model, rank=lora_rank, alpha=2 * lora_rank) if lora_rank else model


def reference_of(model: Any, given: str | None, *, path: str, load: Callable[..., Any]) -> Any:
    """The model at `given`, or what `model` was when it came from `path`: with LoRA, `model` without its adapter."""
    return model if given is None and adapters(model) else load(given or path)


def load_judge(path: str | os.PathLike[str], args: ParallelArgs, *, device: str = "cpu", dtype: str = "fp32") -> Any:
    """Likewise a reward model. Every rank holds the whole one in CPU memory before it is cut."""
    return _load_whole(load_reward_model, path, args, device, dtype)


def load_critic(path: str | os.PathLike[str], args: ParallelArgs, *, device: str = "cpu", dtype: str = "fp32") -> Any:
    """Likewise a critic, as `load_judge`."""
    return _load_whole(load_value_model, path, args, device, dtype)


def _load_whole(
    load: Callable[..., Any], path: str | os.PathLike[str], args: ParallelArgs, device: str, dtype: str
) -> Any:
    mesh = open_mesh(args, device=device)
    if mesh is None:
        return load(path, device=device)
    return parallelize(load(path), mesh, **_options(args, dtype))


def _options(args: ParallelArgs, dtype: str) -> dict[str, Any]:
    return {
        "dtype": DTYPES[dtype],
        "activation_checkpointing": args.activation_checkpointing,
        "offload": args.offload,
        "compile": args.compile,
    }


def open_mesh(args: ParallelArgs, *, device: str) -> Mesh | None:
    """The mesh of these flags; None in a plain process that asks for nothing parallel."""
    if "RANK" not in os.environ and args == ParallelArgs(timeout_s=args.timeout_s):
        return None
    start(device=device, timeout_s=args.timeout_s)
    return make_mesh(args, device=device)


def main_on_ranks(main: Callable[..., X], *args: Any) -> X:
    """`main(*args)` as a script's last line: the ranks leave together, or a failed one ends the job.

    A rank that raises leaves at once; the others may be waiting for it in a collective. torchrun then ends them, and
    names the first rank that failed, with its traceback, as the cause.
    """
    if "RANK" not in os.environ:
        return main(*args)
    from torch.distributed.elastic.multiprocessing.errors import record

    if os.environ["RANK"] != "0":
        logging.getLogger("rlkit").setLevel(logging.ERROR)  # what every rank would warn of is said once
    result: X = record(main)(*args)  # type: ignore[assignment]
    if dist.is_initialized():
        dist.barrier()  # the store lives in rank 0, and others may still need it
        dist.destroy_process_group()
    return result
