"""What a dense decoder layer does around its matrix products: RMS norm, rotary positions, and attention of few queries.
`halves` has halves of a layer, and all layers. Gradients are functions of their own: `rlkit.model.dense` puts several
operators into one autograd function.

On a CPU these operators take longer than the products where a model is small, and most of that is the start of dozens
of operators on a few kilobytes each. In fp32 each is one call of C (layer.c, see `compiled`). Elsewhere norm and
rotation are the torch code below; the callers of the others have other ways. Rows of a matrix may lie apart only where
a function says so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkit.kernels.layer.compiled import library

_SERIAL = 1 << 15  # numbers up to which a second thread costs more than it takes over
LONGEST = 1 << 16  # keys of a query, whose probabilities fit on a thread's stack


def has_kernels(*tensors: Tensor) -> bool:
    """Whether C does the work: fp32 tensors on the CPU, outside torch.compile, and a C compiler."""
    return (
        not torch.compiler.is_compiling()
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)
        and library() is not None
    )


def rms_norm(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T 1"]]:
    """x * scale * weight with scale = 1 / sqrt(mean(x^2) + eps) of each row, and the scale."""
    if not has_kernels(x, weight):
        scale = inverse_rms(x, eps)
        return (x * scale).mul_(weight), scale
    x = x.contiguous()
    out, scale = torch.empty_like(x), x.new_empty(len(x), 1)
    library().rms_norm(x.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), scale.data_ptr(), *x.shape, threads_for(x))
    return out, scale


def rms_norm_backward(
    grad: Float[Tensor, "T D"],
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "D"],
    scale: Float[Tensor, "T 1"],
    residual: Float[Tensor, "T D"],
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "D"], Float[Tensor, "T D"]]:
    """The gradients of x (with `residual`, its gradient from elsewhere, added) and of `weight`, and the output again.

        dx = scale * (g - n * mean(g * n)) + residual      g = grad * weight, n = x * scale
    """  # fmt: skip
    if not has_kernels(grad, x, weight, residual):
        normed = x * scale
        d_weight = (grad * normed).sum(0)
        dx = _through_norm(grad * weight, normed, scale).add_(residual)
        return dx, d_weight, normed.mul_(weight)
    grad, x, residual, threads = grad.contiguous(), x.contiguous(), residual.contiguous(), threads_for(x)
    dx, d_weight, out = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x)
    parts = x.new_empty(threads, len(weight))
    pointers = [t.data_ptr() for t in (grad, x, weight, scale, residual, dx, d_weight, out, parts)]
    library().rms_norm_backward(*pointers, *x.shape, threads)
    return dx, d_weight, out


def rotary(
    x: Float[Tensor, "T H n"],
    norm: Float[Tensor, "n"] | None,
    cos: Float[Tensor, "T 1 n"],
    sin: Float[Tensor, "T 1 n"],
    *,
    eps: float,
) -> Float[Tensor, "T H n"]:
    """Each head RMS-normed to y (if there is a norm), then turned to its position: y * cos + swap(y) * sin, where swap
    exchanges the halves; `sin` has the sign of its half. The rows of x may lie apart."""
    x = x.to(cos.dtype)
    if not has_kernels(x, cos, sin):
        y = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
        return (y * cos).addcmul_(y.roll(y.shape[-1] // 2, -1), sin)
    out = x.new_empty(x.shape)
    pointers = [t.data_ptr() for t in (cos, sin, out)]
    library().rotary(x.data_ptr(), x.stride(0), address(norm), eps, *pointers, *x.shape, threads_for(x))
    return out


def rotary_backward(
    grad: Float[Tensor, "T H n"],
    x: Float[Tensor, "T H n"],
    norm: Float[Tensor, "n"] | None,
    cos: Float[Tensor, "T 1 n"],
    sin: Float[Tensor, "T 1 n"],
    *,
    eps: float,
    dx: Float[Tensor, "T H n"],
) -> Float[Tensor, "n"] | None:
    """Writes the gradient of x, whose rows lie as those of x, from that of `rotary`; returns the norm's gradient."""
    if x.dtype != cos.dtype:
        wide = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
        d_norm = rotary_backward(grad.to(cos.dtype), x.to(cos.dtype), norm, cos, sin, eps=eps, dx=wide)
        dx.copy_(wide)
        return d_norm
    if not has_kernels(grad, x, cos, sin):
        d_norm = None
        dy = (grad * cos).add_((grad * sin).roll(grad.shape[-1] // 2, -1))
        if norm is not None:
            scale = inverse_rms(x, eps)
            normed = x * scale
            d_norm = (dy * normed).sum((0, 1))
            dy = _through_norm(dy.mul_(norm), normed, scale)
        dx.copy_(dy)
        return d_norm
    grad, threads, n = grad.contiguous(), threads_for(x), x.shape[2]
    d_norm, parts = x.new_empty(n), x.new_empty(threads, n)
    pointers = [t.data_ptr() for t in (cos, sin, dx, d_norm, parts)]
    inputs = grad.data_ptr(), x.data_ptr(), x.stride(0), address(norm)
    library().rotary_backward(*inputs, eps, *pointers, *x.shape, threads)
    return None if norm is None else d_norm


class Attention(torch.autograd.Function):
    """Softmax attention of spans of few queries, without padding or copies of the keys that they share; in C only.

    q [T, H, n], k and v [S, K, n]. A row of `spans` has the first query of a span, their number a, the number of its
    keys b, the sum of a * b before it, and ranges (first, number) of its keys, at least one; query i sees its first
    b - a + i + 1 keys. Rows of the result that no span has are not written. `num_pairs`: the sum of a * b. The rows of
    v may lie apart.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "T H n"],
        k: Float[Tensor, "S K n"],
        v: Float[Tensor, "S K n"],
        spans: Int[Tensor, "N 4+2*R"],
        num_pairs: int,
        scale: float,
    ) -> Float[Tensor, "T H n"]:
        """softmax(scale q k^T) v."""
        q, k = q.contiguous(), k.contiguous()
        (_, heads, n), kv_heads = q.shape, k.shape[1]
        out, probs = torch.empty_like(q), q.new_empty(num_pairs * heads)
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), v.stride(0), spans.data_ptr(), spans.shape[1]
        sizes = len(spans), heads, kv_heads, n, torch.get_num_threads()
        library().attention(*inputs, scale, probs.data_ptr(), out.data_ptr(), *sizes)
        ctx.save_for_backward(q, k, v, spans, probs)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of q, k and v; threads divide the heads of the keys."""
        (q, k, v, spans, probs), grad = ctx.saved_tensors, grads[0].contiguous()
        out = [torch.zeros_like(q), torch.zeros_like(k), v.new_zeros(v.shape)]
        inputs = [t.data_ptr() for t in (grad, q, k, v)]
        pointers = [t.data_ptr() for t in (probs, *out)]
        sizes = len(spans), *q.shape[1:2], *k.shape[1:], torch.get_num_threads()
        library().attention_backward(
            *inputs, v.stride(0), spans.data_ptr(), spans.shape[1], ctx.scale, *pointers, *sizes
        )
        return *out, None, None, None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row, in fewer operators than F.rms_norm has on the CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _through_norm(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x, where normed = x * scale, from that of `normed`, which it overwrites."""
    return grad.addcmul_(normed, (grad * normed).mean(-1, keepdim=True), value=-1).mul_(scale)


def address(x: Tensor | None) -> int | None:
    """Where the data of x begins."""
    return None if x is None else x.data_ptr()


def threads_for(x: Tensor) -> int:
    """How many threads the work on x is worth."""
    return torch.get_num_threads() if x.numel() > _SERIAL else 1
