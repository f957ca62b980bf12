"""The operators of a decoding step, fused: one new token per row over a slotted key-value cache.

Between two matrix products of a layer there is one of these. Every shape is fixed by the number of rows and the
capacity of the cache, and lengths are read on the device, so that a CUDA graph can record a step.

    keys, values   [slots, kv heads, capacity, D]
    positions      [B], int64: the place of the token that is read; places 0..position of its slot count
    slots          [B], int64: the slot of each row; None: row i is slot i

Sums, norms, rotations and softmax are in fp32 whatever the dtype. No gradients.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.kernels import _triton
from rlkit.kernels.decode import reference

__all__ = ["add_rms_norm", "append_rotated", "attend_slots", "block_sums", "fits_kernels", "silu_mul"]

IMPLS = ("reference", "triton")
HALF = (torch.bfloat16, torch.float16)
HEAD_DIMS = (32, 64, 128, 256)
MAX_GROUP = 64  # query heads of one key head


def fits_kernels(dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernels run attention of this shape well: 16 bits (in fp32 they spill registers)."""
    return dtype in HALF and head_dim in HEAD_DIMS and heads % kv_heads == 0 and heads // kv_heads <= MAX_GROUP


def append_rotated(
    qkv: Float[Tensor, "B width"],
    cos: Float[Tensor, "L half"],
    sin: Float[Tensor, "L half"],
    positions: Int[Tensor, "B"],
    keys: Float[Tensor, "S K C D"],
    values: Float[Tensor, "S K C D"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    norms: tuple[Float[Tensor, "D"], Float[Tensor, "D"]] | None = None,
    eps: float = 1e-6,
    impl: str | None = None,
) -> Float[Tensor, "B HD"]:
    """Queries of one layer; the new keys and values go into the cache at `positions`.

        [q, k, v] = qkv[i] by heads (H, K and K of them)     p = positions[i]
        q, k <- rms_norm(q) * norms[0], rms_norm(k) * norms[1]     (with norms)
        (x, y) <- (x cos_p - y sin_p, y cos_p + x sin_p)     x, y: the halves of a head of q or k

    `cos` and `sin` are fp32, of the first half of a head. Returns the queries, in the dtype of the cache.
    """
    if chosen(impl, qkv) == "triton":
        from rlkit.kernels.decode import triton

        return triton.append_rotated(qkv, cos, sin, positions, keys, values, slots=slots, norms=norms, eps=eps)
    return reference.append_rotated(qkv, cos, sin, positions, keys, values, slots=slots, norms=norms, eps=eps)


def attend_slots(
    q: Float[Tensor, "B HD"],
    keys: Float[Tensor, "S K C D"],
    values: Float[Tensor, "S K C D"],
    positions: Int[Tensor, "B"],
    *,
    slots: Int[Tensor, "B"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B HD"]:
    """softmax(q k / sqrt(D)) v over places 0..positions[i] of slot i, for each query head; grouped queries.

    What lies behind a row's position is not read. Deterministic: a row's bits depend on its own slot and on the number
    of rows and the capacity, which decide how its places are split, not on other rows.
    """
    if chosen(impl, q) == "triton":
        from rlkit.kernels.decode import triton

        return triton.attend_slots(q, keys, values, positions, slots=slots)
    return reference.attend_slots(q, keys, values, positions, slots=slots)


def add_rms_norm(
    x: Float[Tensor, "B E"],
    y: Float[Tensor, "B E"] | None,
    weight: Float[Tensor, "E"],
    *,
    eps: float,
    dtype: torch.dtype,
    impl: str | None = None,
) -> Float[Tensor, "B E"]:
    """x <- x + y in place, then x / sqrt(mean(x^2) + eps) * weight in `dtype`. `x` is fp32, the residual stream."""
    if chosen(impl, x) == "triton":
        from rlkit.kernels.decode import triton

        return triton.add_rms_norm(x, y, weight, eps=eps, dtype=dtype)
    return reference.add_rms_norm(x, y, weight, eps=eps, dtype=dtype)


def silu_mul(x: Float[Tensor, "B 2I"], *, impl: str | None = None) -> Float[Tensor, "B I"]:
    """silu(gate) * up of x = [gate, up]."""
    if chosen(impl, x) == "triton":
        from rlkit.kernels.decode import triton

        return triton.silu_mul(x)
    return reference.silu_mul(x)


def block_sums(p: Float[Tensor, "B V"], *, block: int, impl: str | None = None) -> Float[Tensor, "B N"]:
    """Sums of `block` neighbours of each row in fp64, of the fewer ones that are left at its end too."""
    if chosen(impl, p) == "triton":
        from rlkit.kernels.decode import triton

        return triton.block_sums(p, block=block)
    return reference.block_sums(p, block=block)


def block_exp_sums(
    z: Float[Tensor, "B V"], *, block: int, impl: str | None = None
) -> tuple[Float[Tensor, "B"], Float[Tensor, "B N"]]:
    """The peak of each row, fp32, and the `block_sums` of exp(z - peak), fp64. `z` is fp32, and read once."""
    if chosen(impl, z) == "triton":
        from rlkit.kernels.decode import triton

        peaks, sums = triton.block_exp_sums(z, block=block)
    else:
        peaks, sums = reference.block_exp_sums(z, block=block)
    peak = peaks.amax(-1)
    return peak, sums * (peaks - peak[:, None]).double().exp()


def chosen(impl: str | None, x: Tensor) -> str:
    """The implementation: Triton on CUDA."""
    return _triton.choose(impl, IMPLS, "triton" if _triton.preferred(x) else "reference", x)
