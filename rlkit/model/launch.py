"""From the flags of a script to a model on many ranks.

    torchrun --nproc-per-node 8 -m rlkit.scripts.grpo --parallel.tp 2 --parallel.cp 2 ...
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m rlkit.scripts.grpo ...

`rlkit grpo ...` is one process: on a CPU a plain model, on a GPU one that `parallelize` cut over one rank, so that
activation checkpointing, compiled layers and bf16 parameters are the same everywhere.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from rlkit._util.files import base_of, is_adapter
from rlkit._util.ranks import launched, rank, world_size
from rlkit._util.text import printable
from rlkit.model.forward import DTYPES, dropping_layers, load_model
from rlkit.model.fp8 import blocks_of
from rlkit.model.heads import load_reward_model, load_reward_parallel, load_value_model, load_value_parallel
from rlkit.model.lora import adapters, lora_config, merge_adapter, snapshot, with_adapters
from rlkit.model.parallelize import COVERED, load_parallel, parallelize
from rlkit.model.pretrained import load_config
from rlkit.model.quantized import Quantized
from rlkit.model.sharding import device_of, mesh_of
from rlkit.model.source import said_of, source_of
from rlkit.parallel.data import each_stage
from rlkit.parallel.mesh import Mesh, make_mesh, start
from rlkit.settings import Bins, ParallelArgs

X = TypeVar("X")


def choose_device(device: str | None, dtype: str | None, *, cuda: bool, bf16: bool) -> tuple[str, str]:
    """`(device, dtype)` of a script: its flags, with the machine's default where one is None.

    The default device is `"cuda"` if `cuda`, else `"cpu"`. The default dtype is `"bf16"` on a CUDA device if `bf16`,
    else `"fp32"`. Other devices, such as `"mps"`, are never chosen by default.
    """
    device = device or ("cuda" if cuda else "cpu")
    return device, dtype or ("bf16" if device.startswith("cuda") and bf16 else "fp32")


def load_policy(
    path: str | os.PathLike[str],
    args: ParallelArgs,
    *,
    device: str = "cpu",
    dtype: str = "fp32",
    frozen: bool = False,
    train_vision: bool = False,
    min_rows: int = 0,
    **lora: Any,
) -> Any:
    """The model of a script's flags: `load_parallel` on many ranks, `load_model` in a plain process.

    A vision tower trains only with `train_vision`. With `lora_rank` only adapters of that rank train, on the modules
    `lora_targets` (none: all that can have one), with `lora_alpha` (None: twice the rank) and `lora_dropout`, over
    frozen weights in `lora_base` (None: fp32). With a folder `adapter`, or one as `path`, the adapter is on its base
    model, and alone trains on, or with `lora_rank` 0 is merged into weights that all train. `min_rows`, in one process,
    is that of `rlkit.model.forward.resized`.
    """
    path = _with_base(path, lora)
    fp8 = blocks_of(load_config(path)) is not None
    alone = min_rows > 0 or _stays_plain(path, **lora) or (fp8 and bool(lora.get("lora_rank")))
    mesh = open_mesh(args, device=device, alone=alone)
    _report_loading(path)
    if mesh is not None:
        if min_rows:
            if mesh.parameters.size() > 1:
                raise ValueError(f"min_rows {min_rows}: the embedding of a model over several ranks is not resized")
            resized = partial(load_model, train_vision=train_vision, min_rows=min_rows)
            return _cut_whole(resized, lora, path, mesh, frozen=frozen, **_options(args, dtype))
        read = lambda *folder, **options: load_model(*folder, train_vision=train_vision, **options)  # noqa: E731
        whole = partial(read, dtype="auto") if lora.get("lora_base") else read
        return load_parallel(path, mesh, frozen=frozen, whole=whole, **lora, **_options(args, dtype))
    load = partial(load_model, path, train_vision=train_vision, min_rows=min_rows)
    return _with_lora(load, device, fp8=fp8, **lora)


def _with_lora(load: Callable[..., Any], device: str, *, fp8: bool = False, **lora: Any) -> Any:
    """`load(device=...)` with its adapters. A policy's quantized weights are made on the CPU from those of the files,
    so that they are never all held in fp32; those of an `fp8` checkpoint are the files' own."""
    rank, quantizes = lora.get("lora_rank"), lora.get("lora_base") or fp8
    trains = rank or (rank is None and lora.get("adapter") is not None)
    options = {"device": "cpu", "dtype": "auto"} if quantizes and trains else {"device": device}
    return with_adapters(load(**options), **lora).to(device)


def _with_base(path: str | os.PathLike[str], lora: dict[str, Any]) -> str | os.PathLike[str]:
    """The path of the base model where `path` is an adapter, which then is the `adapter` of the options."""
    if not is_adapter(path):
        return path
    lora["adapter"] = path
    return base_of(path)


def reference_of(
    model: Any, reference: str | None, *, path: str, load: Callable[..., Any], adapter: str | None = None
) -> Any:
    """The reference model: `reference` loaded, or with LoRA `model` itself, to be used without its adapter, or with the
    `adapter` as it is now, or `path` (and `adapter`) again."""
    if reference is not None:
        return load(reference, frozen=True)
    if adapters(model):
        return model if adapter is None else snapshot(model)
    return load(path, frozen=True, adapter=adapter, lora_rank=0)  # merged, as the model's own is


def load_judge(
    path: str | os.PathLike[str], args: ParallelArgs, *, device: str = "cpu", dtype: str = "fp32", min_rows: int = 0,
    **lora: Any,
) -> Any:  # fmt: skip
    """`load_policy` for a reward model."""
    return _load_headed(
        partial(load_reward_model, min_rows=min_rows), load_reward_parallel, path, args, device, dtype, lora
    )


def load_critic(
    path: str | os.PathLike[str], args: ParallelArgs, *, device: str = "cpu", dtype: str = "fp32", bins: Bins = Bins(),
    min_rows: int = 0, **lora: Any,
) -> Any:  # fmt: skip
    """`load_policy` for a critic, which has adapters of its own: one of the policy is merged into its weights."""
    alone: Callable[..., Any] = partial(load_value_model, bins=bins, min_rows=min_rows)
    sharded = partial(load_value_parallel, bins=bins)
    path = _with_base(path, lora)
    if (adapter := lora.pop("adapter", None)) is not None:
        plain = alone
        alone = lambda path, **options: merge_adapter(plain(path, **options), adapter)  # noqa: E731
        sharded = partial(_cut_whole, alone, lora)
    return _load_headed(alone, sharded, path, args, device, dtype, lora)


def _cut_whole(alone: Callable[..., Any], lora: dict[str, Any], path: Any, mesh: Mesh, **options: Any) -> Any:
    """`alone(path)` with its adapters, cut over the mesh: each rank holds the whole model until then."""
    model = _with_lora(lambda **_: alone(path, device="cpu"), "cpu", **lora)
    return parallelize(model, mesh, **{name: x for name, x in options.items() if name not in lora})


def _load_headed(
    alone: Callable[..., Any],
    sharded: Callable[..., Any],
    path: str | os.PathLike[str],
    args: ParallelArgs,
    device: str,
    dtype: str,
    lora: dict[str, Any],
) -> Any:
    path = _with_base(path, lora)
    resizes = getattr(alone, "keywords", {}).get("min_rows", 0) > 0
    mesh = open_mesh(args, device=device, alone=resizes or _stays_plain(path, **lora))
    _report_loading(path)
    if mesh is None:
        return _with_lora(lambda device, **_: alone(path, device=device), device, **lora)  # checked in fp32
    if resizes and mesh.parameters.size() == 1:
        sharded = partial(_cut_whole, alone, lora)
    return sharded(path, mesh, **lora, **_options(args, dtype))


def _report_loading(path: str | os.PathLike[str]) -> None:
    """Tell a terminal what it waits for: a large model takes a minute."""
    if rank() == 0 and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(printable(f"loading {path}\n"))


def _options(args: ParallelArgs, dtype: str) -> dict[str, Any]:
    names = ("activation_checkpointing", "reshard_after_forward", "offload", "compile")
    return {"dtype": DTYPES[dtype], **{name: getattr(args, name) for name in names}}


def open_mesh(args: ParallelArgs, *, device: str, alone: bool = True) -> Mesh | None:
    """The mesh of these flags; None in a plain process without parallel flags, on CUDA only if it is to be `alone`."""
    if not launched() and args == ParallelArgs(timeout_s=args.timeout_s) and (alone or not device.startswith("cuda")):
        return None
    start(device=device, timeout_s=args.timeout_s)
    return make_mesh(args, device=device)


def _stays_plain(path: str | os.PathLike[str], *, lora_base: str | None = None, **_: Any) -> bool:
    """Whether a process alone keeps a model as it is: types that `parallelize` may refuse, and quantized weights."""
    return lora_base is not None or load_config(path).model_type not in COVERED


def report_model(model: Any, *, dtype: str, name: str = "model") -> None:
    """Print one line on rank 0: a model's size, device and dtype, and which of its parameters train.

    All ranks call it together: a pipeline stage holds its own parameters only.
    """
    mesh, device = mesh_of(model), device_of(model)
    of_stage = {key: (p.numel(), p.requires_grad) for key, p in model.named_parameters()}
    params = {key: facts for stage in each_stage(of_stage, mesh=mesh) for key, facts in stage.items()}
    trained = sum(num for num, trains in params.values() if trains)
    lora = sum(num for key, (num, _) in params.items() if ".lora_" in key)
    modules = [key.removesuffix(".weight") for stage in each_stage([*adapters(model)], mesh=mesh) for key in stage]
    kinds = ": " + ", ".join(sorted({key.rpartition(".")[2] for key in modules})) if lora else ""
    chosen = f"LoRA of rank {lora_config(model).r} on {len(modules)} modules" if lora else "all weights"
    held = [p for p in model.parameters() if isinstance(p, Quantized)]
    kinds += f"; {sum(p.numel() for p in held):,} parameters are held in {held[0].kind}" if held else ""
    source = source_of(model)
    kinds += "; its FP8 weights are dequantized" * (source.in_fp8 and not held)
    drops = any(".lora_dropout" not in name for name in dropping_layers(model))
    kinds += "; the dropout of its config is off" * (drops and trained > 0)
    where = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    where += f" and {world_size() - 1} other ranks" if world_size() > 1 else ""
    if rank() == 0:
        size = sum(num for num, _ in params.values()) - lora
        count = "" if trained == size else f" ({trained:,} parameters)"
        text = f"{name}: {size:,} parameters on {where}, {dtype}; trains {chosen}{count}{kinds}\n"
        said = said_of(source, model.config)
        sys.stdout.write(printable(text + f"{name}: {said}\n" * bool(said)))
        sys.stdout.flush()


def make_deterministic(seed: int) -> None:
    """Make this process reproducible: call it before anything runs on a GPU.

    torch uses deterministic algorithms (flash attention's backward otherwise sums with atomics) and raises RuntimeError
    where it has none; cuBLAS gets a workspace of fixed size, unless CUBLAS_WORKSPACE_CONFIG is set; Python, numpy and
    torch are seeded.

    Limits: the same machine, versions and layout of ranks. CPU runs are bit-reproducible anyway.
    Reference: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # No result depends on fresh memory, and filling it costs a pass over each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
