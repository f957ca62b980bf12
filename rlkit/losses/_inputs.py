"""What every loss does to its tensors first: check, upcast, and neutralise masked places."""

from __future__ import annotations

from torch import Tensor

from rlkit._tensors import check_float, check_mask, check_same_shape, masked, upcast


def prepared(mask: Tensor | None, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the order given, checked, in fp32 or fp64, and 0 where the mask is False."""
    check_float(**tensors)
    check_same_shape(**tensors)
    name, first = next(iter(tensors.items()))
    check_mask(mask, **{name: first})
    return tuple(masked(upcast(x), mask) for x in tensors.values())


def check_at_least(bound: float, **values: float) -> None:
    """Each number is at least `bound`; NaN is not."""
    for name, x in values.items():
        if not x >= bound:
            raise ValueError(f"{name} must be at least {bound:g}, got {x}")


def check_positive(**values: float) -> None:
    """Each number is above 0; NaN is not."""
    for name, x in values.items():
        if not x > 0:
            raise ValueError(f"{name} must be positive, got {x}")
