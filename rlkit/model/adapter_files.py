"""What a folder of a LoRA adapter holds: its rank, scale and layers; adapters that rlkit does not compute are refused.

Does not import torch: scripts check an adapter before they load a model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from rlkit._util.files import ADAPTER, adapter_config, is_adapter

WEIGHTS = "adapter_model.safetensors"
_MAX_RANK = 1 << 20  # of a layer as wide
_PREFIX = "base_model.model."
_READ = {  # of peft's LoraConfig: what rlkit uses, and what changes nothing once the weights are there
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "task_type", "lora_dropout", "fan_in_fan_out", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "runtime_config", "bias", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_LEAVES_OUT = ("exclude_modules", "layers_to_transform", "layers_pattern")  # by which peft adapts fewer layers
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # of `init_lora_weights`; others change base weights


class AdapterFile(NamedTuple):
    """A LoRA adapter on the disk, `W + scale B A` in each layer; scale = alpha / rank (`rslora`: alpha / sqrt(rank)).

    `targets` are the names of its linear layers and, as its config has them, of its fused experts. `patterns` are the
    `rank_pattern` and `alpha_pattern` of layers with others than `rank` and `alpha`. `dropout` is the one that it was
    trained with; who trains it on chooses anew. `named` is its config's choice of layers, None where that leaves some
    out.
    """

    folder: Path
    rank: int
    alpha: float
    targets: list[str]
    rslora: bool
    patterns: dict[str, dict[str, Any]]
    dropout: float
    named: Any = None

    @property
    def last_names(self) -> set[str]:
        """The last parts of its layers' names, as `lora_targets` gives them."""
        return {name.rpartition(".")[2] for name in self.targets}


def read_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """The adapter in a folder of peft's `save_pretrained` or of a run (RUN/adapter).

    Errors: FileNotFoundError for a folder without one; ValueError for other kinds than LoRA (DoRA, a trained bias,
    prompt tuning), for whole weights beside the adapters (`modules_to_save`), for adapters that changed their base
    weights (PiSSA, OLoRA), and for files that are damaged.
    """
    folder = Path(path)
    if not is_adapter(folder):
        expected = f"a folder with {ADAPTER}, as peft's save_pretrained and RUN/adapter are"
        raise FileNotFoundError(f"the adapter {str(path)!r} is not {expected}")
    config = adapter_config(folder)
    refuse = f"the adapter {str(path)!r}"
    fix = "merge it into its model by peft (merge_and_unload, then save_pretrained), and give that folder"
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{refuse} is of peft's type {kind}, and rlkit trains LORA: {fix}")
    if others := [name for name, value in config.items() if name not in _READ and value not in (None, False, {}, [])]:
        raise ValueError(f"{refuse} has {others[0]}, which rlkit does not train: {fix}")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"{refuse} has trained biases (bias {bias!r}), which rlkit does not train: {fix}")
    if (start := config.get("init_lora_weights", True)) not in _KEEPS_BASE:
        raise ValueError(f"{refuse} began with {start} (init_lora_weights), which changes the base weights: {fix}")
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout") or 0.0
    if type(rank) is not int or not 1 <= rank <= _MAX_RANK or not isinstance(alpha, int | float) or not alpha > 0:
        raise ValueError(f"{folder / ADAPTER} is damaged: r is {rank!r} and lora_alpha {alpha!r}")
    if not isinstance(dropout, int | float):
        raise ValueError(f"{folder / ADAPTER} is damaged: lora_dropout is {dropout!r}")
    patterns: dict[str, dict[str, Any]] = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, pattern in patterns.items():
        fine = isinstance(pattern, dict) and all(isinstance(x, int | float) and x > 0 for x in pattern.values())
        if not fine or (name == "rank_pattern" and not all(x <= _MAX_RANK for x in pattern.values())):
            raise ValueError(f"{folder / ADAPTER} is damaged: {name} is {pattern!r:.80}")
    targets, rslora = _targets(folder, config), bool(config.get("use_rslora"))
    named = None if any(config.get(key) for key in _LEAVES_OUT) else config.get("target_modules")
    return AdapterFile(folder, rank, float(alpha), targets, rslora, patterns, dropout, named)


def _targets(folder: Path, config: dict[str, Any]) -> list[str]:
    """The names of the layers that the weights are of; of fused experts, those of the config."""
    from safetensors import SafetensorError, safe_open

    file = folder / WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}: save the adapter by save_pretrained, as safetensors")
    try:
        with safe_open(file, framework="np") as tensors:
            names = [*tensors.keys()]
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): copy it again") from None
    ends = (".lora_A.weight", ".lora_B.weight")
    if beside := [name for name in names if not name.startswith(_PREFIX) or not name.endswith(ends)]:
        fault = f"holds {beside[0]} beside adapters ({len(beside)} such weights)"
        raise ValueError(f"{file} {fault}: merge it into its model by peft (merge_and_unload), and give that folder")
    experts = [name for name in config.get("target_parameters") or () if not name.endswith(".weight")]
    stems = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in names}
    fused = {stem for stem in stems if stem.endswith(".base_layer") or f"{stem}.base_layer" in stems}
    if experts:
        wrapped = {name.rpartition(".")[0].rpartition(".")[2] or "experts" for name in experts}
        fused |= {stem for stem in stems if stem.rpartition(".")[2] in wrapped}
    return [*sorted(stems - fused), *experts]
