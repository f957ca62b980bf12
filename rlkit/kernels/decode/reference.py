"""The operators of a decoding step in torch: what the kernels of `triton.py` must compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def append_rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    slots: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """See `rlkit.kernels.decode.append_rotated`."""
    rows, (_, kv_heads, _, dim) = len(qkv), keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    x = qkv.view(rows, heads + 2 * kv_heads, dim)
    turned = x[:, : heads + kv_heads].float()
    if norms is not None:
        q_norm, k_norm = (norm.float().expand(n, -1) for norm, n in zip(norms, (heads, kv_heads), strict=True))
        turned = F.rms_norm(turned, (dim,), eps=eps) * torch.cat((q_norm, k_norm))
    c, s = (t[positions][:, None] for t in (cos, sin))
    first, second = turned.chunk(2, -1)
    turned = torch.cat((first * c - second * s, second * c + first * s), -1).to(keys.dtype)
    slot = torch.arange(rows, device=qkv.device) if slots is None else slots
    keys[slot, :, positions] = turned[:, heads:]
    values[slot, :, positions] = x[:, heads + kv_heads :]
    return turned[:, :heads].reshape(rows, -1)


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, slots: Tensor | None) -> Tensor:
    """See `rlkit.kernels.decode.attend_slots`."""
    rows, (_, kv_heads, capacity, dim) = len(q), keys.shape
    keys, values = (t[:rows] if slots is None else t[slots] for t in (keys, values))
    seen = torch.arange(capacity, device=q.device) <= positions[:, None]
    scores = torch.einsum("bkgd,bknd->bkgn", q.view(rows, kv_heads, -1, dim).float(), keys.float())
    weights = (scores * dim**-0.5).masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    out = torch.einsum("bkgn,bknd->bkgd", weights, values.float())
    return out.reshape(rows, -1).to(q.dtype)


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
    """See `rlkit.kernels.decode.add_rms_norm`."""
    if y is not None:
        x.add_(y)
    return (F.rms_norm(x, weight.shape, eps=eps) * weight.float()).to(dtype)


def silu_mul(x: Tensor) -> Tensor:
    """See `rlkit.kernels.decode.silu_mul`."""
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def block_sums(p: Tensor, *, block: int) -> Tensor:
    """See `rlkit.kernels.decode.block_sums`."""
    whole = p.shape[-1] // block * block
    sums = p[:, :whole].unflatten(-1, (-1, block)).sum(-1, dtype=torch.float64)
    if whole == p.shape[-1]:
        return sums
    return torch.cat((sums, p[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), -1)


def block_exp_sums(z: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
    """The peak of each block, fp32, and the sum of exp(z - peak) in it, fp64."""
    blocks = F.pad(z, (0, -z.shape[-1] % block), value=-torch.inf).unflatten(-1, (-1, block))
    peaks = blocks.amax(-1).clamp(min=torch.finfo(z.dtype).min)
    return peaks, (blocks - peaks[..., None]).exp().sum(-1, dtype=torch.float64)
