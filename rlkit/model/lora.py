"""LoRA through `peft`: only low-rank updates of the linear layers train.

    model = add_lora(load_model(path), rank=16)              # then `adamw`, `forward` as usual
    model = load_parallel(path, mesh, lora_rank=16)          # on many ranks
    reference = without_adapter(policy, model)               # the base model, in the same memory
    await engine.update_weights(stream_weights(model), ...)  # merged weights, or for servers the adapter alone
    save_adapter(model, folder)                              # a few MB, which `peft` and engines load

`stream_weights` and `export_hf` merge: W + (alpha / rank) B A, in fp32, then cast. Checkpoints hold base weights and
adapters. Only `nn.Linear` layers can have one: fused expert weights, routers with a forward of their own and the
transposed layers of GPT-2 are refused by name. Not supported with tensor parallel.
Reference: arXiv:2106.09685
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlkit._extras import optional
from rlkit.files import explain_full_disk
from rlkit.model.sharding import mesh_of
from rlkit.model.vision import tower_parts
from rlkit.parallel.data import each_stage
from rlkit.ranks import on_rank0

if TYPE_CHECKING:
    from rlkit.model.forward import PolicyFn


class Adapter(NamedTuple):
    """The update of one weight, `scale * b @ a`; sharded like the model."""

    a: Tensor
    b: Tensor
    scale: float


def add_lora(
    model: Any,
    *,
    rank: int = 16,
    alpha: float = 32,
    targets: str | list[str] = "all-linear",
    dropout: float = 0.0,
    seed: int = 0,
) -> Any:
    """Freeze `model` and add an adapter to each target, in place; call it before `parallelize`.

    b starts at 0, so the outputs do not change until the first step. a depends only on `seed` and the layer's name, in
    any layout. `targets`: module names as in peft, such as ["q_proj", "v_proj"]; "all-linear" is all but the head. The
    tower of a vision model has none. The head of a critic or a reward model trains whole. `dropout` is the share of an
    adapter's inputs that are 0 inside `dropping`, and nowhere else.

    Errors: ValueError for a target that the model lacks or peft refuses, and for one that is not a linear layer, with
    the names of those that are.
    """
    peft = optional("peft", "lora", "LoRA needs")
    import torch.distributed.tensor  # peft reads it as an attribute

    frozen = "|".join(map(re.escape, tower_parts(model)))  # not the tower of a vision model
    skipped: dict[str, Any] = {"exclude_modules": rf"(.*\.)?({frozen})(\..*)?"} if frozen else {}
    head = getattr(model, "score", None)
    kind: dict[str, Any] = {"task_type": "CAUSAL_LM" if head is None else "SEQ_CLS", "lora_dropout": dropout}
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **kind, **skipped)
    _check_names(model, targets)
    _check_reached(model, targets)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The following|fan_in_fan_out")  # of layers refused below
            peft.inject_adapter_in_model(config, model)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"LoRA on {type(model).__name__}: {str(error).splitlines()[0]}") from error
    _check_layers(model)
    reset_adapters(model, seed=seed)
    if head is not None:
        head.requires_grad_(True)
    return model.eval()  # the new modules, too


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


def _check_names(model: nn.Module, targets: str | list[str]) -> None:
    """Refuse a name that no module has: peft ignores it, as long as another one fits."""
    names = [name for name, _ in model.named_modules()]
    for target in [] if isinstance(targets, str) else targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            linear = ", ".join(sorted({n.rpartition(".")[2] for n, m in model.named_modules() if is_linear(m)}))
            raise ValueError(f"`lora_targets` {target}: the model has no such module; its linear layers: {linear}")


def _check_layers(model: Any) -> None:
    """Refuse adapters that the forward would ignore or an export lose: those of anything but linear layers."""
    from peft.tuners.lora import Linear, LoraLayer

    head, fine, wrong = getattr(model, "score", None) or model.get_output_embeddings(), set(), {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and not isinstance(getattr(layer, "base_layer", None), LoraLayer):
            base = layer.get_base_layer()
            if isinstance(layer, Linear) and is_linear(base) and layer is not head:
                fine.add(name.rpartition(".")[2])
            else:
                wrong[_pattern(name)] = "the head" if layer is head else type(base).__name__
    if wrong:
        names_of_experts = {"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"}  # for peft, in a MoE
        raise _refused(wrong, fine - names_of_experts)


def _refused(wrong: dict[str, str], fine: set[str]) -> ValueError:
    names = " and ".join(f"{path} ({kind})" for path, kind in wrong.items())
    others = ", ".join(sorted(fine)) or "none, so train all weights"
    return ValueError(
        f"LoRA adapts linear layers only, not {names}; layers to name as targets (--lora-targets): {others}"
    )


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name).removesuffix(".base_layer")


def _check_reached(model: Any, targets: str | list[str]) -> None:
    """Refuse layers whose adapter the forward would pass by: another module computes with their weights."""
    modules, fine, wrong = dict(model.named_modules()), set(), {}
    for name, layer in modules.items():
        parent, _, last = name.rpartition(".")
        if not isinstance(layer, nn.Linear) or layer in (model.get_output_embeddings(), getattr(model, "score", None)):
            continue
        if not _reads_weight(cast(Any, type(modules[parent])), last):
            fine.add(last)
        elif targets == "all-linear" or any(name == t or name.endswith(f".{t}") for t in targets):
            wrong[_pattern(name)] = f"{type(modules[parent]).__name__} reads its weight"
    if wrong:
        raise _refused(wrong, fine - {path.rpartition(".")[2] for path in wrong})


@cache
def _reads_weight(parent: Any, name: str) -> bool:
    """Whether the forward of a module computes with the weight of its layer `name`, as Mamba's do with `dt_proj`."""
    try:
        source = inspect.getsource(parent.forward) + "".join(
            inspect.getsource(f) for key, f in vars(parent).items() if key.endswith("forward") and callable(f)
        )
    except (OSError, TypeError, AttributeError):
        return False
    return re.search(rf"self\.{name}\.weight(?!\.(dtype|device|shape|requires_grad))", source) is not None


def is_linear(module: Any) -> bool:
    """Whether the module computes W x + b: an `nn.Linear`, or a subclass with its forward."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


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
    return {f"{name}.weight": a for name, m in model.named_modules() if (a := adapter_of(m)) is not None}


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a layer; None where it has none."""
    if not getattr(layer, "lora_A", None):
        return None
    return Adapter(layer.lora_A.default.weight, layer.lora_B.default.weight, layer.scaling["default"])


def is_low_rank(layer: Any) -> bool:
    """Whether the layer computes (W + scale B A) x: one adapter, not merged, without bias, DoRA or the like."""
    if adapter_of(layer) is None or len(layer.lora_A) > 1 or layer.merged:
        return False
    return not layer.lora_variant and layer.lora_B.default.bias is None


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """The full weight plus its update, in the weight's dtype. A collective where the adapter is sharded."""
    update = adapter.scale * _full(adapter.b).float() @ _full(adapter.a).float()
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


def only_adapter_trains(model: Any) -> bool:
    """Whether the frozen base weights and one `scale * B A` a layer, of one rank and scale, are all of the model.

    Then the adapter alone is the update that an engine with the base weights needs. False without an adapter, and with
    a trained embedding, DoRA, a bias, other ranks or scales of some layers. Collective over pipeline stages.
    """
    layers = [layer for layer in model.modules() if adapter_of(layer) is not None]
    found = {(layer.lora_A.default.weight.shape[0], layer.scaling["default"]) for layer in layers}
    fine = all(map(is_low_rank, layers))
    fine = fine and not any(x.requires_grad and ".lora_" not in name for name, x in model.named_parameters())
    stages = each_stage((fine, found), mesh=mesh_of(model))
    kinds = set().union(*(kinds for _, kinds in stages))
    config = lora_config(model) if layers else None
    ours = config is None or kinds == {(config.r, config.lora_alpha / config.r)}
    return all(fine for fine, _ in stages) and len(kinds) == 1 and ours


def adapter_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor in CPU memory) of the adapter alone, under the names of a peft checkpoint, on every rank.

    `dtype` casts them (None: as they are).
    """
    of_stage = {}
    for name, adapter in adapters(model).items():
        for part, x in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            of_stage[f"base_model.model.{name.removesuffix('weight')}{part}.weight"] = _full(x).to("cpu", dtype)
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
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _full(x: Any) -> Tensor:
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()
