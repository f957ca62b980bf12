"""Argument checks shared by the operations of this package."""

from __future__ import annotations

from torch import Tensor

from rlkit._util.tensors import check_float, check_mask, readable


def check_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    temperature: float,
    softcap: float | None,
) -> None:
    """Shapes, dtypes and ranges of a vocabulary projection and its input are valid."""
    check_float(hidden=hidden, weight=weight, bias=bias)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}; "
            "flatten batch dimensions with hidden.flatten(0, -2)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape [{weight.shape[0]}], got {list(bias.shape)}")
    if mask is not None:
        rows = hidden[:, 0]
        on_cpu = isinstance(mask, Tensor) and mask.device.type == "cpu"
        check_mask(mask, rows_of_hidden=rows.new_empty(rows.shape, device="cpu") if on_cpu else rows)
    check_scaling(temperature, softcap)


def check_scaling(temperature: float, softcap: float | None) -> None:
    """Temperature and softcap are positive."""
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; score greedy decoding at temperature 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0, or None for off, got {softcap}")


def check_targets(targets: Tensor, num_rows: int, vocab: int | None, mask: Tensor | None) -> None:
    """`targets` holds one integer id per row, below `vocab` if given (values: on CPU tensors, outside compilation)."""
    if targets.is_floating_point() or targets.shape != (num_rows,):
        raise ValueError(f"targets must be integers of shape [{num_rows}], got {targets.dtype} {list(targets.shape)}")
    if vocab is None or not readable(targets) or not num_rows:
        return
    low, high = targets.aminmax()
    if (low < 0 or high >= vocab) and mask is not None and bool(mask.any()):
        low, high = targets[mask].aminmax()
    elif mask is not None and not mask.any():
        return
    if low < 0 or high >= vocab:
        raise ValueError(f"targets must be in [0, {vocab}) where the mask is True, got {int(low)} to {int(high)}")
