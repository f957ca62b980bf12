"""FP8 checkpoints, as DeepSeek-V3, Qwen3-FP8 and compressed-tensors write them: E4M3 codes, and scales beside them.

    W = scale * code      `weight_scale_inv` [ceil(out / 128), ceil(in / 128)]: a scale for a block of 128 x 128
                          `weight_scale` [out, 1] or one number: for a row, or for the whole matrix

transformers reads the codes as numbers, which 16 bits hold exactly, and leaves the scales. `rescaled` then makes W of
them: that of a linear layer or of experts stays in 8 bits (`rlkit.model.quantized`) or becomes fp32, as all else does.
Scales of inputs and of keys and values in such files are for kernels that round those; nothing here does.
Differs: transformers has layers for GPUs that round their inputs too, and without a GPU dequantizes to bf16;
its blocks are of the size that divides a matrix evenly, and it refuses one that ends within a block.
Reference: arXiv:2412.19437
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlkit.model.quantized import Quantized, dequantized
from rlkit.model.source import Stored, stored

_OF_INPUTS = r"(input|activation|[qkv]|output)_scale$"
_SCALE = re.compile(r"(.*\.weight)_scale(_inv)?")


def blocks_of(config: Any) -> tuple[int, int] | None:
    """The rows and columns of a block with one scale, (0, 0) where a row or a matrix has one; None: not FP8 weights."""
    fields: Any = getattr(config, "quantization_config", None) or {}
    fields = fields if isinstance(fields, dict) else fields.to_dict()
    method = fields.get("quant_method")
    if getattr(method, "value", method) == "fp8" and fields.get("expert_dtype", "fp8") == "fp8":
        return tuple(fields.get("weight_block_size") or (0, 0))
    weights = [group.get("weights") or {} for group in (fields.get("config_groups") or {}).values()]
    floats = all((x.get("type"), x.get("num_bits")) == ("float", 8) and x.get("strategy") != "group" for x in weights)
    if method != "compressed-tensors" or not weights or not floats or fields.get("transform_config"):
        return None
    return tuple(weights[0].get("block_structure") or (0, 0))


def unquantized(config: Any, **options: Any) -> Any:
    """A copy of the config of an FP8 checkpoint for a model of plain weights, with the `options` set; else itself."""
    if blocks_of(config) is None:
        return config
    config = copy.deepcopy(config)
    del config.quantization_config
    config.update(options)
    return config


@torch.no_grad()
def rescaled(
    model: Any, path: str | os.PathLike[str], block: tuple[int, int], *, hold: bool, unexpected: Iterable[str]
) -> list[str]:
    """Make W of the codes that a model has for weights, in place; the names in `unexpected` that are no scales of it.

    With `hold` the linear layers and the fused experts whose whole weight has scales keep them and the codes, frozen;
    the experts are then computed one after the other. All else is fp32.
    """
    from transformers.core_model_loading import revert_weight_conversion

    scales = _scales(path, stored(str(path)), block)
    parts = [(m, key, p) for m in model.modules() for key, p in m.named_parameters(recurse=False)]
    places = {id(p): (m, key) for m, key, p in parts if type(m) is nn.Linear or p.ndim == 3}
    used: set[str] = set()
    for name, p in [*model.named_parameters()]:
        rows = torch.arange(p.shape[:-1].numel(), dtype=torch.int32).view(*p.shape[:-1], 1)
        files = revert_weight_conversion(model, {name: rows}) if 2 <= p.ndim <= 3 else {}  # experts are fused
        if not files.keys() & scales.keys():
            p.data = p.data.float()
            continue
        used |= files.keys() & scales.keys()
        weight = _joined(p, {part: (x.flatten().long(), scales.get(part)) for part, x in files.items()}, block)
        if hold and id(p) in places and files.keys() <= scales.keys():
            codes = Quantized(weight.codes.to(torch.float8_e4m3fn), weight.scales, weight.shape)
            setattr(*places[id(p)], nn.Parameter(codes, requires_grad=False))
            if p.ndim == 3:
                model.set_experts_implementation("eager")  # one expert after the other, by `F.linear`
        else:
            p.data = dequantized(weight).contiguous()
    left = {*unexpected}
    if lost := sorted(scales.keys() - used - left):
        raise ValueError(f"model {str(path)!r} has FP8 scales of {lost[0]}, which its class holds in another way")
    return [x for x in left if not re.search(_OF_INPUTS, x) and not ((m := _SCALE.fullmatch(x)) and m[1] in scales)]


def _scales(path: Any, tensors: Mapping[str, Stored], block: tuple[int, int]) -> dict[str, Tensor]:
    """Name of a weight in E4M3 -> its scales by rows, [out, blocks] in fp32. ValueError for codes without scales."""
    from safetensors import safe_open

    names = {m[1]: name for name in tensors if (m := _SCALE.fullmatch(name))}
    scales: dict[str, Tensor] = {}
    for file in {x.file for x in tensors.values()}:
        with safe_open(file, "pt") as opened:
            scales |= {w: opened.get_tensor(name) for w, name in names.items() if tensors[name].file == file}
    for name, x in tensors.items():
        if not x.dtype.startswith("F8") or name in names.values():
            continue
        if x.dtype != "F8_E4M3" or name not in scales or len(x.shape) != 2:
            fault = f"{name} is {x.dtype} {[*x.shape]}" + ", without `weight_scale`" * (name not in scales)
            raise ValueError(f"model {str(path)!r}: {fault}: load the bf16 or fp32 checkpoint of the same model")
        s, (out, width) = scales[name], x.shape
        s = torch.exp2(s.float() - 127) if s.dtype == torch.uint8 else s.float()
        grid = (-(-out // block[0]), -(-width // block[1])) if all(block) else None
        if s.numel() != 1 and s.shape != grid and s.shape not in ((out,), (out, 1)):
            fault = f"{name} [{out}, {width}] has scales {[*s.shape]}, for blocks {[*block]} of config.json"
            raise ValueError(f"model {str(path)!r}: {fault}: copy or download both again")
        scales[name] = s.repeat_interleave(block[0], 0)[:out] if s.shape == grid else s.reshape(-1, 1).expand(out, 1)
    return {name: s for name, s in scales.items() if tensors[name].dtype == "F8_E4M3"}


def _joined(p: Tensor, parts: Mapping[str, tuple[Tensor, Tensor | None]], block: tuple[int, int]) -> Quantized:
    """The codes of a parameter, of any dtype, with the scales of its parts: (rows of the parameter, scales by rows)."""
    width = max(1 if s is None else s.shape[1] for _, s in parts.values())
    size = block[1] if width > 1 else p.shape[-1]
    scales = torch.ones(p.shape[:-1].numel(), width)
    for part, (rows, s) in parts.items():
        if s is not None and len(s) != len(rows):
            raise ValueError(f"FP8 scales of {part} are of {len(s)} rows, and the model holds {len(rows)}")
        scales[rows] = torch.ones(1) if s is None else s
    codes = F.pad(p.flatten(0, -2), (0, -p.shape[-1] % size)).unflatten(1, (-1, size))
    return Quantized(codes, scales[..., None], p.shape)
