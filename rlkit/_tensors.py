"""Argument checks and numerics shared by all public functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far outside any trust region, far inside fp32


def upcast(x: Tensor) -> Tensor:
    """bf16 and fp16 become fp32; fp32 and fp64 stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def cumsum(x: Tensor, dim: int) -> Tensor:
    """`x.cumsum(dim)` in fp64. Under deterministic algorithms it runs on the CPU: CUDA has no deterministic cumsum."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x.cpu().cumsum(dim, dtype=torch.float64).to(x.device)
    return x.cumsum(dim, dtype=torch.float64)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument capped at 20 (not bounded below), so that a huge ratio stays finite."""
    capped = torch.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)  # clamp has gradient 0 at NaN
    return capped.exp()


def masked(x: Tensor, mask: Tensor | None, fill: float = 0.0) -> Tensor:
    """`x` with `fill` where the mask is False. Applied to *inputs*, it keeps NaN there out of value and gradient."""
    return x if mask is None else torch.where(mask, x, torch.full((), fill, dtype=x.dtype, device=x.device))


def carry_nan(x: Tensor, *sources: Tensor) -> Tensor:
    """`x` with NaN where a source is NaN: comparisons with NaN are False, and would give a plausible 0 or 1."""
    for source in sources:
        x = torch.where(source.isnan(), torch.nan, x)
    return x


def check_no_nan(mask: Tensor | None, **tensors: Tensor) -> None:
    """No trainable entry is NaN (CPU tensors, outside compilation): for functions whose result cannot be NaN."""
    for name, x in tensors.items():
        if readable(x) and masked(x, mask).isnan().any():
            raise ValueError(f"{name} must not be NaN where trainable, got {int(masked(x, mask).isnan().sum())} NaN")


def check_float(**tensors: Tensor | None) -> None:
    """Each tensor is floating point."""
    for name, x in tensors.items():
        if x is not None and not (isinstance(x, Tensor) and torch.is_floating_point(x)):
            raise TypeError(f"{name} must be a floating-point tensor, got {_describe(x)}")


def check_same_shape(**tensors: Tensor | None) -> None:
    """All tensors have the same shape and device."""
    given = [(name, x) for name, x in tensors.items() if x is not None]
    for name, x in given[1:]:
        if x.shape != given[0][1].shape:
            raise ValueError(
                f"{name} must have the shape of {given[0][0]}, {list(given[0][1].shape)}, got {list(x.shape)}"
            )
    check_same_device(**tensors)


def check_same_device(**tensors: Tensor | None) -> None:
    """All tensors are on one device: a segment reduction over mixed devices reads invalid memory and crashes."""
    given = [(name, x) for name, x in tensors.items() if x is not None]
    for name, x in given[1:]:
        first, like = given[0]
        if x.device != like.device:
            raise ValueError(f"{name} must be on the device of {first}, {like.device}, got {x.device}; move it there")


def check_mask(mask: Tensor | None, **like: Tensor) -> None:
    """`mask` is bool and has the shape of the one tensor given by keyword."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool (True = trainable), got {_describe(mask)}; use mask.bool()")
    check_same_shape(**like, mask=mask)


def check_cu_seqlens(cu_seqlens: Tensor, **packed: Tensor) -> None:
    """`cu_seqlens` are the sequence bounds of the one tensor given by keyword, which is `[T]` on the same device."""
    ((name, x),) = packed.items()
    if x.ndim != 1:
        raise ValueError(f"{name} must be packed, of shape [T], got {list(x.shape)}; see rlkit.packing.from_padded")
    check_bounds(cu_seqlens, x.shape[0])
    check_same_device(cu_seqlens=cu_seqlens, **packed)


def check_bounds(cu_seqlens: Tensor, num_tokens: int | None) -> None:
    """int32 or int64, 1-D, from 0 to `num_tokens`, non-decreasing (values: on CPU tensors, outside compilation)."""
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or cu_seqlens.ndim != 1
        or cu_seqlens.numel() < 1
    ):
        raise TypeError(f"cu_seqlens must be int32 or int64 of shape [N+1], got {_describe(cu_seqlens)}")
    if not readable(cu_seqlens):
        return
    if cu_seqlens[0] != 0:
        raise ValueError(
            f"cu_seqlens must start at 0, got {cu_seqlens[0].item()}; prepend a 0 to the cumulative lengths"
        )
    if num_tokens is not None and cu_seqlens[-1] != num_tokens:
        raise ValueError(f"cu_seqlens must end at the number of tokens, {num_tokens}, got {cu_seqlens[-1].item()}")
    if (cu_seqlens.diff() < 0).any():
        raise ValueError(f"cu_seqlens must be non-decreasing, got {cu_seqlens.tolist()[:16]}")


def check_ids(like: Tensor | None = None, **ids: Tensor) -> None:
    """Each is a 1-D integer tensor of non-negative ids, one per entry of `like` (if given) and on its device."""
    for name, x in ids.items():
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.ndim != 1:
            raise TypeError(f"{name} must be int32 or int64 of shape [N], got {_describe(x)}")
        if like is not None and x.shape != like.shape:
            raise ValueError(
                f"{name} must have one entry for each value, both [N]; got {x.numel()} and values {list(like.shape)}"
            )
        check_same_device(values=like, **{name: x})
        if readable(x) and x.numel() and x.min() < 0:
            raise ValueError(f"{name} must be >= 0, got {x.min().item()}")


def check_below(num: int, **ids: Tensor) -> None:
    """Each id is below `num`, the length of the indexed axis (values: on CPU tensors, outside compilation)."""
    for name, x in ids.items():
        if readable(x) and x.numel() and x.max() >= num:
            raise ValueError(f"{name} must be below {num}, the number of entries they index, got {x.max().item()}")


def readable(x: Tensor) -> bool:
    """Whether reading values is free of a device sync: on the CPU, outside compilation."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _describe(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"{str(x.dtype).removeprefix('torch.')} of shape {list(x.shape)}"


def uncompiled(fn: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable` that imports dynamo (1 s, 50 MB) only if something has been compiled."""
    disabled: list[Callable[P, R]] = []

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args, **kwargs)

    return call
