"""Matrix products by the library: 16-bit inputs, sums in fp32, and an fp32 result where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def product_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, factor: float = 1.0) -> None:
    """out <- factor a b (+ out), summed in fp32. 16-bit `a` and `b` may go into an fp32 `out`."""
    beta = 1 if add else 0
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=factor, out=out)
    elif out.dtype != torch.float32:
        product = torch.mm(a, b, out=a.new_empty(out.shape)).mul_(factor)  # out= is beyond the reach of autocast
        out.copy_(out + product if add else product)
    elif a.is_cuda and not add and factor == 1:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=factor, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, alpha=factor, out=out)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that both have, or fp32."""
    return hidden.dtype if hidden.dtype == weight.dtype else torch.float32


@contextmanager
def full_sums() -> Iterator[None]:
    """Products of 16-bit matrices that the library splits are summed in fp32 too, not in 16 bits (torch's default)."""
    flags, names = torch.backends.cuda.matmul, ("bf16", "fp16")
    attributes = [f"allow_{name}_reduced_precision_reduction" for name in names]
    before = [getattr(flags, a) for a in attributes]
    try:
        for a in attributes:
            setattr(flags, a, False)
        yield
    finally:
        for a, value in zip(attributes, before, strict=True):
            setattr(flags, a, value)
