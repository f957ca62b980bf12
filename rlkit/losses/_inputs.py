"""What every loss does to its tensors first: check, upcast, and neutralise masked places."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit._tensors import check_float, check_mask, check_same_shape, masked, upcast


def prepared(mask: Tensor | None, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the order given, checked, in fp32 or fp64, and 0 where the mask is False."""
    check_float(**tensors)
    check_same_shape(**tensors)
    name, first = next(iter(tensors.items()))
    check_mask(mask, **{name: first})
    return tuple(masked(upcast(x), mask) for x in tensors.values())


def check_at_least(bound: float, **values: float | Tensor) -> None:
    """Each Python number is at least `bound`; NaN is not. Tensors pass unread: that would cost a device sync."""
    for name, x in values.items():
        if not isinstance(x, Tensor) and not x >= bound:
            raise ValueError(f"{name} must be at least {bound:g}, got {x}")


def check_positive(**values: float) -> None:
    """Each number is above 0; NaN is not."""
    for name, x in values.items():
        if not x > 0:
            raise ValueError(f"{name} must be positive, got {x}")


def check_share(**values: float) -> None:
    """Each number lies in [0, 1]; NaN does not."""
    for name, x in values.items():
        if not 0 <= x <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {x}")


def check_alone(name: str) -> None:
    """Raise where a statistic of the whole batch was left out although several ranks train, each with its share."""
    distributed = torch.distributed
    if torch.compiler.is_compiling() or not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() > 1:
        raise ValueError(
            f"{name} must be given when several ranks train: it is a statistic of the whole optimizer step's batch, "
            f"and this rank may hold only a part. If it holds all of it (replicated metadata), pass its own."
        )
