"""From the flags of a script to a model on many ranks.

    torchrun --nproc-per-node 8 examples/grpo.py --parallel.tp 2 --parallel.cp 2 ...
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT examples/grpo.py ...

`python examples/grpo.py ...` is one process, and without parallel flags a plain model.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rlkit.model.forward import DTYPES, load_model
from rlkit.model.heads import load_reward_model, load_value_model
from rlkit.model.lora import adapters, add_lora
from rlkit.model.parallelize import load_parallel, mesh_of, parallelize
from rlkit.parallel.data import each_stage
from rlkit.parallel.mesh import Mesh, make_mesh, start
from rlkit.ranks import Stopped, rank, world_size
from rlkit.settings import ParallelArgs

X = TypeVar("X")

TRAINING = "training had started"  # begins the note on an error that a run raised after it was set up


def choose_device(device: str | None, dtype: str | None, *, cuda: bool, bf16: bool) -> tuple[str, str]:
    """`(device, dtype)` of a script: what its flags give, and where one is None the default of this machine.

    The default device is `"cuda"` where there is `cuda`, else `"cpu"`. The default dtype is `"bf16"` on a CUDA device
    that has `bf16`, else `"fp32"`. Other devices, such as `"mps"`, have to be given.
    """
    device = device or ("cuda" if cuda else "cpu")
    return device, dtype or ("bf16" if device.startswith("cuda") and bf16 else "fp32")


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


def report_model(model: Any, *, dtype: str, name: str = "model") -> None:
    """Print on rank 0, in one line, where and in which dtype a model runs, its size, and what of it trains.

    All ranks call it together: a pipeline stage holds its own parameters only.
    """
    mesh = mesh_of(model)
    device = model.device if mesh is None else mesh.device
    own = {key: (p.numel(), p.requires_grad) for key, p in model.named_parameters()}
    params = {key: found for stage in each_stage(own, mesh=mesh) for key, found in stage.items()}
    trained = sum(num for num, trains in params.values() if trains)
    lora = sum(num for key, (num, _) in params.items() if ".lora_" in key)
    modules = sum(".lora_A." in key for key in params)
    what = f"LoRA of rank {model.rlkit_lora.r} on {modules} modules" if lora else "all weights"
    where = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    where += f" and {world_size() - 1} other ranks" if world_size() > 1 else ""
    if rank() == 0:
        size = sum(num for num, _ in params.values()) - lora
        text = f"{name}: {size:,} parameters on {where}, {dtype}; trains {what} ({trained:,} parameters)\n"
        sys.stdout.write(text)
        sys.stdout.flush()


def make_deterministic(seed: int) -> None:
    """Reproducible results of this process from here on: call it before anything runs on a GPU.

    torch takes deterministic algorithms (flash attention's backward sums with atomics otherwise) and raises
    RuntimeError where it has none; cuBLAS gets a workspace of fixed size, unless CUBLAS_WORKSPACE_CONFIG is set;
    Python, numpy and torch are seeded.

    Limits: the same machine, versions and layout of ranks. No GPU has run this yet. CPU runs repeat their bits anyway.
    Reference: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def main_on_ranks(main: Callable[..., X], *args: Any) -> X | None:
    """`main(*args)` as a script's last line: the ranks leave together, or a failed one ends the job.

    What is wrong with flags, data or files (ValueError, OSError, ImportError) before training starts is printed to
    stderr as one line, `error: ...`, and the exit code is 2. RLKIT_DEBUG=1 in the environment shows its traceback; any
    other error always has one.

    A rank that raises leaves at once; the others may be waiting for it in a collective. torchrun then ends them, and
    names the first rank that failed, with its traceback, as the cause.

    Exit codes: 2 and one line `error: ...` for a run folder (`args[0].output`) that cannot be used: another process
    has it open, nothing to resume, a full disk. A run that was stopped and has saved ends a plain process by SIGINT, so
    that a shell's loop ends with it, or with 143 after SIGTERM; ranks exit with 0.
    """
    alone, result = "RANK" not in os.environ, None
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger("rlkit").setLevel(logging.ERROR)  # what every rank would warn of is said once
    run = _with_short_errors if alone else _recorded(_with_short_errors)
    try:
        result = run(main, *args)
    except Stopped as stopped:
        if alone and stopped.number == signal.SIGINT:
            sys.excepthook = lambda *_: None  # no traceback
            raise KeyboardInterrupt from None  # of which, and no subclass, Python ends by SIGINT
        if alone:
            sys.exit(128 + stopped.number)
    if dist.is_initialized():
        dist.barrier()  # the store lives in rank 0, and others may still need it
        dist.destroy_process_group()
    return result


def _with_short_errors(main: Callable[..., X], *args: Any) -> X:
    """`main(*args)`; a user's error before training, or one of the run folder at any time, is one line."""
    try:
        return main(*args)
    except (ValueError, OSError, ImportError) as error:
        path = error.filename if isinstance(error, OSError) else None
        of_folder = path is not None and _inside(path, getattr(args[0] if args else None, "output", None))
        started = any(note.startswith(TRAINING) for note in getattr(error, "__notes__", ()))
        if (started and not of_folder) or os.environ.get("RLKIT_DEBUG"):
            raise
        text = str(error) if isinstance(error, ImportError) else " ".join(str(error).split())  # a user's own traceback
        if isinstance(error, OSError) and error.strerror and path is not None:
            text = f"{path}: {error.strerror}"
        sys.stderr.write(f"error: {text or type(error).__name__}\n")
        raise SystemExit(2) from None


def _recorded(main: Callable[..., X]) -> Callable[..., X | None]:
    """`main`, whose exceptions torchrun reports."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(main)


def _inside(path: str, folder: Path | None) -> bool:
    """Whether `path` is `folder`, in it, or on the way to it."""
    if folder is None:
        return False
    here, there = Path(path).absolute(), Path(folder).absolute()
    return here.is_relative_to(there) or there.is_relative_to(here)
