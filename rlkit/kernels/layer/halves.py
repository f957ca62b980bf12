"""Dense decoder layers in C, products included: all layers in one call where a pack has only short segments (`Layers`)
and for a decoding step (`decode`), else the two halves of a layer, between which stands attention, in one call each.

For fp32 weights on the CPU, see `Layer.is_for_c`; `rlkit.model.dense` has the same in torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.kernels.layer import address, has_kernels, threads_for
from rlkit.kernels.layer.compiled import library


class Layer(NamedTuple):
    """The weights of a layer, in the order of `Layer` in layer.c."""

    norm: Tensor
    q: Tensor
    q_bias: Tensor | None
    k: Tensor
    k_bias: Tensor | None
    v: Tensor
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def is_for_c(self) -> bool:
        """Whether the functions below take these weights."""
        present = [w for w in self if w is not None]
        return has_kernels(*present) and all(w.is_contiguous() for w in present)


def alike_for_c(layers: Sequence[Layer]) -> bool:
    """Whether `Layers` and `decode` take these layers: they have the same sizes, and each is for C."""
    sizes = {(w.q.shape, w.k.shape, w.gate.shape) for w in layers}
    return len(sizes) == 1 and all(w.is_for_c for w in layers)


FIRST = Layer._fields.index("o")  # number of weights of the first half
_STACKED = ("q", "k", "v"), ("q_bias", "k_bias", "v_bias"), ("gate", "up")
_Spans = ctypes.c_int64 * 4


class Project(torch.autograd.Function):
    """q, k, v = W norm(x) as [T, heads, head_dim], q and k normed and turned to their positions as in
    `rlkit.kernels.layer.rotary`; and x itself, so that its two gradients are added in one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "T D"], cos: Float[Tensor, "T 1 n"], sin: Float[Tensor, "T 1 n"], eps: float,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`weights` are the first `FIRST` of a `Layer`."""
        (rows, width), n, x = x.shape, cos.shape[-1], x.contiguous()
        sizes, layer = _sizes(weights), _first_half(weights)
        heads, kv_heads = sizes[0] // n, sizes[1] // n
        y, scale, h = x.new_empty(rows, sum(sizes)), x.new_empty(rows, 1), torch.empty_like(x)
        q, k = x.new_empty(rows, heads, n), x.new_empty(rows, kv_heads, n)
        inputs, outputs = [t.data_ptr() for t in (x, cos, sin)], [t.data_ptr() for t in (h, scale, y, q, k)]
        c = library()
        shape = rows, width, heads, kv_heads, n, threads_for(x)
        c.project(c.multiply, _table(layer), *inputs, eps, *outputs, *shape)
        ctx.save_for_backward(x, cos, sin, scale, y, *weights)
        ctx.eps = eps
        return q, k, y[:, -sizes[2] :].view(rows, kv_heads, n), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x and the weights."""
        x, cos, sin, scale, y, *weights = ctx.saved_tensors
        (rows, width), n, sizes, threads = x.shape, cos.shape[-1], _sizes(weights), threads_for(x)
        layer, dx = _first_half(weights), torch.empty_like(x)
        out, (dq, dk, dv, residual) = _gradients(layer), (g.contiguous() for g in grads)
        work = x.new_empty(rows * (2 * width + y.shape[1]) + threads * max(width, n))
        inputs = [t.data_ptr() for t in (x, scale, y, cos, sin)]
        more = [t.data_ptr() for t in (dq, dk, dv, residual, dx, work)]
        c, shape = library(), (rows, width, sizes[0] // n, sizes[1] // n, n, threads)
        c.project_backward(c.multiply, _table(layer), _table(out), *inputs, ctx.eps, *more, *shape)
        return dx, None, None, None, *out[:FIRST]


class Finish(torch.autograd.Function):
    """y = x + attended W_o^T, then y + (silu(W_gate norm(y)) * W_up norm(y)) W_down^T."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "T D"], attended: Float[Tensor, "T A"], eps: float, *weights: Tensor | None
    ) -> Float[Tensor, "T D"]:
        """`weights` are those of a `Layer` after the first `FIRST`."""
        (rows, width), inner, hidden = x.shape, attended.shape[1], len(weights[3])  # type: ignore[arg-type]
        x, attended = x.contiguous(), attended.contiguous()
        y, scale, z = torch.empty_like(x), x.new_empty(rows, 1), torch.empty_like(x)
        gate_up, work = x.new_empty(rows, 2 * hidden), x.new_empty(rows * (width + hidden))
        pointers, c = [t.data_ptr() for t in (y, scale, gate_up, z, work)], library()
        layer, inputs = _table(_second_half(weights)), (x.data_ptr(), attended.data_ptr())
        c.finish(c.multiply, layer, *inputs, eps, *pointers, rows, width, inner, hidden, threads_for(x))
        ctx.save_for_backward(attended, y, scale, gate_up, *weights)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, attended and the weights."""
        attended, y, scale, gate_up, *weights = ctx.saved_tensors
        (rows, width), inner, hidden, threads = y.shape, attended.shape[1], len(weights[3]), threads_for(y)
        layer = _second_half(weights)
        out = _gradients(layer)
        dz, dx, d_attended = grads[0].contiguous(), torch.empty_like(y), torch.empty_like(attended)
        work = y.new_empty(rows * (2 * width + 4 * hidden) + threads * width)
        pointers = [t.data_ptr() for t in (attended, y, scale, gate_up, dz, dx, d_attended, work)]
        c, sizes = library(), (rows, width, inner, hidden, threads)
        c.finish_backward(c.multiply, _table(layer), _table(out), *pointers, *sizes)
        return dx, d_attended, None, *out[FIRST:]


class Layers(torch.autograd.Function):
    """All layers of a decoder and the norm after them, over a packed stream of short segments, in one call."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "S D"], norm: Float[Tensor, "D"], cos: Tensor, sin: Tensor,
        spans: tuple[Tensor, int], last: tuple[Tensor, int], numbers: tuple[int, float, float], trains: bool,
        *weights: Tensor | None,
    ) -> Float[Tensor, "T D"]:  # fmt: skip
        """spans: arguments of `rlkit.kernels.layer.Attention`; `last` for the last layer, whose queries begin later.

        `numbers`: the row where they begin, epsilon, and the scale of the products of queries and keys. Without
        `trains` there is no backward. `weights` are those of all layers, one after the other, see `alike_for_c`.
        """
        start, eps, factor = numbers
        (rows, width), n, layers = x.shape, cos.shape[-1], _layers(weights)
        hidden, heads, kv_heads = len(layers[0].gate), len(layers[0].q) // n, len(layers[0].k) // n
        sizes = rows, start, width, hidden, heads, kv_heads, n, threads_for(x), torch.get_num_threads()
        stride = rows * (2 * (width + hidden + 1) + 3 * (heads + kv_heads) * n) + spans[1] * heads
        kept = x.new_empty(len(layers) * stride + rows * width if trains else stride)
        out, scale = x.new_empty(rows - start, width), x.new_empty(rows - start, 1)
        work, x, c = x.new_empty(rows * (width + hidden)), x.contiguous(), library()
        inputs = [t.data_ptr() for t in (norm, x, cos, sin)]
        memory = kept.data_ptr(), stride if trains else 0, *(t.data_ptr() for t in (work, out, scale))
        tables = _spans(*spans), _spans(*last)
        c.decoder(c.multiply, _table(*layers), len(layers), *inputs, eps, factor, *tables, *memory, *sizes)
        ctx.numbers, ctx.sizes, ctx.stride, ctx.pairs = numbers, sizes, stride, (spans[1], last[1])
        ctx.save_for_backward(norm, cos, sin, scale, kept, spans[0], last[0], *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, the norm and the weights."""
        norm, cos, sin, scale, kept, spans, last, *weights = ctx.saved_tensors
        (_, eps, factor), (rows, _, width, hidden, heads, kv_heads, n, *threads) = ctx.numbers, ctx.sizes
        layers = _layers(weights)
        out = [_gradients(layer) for layer in layers]
        each_row = 3 * width + 2 * (heads + kv_heads) * n + max((heads + 2 * kv_heads) * n, 4 * hidden)
        work = norm.new_empty(rows * each_row + max(threads) * max(width, n))
        grad, dx, d_norm, c = grads[0].contiguous(), norm.new_empty(rows, width), torch.empty_like(norm), library()
        inputs = [t.data_ptr() for t in (norm, d_norm, cos, sin)]
        memory = kept.data_ptr(), ctx.stride, *(t.data_ptr() for t in (work, scale, grad, dx))
        tables = [_spans(*table) for table in zip((spans, last), ctx.pairs, strict=True)]
        weights_and_out = _table(*layers), _table(*out)
        c.decoder_backward(
            c.multiply, *weights_and_out, len(layers), *inputs, eps, factor, *tables, *memory, *ctx.sizes
        )  # fmt: skip
        return dx, d_norm, *[None] * 6, *(t for layer in out for t in layer)


def _first_half(weights: Sequence[Tensor | None]) -> Layer:
    return Layer(*weights, *[None] * len(Layer._fields[FIRST:]))  # type: ignore[arg-type]


def _second_half(weights: Sequence[Tensor | None]) -> Layer:
    return Layer(*[None] * FIRST, *weights)  # type: ignore[arg-type]


def _layers(weights: Sequence[Any]) -> list[Layer]:
    size = len(Layer._fields)
    return [Layer(*weights[i : i + size]) for i in range(0, len(weights), size)]


def _spans(rows: Tensor, pairs: int) -> Any:
    return _Spans(rows.data_ptr(), *rows.shape, pairs)


def _table(*layers: Layer, cache: Iterable[Sequence[Tensor | None]] = repeat((None, None))) -> Any:
    """An array of `Layer` of layer.c; `cache` has the keys and values of each."""
    found = [address(x) for layer, kept in zip(layers, cache) for x in (*layer, *kept)]
    return (ctypes.c_void_p * len(found))(*found)


def _gradients(layer: Layer) -> Layer:
    """Room for the gradients of the weights that are there; C computes those of `_STACKED` in one product."""
    made = {name: torch.empty_like(w) for name, w in layer._asdict().items() if w is not None}
    for names in _STACKED:
        parts = [made[name] for name in names if name in made]
        if parts:
            sizes = [len(w) for w in parts]
            made |= zip(names, parts[0].new_empty(sum(sizes), *parts[0].shape[1:]).split(sizes), strict=True)
    return Layer(*map(made.get, Layer._fields))  # type: ignore[arg-type]


def _sizes(weights: Sequence[Any]) -> list[int]:
    """Numbers of queries, keys and values of a token."""
    return [len(weights[i]) for i in (1, 3, 5)]


def decode(
    x: Float[Tensor, "B D"],
    layers: Sequence[Layer],
    cache: Sequence[tuple[Tensor, Tensor]],
    positions: Int[Tensor, "B"],
    cos: Float[Tensor, "M 1 n"],
    sin: Float[Tensor, "M 1 n"],
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    length: int,
    eps: float,
) -> Float[Tensor, "B D"]:
    """All layers of a decoder for one new token of each row, in one call; overwrites and returns x.

    `layers` are alike (`alike_for_c`); `cache` has their keys, in memory as [B * kv_heads, n, length], and values, as
    [B * kv_heads, length, n]. Addresses are asked for at every step, as whatever replaces the data of a parameter frees
    what it had.
    """
    (rows, width), n = x.shape, cos.shape[-1]
    work = x.new_empty(rows * (2 * (width + hidden + (heads + kv_heads) * n) + 1))
    c, pointers = library(), [t.data_ptr() for t in (x, positions, cos, sin)]
    sizes = rows, width, hidden, heads, kv_heads, n, length, torch.get_num_threads()
    c.decode(c.multiply, _table(*layers, cache=cache), len(layers), *pointers, eps, work.data_ptr(), *sizes)
    return x
