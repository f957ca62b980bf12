"""LoRA through `peft`: only low-rank updates of linear layers and fused experts train.

    model = add_lora(load_model(path), rank=16)              # then `adamw`, `forward` as usual
    model = load_parallel(path, mesh, lora_rank=16)          # on many ranks
    reference = without_adapter(policy, model)               # the base model, in the same memory
    await engine.update_weights(stream_weights(model), ...)  # merged weights, or for servers the adapter alone
    save_adapter(model, folder)                              # a few MB, which `peft` and engines load
    model = load_adapter(load_model(base), folder)           # one of peft's or of a run, which trains on
    reference = snapshot(model)                              # then: the model with that adapter, in the same memory

    W + (alpha / rank) B A           of a linear layer W [out, in]: a [rank, in], b [out, rank]
    W_e + (alpha / rank) B_e A_e     of each expert e of a fused weight W [experts, out, in], by peft's `ParamWrapper`:
                                     a [experts * rank, in], b [out, rank * experts] with the experts innermost

`stream_weights` and `export_hf` add the update in fp32 to W in the dtype that is asked for (in bf16 to what a forward
in bf16 computes with), then cast. Checkpoints hold the adapters, and sums of the frozen weights, against which those of
a resumed run are checked. The forward adds a fused weight's update to a copy of the
weight, in its own dtype. Layers whose weight another module computes with, and routers with a forward of their own,
have no adapter. Not supported with tensor parallel, and not on experts with expert parallel.
Reference: arXiv:2106.09685
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlkit._util.extras import optional
from rlkit._util.files import explain_full_disk, share
from rlkit._util.ranks import on_rank0, rank
from rlkit.model.adapter_files import WEIGHTS, AdapterFile, read_adapter
from rlkit.model.quantized import Quantized, quantized
from rlkit.model.sharding import mesh_of, own_part, whole_of
from rlkit.model.vision import tower_parts
from rlkit.parallel.data import each_stage

if TYPE_CHECKING:
    from rlkit.model.forward import PolicyFn

log = logging.getLogger("rlkit.model")
_PARTS = {  # a fused weight, and its parts as checkpoints name them
    "gate_up_proj": ({"gate_proj", "up_proj"}, {"w1", "w3"}),
    "down_proj": ({"w2"},),
}
_RENAMED = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}  # what peft takes for experts in a MoE


class Adapter(NamedTuple):
    """The update of one weight, `scale * b @ a`; sharded like the model.

    `transposed`: the weight is [in, out], as those of GPT-2. `layer`: the name of the module that holds a and b.
    """

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False
    layer: str = ""


def add_lora(
    model: Any,
    *,
    rank: int = 16,
    alpha: float = 32,
    targets: str | list[str] = "all-linear",
    dropout: float = 0.0,
    seed: int = 0,
    base: str | None = None,
) -> Any:
    """Freeze `model` and add an adapter to each target, in place; call it before `parallelize`.

    b starts at 0, so the outputs do not change until the first step. a depends only on `seed` and the layer's name, in
    any layout. `targets`: module names as in peft, such as ["q_proj", "v_proj"], and fused experts, such as
    "gate_up_proj", or by the names that checkpoints give its parts: both "gate_proj" and "up_proj". "all-linear" is
    every layer and expert that can have an adapter; the head and the tower of a vision model have none. The head of a
    critic or a reward model trains whole. `dropout` is the share of an adapter's inputs that are 0 inside `dropping`,
    and nowhere else; fused experts take none. `base` "int8" or "nf4" quantizes the linear layers that can have an
    adapter (`rlkit.model.quantized`); embeddings, fused experts and the head stay in fp32. A model that holds an FP8
    checkpoint's codes, `load_model(path, dtype="auto")`, needs no `base`; its experts have no adapter.

    Errors: ValueError for a target that the model lacks or that can have no adapter, with the names of those that can,
    and for `dropout` on fused experts.
    """
    _inject(model, *_chosen(model, targets), {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout}, base)
    reset_adapters(model, seed=seed)
    return model


def _inject(model: Any, layers: list[str], experts: list[str], options: dict[str, Any], base: str | None) -> None:
    """Freeze the model and put adapters with the `options` of peft's config around these layers and experts."""
    peft = optional("peft", "lora", "LoRA needs")
    import torch.distributed.tensor  # peft reads it as an attribute

    if options["lora_dropout"] and experts:
        raise ValueError(
            f"`lora_dropout` must be 0 for fused experts ({_lasts(experts)}), or choose targets (--lora-targets) from: "
            f"{_lasts(layers)}"
        )
    head = getattr(model, "score", None)
    if base is not None:
        _quantize(model, base)
    patterns = {kind: options[kind] for kind in ("rank_pattern", "alpha_pattern") if kind in options}
    below = {kind: {re.sub(r"\A\^", r"^model\\.", x): n for x, n in of.items()} for kind, of in patterns.items()}
    names = {"target_modules": [f"model.{x}" for x in layers], "target_parameters": [f"model.{x}" for x in experts]}
    config = peft.LoraConfig(task_type="CAUSAL_LM" if head is None else "SEQ_CLS", **names, **options | below)
    nameless = nn.ModuleDict({"model": model})  # peft renames the targets of model types that it knows
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # it is set where it should be
        peft.inject_adapter_in_model(config, nameless)
    vars(config).update(patterns)
    model.peft_config = {"default": _saved_config(model, config, layers, experts)}
    if head is not None:
        head.requires_grad_(True)
    model.eval()  # the new modules, too


def load_adapter(
    model: Any, folder: str | os.PathLike[str], *, dropout: float = 0.0, base: str | None = None, fill: bool = True
) -> Any:
    """`add_lora` with the rank, the scale, the layers and the weights of an adapter: training it goes on.

    The folder is one of `save_adapter`, or of peft's `save_pretrained`, with rank and scale of their own for some
    layers (`rank_pattern`) and `use_rslora` too. `dropout` is that of the training to come, which is exported, and not
    the adapter's own. Without `fill` its weights are not read: `fill_adapter` does so once the model is cut.

    Errors: those of `rlkit.model.adapter_files.read_adapter`; ValueError for an adapter of another model.
    """
    file = read_adapter(folder)
    try:
        layers, experts = _chosen(model, file.targets)
    except ValueError as error:
        reason = str(error).removeprefix("`lora_targets` ").partition("; choose")[0]
        raise ValueError(f"the adapter {str(folder)!r} does not fit {type(model).__name__}: {reason}") from None
    _warn_of_others(model, file, {*layers})
    options = {"r": file.rank, "lora_alpha": file.alpha, "use_rslora": file.rslora, "lora_dropout": dropout}
    _inject(model, layers, experts, options | file.patterns, base)
    return fill_adapter(model, folder) if fill else model


def with_adapters(
    model: Any,
    *,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = (),
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    lora_base: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    fill: bool = True,
) -> Any:
    """`model` as the flags of a script want it, in place: with new adapters, with those of the folder `adapter` (see
    `load_adapter` for `fill`), with these merged where `lora_rank` is 0, or as it is."""
    if adapter is not None and lora_rank == 0:
        return merge_adapter(model, adapter)
    if adapter is not None:
        return load_adapter(model, adapter, dropout=lora_dropout, base=lora_base, fill=fill)
    if not lora_rank:
        return model
    options: dict[str, Any] = {"targets": [*lora_targets] or "all-linear", "dropout": lora_dropout, "base": lora_base}
    return add_lora(model, rank=lora_rank, alpha=lora_alpha or 2 * lora_rank, **options)


def _warn_of_others(model: Any, file: AdapterFile, layers: set[str]) -> None:
    """Warn of layers that the config of an adapter names and its file lacks, and the other way round."""
    try:
        named = {*_chosen(model, file.named)[0]} if file.named else set()
    except (ValueError, TypeError, re.error):  # names of heads and of other models: the file alone says what it adapts
        return
    if lacking := sorted(named - layers):
        said = f"{len(lacking)} of the {len(named)} layers that its target_modules name, as {lacking[0]}"
        log.warning("the adapter %r has no weights for %s: they stay without one", str(file.folder), said)
    if others := sorted(layers - named if named else ()):
        said = f"{len(others)} of its {len(layers)} layers, as {others[0]}: peft leaves those out, and they train here"
        log.warning("the target_modules of the adapter %r do not name %s", str(file.folder), said)


@torch.no_grad()
def fill_adapter(model: Any, folder: str | os.PathLike[str]) -> Any:
    """Set the adapters to the weights in `folder`, also of a model that is already cut; ValueError for other shapes."""
    from safetensors.torch import load_file

    tensors, acts = load_file(Path(folder) / WEIGHTS), False
    for adapter in adapters(model).values():
        for part, x in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            name = f"base_model.model.{adapter.layer}.{part}.weight"
            whole = tensors.pop(name, torch.empty(0))
            if whole.shape != x.shape:
                there = [*whole.shape] if whole.numel() else "missing"
                raise ValueError(
                    f"the adapter {str(folder)!r} is of another model: {name} is {there}, not {[*x.shape]}"
                )
            _copy(whole, x)
        acts |= bool(whole.any())  # of lora_B
    if not acts:
        log.warning("the adapter %r changes nothing: all its lora_B are 0, as before any training", str(folder))
    if tensors and mesh_of(model) is None:
        raise ValueError(f"the adapter {str(folder)!r} is of another model, which has {next(iter(tensors))}")
    return model


def merge_adapter(model: Any, folder: str | os.PathLike[str]) -> Any:
    """Add the adapter in `folder` to the weights, in place: the model is as without LoRA, and all of it trains."""
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    updates = adapters(load_adapter(model, folder))
    for name, p in model.named_parameters():
        if (clean := clean_of_peft(name)) in updates:
            p.data = merged(p.data, updates[clean])
    for name, layer in [*model.named_modules()]:
        if adapter_of(layer) is not None and not name.endswith(".base_layer"):
            model.set_submodule(name, cast(Any, layer).get_base_layer())
    del model.peft_config
    for name, p in model.named_parameters():
        p.requires_grad_(trains[name])
    return model


def _quantize(model: Any, kind: str) -> None:
    """Quantize the linear layers that can have an adapter, whether they get one or not; the rest becomes fp32."""
    layers = [layer for name in _adaptable(model)[0] if is_linear(layer := model.get_submodule(name))]
    if not layers:
        raise ValueError(f"`lora_base` quantizes linear layers, and {type(model).__name__} has none: drop it")
    for layer in layers:
        layer.weight = nn.Parameter(quantized(layer.weight, kind), requires_grad=False)
    for p in model.parameters():
        if not isinstance(p, Quantized):
            p.data = p.data.float()


@contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Inside the block the adapters' dropout is on: around the forward and the backward of a loss on fixed data."""
    layers = [m for name, m in model.named_modules() if ".lora_dropout." in name]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()


def seed_dropout(model: nn.Module) -> None:
    """Seed torch anew on all ranks but the first, where the adapters have dropout: with one seed their masks would be
    the first's. No two ranks compute the same, since a model with adapters is not tensor parallel.
    """
    if rank() and any(isinstance(m, nn.Dropout) for name, m in model.named_modules() if ".lora_dropout." in name):
        torch.manual_seed(torch.initial_seed() + rank())


def _chosen(model: Any, targets: str | list[str]) -> tuple[list[str], list[str]]:
    """The names of the linear layers and of the fused weights that get an adapter; ValueError: see `add_lora`."""
    layers, experts, others = _adaptable(model)
    names, fine = [*layers, *experts, *others], [*layers, *experts]
    ends = lambda target: {name for name in names if f".{name}".endswith(f".{target}")}  # noqa: E731
    if isinstance(targets, str):
        by_target = {targets: {*fine} if targets == "all-linear" else {n for n in names if re.fullmatch(targets, n)}}
    else:
        by_target = {target: ends(target) for target in targets}
    for whole, forms in _PARTS.items():
        for parts in (parts for parts in forms if parts <= by_target.keys()):
            by_target |= {part: by_target[part] | ends(whole) for part in parts}
    if not fine:
        raise ValueError(
            f"LoRA adapts linear layers and experts, and {type(model).__name__} has none: train all weights"
        )
    if missing := next((target for target, of in by_target.items() if not of), None):
        raise ValueError(f"`lora_targets` {missing}: the model has no such module; choose from: {_lasts(fine)}")
    chosen = set().union(*by_target.values())
    if refused := {_pattern(name): why for name, why in others.items() if name in chosen}:
        listed = " and ".join(f"{path} ({why})" for path, why in refused.items())
        raise ValueError(f"LoRA does not adapt {listed}; choose targets (--lora-targets) from: {_lasts(fine)}")
    return [name for name in layers if name in chosen], [name for name in experts if name in chosen]


def _adaptable(model: Any) -> tuple[list[str], list[str], dict[str, str]]:
    """The names of the linear layers, of the fused weights of experts, and of the other modules with what they are."""
    modules, layers, experts = dict(model.named_modules()), list[str](), list[str]()
    others, heads = dict[str, str](), (model.get_output_embeddings(), getattr(model, "score", None))
    holders = Counter(p for module in modules.values() for p in module.parameters(recurse=False))
    for name, module in modules.items():
        if not name or re.fullmatch(_tower(model), name):
            continue
        above, _, last = name.rpartition(".")
        parent = cast(Any, type(modules[above]))
        if module in heads:
            others[name] = "the head"
        elif not (is_linear(module) or _is_transposed(module)):
            others[name] = type(module).__name__
        elif holders[cast(Any, module.weight)] > 1:  # merged, layers with adapters of their own would differ
            others[name] = "it has one weight with another layer"
        elif _reads_weight(parent, f"{last}.weight"):
            others[name] = f"{parent.__name__} reads its weight"
        else:
            layers.append(name)
        if "Experts" in type(module).__name__:
            parts = module.named_parameters(recurse=False)
            weights = (key for key, p in parts if p.ndim == 3 and not isinstance(p, Quantized))
            experts += [f"{name}.{key}" for key in weights if not _reads_weight(parent, f"{last}.{key}")]
    return layers, experts, others


def _saved_config(model: Any, config: Any, layers: list[str], experts: list[str]) -> Any:
    """The config by which peft adapts the same layers of the model without adapters."""
    modules = {clean_of_peft(name) for name, _ in model.named_modules() if ".lora_" not in name}
    weights = {clean_of_peft(name) for name, _ in model.named_parameters() if ".lora_" not in name}
    modules = {name for name in modules if not re.fullmatch(_tower(model), name)}
    moe = any("experts." in name for name in weights)
    renamed = {name for name in layers if moe and name.rpartition(".")[2] in _RENAMED}
    config = copy.copy(config)
    vars(config).update(
        target_modules=_short({*layers} - renamed, modules),
        target_parameters=_short({*experts, *(f"{name}.weight" for name in renamed)}, weights) or None,
        exclude_modules=_tower(model) if tower_parts(model) else None,
    )
    return config


def _short(names: set[str], among: set[str]) -> list[str]:
    """Last parts of `names`, and those whole whose last part others of `among` have."""
    last = {name: name.rpartition(".")[2] for name in names}
    others = {name.rpartition(".")[2] for name in among - names}
    return sorted({name if part in others else part for name, part in last.items()})


def _tower(model: Any) -> str:
    """A pattern of the names of all modules in the tower of a vision model."""
    return rf"(.*\.)?({'|'.join(map(re.escape, tower_parts(model))) or '(?!)'})(\..*)?"


def _lasts(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none, so train all weights"


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


@cache
def _reads_weight(parent: Any, weight: str) -> bool:
    """Whether the forward of a module computes with a `weight` of a part, as Mamba's do with `dt_proj.weight`."""
    try:
        source = inspect.getsource(parent.forward) + "".join(
            inspect.getsource(f) for key, f in vars(parent).items() if key.endswith("forward") and callable(f)
        )
    except (OSError, TypeError, AttributeError):
        return False
    return re.search(rf"self\.{re.escape(weight)}(?!\.(dtype|device|shape|requires_grad))\b", source) is not None


def is_linear(module: Any) -> bool:
    """Whether the module computes W x + b: an `nn.Linear`, or a subclass with its forward."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_transposed(module: Any) -> bool:
    """Whether the module is a linear layer of GPT-2, with a weight [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


def lora_config(model: Any) -> Any:
    """The `peft.LoraConfig` that `add_lora` injected."""
    return model.peft_config["default"]


@torch.no_grad()
def reset_adapters(model: nn.Module, *, seed: int = 0) -> None:
    """Initialise the adapters (a as in `peft`, b at 0), also those of a model that is already cut."""
    for name, layer in model.named_modules():
        if (adapter := adapter_of(layer)) is not None:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            bound = adapter.a.shape[1] ** -0.5
            a = torch.empty(adapter.a.shape, device="cpu").uniform_(-bound, bound, generator=generator)
            _copy(a, adapter.a)
            adapter.b.zero_()


def _copy(whole: Tensor, to: Any) -> None:
    if not hasattr(to, "placements"):
        to.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor

    to.to_local().copy_(distribute_tensor(whole, to.device_mesh, to.placements, src_data_rank=None).to_local())


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Name of a weight, as without LoRA -> its adapter; {} for a model without adapters."""
    every = ((name, m, adapter_of(m)) for name, m in model.named_modules())
    return {clean_of_peft(f"{name}.{_weight_name(m)}"): a._replace(layer=name) for name, m, a in every if a is not None}


def _weight_name(layer: Any) -> str:
    return getattr(layer, "parameter_name", "weight")


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a layer; None where it has none."""
    if not getattr(layer, "lora_A", None):
        return None
    transposed = layer.fan_in_fan_out or (
        hasattr(layer, "parameter_name") and not getattr(layer, "_did_swap_in_out_features", False)
    )
    return Adapter(layer.lora_A.default.weight, layer.lora_B.default.weight, layer.scaling["default"], transposed)


def clean_of_peft(name: str) -> str:
    """The name of a parameter as without LoRA."""
    return name.replace(".base_layer", "")


def is_low_rank(layer: Any) -> bool:
    """Whether the layer computes (W + scale B A) x: one adapter, not merged, without bias, DoRA or the like."""
    if adapter_of(layer) is None or len(layer.lora_A) > 1 or layer.merged or not is_linear(layer.get_base_layer()):
        return False
    return not layer.lora_variant and layer.lora_B.default.bias is None


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """The full weight plus its update, in the weight's dtype. A collective where the adapter is sharded."""
    a, b = whole_of(adapter.a.detach()).float(), whole_of(adapter.b.detach()).float()
    experts = weight.shape[0] if weight.ndim == 3 else 1
    update = b.view(b.shape[0], -1, experts).permute(2, 0, 1) @ a.view(experts, -1, a.shape[1])
    update = adapter.scale * (update.mT if adapter.transposed else update).view_as(weight)
    return (weight.float() + update.to(weight.device)).to(weight.dtype)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside the block the adapters are off: the model is the base model."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]
    if not layers:
        raise ValueError("the model has no adapter to switch off; call add_lora first")
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also toggles requires_grad, under FSDP
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def without_adapter(policy: PolicyFn, model: nn.Module) -> PolicyFn:
    """The policy of the base model: a reference that takes no extra memory. For scoring only, without gradient."""

    def reference(batch: Any) -> Any:
        with adapter_off(model), torch.no_grad():
            return policy(batch)

    return reference


class Snapshot(NamedTuple):
    """A model, and a copy of its adapters at some time: a `reference` of the loops while the model trains on."""

    model: Any
    copies: list[Tensor]


def snapshot(model: nn.Module) -> Snapshot:
    """The model with its adapters as they are now. It takes no memory but for a copy of them."""
    return Snapshot(model, [x.clone() for x in _adapter_shards(model)])


def at_snapshot(policy: PolicyFn, reference: Snapshot) -> PolicyFn:
    """The policy with the adapters of the snapshot. For scoring only, without gradient."""

    def scored(batch: Any) -> Any:
        live = _adapter_shards(reference.model)
        now = [x.clone() for x in live]
        with torch.no_grad():
            try:
                for x, source in zip(live, reference.copies, strict=True):
                    x.copy_(source)
                return policy(batch)
            finally:
                for x, source in zip(live, now, strict=True):
                    x.copy_(source)

    return scored


def _adapter_shards(model: nn.Module) -> list[Tensor]:
    """The numbers of the adapters that this rank holds, in their own memory."""
    shards: list[Any] = [x.detach() for adapter in adapters(model).values() for x in (adapter.a, adapter.b)]
    return [own_part(x).data for x in shards]


def only_adapter_trains(model: Any) -> bool:
    """Whether the frozen base weights and one `scale * B A` a layer, of one rank and scale, are all of the model.

    Then the adapter alone is the update that an engine with the base weights needs. False without an adapter, and with
    a trained embedding, DoRA, a bias, other ranks or scales of some layers, and of a base that was quantized here:
    servers do not have it, but that of an FP8 checkpoint they do. Collective over pipeline stages.
    """
    layers = [layer for layer in model.modules() if adapter_of(layer) is not None]
    ranks_and_scales = {(layer.lora_A.default.weight.shape[0], layer.scaling["default"]) for layer in layers}
    fine = all(map(is_low_rank, layers))
    fine = fine and not any(x.requires_grad and ".lora_" not in name for name, x in model.named_parameters())
    fine = fine and not any(isinstance(x, Quantized) and x.kind != "fp8" for x in model.parameters())
    stages = each_stage((fine, ranks_and_scales), mesh=mesh_of(model))
    kinds = set().union(*(kinds for _, kinds in stages))
    config = lora_config(model) if layers else None
    ours = config is None or kinds == {(config.r, config.lora_alpha / config.r)}
    return all(fine for fine, _ in stages) and len(kinds) == 1 and ours


def adapter_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor in CPU memory) of the adapter alone, under the names of a peft checkpoint, on every rank.

    `dtype` casts them (None: as they are).
    """
    of_stage = {}
    for adapter in adapters(model).values():
        for part, x in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            of_stage[f"base_model.model.{adapter.layer}.{part}.weight"] = whole_of(x.detach()).to("cpu", dtype)
    for tensors in each_stage(of_stage, mesh=mesh_of(model)):
        yield from tensors.items()


def save_adapter(model: Any, folder: Path | str, *, tokenizer: Any = None) -> Path:
    """Write `adapter_config.json` and `adapter_model.safetensors`, which peft loads, and the tokenizer, if given.

    The config names the model that `model` was loaded from, a folder by its absolute path, for
    `peft.AutoPeftModelForCausalLM.from_pretrained(folder)`. A model made in memory has no name: load its adapter by
    `peft.PeftModel.from_pretrained(base, folder)`.
    """
    folder, tensors = Path(folder), dict(adapter_weights(model))
    needed = (1 << 16) + sum(x.nbytes for x in tensors.values())

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with explain_full_disk("the adapter", folder, needed=needed, fix="Free space there and export it again."):
            write_adapter(model, tensors, folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

    on_rank0(write)
    return folder


def write_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the config and the `tensors` of `adapter_weights`, in this process."""
    from safetensors.torch import save_file

    base, config = model.name_or_path, copy.copy(lora_config(model))
    config.base_model_name_or_path = str(Path(base).resolve()) if base and Path(base).is_dir() else base or None
    config.save_pretrained(folder)
    whole = {name: x.contiguous() for name, x in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    share(folder / WEIGHTS)
