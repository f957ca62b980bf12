"""Statistics and gradients of given logits by Triton: one read forward; one read and one write backward."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.chunked import Head, Rows
from rlkit.kernels.linear_logp.row_kernels import Scaling, pack_terms, update_stats, write_gradient
from rlkit.kernels.linear_logp.stats import no_partials


def partials(logits: Tensor, targets: Tensor, head: Head, mask: Tensor | None) -> Tensor:
    """Statistics `[4, T]`; rows where `mask` is False get those of an empty part."""
    out = no_partials(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.numel():
        with torch.cuda.device_of(logits):
            update_stats(out, _rows_in_line(logits), targets, _scaling(head), mask=mask)
    return out


def backward(logits: Tensor, head: Head, terms: Rows, alive: Tensor | None, *, out: Tensor) -> None:
    """Writes the gradient into `out`, which may be `logits` itself: 0 where `alive` is False."""
    if not logits.numel():
        return
    packed = pack_terms(terms.scale / head.temperature, terms.offset, terms.at_target, terms.base, terms.slope)
    with torch.cuda.device_of(logits):
        written = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        write_gradient(written, _rows_in_line(logits), terms.targets, packed, _scaling(head), alive=alive)
    if written is not out:
        out.copy_(written)


def _scaling(head: Head) -> Scaling:
    return Scaling(None, head.temperature, head.softcap, head.start)


def _rows_in_line(x: Tensor) -> Tensor:
    """The columns of a row side by side, at any distance between rows."""
    return x if x.stride(1) == 1 else x.contiguous()
