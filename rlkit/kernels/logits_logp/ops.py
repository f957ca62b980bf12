"""The operators behind `logits_logp`, as autograd and torch.compile see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.kernels.linear_logp.chunked import Head, compute_dtype, row_terms
from rlkit.kernels.linear_logp.ops import present
from rlkit.kernels.linear_logp.stats import Partials, finish
from rlkit.kernels.logits_logp import chunked


@torch.library.custom_op("rlkit::logits_logp_partials", mutates_args=())
def partials_op(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    impl: str,
) -> Tensor:
    """Statistics `[4, T]` over these columns of the vocabulary, without a gradient."""
    head = _head(logits, temperature, softcap, start)
    if impl == "chunked":
        return chunked.partials(logits, targets.long(), head, present(mask))
    from rlkit.kernels.logits_logp import triton

    return triton.partials(logits, targets, head, mask)


@partials_op.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=compute_dtype(logits))


@torch.library.custom_op("rlkit::logits_logp", mutates_args=())
def logp_op(
    logits: Tensor,  # noqa: ARG001
    targets: Tensor,  # noqa: ARG001
    stats: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    temperature: float,  # noqa: ARG001
    softcap: float | None,  # noqa: ARG001
    start: int,  # noqa: ARG001
    inplace: bool,  # noqa: ARG001
    impl: str,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """logp and entropy from the statistics `[4, T]` of the whole vocabulary, with gradients to these columns."""
    logp, entropy = finish(Partials(*stats))
    return logp, entropy


@logp_op.register_fake
def _(logits: Tensor, targets: Tensor, stats: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return stats.new_empty(stats.shape[1]), stats.new_empty(stats.shape[1])


@torch.library.custom_op("rlkit::logits_logp_backward", mutates_args=())
def backward_op(
    logits: Tensor,
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    targets: Tensor,
    saved: list[Tensor],
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    impl: str,
) -> Tensor:
    """Gradient of the logits, as a new tensor."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    head = _head(logits, temperature, softcap, start)
    _write(out, logits, head, (g_logp, g_entropy), targets, saved, mask, impl)
    return out


@backward_op.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("rlkit::logits_logp_backward_", mutates_args=("logits",))
def backward_op_(
    logits: Tensor,
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    targets: Tensor,
    saved: list[Tensor],
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    impl: str,
) -> None:
    """The same, written over the logits."""
    head = _head(logits, temperature, softcap, start)
    _write(logits, logits, head, (g_logp, g_entropy), targets, saved, mask, impl)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, stats, mask, *constants, ctx.inplace, impl = inputs
    ctx.constants = (*constants, impl)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, *output, stats[0], stats[1], mask)


def _backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, targets, *saved, mask = ctx.saved_tensors
    args = (g_logp, g_entropy, targets, saved, mask, *ctx.constants)
    if ctx.inplace:
        d_logits = logits.detach()
        backward_op_(d_logits, *args)
    else:
        d_logits = backward_op(logits, *args)
    return d_logits, *[None] * 8


logp_op.register_autograd(_backward, setup_context=_setup)


def _write(
    out: Tensor,
    logits: Tensor,
    head: Head,
    upstream: tuple[Tensor | None, Tensor | None],
    targets: Tensor,
    saved: list[Tensor],
    mask: Tensor | None,
    impl: str,
) -> None:
    """out <- gradient; rows that are masked, or whose upstream gradients are all 0, are not read."""
    logp, entropy, offset, total = saved
    g_logp, g_entropy = upstream
    if impl == "chunked" and g_entropy is not None and not g_entropy.any():
        g_entropy = None
    g_logp = torch.zeros_like(logp) if g_logp is None else g_logp
    alive = g_logp != 0 if g_entropy is None else (g_logp != 0) | (g_entropy != 0)
    alive = alive if mask is None else alive & mask
    terms = row_terms(targets.long(), offset, total, logp, entropy, g_logp, g_entropy)
    if impl == "chunked":
        return chunked.backward(logits, head, terms, present(alive), out=out)
    from rlkit.kernels.logits_logp import triton

    return triton.backward(logits, head, terms, alive, out=out)


def _head(logits: Tensor, temperature: float, softcap: float | None, start: int) -> Head:
    return Head(logits, None, temperature, softcap, start)
