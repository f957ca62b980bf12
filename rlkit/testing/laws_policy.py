"""Laws of policy surrogates `f(log_ratio, advantages, ...)`: their gradient, on-policy and off-policy.

A surrogate may also take `logp` and `old_logp` in place of `log_ratio`. If it works on whole sequences (it takes
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

__all__ = ["clipped", "coefficient", "descends", "no_advantage_no_gradient", "on_policy"]


@law(needs=("advantages",))
def on_policy(s: Subject, case: Case) -> None:
    """On-policy, at ratio 1, the gradient of the weighted loss is -A * w for every surrogate."""
    same_policy = dict.fromkeys(("log_ratio", "behavior_log_ratio"), torch.zeros(case.num_tokens, dtype=torch.float64))
    if "logp" in case.tokens:
        same_policy |= dict.fromkeys(("old_logp", "rollout_logp"), case.tokens["logp"])
    case = replaced(case, **same_policy)
    _gradient_is(s, case, lambda case: torch.ones(case.num_tokens, dtype=torch.float64), "at ratio 1")


def coefficient(c: Callable[[Case], Float[Tensor, "T"]]) -> Law:
    """The law that the gradient is -c * A * w. `c(case)` gives c for each token, e.g. from `case.ratio`."""

    @law(needs=("advantages",))
    def coefficient(s: Subject, case: Case) -> None:
        """The gradient of the weighted loss is -c * A * w with the stated coefficient c."""
        _gradient_is(s, case, c, "with the stated c")

    return coefficient


def clipped(*, clip_low: float, clip_high: float, max_ratio: float = math.inf) -> Law:
    """The law of PPO's clip at 1 - clip_low and 1 + clip_high; ratios above `max_ratio` with A < 0 are ignored."""
    edges = [x for x in (1 - clip_low, 1 + clip_high) if 0 < x < math.inf]
    points = [math.log(x) + d for x in edges for d in (-0.01, 0.01)] or [0.0]

    def at_the_edges(case: Case) -> Case:
        """In half of the cases, set the ratios just inside and just outside the clip."""
        if case.seed % 2 == 0:
            return case
        x = torch.tensor(points).double()[(torch.arange(case.num_tokens) + case.seed // 2) % len(points)]
        return replaced(case, log_ratio=x, logp=case.tokens.get("old_logp", x) + x)

    @law(needs=("advantages",), draw=lambda s: cases(s.streams).map(at_the_edges))
    def clipped(s: Subject, case: Case) -> None:
        """The gradient is 0 where a step would move the ratio further beyond the clip, and nonzero elsewhere."""
        case, g = _gradient(s, case)
        ratio, a = case.ratio, case.tokens["advantages"]
        beyond = ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & (ratio < 1 - clip_low))
        checked = _trainable(s, case) & (a != 0) & ~((a < 0) & (ratio > max_ratio))
        for t in checked.nonzero().squeeze(1).tolist():
            where = f"at ratio {ratio[t]:.6g} and A = {a[t]:.6g} the gradient is {g[t]:.6g}"
            if beyond[t] and g[t] != 0:
                raise AssertionError(f"{where}, expected 0: beyond the clip")
            if not beyond[t] and g[t] == 0:
                raise AssertionError(f"{where}, expected nonzero: a step does not move the ratio beyond the clip")

    return clipped


@law(needs=("advantages",))
def descends(s: Subject, case: Case) -> None:
    """No token is pushed against its advantage: the gradient w.r.t. logp has the sign of -A, or is 0."""
    case, g = _gradient(s, case)
    a = case.tokens["advantages"]
    ascending = _trainable(s, case) & (g * a > 0)
    for t in ascending.nonzero().squeeze(1).tolist()[:1]:
        raise AssertionError(f"the gradient at token {t} is {g[t]:.6g}, which has the sign of A = {a[t]:.6g}")


@law(needs=("advantages",))
def no_advantage_no_gradient(s: Subject, case: Case) -> None:
    """If A = 0 for all tokens, the gradient is 0."""
    case = replaced(case, advantages=torch.zeros_like(case.tokens["advantages"]))
    near(run(s, case).grads[s.trained], torch.zeros(case.num_tokens).double(), "the gradient without advantages")


def _gradient_is(s: Subject, case: Case, c: Callable[[Case], Tensor], condition: str) -> None:
    weights = torch.rand(case.num_tokens, generator=case.random(), dtype=torch.float64) + 0.5
    if s.axis != "T":  # one number, already summed
        weights = torch.ones_like(weights)
    if s.takes("cu_seqlens"):
        weights = constant_in_seqs(weights, case)
    case, got = _gradient(s, case, weights)
    want = -c(case) * case.tokens["advantages"] * weights
    near(got, torch.where(_trainable(s, case), want, 0), f"the gradient w.r.t. {s.trained} {condition}")


def _gradient(s: Subject, case: Case, weights: Tensor | None = None) -> tuple[Case, Tensor]:
    """The case, and the gradient w.r.t. the log-ratio."""
    if s.takes("cu_seqlens"):
        case = replaced(case, advantages=constant_in_seqs(case.tokens["advantages"], case))
    weights = torch.ones(case.num_tokens, dtype=torch.float64) if weights is None else weights
    upstream: Any = [weights if s.axis == "T" else torch.ones((), dtype=torch.float64)]
    return case, run(s, case, upstream=upstream).grads[s.trained]


def _trainable(s: Subject, case: Case) -> Tensor:
    return case.mask if s.takes("mask") else torch.ones_like(case.mask)
