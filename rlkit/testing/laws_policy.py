"""Laws of policy surrogates `f(log_ratio, advantages, ...)`: what their gradient is, on-policy and off.

A surrogate may also take `logp` and `old_logp` in place of `log_ratio`. Where it speaks of whole sequences (it takes
`cu_seqlens`), advantages and weights are constant within each sequence, and its gradient is that of the summed token
losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.testing.cases import Case, constant_in_seqs, replaced
from rlkit.testing.law import Law, law, near
from rlkit.testing.strategies import cases
from rlkit.testing.subject import Subject, run


@law(needs=("advantages",))
def on_policy(s: Subject, case: Case) -> None:
    """On-policy, at ratio 1, the gradient of the weighted loss is -A * w, whatever the surrogate."""
    same_policy = dict.fromkeys(("log_ratio", "behavior_log_ratio"), torch.zeros(case.num_tokens, dtype=torch.float64))
    if "logp" in case.tokens:
        same_policy |= dict.fromkeys(("old_logp", "rollout_logp"), case.tokens["logp"])
    case = replaced(case, **same_policy)
    _gradient_is(s, case, lambda case: torch.ones(case.num_tokens, dtype=torch.float64), "at ratio 1")


def coefficient(c: Callable[[Case], Float[Tensor, "T"]]) -> Law:
    """The law that the gradient is -c * A * w. `c(case)` gives c for each token, e.g. from `case.ratio`."""

    @law(needs=("advantages",))
    def coefficient(s: Subject, case: Case) -> None:
        """The gradient of the weighted loss is -c * A * w, with the coefficient c that the function states."""
        _gradient_is(s, case, c, "with the stated c")

    return coefficient


def clipped(*, clip_low: float, clip_high: float, max_ratio: float = math.inf) -> Law:
    """The law of PPO's clip at 1 - clip_low and 1 + clip_high; with A < 0, ratios above `max_ratio` are not judged."""
    edges = [x for x in (1 - clip_low, 1 + clip_high) if 0 < x < math.inf]
    points = [math.log(x) + d for x in edges for d in (-0.01, 0.01)] or [0.0]

    def at_the_edges(case: Case) -> Case:
        """Half of the cases have their ratios just inside and just outside the clip."""
        if case.seed % 2 == 0:
            return case
        x = torch.tensor(points).double()[(torch.arange(case.num_tokens) + case.seed // 2) % len(points)]
        return replaced(case, log_ratio=x, logp=case.tokens.get("old_logp", x) + x)

    @law(needs=("advantages",), draw=lambda s: cases(s.streams).map(at_the_edges))
    def clipped(s: Subject, case: Case) -> None:
        """Beyond the clip the gradient is 0, but only where a step would lead further away; elsewhere it is not 0."""
        case, g = _gradient(s, case)
        ratio, a = case.ratio, case.tokens["advantages"]
        beyond = ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & (ratio < 1 - clip_low))
        judged = _trainable(s, case) & (a != 0) & ~((a < 0) & (ratio > max_ratio))
        for place in judged.nonzero().squeeze(1).tolist():
            where = f"at ratio {ratio[place]:.6g} and A = {a[place]:.6g} the gradient is {g[place]:.6g}"
            if beyond[place] and g[place] != 0:
                raise AssertionError(f"{where}, expected 0: beyond the clip")
            if not beyond[place] and g[place] == 0:
                raise AssertionError(f"{where}, expected another: a step would not lead beyond the clip")

    return clipped


@law(needs=("advantages",))
def descends(s: Subject, case: Case) -> None:
    """No token is pushed against its advantage: the gradient by logp has the sign of -A, or is 0."""
    case, g = _gradient(s, case)
    wrong = _trainable(s, case) & (g * case.tokens["advantages"] > 0)
    for place in wrong.nonzero().squeeze(1).tolist()[:1]:
        raise AssertionError(f"the gradient at token {place} is {g[place]:.6g}: it lowers what A = "
                             f"{case.tokens['advantages'][place]:.6g} praises")  # fmt: skip


@law(needs=("advantages",))
def no_advantage_no_gradient(s: Subject, case: Case) -> None:
    """Where A = 0 for all tokens nothing is learned: the gradient is 0."""
    case = replaced(case, advantages=torch.zeros_like(case.tokens["advantages"]))
    near(run(s, case).grads[s.trained], torch.zeros(case.num_tokens).double(), "the gradient without advantages")


def _gradient_is(s: Subject, case: Case, c: Callable[[Case], Tensor], what: str) -> None:
    weights = torch.rand(case.num_tokens, generator=case.random(), dtype=torch.float64) + 0.5
    if s.axis != "T":  # one number, already summed
        weights = torch.ones_like(weights)
    if s.takes("cu_seqlens"):
        weights = constant_in_seqs(weights, case)
    case, got = _gradient(s, case, weights)
    want = -c(case) * case.tokens["advantages"] * weights
    near(got, torch.where(_trainable(s, case), want, 0), f"the gradient by {s.trained} {what}")


def _gradient(s: Subject, case: Case, weights: Tensor | None = None) -> tuple[Case, Tensor]:
    """The gradient by the log-ratio, and the case at which it was taken."""
    if s.takes("cu_seqlens"):
        case = replaced(case, advantages=constant_in_seqs(case.tokens["advantages"], case))
    weights = torch.ones(case.num_tokens, dtype=torch.float64) if weights is None else weights
    upstream: Any = [weights if s.axis == "T" else torch.ones((), dtype=torch.float64)]
    return case, run(s, case, upstream=upstream).grads[s.trained]


def _trainable(s: Subject, case: Case) -> Tensor:
    return case.mask if s.takes("mask") else torch.ones_like(case.mask)
