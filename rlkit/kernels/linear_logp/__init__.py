"""From hidden states to the log-probability of the taken action and the entropy, without the logits ever being stored."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._tensors import check_float, check_mask, readable
from rlkit.kernels.linear_logp import chunked, ops
from rlkit.kernels.linear_logp import reference as _reference
from rlkit.kernels.linear_logp.stats import Partials, combine, finish
from rlkit.types import LogProbs

__all__ = ["LogProbs", "Partials", "combine", "finish", "linear_logp", "partials", "shard_logp", "which_impl"]


def linear_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability of each target and entropy of its distribution, in nats, from hidden states and the vocabulary projection.

        z = softcap * tanh((hidden W^T + bias) / softcap) / temperature      (no softcap: z = (hidden W^T + bias) / temperature)
        logp_t = z_t[target_t] - log sum_v e^(z_t[v])
        entropy_t = - sum_v p_t[v] log p_t[v]

    Both are differentiable in `hidden`, `weight` and `bias`.
    """
    _check(hidden, weight, targets, bias, mask, temperature, softcap)
    chosen = which_impl(hidden, weight) if impl is None else impl
    if chosen == "reference":
        return _reference.linear_logp(
            hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, mask=mask
        )
    if chosen != "chunked":
        raise ValueError(f'impl must be "reference" or "chunked", got {chosen!r}')
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    keep = trains and chunked.keeps_logits(
        hidden.shape[0], weight.shape[0], chunked.compute_dtype(hidden, weight, bias)
    )
    b = None if bias is None else bias.detach()
    stats, kept = ops.partials_op(hidden.detach(), weight.detach(), targets, b, mask, temperature, softcap, 0, keep)
    return LogProbs(*ops.logp_op(hidden, weight, targets, stats, kept, bias, mask, temperature, softcap, 0))


def partials(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    vocab_start: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
) -> Partials:
    """Softmax statistics of one vocabulary shard, whose first row is entry `vocab_start`. Carries no gradient."""
    _check(hidden, weight, targets, bias, mask, temperature, softcap, sharded=True)
    b = None if bias is None else bias.detach()
    args = (hidden.detach(), weight.detach(), targets, b, mask, temperature, softcap, vocab_start, False)
    return Partials(*ops.partials_op(*args)[0])


def shard_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    combined: Partials,
    vocab_start: int = 0,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
) -> LogProbs:
    """Log-probability and entropy over the whole vocabulary, differentiable in this shard of it."""
    _check(hidden, weight, targets, bias, mask, temperature, softcap, sharded=True)
    stats = torch.stack(combined).detach()
    kept = stats.new_empty(0, 0)
    args = (hidden, weight, targets, stats, kept, bias, mask, temperature, softcap, vocab_start)
    return LogProbs(*ops.logp_op(*args))


def which_impl(hidden: Tensor, weight: Tensor) -> str:  # noqa: ARG001
    """The implementation that `linear_logp` picks for these tensors: "chunked"."""
    return "chunked"


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float,
    softcap: float | None,
    sharded: bool = False,
) -> None:
    check_float(hidden=hidden, weight=weight, bias=bias)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [T, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}; "
            "flatten batch dimensions first"
        )
    if targets.dtype not in (torch.int32, torch.int64) or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets must be int32 or int64 of shape [{hidden.shape[0]}], got {targets.dtype} {list(targets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape [{weight.shape[0]}], got {list(bias.shape)}")
    check_mask(mask, targets=targets)
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; greedy decoding is scored at temperature 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0 or None (off), got {softcap}")
    if not sharded and readable(targets) and targets.numel():
        used = targets if mask is None else targets[mask]
        if used.numel() and (used.min() < 0 or used.max() >= weight.shape[0]):
            raise ValueError(
                f"targets must be in [0, {weight.shape[0]}) where the mask is True, got {used.min()} .. {used.max()}"
            )
