"""Argument checks and numerics shared by all public functions."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from numbers import Integral
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from rlkit._util.numbers import show

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


FILLED_BY = {  # the streams of a batch that are None at first
    "old_logp": "with_old_logp(policy, batch, max_tokens=...)",
    "ref_logp": "with_ref_logp(reference, batch, max_tokens=...)",
    "kept_mass": "with_kept_mass(policy, batch, params=..., max_tokens=...)",
    "advantages": "with_advantages(batch, group_centered)",
    "values": "with_gae(batch, ...)",
    "returns": "with_gae(batch, ...)",
}


def check_given(**tensors: Tensor | None) -> None:
    """None of them is None. The error about a stream of a batch gives the function that fills it."""
    for name, x in tensors.items():
        if x is None:
            fix = f"batch = {FILLED_BY[name]} fills it" if name in FILLED_BY else "give a tensor"
            raise TypeError(f"{name} is None: {fix}")


def check_float(**tensors: Tensor | None) -> None:
    """Each tensor is floating point."""
    for name, x in tensors.items():
        if x is not None and not (isinstance(x, Tensor) and torch.is_floating_point(x)):
            fix = _as_tensor(name, x, "float")
            raise TypeError(f"{name} must be a floating-point tensor, got {_describe(x)}; use {fix}")


def check_tensor(**tensors: object) -> None:
    """Each is a tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {show(x)}; use torch.as_tensor({name})")


def check_log_probs(**tensors: Tensor) -> None:
    """Each is at most 0, up to rounding (values: on CPU tensors, outside compilation). NaN and inf show later."""
    for name, x in tensors.items():
        if readable(x) and bool((positive := (x > 0.01) & (x < torch.inf)).any()):
            mistaken = "are they log-ratios, probabilities or losses?"
            raise ValueError(f"{name} must be log-probs, at most 0, got {x[positive].max():.3g}: {mistaken}")


def check_averaged(**tensors: Tensor) -> None:
    """Warn of log-probs that are all below -20: sums over tokens, or a model that diverges (CPU, not compiled)."""
    for name, x in tensors.items():
        if readable(x) and x.numel() > 1 and (x < -20).all():
            mean = float(x.detach().mean())
            fault = f"{name} must be averages over tokens, got {mean:.4g} on average: are they sums?"
            warnings.warn(f"{fault} divide those by the lengths", stacklevel=3)


def check_logits(**tensors: Tensor) -> None:
    """ValueError for probabilities: the first row is above 0, and its sum is 1 (CPU, outside compilation)."""
    for name, x in tensors.items():
        if readable(x) and x.numel() and x.shape[-1] > 1:
            row = x.detach()[(0,) * (x.ndim - 1)].float()
            if (row > 0).all() and abs(float(row.sum()) - 1) < 1e-4:
                raise ValueError(f"{name} are probabilities, whose rows sum to 1: give logits, or their logarithms")


def check_no_ratio(log_ratio: Tensor, mask: Tensor | None) -> None:
    """ValueError for values that are ratios: 1 on-policy, and at no token far below (CPU, outside compilation).

    The mean of a true ratio over samples is 1, so its logarithm is not at least 0.5 at each of many tokens, but for a
    policy that a few steps of a large size have moved far, where it is on average above 2. One value may stand at all
    tokens of a sequence: the sum of its log-ratios.
    """
    if not readable(log_ratio):
        return
    x = log_ratio.detach() if mask is None else log_ratio.detach()[mask]
    if x.numel() < 16 or not (x.min() >= 0.5 and x.mean() <= 2):
        return
    if (x == 1).all() or x.unique().numel() >= (2 if ((x - 1).abs() < 1e-5).all() else 64):
        fault = f"log_ratio is at least {x.min():.3g} at all {x.numel()} tokens: is it a ratio?"
        raise ValueError(f"{fault} Give its logarithm, logp - old_logp")


def check_same_shape(**tensors: Tensor | None) -> None:
    """All tensors have the same shape and device."""
    present = [(name, x) for name, x in tensors.items() if x is not None]
    for name, x in present[1:]:
        if x.shape != present[0][1].shape:
            (like, first), fix = present[0], _shape_fix(present[0], (name, x))
            raise ValueError(f"{name} must have the shape of {like}, {list(first.shape)}, got {list(x.shape)}" + fix)
    check_same_device(**tensors)


def check_same_device(**tensors: Tensor | None) -> None:
    """All tensors are on one device: a segment reduction over mixed devices reads invalid memory and crashes."""
    present = [(name, x) for name, x in tensors.items() if x is not None]
    for name, x in present[1:]:
        first, like = present[0]
        if x.device != like.device:
            raise ValueError(f"{name} must be on the device of {first}, {like.device}, got {x.device}; move it there")


def check_mask(mask: Tensor | None, **like: Tensor) -> None:
    """`mask` is bool and has the shape of the one tensor given by keyword."""
    if mask is None:
        return
    check_bool("mask", mask, "trainable")
    check_same_shape(**like, mask=mask)


def check_bool(name: str, mask: object, true: str) -> None:
    """A bool tensor. The error gives the conversion of a 0/1 mask, or of labels, where -100 means False."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return
    fix = _as_tensor(name, mask, "bool")
    if isinstance(mask, Tensor) and not readable(mask):
        fix += " for 0 and 1, or labels != -100 for labels"
    elif isinstance(mask, Tensor) and (mask == -100).any():
        fix = "labels != -100"
    elif isinstance(mask, Tensor) and not ((mask == 0) | (mask == 1)).all():
        fix = f"a comparison: {name} has values other than 0 and 1"
    raise TypeError(f"{name} must be bool (True = {true}), got {_describe(mask)}; use {fix}")


def check_cu_seqlens(cu_seqlens: Tensor, **packed: Tensor) -> None:
    """`cu_seqlens` are the sequence bounds of the one tensor given by keyword, which is `[T]` on the same device."""
    ((name, x),) = packed.items()
    if x.ndim != 1:
        fix = f"use from_padded({name}, padding_mask=padding_mask), which also gives cu_seqlens"
        raise ValueError(f"{name} must be packed, of shape [T], got {list(x.shape)}; {fix}")
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
        lens = "cu_seqlens" if cu_seqlens.sum() == num_tokens else "lens"
        raise ValueError(f"cu_seqlens must start at 0, got {cu_seqlens[0].item()}; use cumulative({lens})")
    if num_tokens is not None and cu_seqlens[-1] != num_tokens:
        raise ValueError(f"cu_seqlens must end at the number of tokens, {num_tokens}, got {cu_seqlens[-1].item()}")
    if (cu_seqlens.diff() < 0).any():
        raise ValueError(f"cu_seqlens must be non-decreasing, got {cu_seqlens.tolist()[:16]}")


def check_ids(like: Tensor | None = None, **ids: Tensor) -> None:
    """Each is a 1-D integer tensor of non-negative ids, one per entry of `like` (if given) and on its device."""
    for name, x in ids.items():
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.ndim != 1:
            fix = _as_ids(name, x, like)
            raise TypeError(f"{name} must be int32 or int64 of shape [N], got {_describe(x)}; use {fix}")
        if like is not None and x.shape != like.shape:
            per = like.numel() // max(1, x.numel())
            whole = like.ndim == 1 and per > 1 and like.numel() == per * x.numel()
            raise ValueError(
                f"{name} must have one entry for each value, both [N]; got {x.numel()} and values {list(like.shape)}"
                + f"; if it has one id per {per} consecutive values, use {name}.repeat_interleave({per})" * whole
            )
        check_same_device(values=like, **{name: x})
        if readable(x) and x.numel() and x.min() < 0:
            raise ValueError(f"{name} must be >= 0, got {x.min().item()}")


def check_not_negative(**numbers: float | Tensor) -> None:
    """Each number, or each value of a tensor (on the CPU, outside compilation), is at least 0."""
    for name, x in numbers.items():
        if isinstance(x, Tensor):
            x = x.min().item() if readable(x) and x.numel() else 0.0
        if not x >= 0:
            raise ValueError(f"{name} must be at least 0, got {x}")


def check_count(**numbers: object) -> None:
    """Each is a whole number of at least 1, and no bool."""
    for name, x in numbers.items():
        if isinstance(x, bool) or not isinstance(x, Integral) or x < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {x}")


def check_below(num: int, **ids: Tensor) -> None:
    """Each id is below `num`, the length of the indexed axis (values: on CPU tensors, outside compilation)."""
    for name, x in ids.items():
        if readable(x) and x.numel() and x.max() >= num:
            raise ValueError(f"{name} must be below {num}, the number of entries they index, got {x.max().item()}")


def check_call(name: str, function: object, call: str) -> None:
    """`function` is a function that takes the arguments of `call`, e.g. "baseline(rewards, group_ids=group_ids)"."""
    if not callable(function):
        raise TypeError(f"{name} must be a function, called as {call}, got {show(function)}")
    arguments = [part.strip().split("=") for part in call[call.index("(") + 1 : -1].split(",")]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*[x for x, *rest in arguments if not rest], **{x: x for x, *rest in arguments if rest})
    except TypeError as error:
        function_name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{name} is called as {call}, which {function_name} does not take: {error}") from None


def readable(x: Tensor) -> bool:
    """Whether values can be read without a device sync: on the CPU, outside compilation and torch.func transforms."""
    return x.device.type == "cpu" and not traced()


def traced() -> bool:
    """Whether torch.compile or torch.export records this call, or torch.func transforms it: no value can be read."""
    return torch.compiler.is_compiling() or transformed()


def transformed() -> bool:
    """Whether this call is inside torch.func.grad, vmap or another transform: no custom operator, no checkpoint."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _describe(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"{str(x.dtype).removeprefix('torch.')} of shape {list(x.shape)}"


def _as_tensor(name: str, x: object, dtype: str) -> str:
    """The call that makes `x` a tensor of this dtype."""
    return f"{name}.{dtype}()" if isinstance(x, Tensor) else f"torch.as_tensor({name}).{dtype}()"


def _as_ids(name: str, x: object, like: Tensor | None) -> str:
    """The call that makes ids `[N]` of `x`: a group size, a column of ids, strings (uids)."""
    if isinstance(x, int):
        return f"torch.arange({'N' if like is None else like.numel()}) // {x} for consecutive groups of {x}"
    if isinstance(x, Tensor):
        return name + ".flatten()" * (x.ndim != 1) + ".long()" * (x.dtype not in (torch.int32, torch.int64))
    return f"torch.as_tensor(np.unique({name}, return_inverse=True)[1])"


def _shape_fix(a: tuple[str, Tensor], b: tuple[str, Tensor]) -> str:
    """For the error about two unequal shapes: the call that converts one of them, if it follows from the shapes."""
    (small, x), (large, y) = sorted((a, b), key=lambda named: (named[1].ndim, named[1].numel()))
    if x.ndim == 0:
        return f"; use {small}.expand_as({large})"
    if x.ndim == y.ndim == 1:
        return f"; if {small} has one value per sequence, use broadcast_to_tokens({small}, cu_seqlens=cu_seqlens)"
    if x.ndim == 1 and y.shape == (x.numel(), 1):
        return f"; use {large}.squeeze(-1)"
    if x.ndim == 1 and x.shape == y.shape[:1]:
        return f"; if {small} has one value per row, use {small}[:, None].expand_as({large})"
    if x.ndim == 1 and y.ndim == 2:
        return f"; if {large} is padded, use from_padded({large}, padding_mask=padding_mask)"
    if x.shape[:-1] == y.shape[:-1] and y.shape[-1] == x.shape[-1] + 1 > 2:
        return f"; use {large}[:, 1:] if its entry t speaks of token t, {large}[:, :-1] if of the next token"
    if x.ndim == y.ndim and all(m in (1, n) for m, n in zip(x.shape, y.shape)):
        return f"; use {small}.expand_as({large})"
    return ""


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
