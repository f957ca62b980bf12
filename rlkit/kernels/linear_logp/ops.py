"""Custom operators of `linear_logp` for autograd and torch.compile.

The forward drops masked rows; the backward also drops rows whose upstream gradients are all zero (clipped, no
advantage). This happens inside the operators, so that torch.compile sees no data-dependent shapes.

On CUDA the host waits once in the forward, unless the mask is on the CPU, and once in the backward, for the number of
remaining rows. The backward's wait stays: it delays no more than the launch of its first kernels, after which long
products give the host time to run ahead again, and each row that leaves saves its part of three products.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from rlkit._util.tensors import readable
from rlkit.kernels import _triton
from rlkit.kernels.linear_logp import chunked
from rlkit.kernels.linear_logp.chunked import Head, KeptRows, row_terms
from rlkit.kernels.linear_logp.reference import LOWEST, Partials, compute_dtype, finish, no_partials

IMPLS = ("reference", "chunked", "triton")
BACKENDS = IMPLS[1:]
SYNCS = (torch.Tag.cudagraph_unsafe,)  # of operators that sync with the device to count the remaining rows


@torch.library.custom_op("rlkit::linear_logp_partials", mutates_args=(), tags=SYNCS)
def partials_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    impl: str,
) -> Tensor:
    """Statistics `[4, T]` over this shard of the vocabulary, without a gradient."""
    dtype = compute_dtype(hidden, weight, bias)
    head = Head(weight, finite(bias, dtype), temperature, softcap, start)
    rows = present(mask, hidden.device)
    if rows is None:
        return module(impl).partials(hidden, targets.long(), head)
    stats = module(impl).partials(hidden[rows], targets[rows].long(), head)
    return no_partials(hidden.shape[0], dtype=dtype, device=hidden.device).index_copy_(1, rows, stats)


@partials_op.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, *_: Any) -> Tensor:  # noqa: ARG001
    return hidden.new_empty(4, hidden.shape[0], dtype=compute_dtype(hidden, weight, bias))


@torch.library.custom_op("rlkit::linear_logp", mutates_args=(), tags=SYNCS)
def logp_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    keep: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, and for the backward: offset, sum, and the tensors that `forward_kept` keeps (unmasked rows)."""
    if not keep:
        stats = partials_op(hidden, weight, targets, bias, mask, temperature, softcap, 0, impl)
        return *finish(Partials(*stats)), stats[0].clone(), stats[1].clone(), stats.new_empty(0)
    head = Head(weight, finite(bias, compute_dtype(hidden, weight, bias)), temperature, softcap)
    rows, num_rows = present(mask, hidden.device), hidden.shape[0]
    if rows is None:
        logp, entropy, offset, probs = chunked.forward_kept(hidden, targets.long(), head)
    else:
        *values, probs = chunked.forward_kept(hidden[rows], targets[rows].long(), head)
        logp, entropy, offset = (x.new_zeros(num_rows).index_copy_(0, rows, x) for x in values)
        probs = pad(probs, (0, 0, 0, num_rows - rows.numel()))
    return logp, entropy, offset, logp.new_empty(0), probs


@logp_op.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, bias, *_, keep, _ = rest
    num_rows, dtype = hidden.shape[0], compute_dtype(hidden, weight, bias)
    shapes = [(num_rows,)] * 3 + ([(0,), (2, num_rows, weight.shape[0])] if keep else [(num_rows,), (0,)])
    return tuple(hidden.new_empty(shape, dtype=dtype) for shape in shapes)


@torch.library.custom_op(
    "rlkit::linear_logp_shard",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, Tensor? mask, float temperature, "
    "float? softcap, SymInt start, Tensor stats, str impl) -> (Tensor, Tensor)",
)
def shard_op(*args: Any) -> tuple[Tensor, Tensor]:
    """logp and entropy from the statistics `[4, T]` of the whole vocabulary, differentiable in this shard."""
    logp, entropy = finish(Partials(*args[8]))
    return logp, entropy


@shard_op.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    stats = args[8]
    return stats.new_empty(stats.shape[1]), stats.new_empty(stats.shape[1])


def _gradients(
    g_logp: Tensor | None,
    g_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    saved: list[Tensor],
    probs: Tensor | None,
    temperature: float,
    softcap: float | None,
    start: int,
    impl: str,
    need: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias (`[0]` if not needed), over the rows with a non-zero upstream gradient."""
    head = Head(weight, finite(bias, saved[0].dtype), temperature, softcap, start)
    g_entropy = unless_zero(g_entropy)
    g_logp = torch.zeros_like(saved[0]) if g_logp is None else g_logp
    mask = None if mask is None else on_device(mask, hidden.device)
    alive = not_zero(g_logp, g_entropy)
    rows = present(alive if mask is None else alive & mask)
    h, t, g_l, g_h, logp, entropy, offset = (
        _take(x, rows) for x in (hidden, targets.long(), g_logp, g_entropy, *saved[:3])
    )
    if probs is None:
        terms = row_terms(t, offset, _take(saved[3], rows), logp, entropy, g_l, g_h)
        grads = module(impl).backward(h, head, terms, need=need)
    else:  # `probs` starts with the unmasked rows, in order
        entered = rows if rows is None or mask is None else (mask.cumsum(0) - 1)[rows]
        kept_rows = KeptRows(t, logp, entropy, offset, g_l, g_h)
        probs = probs if entered is None else probs[:, entered]
        grads = chunked.backward_kept(h, head, probs, kept_rows, need=need)
    d_hidden, d_weight, d_bias = grads
    if d_hidden is not None and rows is not None:
        d_hidden = torch.zeros_like(hidden).index_copy_(0, rows, d_hidden)
    d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
    likes = (hidden, weight, hidden if bias is None else bias)
    out = (like.new_empty(0) if g is None else g for like, g in zip(likes, (d_hidden, d_weight, d_bias), strict=True))
    return tuple(out)  # type: ignore[return-value]


backward_op = torch.library.custom_op(
    "rlkit::linear_logp_backward",
    _gradients,
    mutates_args=(),
    schema="(Tensor? g_logp, Tensor? g_entropy, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, "
    "Tensor? mask, Tensor[] saved, Tensor? kept, float temperature, float? softcap, SymInt start, str impl, "
    "bool[] need) -> (Tensor, Tensor, Tensor)",
    tags=SYNCS,
)


@backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    hidden, weight, _, bias = args[2:6]
    wanted = zip((hidden, weight, hidden if bias is None else bias), args[-1], strict=True)
    return tuple(torch.empty_like(x) if needed else x.new_empty(0) for x, needed in wanted)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, temperature, softcap, _, impl = inputs
    *saved, probs = output
    ctx.mark_non_differentiable(*output[2:])
    _save(ctx, tensors, saved, probs if probs.numel() else None, (temperature, softcap, 0, impl))


def _shard_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, temperature, softcap, start, stats, impl = inputs
    _save(ctx, tensors, (*output, *stats[:2]), None, (temperature, softcap, start, impl))


def _save(ctx: Any, tensors: Any, saved: Any, probs: Tensor | None, constants: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *saved, probs)
    ctx.constants = constants


def _backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    *inputs, logp, entropy, offset, total, probs = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    need = [wanted[0], wanted[1], wanted[3]]
    saved = [logp, entropy, offset, total]
    rest = [None] * (len(wanted) - 4)
    args = (g_logp, g_entropy, *inputs, saved, probs, *ctx.constants, need)
    d_hidden, d_weight, d_bias = (g if needed else None for g, needed in zip(backward_op(*args), need, strict=True))
    return d_hidden, d_weight, None, d_bias, *rest


logp_op.register_autograd(_backward, setup_context=_setup)
shard_op.register_autograd(_backward, setup_context=_shard_setup)


def which_impl(hidden: Float[Tensor, "T D"], weight: Float[Tensor, "V D"], bias: Tensor | None = None) -> str:
    """The default implementation for these tensors.

    "triton" for fp32, bf16 and fp16 on CUDA where Triton is installed, otherwise "chunked". Neither stores `[T, V]`,
    but for at most 16 MB on a CPU.
    """
    return "triton" if _triton.preferred(hidden, weight, bias) else "chunked"


def check_impl(
    impl: str | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, ...] = BACKENDS
) -> str:
    """`impl`, checked, or the default of `which_impl`."""
    return _triton.choose(impl, names, which_impl(hidden, weight, bias), hidden, weight, bias)


def module(impl: str) -> Any:
    """The backend module, with `partials`, `backward` and their chunk forms. Triton is imported at its first use."""
    if impl == "chunked":
        return chunked
    from rlkit.kernels.linear_logp import triton

    return triton


def present(mask: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    """Indices of the True rows, on `device` (None: the mask's), or None if all are True.

    The host waits for the device of the mask. Pass a CPU mask to avoid a device sync.
    """
    if mask is None:
        return None
    rows = mask.nonzero().squeeze(1)
    return None if rows.shape == mask.shape else on_device(rows, device or mask.device)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on this device. The host does not wait for a CUDA device: it copies from pinned memory."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def unless_zero(grad: Tensor | None) -> Tensor | None:
    """The upstream gradient, or None if all of it is 0. Read on the CPU only: elsewhere the host would wait."""
    return None if grad is None or (readable(grad) and not grad.any()) else grad


def not_zero(g_logp: Tensor, g_entropy: Tensor | None) -> Tensor:
    """Whether each row has an upstream gradient."""
    return g_logp != 0 if g_entropy is None else (g_logp != 0) | (g_entropy != 0)


def _take(x: Any, rows: Tensor | None) -> Any:
    return x if x is None or rows is None else x[rows]


def finite(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias with -inf (a banned entry) replaced by -1e30, so that e^(z - max) (z - max) is 0 and not NaN."""
    return None if bias is None else bias.to(dtype).clamp(min=LOWEST)
