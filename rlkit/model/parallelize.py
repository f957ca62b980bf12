"""One transformers model over many ranks: tensor parallel, compilation, activation checkpointing, then FSDP2.

    start(device="cuda")
    mesh = make_mesh(Parallel(shard=4, tp=2), device="cuda")
    model = load_parallel("Qwen/Qwen3-8B", mesh, dtype=torch.bfloat16, activation_checkpointing=True)

The result is used like a model in one process: `rlkit.model.forward.forward`, `adamw`, `optimizer_step`. On one rank a
`WorkingCopy` takes the place of FSDP2, unless the parameters are offloaded. Gradients are sums over ranks and
micro-batches: the weights of the loss already hold the denominator of the whole batch.

Tensor parallelism follows the model's own plan, which transformers ships, as DTensor styles: column-parallel
projections into heads and hidden units, row-parallel ones back, embedding and head cut along the vocabulary.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlkit._util.ranks import await_all, local_rank
from rlkit.model.families import check_causal_lm, check_leftover, check_loaded, set_packed
from rlkit.model.flops import attention_share
from rlkit.model.forward import forward, load_model
from rlkit.model.fp8 import blocks_of
from rlkit.model.lora import adapters, clean_of_peft, fill_adapter, reset_adapters, with_adapters
from rlkit.model.pretrained import HUB_FILES, NO_CODE, building, explained, load_config
from rlkit.model.quantized import Quantized
from rlkit.model.sharding import ShardedModel, device_of
from rlkit.model.source import same_tensors, untie
from rlkit.model.working_copy import WorkingCopy
from rlkit.parallel.attention import recomputing
from rlkit.parallel.data import each_stage
from rlkit.parallel.mesh import Mesh
from rlkit.parallel.moe import read_experts, split_experts
from rlkit.parallel.pipeline import cut_stage

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


# model_type -> dimension of the heads in the input of q_norm and k_norm, where the model has them
COVERED = {"llama": None, "mistral": None, "qwen2": None, "gemma2": None, "qwen3": 2, "qwen3_moe": 2, "gemma3_text": 1}


def check_model(config: Any, *, tp: int = 1, cp: int = 1, ulysses: bool = False) -> None:
    """Refuse a model that cannot be cut exactly.

    Errors: ValueError for a model type that is not covered, and for sizes that do not divide the heads or the MLP.
    """
    kind, text = config.model_type, config.get_text_config()
    if kind not in COVERED:
        raise ValueError(
            f"model type {kind!r} is not covered by tp, cp, pp and ep, only {', '.join(sorted(COVERED))}. Use "
            "replicate and shard: another layout needs its tensor parallel plan checked against one process first"
        )
    if getattr(text, "use_bidirectional_attention", False):
        raise ValueError(f"model type {kind!r} is not causal: `use_bidirectional_attention` is set")
    kv_heads = text.num_key_value_heads
    split = tp * (cp if ulysses else 1)
    if kv_heads % split:
        fits = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        sizes = f"tp={tp} * cp={cp} (ulysses)" if ulysses else f"tp={tp}"
        fix = "; context parallel without ulysses has no such limit" if ulysses else ""
        raise ValueError(f"{sizes} must divide the {kv_heads} key-value heads of the model: use {fits}{fix}")
    if text.intermediate_size % tp:
        raise ValueError(f"tp={tp} must divide the intermediate_size {text.intermediate_size}")


def tensor_plan(model: Any) -> dict[str, ParallelStyle]:
    """Module name -> DTensor style, for `parallelize_module`.

    All heads share the weights of q_norm and k_norm, so their gradient is a sum over the ranks' heads. A plan that
    leaves them out trains on a wrong gradient without any error; here their input is declared as sharded along heads.
    The input of attention and of a dense MLP becomes a DTensor once, so that the gradients of its projections are added
    before one all-reduce.

    Errors: ValueError for a style that is not covered, and for a linear layer that the plan leaves out.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    head_dim_at = COVERED[model.config.model_type]
    prefix = model.base_model_prefix + "."
    plan: dict[str, ParallelStyle] = {prefix + "embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if model.get_output_embeddings() is not None:
        plan["lm_head"] = ColwiseParallel()
    if head_dim_at is not None:
        norms = SequenceParallel(sequence_dim=head_dim_at, use_local_output=True)
        plan |= {f"{prefix}layers.*.self_attn.{n}_norm": norms for n in "qk"}
    for pattern, style in model.base_model.config.base_model_tp_plan.items():
        if prefix + pattern in plan or ".experts" in pattern:
            continue  # planned above, or by `rlkit.parallel.moe`
        if style not in styles:
            raise ValueError(f"the model's tensor parallel plan has {pattern}: {style!r}, which is not covered")
        plan[prefix + pattern] = styles[style]()
    names = dict(model.named_modules())
    styled = {name: style for pattern, style in plan.items() for name in fnmatch.filter(names, pattern)}
    # a linear layer without a style would be summed or repeated wrongly
    missing = [n for n, m in names.items() if isinstance(m, nn.Linear) and n.startswith(prefix) and n not in styled]
    if missing:
        raise ValueError(f"the model's tensor parallel plan leaves out {missing[0]} ({len(missing)} in all)")
    hidden: dict[str, Any] = {"hidden_states": Replicate()}
    parents = (name.rpartition(".") for name in styled)
    inputs = {
        "q_proj": PrepareModuleInput(input_kwarg_layouts=hidden, desired_input_kwarg_layouts=hidden),
        "gate_proj": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    }
    return styled | {parent: inputs[last] for parent, _, last in parents if last in inputs}


def _moved_alone(model: Any, mesh: Mesh, *, offload: bool) -> bool:
    """Whether this process holds a model alone, which then is on the mesh's device; FSDP moves the others."""
    alone = dist.get_world_size() == 1 and not offload
    if alone and not next(model.parameters()).is_meta:
        model.to(mesh.device)
    return alone


def _drops(layer: nn.Module) -> bool:
    """Whether a layer that is computed again has to draw the same numbers."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    activation_checkpointing: bool = False,
    reshard_after_forward: bool = True,
    offload: bool = False,
    compile: bool = False,
    frozen: bool = False,
) -> ShardedModel:
    """Cut `model`, which every rank holds whole (or on the meta device), over the mesh, in place.

    Returns it with its mesh and dtype, for everything that follows: `model` itself no longer computes.

    Args:
        dtype: of the forward and backward. The optimizer's parameters are fp32 shards, the master weights.
        reduce_dtype: of the sum of gradients over ranks.
        activation_checkpointing: keep only each layer's input, and recompute the layer in the backward.
        reshard_after_forward: free each layer's gathered parameters after its forward, and gather them again for its
            backward. False keeps them, in `dtype`, from forward to backward: one gather a micro-batch instead of two.
            One rank keeps them in any case.
        offload: parameters, gradients and optimizer states live in CPU memory, and are copied layer by layer.
        compile: compile each layer, with attention as a graph break. Not with tensor parallelism.
        frozen: the model will not train, so its weights are kept in `dtype`: the same numbers, half the memory in bf16.

    Errors: ValueError for a model type that is not causal, or not covered by the sizes, for layers that share weights
    (Zamba's), for heads that the sizes do not divide, for `compile` with tensor parallelism, for adapters of
    experts with `ep`, and for adapters on the layers of some pipeline stages only.
    """
    sizes = mesh.sizes
    if _layers(model) is None:
        raise ValueError(f"model type {model.config.model_type!r} has no list of layers to cut over ranks")
    in_layers = Counter(p for layer in _layers(model) for p in layer.parameters())
    if tied := next((name for name, p in model.named_parameters() if in_layers[p] > 1), None):
        raise ValueError(f"{type(model).__name__} has layers that share weights ({tied}): train it in one process")
    if max(sizes.tp, sizes.cp, sizes.pp, sizes.ep) > 1 or model.config.model_type in COVERED:
        check_model(model.config, tp=sizes.tp, cp=sizes.cp, ulysses=sizes.ulysses)
    if compile and sizes.tp > 1:
        raise ValueError("compile=True with tp > 1: torch cannot trace DTensors of varying length; drop one")
    fused = [name for name in adapters(model) if not name.endswith(".weight")]
    if sizes.ep > 1 and fused:
        fault = f"ep={sizes.ep} trains no adapters of experts ({fused[0]})"
        raise ValueError(f"{fault}: give other targets (--lora-targets)")
    alone = _moved_alone(model, mesh, offload=offload)
    verdict, mesh = check_loaded(model, forward), mesh.weighing(attention_share(model))
    model.to(torch.float32)
    for p in model.parameters() if frozen else ():  # not the buffers: rotary frequencies stay in fp32
        p.data = p.data.to(dtype)
    if verdict.packed:
        set_packed(model, replay=verdict.replay)
    model.eval()  # dropout off: scoring and training must give the same numbers
    if sizes.tp > 1:
        split_tensors(model, mesh)
    copies = cut_stage(model, mesh, dtype=dtype) if sizes.pp > 1 else None
    _check_adapted(model, mesh)
    half = alone and not frozen and dtype != torch.float32
    working = WorkingCopy(model, dtype=dtype, reduce_dtype=reduce_dtype) if half else None
    again = recomputing if working is None else working.recomputing
    for layer in filter(_holds_any, _layers(model)):
        if compile:
            layer.forward = torch.compile(layer.forward)
        if activation_checkpointing:  # outside: torch cannot compile a graph break inside a checkpoint
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": _drops(layer), "context_fn": again}
            layer.forward = partial(checkpoint, layer.forward, **options)
    sharded = ShardedModel(model, mesh, dtype=dtype, copies=copies, working=working)
    if not alone:
        options = {"dtype": dtype, "reduce_dtype": reduce_dtype}
        shard(sharded, mesh, reshard_after_forward=reshard_after_forward, offload=offload, **options)
    return sharded


def _check_adapted(model: nn.Module, mesh: Mesh) -> None:
    """ValueError where only some pipeline stages have adapters: their work would differ."""
    adapted = each_stage(bool(adapters(model)), mesh=mesh)
    if len({*adapted}) > 1:
        fault = f"only {sum(adapted)} of pp={mesh.sizes.pp} pipeline stages have adapters"
        raise ValueError(f"{fault}: give them to modules of all layers (--lora-targets), or drop --parallel.pp")


def split_tensors(model: Any, mesh: Mesh) -> None:
    """Tensor parallelism by `tensor_plan`. DTensor unties the head and the embedding, so they are tied again."""
    from torch.distributed.tensor.parallel import parallelize_module

    # it warns for each gathered weight that a gather in two steps may change the order of summation
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parallelize_module(model, mesh.tensor, tensor_plan(model))
    tie(model)


def shard(
    model: Any, mesh: Mesh, *, dtype: torch.dtype, reduce_dtype: torch.dtype, reshard_after_forward: bool, offload: bool
) -> None:
    """FSDP2 with a unit per layer, one for an untied embedding, and the root for the rest (final norm, head).

    The root's parameters are kept from forward to backward in any case: its backward is the first. Quantized weights
    stay whole on each rank: they are an eighth to a quarter of fp32, and a forward then has none to gather.
    """
    from torch.distributed import fsdp

    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    memory = fsdp.CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if offload else fsdp.OffloadPolicy()
    options: dict[str, Any] = {"mp_policy": precision, "offload_policy": memory}
    options["reshard_after_forward"] = None if reshard_after_forward else False  # None: all but the root
    held = [module for module in model.modules() if isinstance(getattr(module, "weight", None), Quantized)]
    options["ignored_params"] = {module.to(mesh.device).weight for module in held}
    if mesh.sizes.ep > 1 or (mesh.sizes.tp > 1 and hasattr(model.config, "num_experts")):
        split_experts(model, mesh, **options)
    unit = partial(fsdp.fully_shard, mesh=mesh.fsdp, **options)
    for layer in filter(_holds_any, _layers(model)):
        unit(layer)
    embedding = model.get_input_embeddings()
    # of a sharded embedding torch warns about the view that it returns
    if not is_tied(model) and mesh.sizes.tp == 1 and _holds_any(embedding):
        unit(embedding)
    unit(model)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_tied(model: Any) -> bool:
    """Whether the model has a head whose weight is the embedding's."""
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", None)  # of some vision models, only the outer
    tied = getattr(model.config, "tie_word_embeddings", False) if tied is None else tied
    return model.get_output_embeddings() is not None and bool(tied)


def tie(model: Any) -> None:
    """Make the head's weight the embedding's again, where the config ties them."""
    if is_tied(model):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def load_parallel(
    path: str | os.PathLike[str],
    mesh: Mesh,
    *,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = (),
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_base: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    build: Callable[..., Any] | None = None,
    whole: Callable[..., Any] = load_model,
    new: str = "",
    **options: Any,
) -> ShardedModel:
    """A causal LM from a folder or hub id, cut over the mesh; no rank holds the whole model of a type in `COVERED`.

    It is built on the meta device and cut; then each rank reads its shards from the safetensors files. A model type
    outside `COVERED`, whose files may have other names than its weights, is read by transformers: each rank holds the
    whole model on its CPU (by `whole(path)`) until it is cut; so is an FP8 checkpoint, dequantized. `options` are those
    of `parallelize`. A hub id is downloaded once per node. With `lora_rank` only adapters of that rank train, on the
    modules `lora_targets` (see `rlkit.model.lora`; none: all; `lora_alpha` None: twice the rank), or the one in the
    folder `adapter`, which with `lora_rank` 0 is merged, before the model is cut. With `lora_base` each rank reads the
    whole model, too, and keeps all quantized weights of its layers.

    `build(config, dtype=...)` makes another model (`rlkit.model.heads`), in which weights
    whose names begin with `new` are 0 where the files lack them.

    Errors: those of `parallelize`; FileNotFoundError for a folder without config or weights; ValueError naming weights
    that the files lack or hold in another shape.
    """
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    folder, device = local_folder(path), "cpu" if options.get("offload") else mesh.device
    config = load_config(folder)
    config.name_or_path = str(path)  # not the hub's cache
    check_causal_lm(config)
    merging = adapter is not None and lora_rank == 0
    lora: dict[str, Any] = {"lora_rank": lora_rank, "lora_targets": lora_targets, "adapter": adapter}
    lora |= {"lora_alpha": lora_alpha, "lora_dropout": lora_dropout, "lora_base": lora_base}
    if config.model_type not in COVERED or merging or lora_base is not None or blocks_of(config) is not None:
        if max(mesh.sizes.tp, mesh.sizes.cp, mesh.sizes.pp, mesh.sizes.ep) > 1:
            check_model(config)
        model = whole(folder)
        model.config.name_or_path = str(path)
        return parallelize(with_adapters(model, **lora), mesh, **options)
    untie(config, equal=same_tensors(folder, "lm_head.weight", "model.embed_tokens.weight"), path=path)
    with building(path), torch.device("meta"):
        make: Callable[..., Any] = AutoModelForCausalLM.from_config if build is None else build
        model = make(config, dtype=torch.float32, **NO_CODE)
    if (folder / "generation_config.json").is_file():  # an export must keep the stop tokens
        with explained(path, "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    sharded = parallelize(with_adapters(model, fill=False, **lora), mesh, **options)
    read_weights(sharded, folder, device=device, new=new)
    reset_adapters(sharded)
    return sharded if adapter is None else fill_adapter(sharded, adapter)


@torch.no_grad()
def read_weights(model: Any, folder: Path, *, device: torch.device | str, new: str = "") -> None:
    """Materialise a model on the meta device: memory, buffers, and weights from files of any dtype.

    Weights whose names begin with `new` are 0 where the files lack them.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model.to_empty(device=device)
    tie(model)
    for module in model.modules():
        if module._non_persistent_buffers_set:  # rotary frequencies, embedding scales: not in the files
            model._init_weights(module)
        for name, x in module._buffers.items():  # offloading is for parameters
            module._buffers[name] = x if x is None else x.to(device_of(model))
    held: dict[str, Any] = get_model_state_dict(model)
    weights = {clean_of_peft(name): x for name, x in held.items() if ".lora_" not in name}
    if is_tied(model):
        weights.pop("lm_head.weight", None)
    for name in read_experts(weights, folder):
        del weights[name]
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    check_leftover(folder, stored.keys() - weights.keys())
    for name in [name for name in weights if new and name.startswith(new) and name not in stored]:
        weights.pop(name).zero_()
    diffs = [f"{name} is missing" for name in weights if name not in stored]
    diffs += [
        f"{name} is {list(stored[name].size)} there and {list(x.shape)} in the model"
        for name, x in weights.items()
        if name in stored and stored[name].size != x.shape
    ]
    if diffs:
        raise ValueError(f"{folder} does not hold this model: {'; '.join(diffs[:4])} ({len(diffs)} differences in all)")
    dcp.load(weights, storage_reader=reader)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a model: the path itself, or the hub's cache after one rank per node has downloaded the files."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder} has no config.json or no *.safetensors; save it by save_pretrained")
        return folder
    if os.path.isabs(path) or str(path).startswith((".", "~")) or str(path).count("/") != 1:
        raise FileNotFoundError(f"{path}: no such folder; give one saved by save_pretrained, or a hub id a/b")
    from huggingface_hub import snapshot_download

    check_causal_lm(load_config(path))  # before gigabytes are downloaded
    if not local_rank():
        snapshot_download(str(path), allow_patterns=HUB_FILES)
    await_all()  # a download may take longer than a collective; some shared disks grant the hub's locks to all
    return Path(snapshot_download(str(path), allow_patterns=HUB_FILES))


def _layers(model: Any) -> Any:
    """The decoder's layers: the list of as many modules as the config has layers; None without one."""
    base: Any = getattr(model.base_model, "language_model", model.base_model)  # not those of a vision tower
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return base.layers if hasattr(base, "layers") else next(lists, None)


def _holds_any(module: nn.Module) -> bool:
    """Whether it has parameters: the placeholder of another pipeline stage's layer has none."""
    return next(module.parameters(), None) is not None
