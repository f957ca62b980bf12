"""Fused expert weights out of a checkpoint that stores each expert apart: every rank reads only what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# A fused weight holds these, one after the other, in the dimension after the experts'.
PARTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


def fused_experts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of each fused expert weight -> the names of its parts in the files."""
    return {name: parts for name, _ in model.named_parameters() for end, parts in PARTS.items() if name.endswith(end)}


@torch.no_grad()
def read_experts(model: nn.Module, folder: Path) -> list[str]:
    """Fill the fused expert weights of a sharded model from the safetensors files of `folder`, in place; their names.

    Errors: ValueError naming weights that the files lack.
    """
    from safetensors import safe_open
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where, opened, fused = _files(folder), {}, fused_experts(model)
    for name, parts in fused.items():
        param: Any = model.get_parameter(name)
        _, (first, *rest) = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        for i, target in enumerate(param.to_local()):
            stored = [f"{name.rsplit('.', 1)[0]}.{first + i}.{part}.weight" for part in parts]
            if missing := [x for x in stored if x not in where]:
                raise ValueError(f"{folder} does not hold this model: {missing[0]} is missing")
            for x in stored:
                if where[x] not in opened:
                    opened[where[x]] = safe_open(folder / where[x], framework="pt")
            _copy_rows(target, [opened[where[x]].get_slice(x) for x in stored], rest)
    return list(fused)


def _copy_rows(target: Tensor, parts: list[Any], offset: list[int]) -> None:
    """`target` is the block at `offset` of the parts stacked on top of each other."""
    (row, column), (height, width) = offset, target.shape
    start = 0
    for part in parts:
        size = part.get_shape()[0]
        a, b = max(row, start), min(row + height, start + size)
        if a < b:
            target[a - row : b - row] = part[a - start : b - start, column : column + width].to(target)
        start += size


def _files(folder: Path) -> dict[str, str]:
    """Tensor name -> the file that holds it."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    found: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found
