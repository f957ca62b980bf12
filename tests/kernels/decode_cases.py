"""The operators of a decoding step against loops in fp64, on any device and implementation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlkit.kernels import decode

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SHAPES = {"grouped": (3, 2, 6, 64), "odd group": (2, 3, 7, 32), "plain heads": (4, 4, 1, 128)}  # rows, kv, group, D


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), rtol=tolerance, atol=tolerance)


def rotation(device: str, dtype: torch.dtype, impl: str | None, shape: str, norm: bool) -> None:
    """Each head turned by complex numbers; the rest of the cache stays."""
    rows, kv, group, dim = SHAPES[shape]
    heads, capacity, half = kv * group, 40, dim // 2
    qkv = draw(rows, (heads + 2 * kv) * dim, device=device, dtype=dtype)
    keys, values = (draw(rows + 1, kv, capacity, dim, device=device, dtype=dtype, seed=n) for n in (1, 2))
    norms = tuple(1 + 0.3 * draw(dim, device=device, dtype=torch.float32, seed=n) for n in (3, 4)) if norm else None
    positions, slots = torch.tensor([0, 39, 7, 20])[:rows].to(device), None
    if norm:  # and then the rows are in other slots
        slots = torch.arange(1, rows + 1, device=device)
    angles = torch.outer(torch.arange(capacity), 100.0 ** -(torch.arange(half) / half)).double()
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    want_keys, want_values = keys.double().cpu(), values.double().cpu()
    x, want = qkv.double().cpu().view(rows, heads + 2 * kv, dim), torch.zeros(rows, heads, dim, dtype=torch.float64)
    for i in range(rows):
        place, slot = int(positions[i]), i if slots is None else int(slots[i])
        for h in range(heads + 2 * kv):
            head = x[i, h]
            if h < heads + kv:
                if norms is not None:
                    head = head / (head.square().mean() + 1e-6).sqrt() * norms[h >= heads].double().cpu()
                turned = torch.complex(head[:half], head[half:]) * torch.polar(torch.ones(half).double(), angles[place])
                head = torch.cat((turned.real, turned.imag))
            if h < heads:
                want[i, h] = head
            elif h < heads + kv:
                want_keys[slot, h - heads, place] = head
            else:
                want_values[slot, h - heads - kv, place] = head
    got = decode.append_rotated(qkv, cos, sin, positions, keys, values, slots=slots, norms=norms, impl=impl)
    close(got, want.view(rows, -1))
    close(keys, want_keys)
    close(values, want_values)


def attention(device: str, dtype: torch.dtype, impl: str | None, shape: str, capacity: int) -> None:
    """Softmax by a loop over places; what lies behind a position is NaN."""
    rows, kv, group, dim = SHAPES[shape]
    lens = [1, capacity, capacity // 2 + 1, 17][:rows]
    q = draw(rows, kv * group * dim, device=device, dtype=dtype)
    keys, values = (draw(rows, kv, capacity, dim, device=device, dtype=dtype, seed=n) for n in (1, 2))
    for i, n in enumerate(lens):
        keys[i, :, n:], values[i, :, n:] = math.nan, math.nan
    want = torch.zeros(rows, kv * group, dim, dtype=torch.float64)
    for i, n in enumerate(lens):
        for h in range(kv * group):
            query = q.double().cpu().view(rows, -1, dim)[i, h]
            k, v = (t[i, h // group, :n].double().cpu() for t in (keys, values))
            weights = [math.exp(float(k[j] @ query) / math.sqrt(dim)) for j in range(n)]
            want[i, h] = sum(w * v[j] for j, w in enumerate(weights)) / sum(weights)
    positions = torch.tensor(lens, device=device) - 1
    if impl == "reference":  # which masks by weights of 0
        keys, values = keys.nan_to_num(), values.nan_to_num()
    close(decode.attend_slots(q, keys, values, positions, impl=impl), want.view(rows, -1))
    last = torch.tensor([rows - 1], device=device)  # a row in a slot of another number
    got = decode.attend_slots(q[last], keys, values, positions[last], slots=last, impl=impl)
    close(got, want.view(rows, -1)[-1:])


def norm(device: str, dtype: torch.dtype, impl: str | None, dim: int) -> None:
    x, w = (draw(3, dim, device=device, dtype=torch.float32), 1 + 0.2 * draw(dim, device=device, dtype=dtype, seed=1))
    y = draw(3, dim, device=device, dtype=dtype, seed=2)
    for added in (None, y):
        before = x.double().cpu()
        total = before if added is None else before + added.double().cpu()
        got = decode.add_rms_norm(x, added, w, eps=1e-5, dtype=dtype, impl=impl)
        torch.testing.assert_close(x.double().cpu(), total, rtol=1e-6, atol=1e-6)
        scale = torch.tensor([1 / math.sqrt(sum(v * v for v in row) / dim + 1e-5) for row in total.tolist()])
        assert got.dtype == dtype
        close(got, total * scale.double()[:, None] * w.double().cpu())


def silu(device: str, dtype: torch.dtype, impl: str | None, width: int) -> None:
    x = 4 * draw(3, 2 * width, device=device, dtype=dtype)
    gate, up = x.double().cpu().chunk(2, -1)
    close(decode.silu_mul(x, impl=impl), gate / (1 + (-gate).exp()) * up)


def sums(device: str, dtype: torch.dtype, impl: str | None, width: int) -> None:
    p = draw(3, width, device=device, dtype=torch.float32).softmax(-1)
    want = [[math.fsum(row[i : i + 32]) for i in range(0, width, 32)] for row in p.tolist()]
    got = decode.block_sums(p, block=32, impl=impl)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got.cpu(), torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)


def exp_sums(device: str, dtype: torch.dtype, impl: str | None, width: int) -> None:
    z = 9 * draw(3, width, device=device, dtype=torch.float32)
    z[0, :31], z[1, 5:], z[2, -1] = -math.inf, -math.inf, 80.0
    peak, got = decode.block_exp_sums(z, block=32, impl=impl)
    assert got.dtype == torch.float64
    assert torch.equal(peak, z.amax(-1))
    rows = zip(z.double().tolist(), peak.tolist(), strict=True)
    want = [[math.fsum(math.exp(x - top) for x in row[i : i + 32]) for i in range(0, width, 32)] for row, top in rows]
    torch.testing.assert_close(got.cpu(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=0)


CASES: dict[str, Callable[[str, torch.dtype, str | None], None]] = {
    **{
        f"rotation, {shape}, norm={n}": lambda d, t, i, shape=shape, n=n: rotation(d, t, i, shape, n)
        for shape in SHAPES
        for n in (False, True)
    },
    **{
        f"attention, {shape}, {c} places": lambda d, t, i, shape=shape, c=c: attention(d, t, i, shape, c)
        for shape in SHAPES
        for c in (33, 600)
    },
    **{f"norm, {n}": lambda d, t, i, n=n: norm(d, t, i, n) for n in (96, 256)},
    **{f"silu, {n}": lambda d, t, i, n=n: silu(d, t, i, n) for n in (100, 1500)},
    **{f"sums of exponentials, {n}": lambda d, t, i, n=n: exp_sums(d, t, i, n) for n in (40, 64, 700)},
    **{f"sums, {n}": lambda d, t, i, n=n: sums(d, t, i, n) for n in (30, 64, 700)},
}
