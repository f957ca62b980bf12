"""The two halves of a dense decoder layer, products included, as one call of C each, and all layers of a decoding step.

Between the halves of a layer stands attention. For fp32 weights on the CPU, see `Layer.is_for_c`; `rlkit.model.dense`
has the same in torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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


FIRST = Layer._fields.index("o")  # number of weights of the first half
_Addresses = ctypes.c_void_p * (len(Layer._fields) + 2)


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
        sizes = _sizes(weights)
        heads, kv_heads = sizes[0] // n, sizes[1] // n
        y, scale, h = x.new_empty(rows, sum(sizes)), x.new_empty(rows, 1), torch.empty_like(x)
        q, k = x.new_empty(rows, heads, n), x.new_empty(rows, kv_heads, n)
        inputs, outputs = [t.data_ptr() for t in (x, cos, sin)], [t.data_ptr() for t in (h, scale, y, q, k)]
        c = library()
        c.project(
            c.multiply, _addresses(*weights), *inputs, eps, *outputs, rows, width, heads, kv_heads, n, threads_for(x)
        )
        ctx.save_for_backward(x, cos, sin, scale, y, *weights)
        ctx.eps = eps
        return q, k, y[:, -sizes[2] :].view(rows, kv_heads, n), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x and the weights."""
        x, cos, sin, scale, y, *weights = ctx.saved_tensors
        (rows, width), n, sizes, threads = x.shape, cos.shape[-1], _sizes(weights), threads_for(x)
        d_weights, dx = x.new_empty(sum(sizes), width).split(sizes), torch.empty_like(x)
        d_biases = (None,) * 3 if weights[2] is None else x.new_empty(sum(sizes)).split(sizes)
        out = [torch.empty_like(weights[0]), *(t for pair in zip(d_weights, d_biases) for t in pair)]
        out += [None if t is None else torch.empty_like(t) for t in weights[-2:]]
        dq, dk, dv, residual = (g.contiguous() for g in grads)
        work = x.new_empty(rows * (2 * width + y.shape[1]) + threads * max(width, n))
        inputs = [t.data_ptr() for t in (x, scale, y, cos, sin)]
        more = [t.data_ptr() for t in (dq, dk, dv, residual, dx, work)]
        c, shape = library(), (rows, width, sizes[0] // n, sizes[1] // n, n, threads)
        c.project_backward(c.multiply, _addresses(*weights), _addresses(*out), *inputs, ctx.eps, *more, *shape)
        return dx, None, None, None, *out


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
        layer, inputs = _addresses(*[None] * FIRST, *weights), (x.data_ptr(), attended.data_ptr())
        c.finish(c.multiply, layer, *inputs, eps, *pointers, rows, width, inner, hidden, threads_for(x))
        ctx.save_for_backward(attended, y, scale, gate_up, *weights)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of x, attended and the weights."""
        attended, y, scale, gate_up, *weights = ctx.saved_tensors
        o, o_bias, norm, gate, _, down = weights
        (rows, width), inner, hidden, threads = y.shape, attended.shape[1], len(gate), threads_for(y)
        d_o_bias = None if o_bias is None else torch.empty_like(o_bias)
        d_gate, d_up = y.new_empty(2 * hidden, width).split(hidden)
        out = [torch.empty_like(o), d_o_bias, torch.empty_like(norm), d_gate, d_up, torch.empty_like(down)]
        dz, dx, d_attended = grads[0].contiguous(), torch.empty_like(y), torch.empty_like(attended)
        work = y.new_empty(rows * (2 * width + 4 * hidden) + threads * width)
        layer, d = (_addresses(*[None] * FIRST, *tensors) for tensors in (weights, out))
        pointers = [t.data_ptr() for t in (attended, y, scale, gate_up, dz, dx, d_attended, work)]
        c = library()
        c.finish_backward(c.multiply, layer, d, *pointers, rows, width, inner, hidden, threads)
        return dx, d_attended, None, *out


def _sizes(weights: Sequence[Any]) -> list[int]:
    """Numbers of queries, keys and values of a token."""
    return [len(weights[i]) for i in (1, 3, 5)]


def _addresses(*tensors: Tensor | None) -> Any:
    return _Addresses(*map(address, tensors))


def decode(
    x: Float[Tensor, "B D"],
    layers: Int[Tensor, "N 17"],
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

    `layers` has the addresses of the tensors of each `Layer`, 0 for one that it has not, and then of its cache, keys
    [B * kv_heads, n, length] and values [B * kv_heads, length, n].
    """
    (rows, width), n = x.shape, cos.shape[-1]
    work = x.new_empty(rows * (2 * (width + hidden + (heads + kv_heads) * n) + 1))
    c, pointers = library(), [t.data_ptr() for t in (x, positions, cos, sin)]
    sizes = rows, width, hidden, heads, kv_heads, n, length, torch.get_num_threads()
    c.decode(c.multiply, layers.data_ptr(), len(layers), *pointers, eps, work.data_ptr(), *sizes)
    return x
