"""Frozen weights in 8 or 4 bits under LoRA adapters, in plain torch.

    model = add_lora(load_model(path), rank=16, base="nf4")

A layer's weight stays one matrix for whoever reads it, `W' = dequantized(quantized(W))`: a forward computes with `W'`,
made anew for each product and again in its backward, and nothing keeps it. An export, an engine's copy and a server's
weights hold `W' + (alpha / rank) B A`, the function that was trained. The weights cannot be written.

    int8   a / 127 round(127 W / a), a = max |W| of the row                                        1 byte a weight
    nf4    the nearest of a times 16 quantiles of a normal distribution, a = max |W| of 64 weights 0.56 bytes
    fp8    E4M3 times a scale of a block, as a checkpoint has them (`rlkit.model.fp8`)             1 byte

The first two have the bits of bitsandbytes (`int8_vectorwise_quant`, `quantize_4bit` with blocks of 64 and no double
quantization), whose layers are not used: on some CPUs their NF4 layer takes another kernel where no gradient is needed,
and their int8 layer also rounds its input, all but columns that the batch decides. A sampled token would then have
another log-prob in training.
Reference: arXiv:2305.14314 (QLoRA), arXiv:2208.07339 (LLM.int8).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_aten = torch.ops.aten


class Quantized(Tensor):
    """A matrix [out, in] of the dtype fp32, held as `codes` and `scales` (fp32).

    int8: codes [out, in], scales [out, 1]. nf4: codes [blocks, 32], two 4-bit indices a byte, scales [blocks, 1].
    fp8: codes [out, blocks, block], the last block of a row with padding, scales [out, blocks, 1].
    Of experts, [experts, out, in] in fp8, codes and scales are those of all rows, and an index gives one expert's.
    `F.linear` dequantizes it for one product; any other function gets a dequantized copy, and none may write to it.
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: torch.Size) -> Quantized:  # noqa: D102
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=codes.device)
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.Size]:
        return ["codes", "scales"], self.shape

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], shape: torch.Size, *_: Any) -> Quantized:
        return Quantized(parts["codes"], parts["scales"], shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantized({[*self.shape]}, {self.kind})"

    @property
    def kind(self) -> str:
        """int8, nf4 or fp8."""
        return {torch.int8: "int8", torch.uint8: "nf4"}.get(self.codes.dtype, "fp8")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], Quantized) and len(args) + len(kwargs or {}) <= 3:
            bias = (kwargs or {}).get("bias", args[2] if len(args) > 2 else None)
            return _linear(args[0], args[1], bias)
        if func is Tensor.__getitem__ and args[0].ndim == 3 and (isinstance(args[1], int) or args[1].ndim == 0):
            codes, scales = (x.unflatten(0, args[0].shape[:2])[int(args[1])] for x in (args[0].codes, args[0].scales))
            return Quantized(codes, scales, args[0].shape[1:])
        with torch._C.DisableTorchFunctionSubclass():  # a result is a plain tensor
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (_aten.detach.default, _aten.clone.default) or _only_moves(func, kwargs or {}):
            same = {name: x for name, x in (kwargs or {}).items() if name != "dtype"}
            codes, scales = (func(x, *args[1:], **same) for x in (args[0].codes, args[0].scales))
            return Quantized(codes, scales, args[0].shape)
        if func._schema.is_mutable:
            raise TypeError("quantized weights are frozen: nothing can be written to them")
        plain = torch.utils._pytree.tree_map_only(Quantized, dequantized, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _only_moves(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it copies to another device, in the same dtype."""
    return func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.float32) and "device" in kwargs


class _Linear(torch.autograd.Function):
    """x W'^T without keeping W' for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        ctx.weight = weight
        return F.linear(x, dequantized(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantized(ctx.weight).to(grad.dtype), None


def _linear(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out = cast(Tensor, _Linear.apply(x, weight.detach()))
    return out if bias is None else out + bias.to(out.dtype)


def dequantized(x: Tensor) -> Tensor:
    """The matrix of a `Quantized` in fp32; any other tensor unchanged."""
    if not isinstance(x, Quantized):
        return x
    with torch.no_grad():
        if x.kind == "int8":
            return x.codes * (x.scales / 127)
        if x.kind == "fp8":
            return (x.codes.float() * x.scales).flatten(1)[:, : x.shape[-1]].reshape(x.shape)
        pairs = torch.tensor([(a, b) for a in NF4 for b in NF4], device=x.codes.device)
        blocks = pairs.index_select(0, x.codes.flatten().int()).view(-1, BLOCK) * x.scales
        return blocks.flatten()[: x.numel()].view(x.shape)


@torch.no_grad()
def quantized(weight: Tensor, kind: str) -> Quantized:
    """A matrix in `kind`, "int8" or "nf4"; ValueError for another kind."""
    weight = dequantized(weight.detach()).float()
    if kind == "int8":
        scales = weight.abs().amax(1, keepdim=True)
        codes = torch.round(weight * (127 / scales.where(scales > 0, 1))).to(torch.int8)
        return Quantized(codes, scales, weight.shape)
    if kind != "nf4":
        raise ValueError(f"frozen weights can be int8 or nf4, got {kind!r}")
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4, device=weight.device)
    index = torch.bucketize(blocks / scales.where(scales > 0, 1), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return Quantized(index[:, ::2] * 16 + index[:, 1::2], scales, weight.shape)
