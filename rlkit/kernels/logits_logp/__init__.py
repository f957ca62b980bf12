"""Log-probabilities of the targets and entropies from existing logits, with the backends of `linear_logp`."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import check_float, check_mask, readable, transformed
from rlkit.kernels import _triton
from rlkit.kernels._checks import check_scaling, check_targets
from rlkit.kernels.linear_logp import Partials
from rlkit.kernels.linear_logp.ops import BACKENDS, IMPLS
from rlkit.kernels.logits_logp import ops
from rlkit.kernels.logits_logp import reference as _reference
from rlkit.types import LogProbs

__all__ = ["logits_logp", "partials", "shard_logp", "which_impl"]


def logits_logp(
    logits: Float[Tensor, "T V"],
    targets: Int[Tensor, "T"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability of each target and entropy of its distribution, in nats, from logits.

        z = softcap * tanh(logits / softcap) / temperature
        logp_t = log softmax(z_t)[targets_t]             entropy_t = - sum_v softmax(z_t)[v] log softmax(z_t)[v]

    For models that return logits; from hidden states, `linear_logp` saves the memory of the logits. Both outputs are
    differentiable. The gradient is the only new `[T, V]` tensor; fp32 copies are made of a few rows at a time. Rows
    where `mask` is False are not read: logp = entropy = 0, gradient 0. The backward skips rows whose upstream gradients
    are 0.

    Precision:  fp32 statistics relative to the row's maximum for every dtype of the logits (fp64 for fp64); the
                gradient is rounded once. A logit of -inf counts as -1e30.
    Args:       inplace_backward: the gradient overwrites the logits, which saves `[T, V]`; for logits that are not read
                afterwards (the output of a matrix product). A second backward then raises. Ignored under torch.compile.
                impl: "reference" (materialised log-softmax), "chunked" (torch, a few rows at a time) or "triton" (one
                read forward, one read and one write backward, no device sync); default: see `which_impl`.
    Errors:     ValueError for probabilities (on the CPU): the first two rows are at least 0 and sum to 1.
    Differs:    from `log_softmax` and a gather, which allocate two more `[T, V]` tensors.
                From FlashAttention's cross entropy (verl): the entropy has a gradient.
    Reference:  the shifted statistics of `rlkit.kernels.linear_logp.finish`.
    """
    _check(logits, targets, mask, logits.shape[-1], temperature, softcap)
    chosen = _triton.choose(impl, IMPLS, which_impl(logits), logits)
    if chosen == "reference" or transformed():
        return _reference.logits_logp(logits, targets, temperature=temperature, softcap=softcap, mask=mask)
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward would overwrite logits, which are a leaf; turn it off")
    stats = ops.partials_op(logits.detach(), targets, mask, temperature, softcap, 0, chosen)
    inplace = inplace_backward and not torch.compiler.is_compiling()
    return LogProbs(*ops.logp_op(logits, targets, stats, mask, temperature, softcap, 0, inplace, chosen))


def which_impl(logits: Float[Tensor, "T V"]) -> str:
    """The default implementation: "triton" for fp32, bf16 and fp16 on CUDA with Triton, otherwise "chunked"."""
    return "triton" if _triton.preferred(logits) else "chunked"


def partials(
    logits: Float[Tensor, "T V"],
    targets: Int[Tensor, "T"],
    *,
    vocab_start: int = 0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> Partials:
    """Softmax statistics of one vocabulary shard of the logits, starting at entry `vocab_start`.

    Merge the shards with `rlkit.kernels.linear_logp.combine`. The result has no gradient: see `shard_logp`.
    """
    _check(logits, targets, mask, None, temperature, softcap)
    chosen = _check_impl(impl, logits)
    return Partials(*ops.partials_op(logits.detach(), targets, mask, temperature, softcap, vocab_start, chosen))


def shard_logp(
    logits: Float[Tensor, "T V"],
    targets: Int[Tensor, "T"],
    *,
    combined: Partials,
    vocab_start: int = 0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability and entropy over the whole vocabulary, differentiable in this shard's logits.

    Like `rlkit.kernels.linear_logp.shard_logp`: the values are `finish(combined)` on every rank, and the gradient of
    this shard's columns is complete if all ranks compute the same loss.
    """
    _check(logits, targets, mask, None, temperature, softcap)
    stats, chosen = torch.stack(combined).detach(), _check_impl(impl, logits)
    return LogProbs(*ops.logp_op(logits, targets, stats, mask, temperature, softcap, vocab_start, False, chosen))


def _check_impl(impl: str | None, logits: Tensor) -> str:
    return _triton.choose(impl, BACKENDS, which_impl(logits), logits)


def _check(
    logits: Tensor, targets: Tensor, mask: Tensor | None, vocab: int | None, temperature: float, softcap: float | None
) -> None:
    check_float(logits=logits)
    if logits.ndim != 2:
        raise ValueError(f"logits must be [T, V], got {list(logits.shape)}; flatten with logits.flatten(0, -2)")
    if mask is not None:
        check_mask(mask, rows_of_logits=logits.new_empty(logits.shape[0]))  # a shard may have no column
    check_targets(targets, logits.shape[0], vocab, mask)
    check_scaling(temperature, softcap)
    first = logits.detach()[:2].double() if vocab and readable(logits) and len(logits) > 1 else None
    if first is not None and (first >= 0).all() and ((first.sum(-1) - 1).abs() < 1e-2).all():
        raise ValueError("logits has rows that are at least 0 and sum to 1: give the values before the softmax")
