"""The recurrence in blocks, for any device: many short scans in parallel, a scan of their carries, one correction."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from rlkit.kernels.linear_scan import reference

BLOCK = 16
COLUMNS = 16_384  # longer streams get longer blocks: a row of this size stays in the cache and on one thread
LOOP_TOKENS = 1024  # up to this length the Python loop is faster than a level of blocks (on two CPU cores)


def scan(a: Float[Tensor, "T"], b: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """x_t = a_t x_{t+1} + b_t from x_T = 0, for |a| <= 1.

    Blocks of L tokens are the columns of a [L, T / L] matrix, so each of the L steps is one operation on a contiguous
    row. First every block is scanned from a zero carry, together with the running products of a; then the carries,
    recursively, on a stream L times shorter; then x += product * carry. For |a| > 1 the products can overflow where x
    does not: on the CPU the loop runs instead, elsewhere the caller must ensure |a| <= 1.
    """
    if a.device.type != "cpu":
        return _scan(a, b, finite=False)
    if a.numel() <= LOOP_TOKENS or not _largest(a) <= 1:
        return reference.scan(a, b)
    return _scan(a, b, finite=_largest(b) * b.numel() < torch.finfo(b.dtype).max)


def doubled(a: Float[Tensor, "T"], b: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
    """The same in plain torch, log2(T) times over the stream, for a_{T-1} = 0: torch.func transforms no operator.

    b_t and a_t become the recurrence of steps t to t + 2^k - 1 and the product of its a. What comes round the end is
    multiplied by a_{T-1}. fp64 for every dtype.
    """
    dtype, step, a, b = b.dtype, 1, a.double(), b.double()
    cut = a == 0
    while step < b.shape[0]:
        ahead = b.roll(-step)
        b = b + a * torch.where(cut & ~ahead.isfinite(), 0.0, ahead)
        a, cut, step = a * a.roll(-step), cut | cut.roll(-step), 2 * step
    return b.to(dtype)


def _scan(a: Tensor, b: Tensor, *, finite: bool) -> Tensor:
    if a.device.type == "cpu" and a.numel() <= LOOP_TOKENS:
        return reference.scan(a, b)
    length = max(BLOCK, -(-a.numel() // COLUMNS))
    product, x = _in_blocks(a, length), _in_blocks(b, length)
    for j in range(length - 2, -1, -1):
        _add_product(x[j], product[j], x[j + 1], finite=finite)
        product[j].mul_(product[j + 1])
    if x.shape[1] > 1:
        carry = _scan(product[0], x[0], finite=finite)
        _add_product(x, product, pad(carry[1:], (0, 1)), finite=finite)
    return x.t().reshape(-1)[: a.numel()]


def _largest(x: Tensor) -> float:
    """max |x|; NaN if x contains NaN."""
    low, high = x.aminmax()
    return max(-low.item(), high.item())


def _in_blocks(x: Tensor, length: int) -> Tensor:
    rest = -x.numel() % length
    return (pad(x, (0, rest)) if rest else x).reshape(-1, length).t().contiguous()


def _add_product(x: Tensor, a: Tensor, y: Tensor, *, finite: bool) -> None:
    """x += a y, with x unchanged where a = 0 (avoids 0 * nan). If all sums are `finite`, the plain product is equal."""
    if finite:
        x.addcmul_(a, y)
    else:
        x.add_(torch.where(a == 0, torch.zeros_like(a), a * y))
