"""Library products into blocks that stay in the cache, and one Triton pass over each block. CUDA, any vocabulary.

The tensor cores' work is left to the library (cuBLAS), which writes fp32 logits of 16-bit inputs; the row kernels read
each block once, from the L2 cache where it fits. The forward's blocks have one fixed shape, the last rows filled up
with zeros, so the library takes the same kernel for every row: a row's log-probability does not depend on how many
rows there are, or on which. The backward walks over the vocabulary: for some columns the gradient of the logits of
*all* rows, then one product for the weight's gradient there, final when written and rounded once, and one into an fp32
sum for the hidden states'.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.kernels.linear_logp.chunked import Grads, Head, Rows, blocks
from rlkit.kernels.linear_logp.products import full_sums, product_dtype, product_into
from rlkit.kernels.linear_logp.row_kernels import Scaling, pack_terms, update_stats, write_gradient
from rlkit.kernels.linear_logp.stats import no_partials

HEIGHT, WIDTH = 1024, 8192  # of a block of logits in the forward: 32 MB in fp32, in an L2 cache of 50
BLOCK_BYTES, MIN_HEIGHT = 32 << 20, 256  # of a block of logits in the backward
GRADIENT_BYTES = 128 << 20  # of the logits' gradient: all rows, and at least MIN_WIDTH columns
MIN_WIDTH, MAX_WIDTH = 4096, 16_384


def partials(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Statistics of every row over the head's part of the vocabulary, stacked: `[4, T]`, fp32."""
    (num_rows, _), vocab = hidden.shape, head.weight.shape[0]
    out = no_partials(num_rows, dtype=torch.float32, device=hidden.device)
    if num_rows == 0 or vocab == 0:
        return out
    dtype = product_dtype(hidden, head.weight)
    z = hidden.new_empty(HEIGHT, min(WIDTH, vocab), dtype=torch.float32)
    with torch.cuda.device_of(hidden), full_sums():
        for top, end in blocks(num_rows, HEIGHT):
            h = pad(hidden[top:end].to(dtype), (0, 0, 0, HEIGHT - (end - top)))
            for first, last in blocks(vocab, WIDTH):
                x = z[:, : last - first]
                product_into(x, h, head.weight[first:last].to(dtype).t())
                update_stats(out[:, top:end], x[: end - top], targets[top:end], scaling(head, first, last))
    return out


def backward(hidden: Tensor, head: Head, rows: Rows, *, need: list[bool], d_weight: Tensor | None = None) -> Grads:
    """Gradients as far as `need` asks for them; a given `d_weight` is added to, in its own dtype."""
    weight, dtype = head.weight, product_dtype(hidden, head.weight)
    h, (vocab, dim), num_rows = hidden.to(dtype), weight.shape, hidden.shape[0]
    add = d_weight is not None
    if need[1] and d_weight is None:
        d_weight = torch.empty_like(weight) if num_rows else torch.zeros_like(weight)
    d_hidden = h.new_zeros(num_rows, dim, dtype=torch.float32) if need[0] else None
    d_bias = h.new_zeros(vocab, dtype=torch.float32) if need[2] else None
    if num_rows == 0 or vocab == 0:
        return Grads(None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias)
    scale, unscale = lift(rows, dtype, head.temperature)
    terms = pack_terms(scale, rows.offset, rows.at_target, rows.base, rows.slope)
    width = min(vocab, max(MIN_WIDTH, min(MAX_WIDTH, GRADIENT_BYTES // (dtype.itemsize * num_rows) // 256 * 256)))
    buffer, z = (
        h.new_empty(num_rows, width),
        h.new_empty(max(MIN_HEIGHT, BLOCK_BYTES // (4 * width)), width, dtype=torch.float32),
    )
    with torch.cuda.device_of(hidden), full_sums():
        for first, last in blocks(vocab, width):
            w, d = weight[first:last].to(dtype), buffer[:, : last - first]
            for top, end in blocks(num_rows, z.shape[0]):
                x = z[: end - top, : last - first]
                product_into(x, h[top:end], w.t())
                write_gradient(d[top:end], x, rows.targets[top:end], terms[:, top:end], scaling(head, first, last))
            if d_hidden is not None:
                product_into(d_hidden, d, w, add=True, factor=unscale)
            if d_weight is not None and need[1]:
                product_into(d_weight[first:last], d.t(), h, add=add, factor=unscale)
            if d_bias is not None:
                torch.sum(d, 0, dtype=torch.float32, out=d_bias[first:last])
    d_bias = None if d_bias is None else d_bias.mul_(unscale)
    return Grads(None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias)


def lift(rows: Rows, dtype: torch.dtype, temperature: float) -> tuple[Tensor, float]:
    """What to scale each row's gradient by, and the factor to take off after the products.

    fp16 ends at 6e-8 and 65504. A power of two brings the largest possible entry near 2^14, so that what is lost is
    4e11 times smaller. It costs a device sync; the other dtypes have the range of fp32, and their factor is 1.
    """
    scale = rows.scale / temperature
    if dtype != torch.float16 or not scale.numel():
        return scale, 1.0
    size = torch.ones_like(scale) if rows.base is None else rows.base.abs()
    size = size if rows.slope is None else size + rows.slope.abs()
    largest = (scale.abs() * torch.maximum(size, rows.at_target.abs())).max().item()
    if not 0 < largest < math.inf:
        return scale, 1.0
    factor = 2.0 ** min(120, 14 - math.frexp(largest)[1])
    return scale * factor, 1 / factor


def scaling(head: Head, first: int, last: int) -> Scaling:
    """How a block of raw logits of the weight's rows [first, last) becomes logits."""
    bias = None if head.bias is None else head.bias[first:last]
    return Scaling(bias, head.temperature, head.softcap, head.start + first)
