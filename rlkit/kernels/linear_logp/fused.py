"""A per-token loss and its gradients in one pass over the rows: three matrix products instead of four."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_cu_seqlens, readable, uncompiled
from rlkit.kernels._checks import check_head, check_targets
from rlkit.kernels.linear_logp.chunked import Grads, Head, Rows, blocks, padded, row_terms
from rlkit.kernels.linear_logp.ops import check_impl, finite, module, not_zero, on_device, present, unless_zero
from rlkit.kernels.linear_logp.reference import compute_dtype, finish
from rlkit.types import LogProbs


class FusedLoss(NamedTuple):
    """The summed loss, and detached log-probs and entropies (0 where the mask is False)."""

    loss: Float[Tensor, ""]
    logp: Float[Tensor, "T"]
    entropy: Float[Tensor, "T"]


class _Task(NamedTuple):
    """The non-differentiable arguments of `fused_loss`. `rows`: indices of the unmasked rows (None: all)."""

    targets: Tensor
    rows: Tensor | None
    row_data: tuple[Tensor, ...]
    loss_fn: Callable[..., Tensor]
    cu_seqlens: list[int] | None
    temperature: float
    softcap: float | None
    need: list[bool]
    impl: str


@uncompiled
def fused_loss(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    loss_fn: Callable[..., Float[Tensor, "R"]],
    row_data: Sequence[Tensor] = (),
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    cu_seqlens: Int[Tensor, "N1"] | None = None,
    impl: str | None = None,
) -> FusedLoss:
    """sum_t loss_fn(LogProbs_t, row_data_t), with gradients computed in the forward, for a loss known in advance.

        loss = sum over chunks of rows of loss_fn(linear_logp(hidden, ...), *row_data).sum()

    `loss_fn(out, *row_data)` gets `LogProbs` of R rows and the same R rows of each tensor in `row_data` (first axis T),
    and returns R weighted losses. It is called once per chunk under autograd, on `[R]` tensors. Any loss (clipped
    surrogate, KL, entropy bonus) takes three matrix products, because a chunk's logits are kept until their gradient is
    computed. Memory: one chunk of fp32 logits (on a CPU 32 MB, or 256 rows if they take more; with Triton up to 4 GB,
    or 1024 rows), a part of their gradient (up to 512 MB), and the gradient of the weight: in fp32 if the rows take
    several chunks or the weight is fp16, otherwise in the weight's dtype. The backward only scales by the upstream
    gradient, unless that is 1, and can run once. Gradients flow to `hidden`, `weight` and `bias`, not to `row_data` or
    to tensors that `loss_fn` closes over. `impl` is "chunked" or "triton"; default: see `which_impl`.

    `mask`: rows where it is False are skipped and not passed to `loss_fn`. It may be on the CPU, as in `linear_logp`.
    Rows of a chunk whose gradient is 0 are left out of the gradient's products.

    `cu_seqlens`: chunks then hold whole sequences, and `loss_fn(out, *row_data, cu_seqlens=...)` gets their bounds
    among the unmasked rows; a chunk is at least as long as its longest sequence. Without it the loss of a row must not
    depend on other rows. On the CPU this is checked: half of the first chunk is also evaluated alone, and a loss that
    changes (a sequence-level ratio, a mean, a running sum) raises.

    Example:
        def loss_fn(out, old_logp, advantages, weights):
            return weights * ppo_clip(out.logp - old_logp, advantages)
        fused_loss(hidden, weight, targets, loss_fn=loss_fn, row_data=(old_logp, advantages, w)).loss.backward()

    Limits:     equals `(loss_fn(linear_logp(hidden, weight, targets), *row_data)).sum()` and its gradients.
    Precision:  that of `linear_logp`: each gradient is a sum in fp32, rounded once. An upstream gradient other than 1
                rounds a bf16 gradient once more; fp16 gradients are kept in fp32 until then.
    Differs:    from Liger's fused GRPO and DPO losses: any loss, not one kernel per algorithm.
    Reference:  gradients in the forward: Liger kernel, arXiv:2410.10989, fused linear cross entropy.
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], weight.shape[0], mask)
    for i, x in enumerate(row_data):
        if x.shape[:1] != hidden.shape[:1]:
            raise ValueError(f"row_data[{i}] must have first axis T = {hidden.shape[0]}, got {list(x.shape)}")
    bounds = None
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, targets=targets)
        ends = None if mask is None else torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        bounds = cu_seqlens if ends is None else on_device(ends, cu_seqlens.device)[cu_seqlens.long()]
    needs = torch.is_grad_enabled()
    task = _Task(
        targets,
        present(mask, hidden.device),
        tuple(x.detach() for x in row_data),
        loss_fn,
        None if bounds is None else bounds.tolist(),
        temperature,
        softcap,
        [needs and x is not None and x.requires_grad for x in (hidden, weight, bias)],
        check_impl(impl, hidden, weight, bias),
    )
    return FusedLoss(*_Fused.apply(hidden, weight, bias, task))


class _Fused(torch.autograd.Function):
    """Compute the gradients in the forward; scale and return them in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> tuple[Tensor, ...]:
        loss, logp, entropy, ctx.grads = _run(hidden, weight, bias, task)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(logp, entropy)
        return loss, logp, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of fused_loss were already consumed; call it again for another backward")
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused_loss has no second derivative; use linear_logp(impl='reference') for create_graph=True"
            )
        grads, ctx.grads = ctx.grads, None
        g = upstream[0]
        if torch.compiler.is_compiling() or g != 1:  # a wait for the device costs less than a pass over a [V, D]
            g = g.reshape(1)  # with a 0-dim tensor, CUDA would round g to the 16 bits of x first
            grads = [None if x is None else x.mul_(g) for x in grads]
        return *(None if x is None else x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)), None


def _run(hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> tuple[Tensor, Tensor, Tensor, Grads]:
    dtype, rows, backend = compute_dtype(hidden, weight, bias), task.rows, module(task.impl)
    head, vocab, need = Head(weight, finite(bias, dtype), task.temperature, task.softcap), weight.shape[0], task.need
    h, targets, *data = (x if rows is None else x[rows] for x in (hidden, task.targets.long(), *task.row_data))
    chunks = _chunks(h, backend.chunk_rows(h.device, max(1, vocab)), task.cu_seqlens)
    sum_dtype = dtype if len(chunks) > 1 else _grad_dtype(weight)  # one chunk's product is the gradient itself
    grads = Grads(
        torch.zeros_like(h, dtype=_grad_dtype(h)) if need[0] else None,
        torch.empty_like(weight, dtype=sum_dtype) if need[1] else None,
        h.new_zeros(vocab, dtype=dtype) if need[2] else None,
    )
    total, out = h.new_zeros((), dtype=dtype), h.new_zeros(2, h.shape[0], dtype=dtype)
    buffer = h.new_empty(max((c.stop - c.start for c, _ in chunks), default=0) * padded(vocab), dtype=dtype)
    written = False
    for chunk, bounds in chunks:
        kept, stats = backend.forward_chunk(h[chunk], targets[chunk], head, buffer)
        values, part = finish(stats), [x[chunk] for x in data]
        if chunk.start == 0 and readable(h):
            _check_rows(task.loss_fn, values, part, bounds)
        out[:, chunk] = torch.stack(values)
        if not any(need):
            total += _call(task.loss_fn, values, part, bounds).sum()
            continue
        losses, g_logp, g_entropy = _loss_and_slopes(task.loss_fn, values, part, bounds)
        total += losses.sum()
        alive = present(not_zero(g_logp, g_entropy))
        if alive is None or alive.numel():
            terms = row_terms(targets[chunk], stats.max, stats.sum, *values, g_logp, g_entropy)
            _add_gradients(grads, chunk, alive, terms, h, head, kept, backend, add=written)
            written = True
    if grads.weight is not None and not written:
        grads.weight.zero_()
    if rows is not None:
        out = out.new_zeros(2, hidden.shape[0]).index_copy_(1, rows, out)
    return total, out[0], out[1], _stored(grads, rows, hidden, weight, bias)


def _add_gradients(
    grads: Grads,
    chunk: slice,
    alive: Tensor | None,
    terms: Rows,
    h: Tensor,
    head: Head,
    kept: Any,
    backend: Any,
    *,
    add: bool,
) -> None:
    """Add the gradients of a chunk's rows with indices `alive` (None: all); write the weight's if not `add`."""
    h, d_hidden = h[chunk], None if grads.hidden is None else grads.hidden[chunk]
    if alive is not None:
        h, terms = h[alive], terms.take(alive)
    out = d_hidden if d_hidden is None or alive is None else torch.empty_like(h, dtype=d_hidden.dtype)
    backend.backward_chunk(h, head, terms, kept, alive, out, grads.weight, grads.bias, add=add)
    if d_hidden is not None and out is not None and alive is not None:
        d_hidden.index_copy_(0, alive, out)


def _stored(grads: Grads, rows: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Grads:
    """The gradients of all rows, in the dtypes that they have until the backward."""
    d_hidden, d_weight, d_bias = grads
    if d_hidden is not None and rows is not None:
        d_hidden = d_hidden.new_zeros(hidden.shape).index_copy_(0, rows, d_hidden)
    d_weight = None if d_weight is None else d_weight.to(_grad_dtype(weight))
    d_bias = None if d_bias is None or bias is None else d_bias.to(_grad_dtype(bias))
    return Grads(d_hidden, d_weight, d_bias)


def _grad_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the gradient of `x` until the backward; fp32 for fp16, because a loss scale may bring it into range."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def _loss_and_slopes(
    loss_fn: Callable[..., Tensor], values: LogProbs, data: list[Tensor], bounds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses of a chunk, and their gradients in logp and entropy (None if the loss does not use the entropy)."""
    with torch.enable_grad():
        leaves = LogProbs(*(x.detach().requires_grad_() for x in values))
        losses = _call(loss_fn, leaves, data, bounds)
        if not losses.requires_grad:
            return losses, torch.zeros_like(values.logp), None
        slopes: list[Tensor | None] = list(torch.autograd.grad(losses.sum(), leaves, allow_unused=True))
    g_logp, g_entropy = slopes
    return losses.detach(), torch.zeros_like(values.logp) if g_logp is None else g_logp, unless_zero(g_entropy)


def _call(loss_fn: Callable[..., Tensor], out: LogProbs, data: list[Tensor], bounds: Tensor | None) -> Tensor:
    losses = loss_fn(out, *data) if bounds is None else loss_fn(out, *data, cu_seqlens=bounds)
    if isinstance(losses, Tensor) and losses.shape == out.logp.shape:
        return losses
    found = list(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
    raise ValueError(
        f"loss_fn must return one loss per row, {list(out.logp.shape)}, got {found}; leave the sum to fused_loss"
    )


def _check_rows(loss_fn: Callable[..., Tensor], values: LogProbs, data: list[Tensor], bounds: Tensor | None) -> None:
    """Raise if the losses of the middle half of the rows (sequences) change when evaluated alone."""
    num = values.logp.shape[0] if bounds is None else bounds.numel() - 1
    first, last = (num + 2) // 4, (num + 2) // 4 + num // 2
    some = None if bounds is None else bounds[first : last + 1] - bounds[first]
    rows = slice(first, last) if bounds is None else slice(int(bounds[first]), int(bounds[last]))
    if rows.start == rows.stop:
        return
    with torch.no_grad():
        among = _call(loss_fn, values, data, bounds)[rows]
        alone = _call(loss_fn, LogProbs(*(x[rows] for x in values)), [x[rows] for x in data], some)
    if not torch.allclose(among, alone, rtol=1e-3, equal_nan=True):
        unit = "row" if bounds is None else "sequence"
        raise ValueError(
            f"loss_fn must return a loss per {unit} that does not depend on the other {unit}s, but it does. For "
            "sequence-level ratios pass cu_seqlens; for losses that couple sequences apply the loss to linear_logp"
        )


def _chunks(h: Tensor, size: int, cu_seqlens: list[int] | None) -> list[tuple[slice, Tensor | None]]:
    """Row ranges of at most `size`; with `cu_seqlens`, ranges of whole sequences, with their bounds in the range."""
    if cu_seqlens is None:
        return [(slice(top, end), None) for top, end in blocks(h.shape[0], size)]
    out: list[tuple[slice, Tensor | None]] = []
    begin = 0
    for i in range(1, len(cu_seqlens)):
        if i + 1 == len(cu_seqlens) or cu_seqlens[i + 1] - cu_seqlens[begin] > size:
            bounds = torch.tensor(cu_seqlens[begin : i + 1], device=h.device) - cu_seqlens[begin]
            if cu_seqlens[begin] < cu_seqlens[i]:  # not only empty sequences
                out.append((slice(cu_seqlens[begin], cu_seqlens[i]), bounds))
            begin = i
    return out
