"""Problems whose logits take a few MB altogether: one tile, its probabilities kept, and few operations.

With p = e^log_p, and upstream gradients g_l of logp and g_h of the entropy,

    dz_j = g_l [j = target] - p_j (g_l + g_h (entropy + log_p_j))

Next to computing the logits again this saves one matrix product of four, an exponential, and most of the overhead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.chunked import Grads, Head, compute_dtype, logits_into
from rlkit.kernels.linear_logp.stats import exp_into

KEEP_BYTES = 16 << 20


class KeptRows(NamedTuple):
    """What the backward reads per row, all `[T]`: saved values and upstream gradients (`g_entropy` None: zero)."""

    targets: Tensor
    logp: Tensor
    entropy: Tensor
    lse: Tensor
    g_logp: Tensor
    g_entropy: Tensor | None


def fits(num_rows: int, vocab: int, dtype: torch.dtype) -> bool:
    """Whether all log-probabilities and probabilities together are small enough to be kept for the backward."""
    return 2 * num_rows * vocab * dtype.itemsize <= KEEP_BYTES


def forward(hidden: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, logsumexp (0 without a softcap, which alone needs it), and log_p and p, stacked: `[2, T, V]`."""
    dtype = compute_dtype(hidden, head.weight, head.bias)
    h, w, index = hidden.to(dtype), head.weight.to(dtype), targets.unsqueeze(1)
    kept = h.new_empty(2, h.shape[0], w.shape[0])
    log_p, z = kept
    logits_into(z, h, w, head.bias, head)
    torch.log_softmax(z, 1, out=log_p)
    logp = log_p.gather(1, index).squeeze(1)
    lse = torch.zeros_like(logp) if head.softcap is None else z.gather(1, index).squeeze(1) - logp
    entropy = torch.linalg.vecdot(exp_into(log_p, out=z), log_p, out=torch.empty_like(logp)).neg_()
    return logp, entropy, lse, kept


def backward(
    hidden: Tensor, head: Head, kept: Tensor, rows: KeptRows, *, need: list[bool], d_weight: Tensor | None = None
) -> Grads:
    """Gradients as far as `need` asks for them; a given `d_weight` is added to, in its own dtype."""
    targets, logp, entropy, lse, g_logp, g_entropy = rows
    scale = (g_logp / -head.temperature).unsqueeze(1)
    log_p, p = kept
    if g_entropy is None:
        d = p * scale
        at_target = logp.expm1().unsqueeze(1).mul_(scale)
    else:
        slope = (g_entropy / -head.temperature).unsqueeze(1)
        d = (log_p * slope).add_(torch.addcmul(scale, slope, entropy.unsqueeze(1))).mul_(p)
        logp, entropy = logp.unsqueeze(1), entropy.unsqueeze(1)
        at_target = scale * logp.expm1() + slope * logp.exp() * (logp + entropy)
    d.scatter_(1, targets.unsqueeze(1), at_target)
    if head.softcap is not None:  # d softcap * tanh(x / softcap) / dx = 1 - (z temperature / softcap)^2
        d.addcmul_(d, (log_p + lse.unsqueeze(1)).mul_(head.temperature / head.softcap).square_(), value=-1)
    if need[1]:
        product = _product(d.t(), hidden)
        d_weight = product.to(head.weight.dtype) if d_weight is None else d_weight.add_(product)
    return Grads(
        _product(d, head.weight).to(hidden.dtype) if need[0] else None,
        d_weight,
        d.sum(0) if need[2] else None,
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in the dtype of `a`, also under autocast, which leaves products with an `out` alone."""
    return torch.mm(a, b.to(a.dtype), out=a.new_empty(a.shape[0], b.shape[1]))
