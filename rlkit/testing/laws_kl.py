"""Laws of KL estimators `f(logp, ref_logp)`: signs, and exact expectations by enumerating a small vocabulary.

Samples are drawn from `old` if the function takes `old_logp` (off-policy), otherwise from the policy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.testing.cases import Case, Vocab
from rlkit.testing.law import Law, law, near
from rlkit.testing.strategies import vocabularies
from rlkit.testing.subject import Subject, tensors

__all__ = ["backward", "expectation", "forward", "gradient_expectation", "non_negative", "nothing", "zero_at_equality"]

Divergence = Callable[[Float[Tensor, "V"], Float[Tensor, "V"]], Float[Tensor, ""]]


def forward(policy: Float[Tensor, "V"], ref: Float[Tensor, "V"]) -> Float[Tensor, ""]:
    """KL(policy || ref) from logits."""
    log_p, log_q = policy.log_softmax(-1), ref.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def backward(policy: Float[Tensor, "V"], ref: Float[Tensor, "V"]) -> Float[Tensor, ""]:
    """KL(ref || policy) from logits."""
    return forward(ref, policy)


def nothing(policy: Float[Tensor, "V"], ref: Float[Tensor, "V"]) -> Float[Tensor, ""]:
    """0: for an estimator whose expected gradient is 0."""
    return (policy * ref).sum() * 0


@law(needs=("logp", "ref_logp"))
def non_negative(s: Subject, case: Case) -> None:
    """The value is non-negative, and 0 where the two policies are equal."""
    (value,) = tensors(s(case))
    if not (value >= -1e-12).all():
        raise AssertionError(f"the value is {value.min().item():.6g}, expected at least 0")
    zero_at_equality.check(s, case)


@law(needs=("logp", "ref_logp"))
def zero_at_equality(s: Subject, case: Case) -> None:
    """The value is 0 where the two policies are equal."""
    (value,) = tensors(s(case._replace(tokens={**case.tokens, "ref_logp": case.tokens["logp"]})))
    near(value, torch.zeros_like(value), "the value where the two policies are equal")


def expectation(of: Divergence = forward) -> Law:
    """The law that the value's expectation is `of(policy, ref)`, exactly."""

    @law(needs=("logp", "ref_logp"), draw=vocabularies())
    def expectation(s: Subject, vocab: Vocab) -> None:
        """The expected value over a small vocabulary is exactly the divergence."""
        near(_mean(s, vocab, vocab.policy), of(vocab.policy, vocab.ref), "the expected value")

    return expectation


def gradient_expectation(of: Divergence = forward) -> Law:
    """The law that the expected gradient of the estimator as a loss is exactly that of `of(policy, ref)`."""

    @law(needs=("logp", "ref_logp"), draw=vocabularies())
    def gradient_expectation(s: Subject, vocab: Vocab) -> None:
        """The expected gradient over a small vocabulary is exactly the divergence's."""
        logits = vocab.policy.clone().requires_grad_()
        got, want = _mean(s, vocab, logits), of(logits, vocab.ref)
        if not got.requires_grad:
            raise AssertionError("the value carries no gradient")
        (slope,), (truth,) = torch.autograd.grad(got, logits), torch.autograd.grad(want, logits)
        near(slope, truth, "the expected gradient w.r.t. the logits")

    return gradient_expectation


def _mean(s: Subject, vocab: Vocab, logits: Tensor) -> Tensor:
    """The expectation of the estimator under the policy that sampled, which gets no gradient."""
    sampler = (vocab.old if s.takes("old_logp") else vocab.policy).log_softmax(-1)
    streams = {"logp": logits.log_softmax(-1), "ref_logp": vocab.ref.log_softmax(-1)}
    streams |= {"old_logp": sampler} if s.takes("old_logp") else {}
    size = sampler.numel()
    case = Case(
        tokens=streams,
        seqs={},
        mask=torch.ones(size, dtype=torch.bool),
        cu_seqlens=torch.arange(size + 1),
        group_ids=torch.zeros(size, dtype=torch.int64),
        seed=0,
    )
    (value,) = tensors(s(case))
    return (sampler.exp() * value).sum()
