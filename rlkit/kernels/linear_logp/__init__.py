"""From hidden states to the log-probability of the taken action and the entropy, without storing the logits."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.kernels._checks import check_head, check_targets
from rlkit.kernels.linear_logp import chunked, ops, small
from rlkit.kernels.linear_logp import reference as _reference
from rlkit.kernels.linear_logp.fused import FusedLoss, fused_loss
from rlkit.kernels.linear_logp.kept_mass import log_kept_mass
from rlkit.kernels.linear_logp.ops import which_impl
from rlkit.kernels.linear_logp.shards import partials, shard_logp
from rlkit.kernels.linear_logp.stats import Partials, combine, finish
from rlkit.types import LogProbs

__all__ = [
    "FusedLoss",
    "Partials",
    "combine",
    "finish",
    "fused_loss",
    "linear_logp",
    "log_kept_mass",
    "partials",
    "shard_logp",
    "which_impl",
]


def linear_logp(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "T"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Bool[Tensor, "T"] | None = None,
    into_grad: bool = False,
    impl: str | None = None,
) -> LogProbs:
    """Log-probability of each target and entropy of its distribution, in nats, from the last hidden states.

        z = softcap * tanh((hidden W^T + bias) / softcap) / temperature
        logp_t = log softmax(z_t)[targets_t]
        entropy_t = - sum_v softmax(z_t)[v] log softmax(z_t)[v]

    Differentiable in `hidden`, `weight` and `bias`, through both outputs. The `[T, V]` logits are never stored: each
    pass walks over blocks of them (a few MB on a CPU, 32 on a GPU), and the backward computes them again (four matrix
    products in all). Only where, on a CPU, they and their log-probabilities together take 16 MB or less are they kept,
    which was measured to be 20% faster.

    Rows where `mask` is False never enter: logp = entropy = 0 there, gradient 0, and NaN in them harms nothing. Rows
    whose upstream gradients are both 0 (clipped, no advantage) leave before the backward. Both are exact, and time goes
    with the rows that are left. Tensors that do not require a gradient cost nothing in the backward (a frozen head).

    Limits:     softcap None is softcap -> inf, z = (hidden W^T + bias) / temperature; V = 1 gives logp = entropy = 0.
    Precision:  fp32 logits, statistics and sums whatever the inputs (fp64 for fp64), each gradient rounded once to its
                tensor's dtype; statistics relative to the row's maximum (see `finish`). On a GPU the gradient of the
                logits enters its two products in the inputs' 16 bits. The same bits every run; with "triton" a row's
                values have the same bits whatever rows surround it. A bias of -inf bans an entry; its own logp is then
                about -1e30, not -inf.
    Args:       targets: ids in [0, V) where the mask is True, anything elsewhere.  temperature: > 0, as sampled.
                into_grad: the backward adds the weight's gradient to `weight.grad` itself, which saves a tensor of the
                weight's size; for a parameter without gradient hooks: single-process, or under FSDP2 inside the forward
                of the module that owns it (not DDP, nor a DTensor). Ignored under torch.compile.
                impl: "reference" (row chunks of log-softmax, checkpointed), "chunked" (torch, tile by tile) or "triton"
                (library products and Triton passes over their blocks); None picks, see `which_impl`.
    Differs:    from Liger and QuACK: the entropy has its gradient, and any loss may follow (theirs is known in advance;
                `fused_loss` is that case). From verl `FusedLinearForPPO` and TRL: fp32 logits for bf16 models; rows
                without gradient leave. From apple CCE: no gradient is dropped, and the result is deterministic.
    Reference:  online softmax, arXiv:1805.02867; computing logits again in the backward, arXiv:2411.09009 (CCE).
    """
    check_head(hidden, weight, bias, mask, temperature=temperature, softcap=softcap)
    check_targets(targets, hidden.shape[0], weight.shape[0], mask)
    if impl == "reference":
        return _reference.linear_logp(
            hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, mask=mask
        )
    if into_grad:
        ops.check_into_grad(weight)
    into_grad = into_grad and not torch.compiler.is_compiling()
    chosen, dtype = ops.check_impl(impl, hidden, weight, bias), chunked.compute_dtype(hidden, weight, bias)
    keep = chosen == "chunked" and small.fits(hidden.shape[0], weight.shape[0], dtype)
    out = ops.logp_op(hidden, weight, targets, bias, mask, temperature, softcap, keep, chosen, into_grad)
    return LogProbs(out[0], out[1])
