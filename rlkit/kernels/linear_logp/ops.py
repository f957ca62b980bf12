"""The operators behind `linear_logp`, as the dispatcher, autograd and torch.compile see them, and the exact removal of rows.

Rows leave in two places: masked ones never enter the forward, and rows whose upstream gradients are all zero (clipped, no
advantage) never enter the backward. Time goes with the rows that are left; both happen inside an operator, so that no compiler
sees a shape that depends on data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.kernels.linear_logp import chunked
from rlkit.kernels.linear_logp.chunked import Head, Rows
from rlkit.kernels.linear_logp.stats import LOWEST, Partials, finish, no_partials


@torch.library.custom_op("rlkit::linear_logp_partials", mutates_args=())
def partials_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Statistics `[4, T]` over this part of the vocabulary, and with `keep` the shifted logits of the rows that entered."""
    dtype = chunked.compute_dtype(hidden, weight, bias)
    head = Head(weight, _finite(bias, dtype), temperature, softcap, start)
    rows = None if mask is None or bool(mask.all()) else mask.nonzero().squeeze(1)
    h, t = (hidden, targets) if rows is None else (hidden[rows], targets[rows])
    kept = hidden.new_empty(_kept_shape(hidden, weight, keep), dtype=dtype)
    if rows is not None:
        kept[h.shape[0] :] = 0.0
    stats = chunked.partials(h, t.long(), head, kept=kept[: h.shape[0]] if keep else None)
    if rows is None:
        return stats, kept
    return no_partials(hidden.shape[0], dtype=dtype, device=hidden.device).index_copy_(1, rows, stats), kept


@partials_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001
    bias: Tensor | None,
    mask: Tensor | None,  # noqa: ARG001
    temperature: float,  # noqa: ARG001
    softcap: float | None,  # noqa: ARG001
    start: int,  # noqa: ARG001
    keep: bool,
) -> tuple[Tensor, Tensor]:
    dtype = chunked.compute_dtype(hidden, weight, bias)
    return hidden.new_empty(4, hidden.shape[0], dtype=dtype), hidden.new_empty(
        _kept_shape(hidden, weight, keep), dtype=dtype
    )


@torch.library.custom_op("rlkit::linear_logp", mutates_args=())
def logp_op(
    hidden: Tensor,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    targets: Tensor,  # noqa: ARG001
    stats: Tensor,
    kept: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    mask: Tensor | None,
    temperature: float,  # noqa: ARG001
    softcap: float | None,  # noqa: ARG001
    start: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy from the statistics of the whole vocabulary; gradients for this part of it."""
    out = finish(Partials(*stats))
    if mask is None:
        return out.logp, out.entropy
    zero = stats.new_zeros(())
    return torch.where(mask, out.logp, zero), torch.where(mask, out.entropy, zero)


@logp_op.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, stats: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return stats.new_empty(stats.shape[1]), stats.new_empty(stats.shape[1])


@torch.library.custom_op("rlkit::linear_logp_backward", mutates_args=())
def backward_op(
    g_logp: Tensor,
    g_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    logp: Tensor,
    entropy: Tensor,
    kept: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias (`[0]` where not needed), from the rows with a non-zero upstream gradient."""
    alive = (g_logp != 0) | (g_entropy != 0)
    alive = alive if mask is None else alive & mask
    entropy_grad = g_entropy if bool((g_entropy != 0).any()) else None
    rows = Rows(targets.long(), stats[0], stats[1], logp, entropy, g_logp, entropy_grad)
    index = None if bool(alive.all()) else alive.nonzero().squeeze(1)
    used = kept if kept.numel() else None
    if index is not None:
        if used is not None:
            used = used[index if mask is None else (mask.cumsum(0) - 1)[index]]
        rows = Rows(*(None if x is None else x[index] for x in rows))  # type: ignore[arg-type]
    head = Head(weight, _finite(bias, stats.dtype), temperature, softcap, start)
    h = hidden if index is None else hidden[index]
    out = chunked.backward(h, head, rows, need=(need[0], need[1], need[2]), kept=used)
    d_hidden = out.hidden
    if d_hidden is not None and index is not None:
        d_hidden = torch.zeros_like(hidden).index_copy_(0, index, d_hidden)
    return (
        hidden.new_empty(0) if d_hidden is None else d_hidden,
        weight.new_empty(0) if out.weight is None else out.weight,
        hidden.new_empty(0) if out.bias is None or bias is None else out.bias.to(bias.dtype),
    )


@backward_op.register_fake
def _(
    g_logp: Tensor,
    g_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *rest: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    bias, need = rest[4], rest[-1]
    return (
        torch.empty_like(hidden) if need[0] else hidden.new_empty(0),
        torch.empty_like(weight) if need[1] else weight.new_empty(0),
        torch.empty_like(bias) if need[2] else hidden.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, targets, stats, kept, bias, mask, *ctx.head = inputs
    ctx.save_for_backward(hidden, weight, targets, stats, *output, kept, bias, mask)


def _backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    need = [needs[0], needs[1], needs[5]]
    grads = backward_op(g_logp, g_entropy, *ctx.saved_tensors, *ctx.head, need)
    d_hidden, d_weight, d_bias = (g if wanted else None for g, wanted in zip(grads, need, strict=True))
    return d_hidden, d_weight, None, None, None, d_bias, None, None, None, None


logp_op.register_autograd(_backward, setup_context=_setup)


def _kept_shape(hidden: Tensor, weight: Tensor, keep: bool) -> tuple[int, ...]:
    return (hidden.shape[0], weight.shape[0]) if keep else (0, 0)


def _finite(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bias of -inf (a banned entry) as a huge finite one: e^(z - max) * (z - max) is then 0 and not NaN."""
    return None if bias is None else bias.to(dtype).clamp(min=LOWEST)
