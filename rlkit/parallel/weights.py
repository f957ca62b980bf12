"""The policy's weights as everything outside wants them: full tensors under their Hugging Face checkpoint names.

`stream_weights` feeds a rollout engine, `export_hf` a folder that any tool loads. Both work from any layout, plain,
FSDP2, tensor parallel, pipeline stages or a product of these, and never hold the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit.parallel._dcp import model_tensors
from rlkit.parallel._files import (
    TEMP_PREFIX,
    explain_full_disk,
    remove_folder,
    removed_on_error,
    replace_folder,
    require_room,
)
from rlkit.parallel._ranks import first, rank, together
from rlkit.parallel.data import each_stage
from rlkit.parallel.lora import Adapter, adapters, merged
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.parallelize import mesh_of

_INDEX = "model.safetensors.index.json"
_EXPORT_FIX = "What was at the path is untouched. Free space there or give another path."


@torch.no_grad()
def stream_weights(
    model: nn.Module, *, dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 28
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight and persistent buffer, on every rank; tied ones once, under the first name.

    Names and shapes are those of the Hugging Face checkpoint: fused expert weights come apart again, and LoRA adapters
    are merged. Floating-point tensors are cast to `dtype` before they are gathered, so a bf16 engine costs half the
    traffic of fp32 master weights; what the model wants in fp32 under any dtype (`_keep_in_fp32_modules_strict`) stays.
    The gathers of a bucket run together. Pipeline stages send theirs to the other stages, one stage after the other.

    Memory: `bucket_bytes`, or the largest tensor where that is larger (twice that for one which is sharded other than
    by rows, or which comes apart), as long as the caller drops what it has used. A tensor that is not sharded and needs
    no cast is the live one: copy it to keep it. Every rank has to read the stream to its end, because gathering is
    collective; an engine that shares the model's memory leaves it unread on every rank.

    Differs: verl and OpenRLHF gather tensor by tensor, verl's FSDP path after a full state dict; slime buckets as here.
    """
    for bucket in _of_all_stages(_buckets(model, dtype, bucket_bytes), mesh_of(model)):
        while bucket:
            name = next(iter(bucket))
            yield name, bucket.pop(name)


def _buckets(model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """What this pipeline stage holds, as full tensors under their checkpoint names."""
    dtypes, updates = _dtypes(model, dtype), adapters(model)
    bucket: dict[str, Tensor] = {}
    size = 0
    for unit in _units(model):
        cast = {name: (x, dtypes(name, x)) for name, x in unit.items()}
        added = sum(x.numel() * kind.itemsize for x, kind in cast.values())
        if bucket and size + added > bucket_bytes:
            yield _realized(model, bucket, updates)
            size = 0
        bucket |= {name: _start_gather(x, kind) for name, (x, kind) in cast.items()}
        size += added
    yield _realized(model, bucket, updates)


def _of_all_stages(own: Iterator[dict[str, Tensor]], mesh: Mesh | None) -> Iterator[dict[str, Tensor]]:
    """The buckets of all pipeline stages on all of them, first to last."""
    if mesh is None or mesh.sizes.pp == 1:
        yield from own
        return
    for source in range(mesh.sizes.pp):
        to: Any = {"group": mesh.group("pp"), "group_src": source}
        while True:
            bucket = next(own, None) if mesh.pp_rank == source else None
            shapes = [None if bucket is None else {name: (x.shape, x.dtype) for name, x in bucket.items()}]
            dist.broadcast_object_list(shapes, **to)
            if shapes[0] is None:
                break
            if bucket is None:
                bucket = {k: torch.empty(s, dtype=d, device=mesh.device) for k, (s, d) in shapes[0].items()}
            bucket = {name: x.to(mesh.device).contiguous() for name, x in bucket.items()}
            for x in bucket.values():
                dist.broadcast(x, **to)
            yield bucket


def export_hf(
    model: Any, tokenizer: Any, path: Path | str, *, dtype: torch.dtype | None = None, shard_bytes: int = 4 << 30
) -> Path:
    """Write a folder that `transformers.from_pretrained` loads: config, safetensors, tokenizer and chat template.

    All ranks call it together, rank 0 writes. Files hold up to `shard_bytes` each, which is also about the memory it
    takes. Atomic: the folder is complete or absent. An earlier export at `path` is replaced; any other folder is
    refused. `dtype` casts the weights (for example fp32 master weights to bf16); None keeps them.

    Errors: FileExistsError where `path` is a folder that holds something else; OSError (ENOSPC, EDQUOT, EFBIG) with the
    space needed and free. An error on rank 0 is raised on every rank.
    Differs: `save_pretrained` first collects the full state dict; torch's HuggingFaceStorageWriter leaves the shards
    beside the consolidated files and cannot name the experts of a mixture.
    """
    path = Path(path).absolute()
    temp = path.with_name(TEMP_PREFIX + path.name)
    needed = (1 << 16) + sum(
        x.numel() * (dtype if dtype is not None and x.is_floating_point() else x.dtype).itemsize + 256
        for x in _own(model).values()
    )
    needed = sum(each_stage(needed, mesh=mesh_of(model)))
    first(lambda: _prepare(path, temp, needed))
    weights = stream_weights(model, dtype=dtype)
    together(lambda: _write(model, tokenizer, temp, path, weights, dtype, shard_bytes, needed))
    return path


def _write(
    model: Any,
    tokenizer: Any,
    temp: Path,
    path: Path,
    weights: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    shard_bytes: int,
    needed: int,
) -> None:
    try:
        if rank() == 0:
            with explain_full_disk("the model", path.parent, needed=needed, fix=_EXPORT_FIX), removed_on_error(temp):
                _write_weights(temp, weights, shard_bytes)
                _write_config(model, temp, dtype)
                if tokenizer is not None:
                    tokenizer.save_pretrained(temp)
                replace_folder(temp, path)
    finally:
        for _ in weights:  # the other ranks gather on, also where rank 0 has failed
            pass


def _write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    from safetensors.torch import save_file

    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(shard, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()

    for name, x in weights:
        nbytes = x.numel() * x.element_size()
        if shard and size + nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = x.cpu().contiguous()
        size, total = size + nbytes, total + nbytes
    flush()
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {k: n for n, ks in zip(names, files) for k in ks}}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [_class_name(model)]
    config["dtype"] = str(dtype if dtype is not None else model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _class_name(model: nn.Module) -> str:
    """The name of the class before FSDP2 made its own subclass of it."""
    from torch.distributed.fsdp import FSDPModule

    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def _prepare(path: Path, temp: Path, needed: int) -> None:
    if path.exists() and any(path.iterdir()) and not (path / "config.json").exists():
        raise FileExistsError(f"{path} exists and is not a Hugging Face model folder; give another path or delete it")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_folder(temp)
    require_room("the model", path.parent, needed=needed, fix=_EXPORT_FIX)
    temp.mkdir()


def _dtypes(model: nn.Module, dtype: torch.dtype | None) -> Any:
    """(name, tensor) -> the dtype to send it in."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())

    def of(name: str, x: Tensor) -> torch.dtype:
        keep = dtype is None or not x.is_floating_point() or any(part in name for part in kept)
        return x.dtype if keep else dtype  # type: ignore[return-value]

    return of


def _units(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Weights that must be in one bucket: single ones, or whole blocks where the checkpoint joins what we have apart.

    Fused experts are single in any case: the checkpoint has them apart.
    """
    joins = _checkpoint_joins(model)
    unit: dict[str, Tensor] = {}
    last = None
    for full, x in _own(model).items():
        if ".lora_" in full:
            continue
        name = full.removeprefix("model/").replace(".base_layer.", ".")
        block = name.rsplit(".", 2)[0] if joins and x.ndim < 3 else name
        if unit and block != last:
            yield unit
            unit = {}
        unit[name], last = x, block
    if unit:
        yield unit


def _own(model: nn.Module) -> dict[str, Tensor]:
    """The stage's tensors, without the copy of the embedding that a tied head on the last stage works on."""
    mesh = mesh_of(model)
    copy = mesh is not None and mesh.pp_rank > 0
    return {k: x for k, x in model_tensors(model).items() if not (copy and k.endswith("embed_tokens.weight"))}


def _checkpoint_joins(model: Any) -> bool:
    """Whether a tensor of the checkpoint is made of several of the model's."""
    if not hasattr(model, "config"):
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    known = getattr(model, "_weight_conversions", None)
    conversions = get_model_conversion_mapping(model, add_legacy=False) if known is None else known
    return any(isinstance(c, WeightConverter) and len(c.source_patterns) < len(c.target_patterns) for c in conversions)


def _start_gather(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, and begin to gather on the mesh's own device (offloaded shards are on the host)."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, DTensor):
        return x.detach().to(dtype)
    mesh = x.device_mesh
    local = x.to_local().to(mesh.device_type, dtype)
    cast = DTensor.from_local(local, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    apart = mesh.device_type != "cpu"  # gloo's threads were seen to crash with several gathers in flight
    return cast.redistribute(placements=[Replicate()] * mesh.ndim, async_op=apart).to_local()


def _realized(model: Any, bucket: dict[str, Tensor], updates: dict[str, Adapter]) -> dict[str, Tensor]:
    """Wait for the bucket, merge adapters and give checkpoint names. The bucket is empty afterwards."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    for name, x in bucket.items():
        full = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        bucket[name] = merged(full, updates[name]) if name in updates else full
    if hasattr(model, "config"):
        from transformers.core_model_loading import revert_weight_conversion

        out = dict(revert_weight_conversion(model, bucket))
    else:
        out = dict(bucket)
    bucket.clear()
    return out
