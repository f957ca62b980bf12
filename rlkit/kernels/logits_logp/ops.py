"""Custom operators of `logits_logp`: statistics and gradients of existing logits.

They use the backends of `linear_logp`: its tile functions on fp32 buffers of a few rows, or its Triton row kernels,
which read the logits once in the forward, and read and write them once in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkit.kernels.linear_logp import ops
from rlkit.kernels.linear_logp.chunked import Head, Rows, blocks, row_terms, tile_bytes, tile_gradient, tile_partials
from rlkit.kernels.linear_logp.ops import present
from rlkit.kernels.linear_logp.reference import LOWEST, Partials, compute_dtype, finish, no_partials


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
    """Statistics `[4, T]` over these columns of the vocabulary, without a gradient. Masked rows are not read."""
    head = Head(logits, None, temperature, softcap, start)
    out = no_partials(logits.shape[0], dtype=compute_dtype(logits), device=logits.device)
    if impl == "chunked":
        targets = targets.long()
        for z, scratch, block in _tiles(logits, head, present(mask)):
            out[:, block] = torch.stack(tile_partials(z, targets[block], first=start, scratch=scratch))
    elif logits.numel():
        with torch.cuda.device_of(logits):
            ops.module(impl).update_stats(out, _contiguous_rows(logits), targets, head, mask=mask)
    return out


@partials_op.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(4, logits.shape[0], dtype=compute_dtype(logits))


@torch.library.custom_op(
    "rlkit::logits_logp",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, Tensor stats, Tensor? mask, float temperature, float? softcap, "
    "SymInt start, bool inplace, str impl) -> (Tensor, Tensor)",
)
def logp_op(*args: Any) -> tuple[Tensor, Tensor]:
    """logp and entropy from the statistics `[4, T]` of the whole vocabulary, differentiable in these columns."""
    logp, entropy = finish(Partials(*args[2]))
    return logp, entropy


@logp_op.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    stats = args[2]
    return stats.new_empty(stats.shape[1]), stats.new_empty(stats.shape[1])


_BACKWARD_ARGS = (
    "Tensor? g_logp, Tensor? g_entropy, Tensor targets, Tensor[] saved, Tensor? mask, float temperature, "
    "float? softcap, SymInt start, str impl"
)


@torch.library.custom_op(
    "rlkit::logits_logp_backward", mutates_args=(), schema=f"(Tensor logits, {_BACKWARD_ARGS}) -> Tensor"
)
def backward_op(logits: Tensor, *args: Any) -> Tensor:
    """Gradient of the logits, as a new tensor."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(out, logits, *args)
    return out


@backward_op.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "rlkit::logits_logp_backward_", mutates_args=("logits",), schema=f"(Tensor(a!) logits, {_BACKWARD_ARGS}) -> ()"
)
def backward_op_(logits: Tensor, *args: Any) -> None:
    """Gradient of the logits, written in place."""
    _write_gradient(logits, logits, *args)


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


def _write_gradient(
    out: Tensor,
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
    """out <- gradient; `out` may be `logits`. Masked rows and rows whose upstream gradients are 0 are not read."""
    logp, entropy, offset, total = saved
    head = Head(logits, None, temperature, softcap, start)
    if impl == "chunked" and g_entropy is not None and not g_entropy.any():
        g_entropy = None
    g_logp = torch.zeros_like(logp) if g_logp is None else g_logp
    alive = g_logp != 0 if g_entropy is None else (g_logp != 0) | (g_entropy != 0)
    alive = alive if mask is None else alive & mask
    terms = row_terms(targets.long(), offset, total, logp, entropy, g_logp, g_entropy)
    if impl == "chunked":
        _write_by_tiles(out, logits, head, terms, alive)
    elif logits.numel():
        backend = ops.module(impl)
        written = out if out.stride(1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        with torch.cuda.device_of(logits):
            packed, _ = backend.pack_terms(terms, torch.float32, temperature)
            backend.write_gradient(written, _contiguous_rows(logits), terms.targets, packed, head, alive=alive)
        if written is not out:
            out.copy_(written)


def _write_by_tiles(out: Tensor, logits: Tensor, head: Head, terms: Rows, alive: Tensor) -> None:
    rows = present(alive)
    if rows is not None:
        out[~alive] = 0.0
    spare = None
    for z, scratch, block in _tiles(logits, head, rows):
        part = terms.take(block)
        u = z.sub_(part.offset.unsqueeze(1))
        spare = torch.empty_like(u) if spare is None else spare
        d = tile_gradient(u, part, head, first=0, out=scratch, spare=spare[: u.shape[0]])
        out[block] = d.mul_((part.scale / head.temperature).unsqueeze(1)).to(out.dtype)


def _tiles(logits: Tensor, head: Head, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, slice | Tensor]]:
    """Blocks of the given rows (None: all): their scaled logits in a buffer, a second buffer, and their indices."""
    num_rows, vocab = logits.shape[0] if rows is None else rows.numel(), logits.shape[1]
    if vocab == 0:
        return
    dtype = compute_dtype(logits)
    height = max(1, min(num_rows, tile_bytes(logits.device) // (dtype.itemsize * vocab)))
    buffers = logits.new_empty(2, height, vocab, dtype=dtype)
    for top, end in blocks(num_rows, height):
        block = slice(top, end) if rows is None else rows[top:end]
        z = buffers[0, : end - top].copy_(logits[block])
        if head.softcap is not None:
            z.div_(head.softcap).tanh_().mul_(head.softcap / head.temperature)
        elif head.temperature != 1:
            z.div_(head.temperature)
        yield z.clamp_(min=LOWEST), buffers[1, : end - top], block


def _contiguous_rows(x: Tensor) -> Tensor:
    """`x` with contiguous rows, at any row stride."""
    return x if x.stride(1) == 1 else x.contiguous()
