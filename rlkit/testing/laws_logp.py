"""Laws of log-probabilities `f(hidden, targets) -> LogProbs(logp, entropy)`: both belong to one distribution."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlkit.testing.cases import Case, replaced
from rlkit.testing.law import Law, law, near
from rlkit.testing.subject import Subject, tensors

__all__ = ["normalised", "temperature_is_scale"]


def normalised(*, vocab: int) -> Law:
    """The law that probabilities over all `vocab` targets sum to 1 at every trainable token."""

    @law(needs=("targets",))
    def normalised(s: Subject, case: Case) -> None:
        """The probabilities of all targets sum to 1, and the entropy is minus the expected log-probability."""
        logp, entropy = _all_targets(s, case, vocab)
        on = case.mask if s.takes("mask") else torch.ones_like(case.mask)
        near(logp.exp().sum(0)[on], torch.ones(int(on.sum()), dtype=logp.dtype), "the sum of probabilities")
        near(entropy[on], -(logp.exp() * logp).sum(0)[on], "the entropy")

    return normalised


def temperature_is_scale(*, vocab: int) -> Law:
    """The law that the option `temperature` divides the logits."""

    @law(needs=("targets", "temperature"))
    def temperature_is_scale(s: Subject, case: Case) -> None:
        """Temperature 2 gives the same distribution as halved hidden states."""
        plain = replace(s, options={**s.options, "temperature": 1.0})
        warm = replace(s, options={**s.options, "temperature": 2.0})
        got = _all_targets(warm, case, vocab)[0]
        want = _all_targets(plain, replaced(case, hidden=case.tokens["hidden"] / 2), vocab)[0]
        near(got, want, "the log-probability at temperature 2")

    return temperature_is_scale


def _all_targets(s: Subject, case: Case, vocab: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [vocab, T] of every target, and the entropy [T]."""
    outs = [tensors(s(replaced(case, targets=torch.full_like(case.tokens["targets"], v)))) for v in range(vocab)]
    return torch.stack([logp for logp, _ in outs]), outs[0][1]
