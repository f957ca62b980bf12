"""The policy's weights for engines and files: full tensors under their Hugging Face checkpoint names.

`stream_weights` feeds a rollout engine, `export_hf` writes a folder for `from_pretrained`. Both work on every layout
(plain, FSDP2, tensor parallel, pipeline stages and their products) and never hold the whole model.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit._util import files as _files
from rlkit._util.ranks import on_all_ranks, on_rank0, rank
from rlkit.model.lora import Adapter, adapter_weights, adapters, clean_of_peft, merged, only_adapter_trains
from rlkit.model.pretrained import no_progress_bar, only_errors
from rlkit.model.quantized import dequantized
from rlkit.model.sharding import mesh_of
from rlkit.model.source import Source, class_of, corrected, source_of
from rlkit.model.vision import copy_processor
from rlkit.parallel.data import each_stage
from rlkit.parallel.mesh import Mesh

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # added by torch.compile and by activation checkpointing
_WHAT, _FIX = "the model", "The previous content of the path is untouched. Free space there or give another path."


Pairs = Iterator[tuple[str, Tensor]]


class Payload(IntEnum):
    """What is sent of a LoRA model: the first of these that suffices for all servers."""

    ADAPTER = 0  # the adapter alone
    BASE = 1  # the base weights once, and the adapter
    MERGED = 2  # the weights with the adapter added


class WeightStream(Pairs):
    """The pairs of `stream_weights`, the `model` they are of, and `num_bytes`, those of the tensors read so far.

    An engine that samples from the model leaves them unread. One whose servers add the adapter themselves reads
    `in_form` in place of them, if `has_adapter`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> None:
        self.model, self.num_bytes = model, 0
        self._dtype, self._bucket_bytes = dtype, bucket_bytes
        self._pairs = self._counted(_pairs(model, dtype, bucket_bytes))
        self._has_adapter: bool | None = None

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._pairs)

    @property
    def has_adapter(self) -> bool:
        """Whether the base weights and the adapter are all there is, and no form is chosen yet. See
        `rlkit.model.lora.only_adapter_trains`: ask on every rank."""
        if self._has_adapter is None:
            self._has_adapter = only_adapter_trains(self.model)
        return self._has_adapter

    def in_form(self, form: Payload) -> WeightStream | AdapterStream:
        """The weights in this form, unread; choose once, and the same on every rank."""
        self._has_adapter = False
        if form is Payload.MERGED:
            return self
        base = _pairs(self.model, self._dtype, self._bucket_bytes, merge=False) if form is Payload.BASE else None
        adapter = self._counted(adapter_weights(self.model, dtype=self._dtype))
        return AdapterStream(self.model, None if base is None else self._counted(base), adapter)

    def _counted(self, pairs: Pairs) -> Pairs:
        for name, x in pairs:
            self.num_bytes += x.nbytes
            yield name, x


class AdapterStream(Pairs):
    """A LoRA model's base weights (None: the servers have them), then its adapter, under the names of peft.

    Like a `WeightStream` it must be read to its end on every rank.
    """

    def __init__(self, model: nn.Module, base: Pairs | None, adapter: Pairs) -> None:
        self.model, self.base, self.adapter = model, base, adapter
        self._all = chain(base or (), adapter)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._all)


def stream_weights(model: nn.Module, *, dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 28) -> WeightStream:
    """(name, full tensor) of every weight and persistent buffer, on every rank; tied ones once, under the first name.

    Names and shapes match the Hugging Face checkpoint: fused expert weights are split, and LoRA adapters are merged.
    Floating-point tensors are cast to `dtype` before they are gathered, so a bf16 engine costs half the traffic of fp32
    master weights; modules that the model keeps in fp32 (`_keep_in_fp32_modules_strict`) are not cast.
    The gathers of a bucket run concurrently. Pipeline stages broadcast their buckets in order, one stage at a time.

    Memory: the larger of `bucket_bytes` and the largest tensor (twice that for a tensor that is split, or not sharded
    by rows), as long as the caller drops used tensors. A tensor that is neither sharded nor cast is the live parameter:
    copy it to keep it. Every rank must read the stream to its end, because gathering is collective; an engine that
    shares the model's memory leaves it unread on every rank.

    Differs: verl and OpenRLHF gather tensor by tensor, verl's FSDP path after a full state dict; slime also buckets.
    """
    return WeightStream(model, dtype, bucket_bytes)


@torch.no_grad()
def _pairs(model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int, *, merge: bool = True) -> Pairs:
    for bucket in _of_all_stages(_buckets(model, dtype, bucket_bytes, merge), mesh_of(model)):
        while bucket:
            name = next(iter(bucket))
            yield name, bucket.pop(name)


def _buckets(
    model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int, merge: bool
) -> Iterator[dict[str, Tensor]]:
    """The full tensors of this pipeline stage, under their checkpoint names."""
    updates = adapters(model) if merge else {}
    bucket: dict[str, Tensor] = {}
    size = 0
    for full, x in _stage_tensors(model).items():
        if ".lora_" in full:
            continue
        name = clean_of_peft(full.removeprefix("model/"))
        kind = _dtype(model, name, x, dtype)
        if bucket and size + x.numel() * kind.itemsize > bucket_bytes:
            yield _realized(model, bucket, updates)
            size = 0
        bucket[name] = _start_gather(x, kind)
        size += x.numel() * kind.itemsize
    yield _realized(model, bucket, updates)


def _of_all_stages(buckets: Iterator[dict[str, Tensor]], mesh: Mesh | None) -> Iterator[dict[str, Tensor]]:
    """The buckets of all pipeline stages, first to last, on every stage."""
    if mesh is None or mesh.sizes.pp == 1:
        yield from buckets
        return
    for source in range(mesh.sizes.pp):
        to: Any = {"group": mesh.group("pp"), "group_src": source}
        while True:
            bucket = next(buckets, None) if mesh.pp_rank == source else None
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

    All ranks call it together, and rank 0 writes. Files hold up to `shard_bytes` each, which is also roughly the memory
    that rank 0 needs. Atomic: the folder is complete or absent. An earlier export at `path` is replaced.

    A checkpoint goes out as it came in (`rlkit.model.source`): `dtype` None gives each weight the dtype that it has in
    the files which the model was read from (a model from no file keeps its own), tensors there that the model's class
    has no place for are copied, and config keys that contradict the weights are corrected, which is logged.

    Errors: FileExistsError where `path` is a folder with other files; OSError (ENOSPC, EDQUOT, EFBIG) with the
    space needed and free; ValueError for a weight that overflows in fp16. An error on rank 0 is raised on every rank.
    Differs: `save_pretrained` first collects the full state dict; torch's HuggingFaceStorageWriter leaves the shards
    beside the consolidated files and cannot rename fused experts.
    """
    path = Path(path).absolute()
    temp = path.with_name(_files.TEMP_PREFIX + path.name)
    source = on_all_ranks(lambda: source_of(model) if rank() == 0 else Source(""))[0]
    kind = dtype or source.dtype
    size = sum(x.numel() * _dtype(model, name, x, kind).itemsize + 256 for name, x in _stage_tensors(model).items())
    needed = (1 << 16) + sum(each_stage(size, mesh=mesh_of(model))) + source.carried_bytes
    on_rank0(lambda: _prepare(path, temp, needed))
    weights = stream_weights(model, dtype=dtype if dtype != torch.float16 else None)

    def write() -> None:
        with _files.explain_full_disk(_WHAT, path.parent, needed=needed, fix=_FIX), _files.removed_on_error(temp):
            cast = ((name, _as_stored(model, name, x, dtype, source)) for name, x in weights)
            written = _write_weights(temp, chain(cast, source.carried()), shard_bytes)
            _write_config(model, temp, kind, source, written)
            if tokenizer is not None:
                tokenizer.save_pretrained(temp)
            _files.replace_folder(temp, path)

    def gather() -> None:
        try:
            if rank() == 0:
                write()
        finally:
            deque(weights, maxlen=0)  # the other ranks still gather if rank 0 has failed

    on_all_ranks(gather)
    return path


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live weights and persistent buffers, tied weights once; writing into them changes the model."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    unique = {clean_name(name) for name, _ in model.named_parameters()}
    tied = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    weights: dict[str, Any] = get_model_state_dict(model)
    return {f"model/{name}": x for name, x in weights.items() if name not in tied}


def clean_name(name: str) -> str:
    """The parameter's name without the prefixes of torch.compile and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _as_stored(model: Any, name: str, x: Tensor, dtype: torch.dtype | None, source: Source) -> Tensor:
    """A weight in the dtype of an export; ValueError for one that overflows there."""
    there = source.dtype_of(name) if dtype is None and x.is_floating_point() else None
    kind = there if there is not None and name in source.tensors else _dtype(model, name, x, dtype or there)
    if kind == torch.float16 and x.dtype != kind and float(x.abs().max() if x.numel() else 0) > 65504:
        raise ValueError(f"{name} has weights above 65504, which fp16 cannot hold: export in bf16 or fp32")
    return x.to(kind)


def _write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]], shard_bytes: int) -> dict[str, torch.Size]:
    """Write the shards; returns the shapes by name."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    written: dict[str, torch.Size] = {}
    total = size = 0

    def flush() -> None:
        save_file(shard, part := folder / f"{len(files)}.part", metadata={"format": "pt"})
        _files.share(part)
        files.append(list(shard))
        shard.clear()

    for name, x in weights:
        nbytes = x.numel() * x.element_size()
        if shard and size + nbytes > shard_bytes:
            flush()
            size = 0
        shard[name], written[name] = x.cpu().contiguous(), x.shape
        size, total = size + nbytes, total + nbytes
    flush()
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [_files.SINGLE]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {k: n for n, ks in zip(names, files) for k in ks}}
        (folder / _files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return written


def _write_config(
    model: Any, folder: Path, dtype: torch.dtype | None, source: Source, written: dict[str, torch.Size]
) -> None:
    model.config.save_pretrained(folder)
    if model.can_generate():
        # not `save_pretrained`, which refuses what the model came with once it was changed
        model.generation_config.to_json_file(folder / "generation_config.json", use_diff=True)
    copy_processor(model, folder)
    config = corrected(json.loads((folder / "config.json").read_text()), source, model, written)
    config["architectures"] = [class_of(model).__name__]
    config["dtype"] = str(dtype if dtype is not None else model.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _prepare(path: Path, temp: Path, needed: int) -> None:
    if path.exists() and any(path.iterdir()) and not (path / "config.json").exists():
        raise FileExistsError(f"{path} exists and is not a Hugging Face model folder; give another path or delete it")
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.remove_folder(temp)
    _files.require_room(_WHAT, path.parent, needed=needed, fix=_FIX)
    temp.mkdir()


def _dtype(model: Any, name: str, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a weight in the stream."""
    in_fp32 = any(part in name for part in model._keep_in_fp32_modules_strict or ())
    return x.dtype if dtype is None or in_fp32 or not x.is_floating_point() else dtype


def _stage_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The stage's tensors, without the last stage's copy of a tied embedding."""
    mesh = mesh_of(model)
    copy = mesh is not None and mesh.pp_rank > 0
    return {k: x for k, x in model_tensors(model).items() if not (copy and k.endswith("embed_tokens.weight"))}


def _start_gather(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, and start an asynchronous gather on the mesh's device (offloaded shards are on the host)."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, DTensor):
        return dequantized(x.detach()).to(dtype)
    mesh = x.device_mesh
    local = x.to_local().to(mesh.device_type, dtype)
    cast = DTensor.from_local(local, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    concurrent = mesh.device_type != "cpu"  # gloo crashes with several gathers in flight
    return cast.redistribute(placements=[Replicate()] * mesh.ndim, async_op=concurrent).to_local()


def _realized(model: Any, bucket: dict[str, Tensor], updates: dict[str, Adapter]) -> dict[str, Tensor]:
    """Wait for the bucket, merge adapters and convert to checkpoint names. The bucket is empty afterwards."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from transformers.core_model_loading import revert_weight_conversion

    for name, x in bucket.items():
        full = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        bucket[name] = merged(full, updates[name]) if name in updates else full
    out = dict(revert_weight_conversion(cast(Any, _Plain(model)), bucket))
    bucket.clear()
    return out


@torch.no_grad()
def in_names_of(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names of the model's own: transformers fuses experts and renames layers.

    Weights that the model lacks keep their names; those that the checkpoint lacks, or has in another shape, are left
    out. Memory: a copy of the model.
    """
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    options |= {"config": copy.deepcopy(model.config), "attn_implementation": "eager", "dtype": model.dtype}
    with no_progress_bar(), only_errors():
        loaded, info = type(model).from_pretrained(None, state_dict=weights, **options)
    lacking = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    tensors = {name.removeprefix("model/"): x for name, x in model_tensors(loaded).items()}
    return {k: x for k, x in tensors.items() if k not in lacking} | {k: weights[k] for k in info["unexpected_keys"]}


class _Plain:
    """A model whose parameters transformers finds by their names without LoRA."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
        return {clean_of_peft(name): p for name, p in self._model.named_parameters()}

    def get_parameter(self, name: str) -> Tensor:
        return self._parameters[name]
