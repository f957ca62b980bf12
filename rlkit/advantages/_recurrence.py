"""The one recurrence behind every trace: x_t = a_t x_{t+1} + b_t, backwards inside each sequence.

A masked token is the identity (a, b) = (1, 0). So the scan's value *at* a masked token is the value at the next action
token (or the end value after the last), which is what "next action" means everywhere in this package.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from rlkit._tensors import (
    check_cu_seqlens,
    check_float,
    check_mask,
    check_same_device,
    check_same_shape,
    masked,
    readable,
    upcast,
)
from rlkit.kernels.linear_scan import linear_scan


def prepared(mask: Tensor, cu_seqlens: Tensor, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The `[T]` tensors in the order given, checked, in one dtype (fp32 or fp64), and 0 where the mask is False."""
    check_float(**tensors)
    name, first = next(iter(tensors.items()))
    check_same_shape(**tensors)
    check_mask(mask, **{name: first})
    check_cu_seqlens(cu_seqlens, **{name: first})
    dtype = reduce(torch.promote_types, (upcast(x[:0]).dtype for x in tensors.values()))
    return tuple(masked(x.to(dtype), mask) for x in tensors.values())


def coefficient(mask: Tensor, like: Tensor, **named: float | Tensor) -> Tensor:
    """A float or per-token `gamma` or `lam` as a tensor of `like`'s dtype, in [-1, 1]; 1 where masked."""
    ((name, x),) = named.items()
    if not isinstance(x, Tensor):
        if not -1 <= x <= 1:
            raise ValueError(f"{name} must be in [-1, 1], got {x}")
        return torch.full((), x, dtype=like.dtype, device=like.device)
    check_float(**{name: x})
    check_same_shape(mask=mask, **{name: x})
    x = masked(x.to(like.dtype), mask, fill=1.0)
    if readable(x) and not (x.abs() <= 1).all():
        raise ValueError(f"{name} must be in [-1, 1], got {x[x.abs().argmax()].item()}")
    return x


def end_values(bootstrap: Tensor | None, cu_seqlens: Tensor, like: Tensor) -> Tensor:
    """`bootstrap` of shape [N], checked, in `like`'s dtype; 0 (terminated) where there is none."""
    num_seqs = cu_seqlens.numel() - 1
    if bootstrap is None:
        return like.new_zeros(num_seqs)
    check_float(bootstrap=bootstrap)
    check_same_device(cu_seqlens=cu_seqlens, bootstrap=bootstrap)
    if bootstrap.shape != (num_seqs,):
        raise ValueError(f"bootstrap must have one value per sequence, [{num_seqs}], got {list(bootstrap.shape)}")
    return bootstrap.to(like.dtype)


def scan(a: Tensor, b: Tensor, *, mask: Tensor, cu_seqlens: Tensor, end: Tensor, a_max: float = 1.0) -> Tensor:
    """x_t = a_t x' + b_t at actions, x_t = x' at masked tokens; x' after the last token is `end`.

    `a_max` bounds |a|. Above 1 the products of a parallel scan could overflow where x does not: the loop is taken.
    """
    impl = None if a_max <= 1 else "reference"
    return linear_scan(masked(a, mask, fill=1.0), masked(b, mask), cu_seqlens=cu_seqlens, x_end=end, impl=impl)


def following(x: Tensor, *, cu_seqlens: Tensor, end: Tensor) -> Tensor:
    """The scan's value one token on: of the next action after t, or `end` after the last. `x` is a result of `scan`."""
    num_tokens = x.shape[0]
    last = torch.where(
        cu_seqlens.diff() > 0, cu_seqlens[1:] - 1, num_tokens
    ).long()  # an empty sequence's: a spare place
    return torch.cat([x[1:], x.new_zeros(min(num_tokens, 1) + 1)]).index_copy(0, last, end)[:num_tokens]


def next_action(x: Tensor, *, mask: Tensor, cu_seqlens: Tensor, end: Tensor) -> Tensor:
    """For each token, `x` at the next action token of its sequence after it, or `end` where there is none."""
    at_or_after = scan(torch.zeros_like(x), x, mask=mask, cu_seqlens=cu_seqlens, end=end)
    return following(at_or_after, cu_seqlens=cu_seqlens, end=end)
