"""Check a function against all its laws; report which hold, and the smallest counterexample of each that fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TextIO

from torch import Tensor

from rlkit.testing import laws_estimators as estimators
from rlkit.testing import laws_kl as kl
from rlkit.testing import laws_numerics as numerics
from rlkit.testing import laws_policy as policy
from rlkit.testing import laws_preference as preference
from rlkit.testing import laws_structure as structure
from rlkit.testing import laws_transforms as transforms
from rlkit.testing.cases import Case
from rlkit.testing.law import Law, report, sample
from rlkit.testing.subject import Subject, subject, tensors

PACKED = (
    structure.shape, structure.mask_isolation, structure.masked_is_zero, structure.permutation,
    structure.segment_isolation, structure.group_isolation, structure.group_labels, structure.padded_is_packed,
    structure.additive, structure.nothing_to_train_on, numerics.dtypes, numerics.pure, numerics.finite,
    structure.nan_shows,
)  # fmt: skip
LOSS = (*PACKED, numerics.differentiable, numerics.gradcheck)
SURROGATE = (*LOSS, structure.all_count, policy.on_policy, policy.descends, policy.no_advantage_no_gradient)
WEIGHT = (*PACKED, structure.all_count, numerics.detached)
ESTIMATOR = (*PACKED, structure.all_count, numerics.gradcheck, estimators.rewards_raise)
GROUP_BASELINE = (*ESTIMATOR, structure.singleton_is_zero, estimators.shift_invariant, estimators.stated_scale)
TARGETS = re.compile(r"(^|_)(returns?|targets?|old_values)$")  # arguments of a loss that must not get a gradient


class Result(NamedTuple):
    """The result of one law: `outcome` is "holds", "fails", "skipped" or "does not apply"; `note` gives the reason."""

    law: str
    outcome: str
    note: str
    statement: str


class Report(list[Result]):
    """The results in order. `print(report)` shows them as the check did; `repr` gives their counts."""

    def __init__(self, results: Iterable[Result] = (), *, title: str = "") -> None:
        super().__init__(results)
        self.title = title

    def __str__(self) -> str:
        return text(self.title, self)

    def __repr__(self) -> str:
        return text("", self).splitlines()[-1]


def check_loss(
    fn: Callable[..., Any],
    *,
    coefficient: Callable[[Case], Tensor] | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    **how: Any,
) -> Report:
    """Check a loss per token (or per pair of responses), print the results to `out` (stdout) and return them.

    `fn` takes tensors by name: `log_ratio` (or `logp`, `old_logp`), `advantages`, `ref_logp`, `chosen_log_ratio`, ..,
    `mask`, `cu_seqlens`; wrap it in a lambda if it uses other names. It returns one loss per token, not their mean.

    Example:  check_loss(my_loss, options={"clip_high": 0.28}, clip_low=0.2, clip_high=0.28)

    Args:     coefficient: c(case) per token, e.g. `lambda case: case.ratio.clamp(max=5)`: adds the law that the
              gradient is -c * A * dlogp.  clip_low, clip_high: distances from 1; both together add PPO's clip law.
              laws: further laws, e.g. `laws.margin_only` for a pairwise loss.
              skip: law name -> reason why it need not hold, e.g. {"gradcheck": "detached ratio"}.
              compile: also check `torch.compile(fullgraph=True)` (a few seconds).
              max_examples: cases of each law (60). out: where the results are printed.
              Others are arguments of `rlkit.testing.subject`: `options`, `streams`, `statistics`, `name`.
    """

    def wanted(s: Subject) -> list[Law]:
        chosen: list[Law] = list(SURROGATE if s.takes("advantages") else LOSS)
        if any(name.startswith("chosen_") for name in s.streams):
            chosen.append(preference.prefers_chosen)
        if targets := [name for name, x in s.streams.items() if TARGETS.search(name) and x.dtype.is_floating_point]:
            chosen.append(numerics.no_gradient_by(*targets))
        if coefficient is not None:
            chosen.append(policy.coefficient(coefficient))
        if clip_low is not None and clip_high is not None:
            chosen.append(policy.clipped(clip_low=clip_low, clip_high=clip_high))
        return chosen

    return _check("check_loss", fn, wanted, **how)


def check_estimator(fn: Callable[..., Any], *, loop: Callable[..., Any] | None = None, **how: Any) -> Report:
    """Check an advantage estimator, print the results to `out` (stdout) and return them.

    `fn` takes `rewards`, `values`, `bootstrap`, `gamma`, `lam`, `mask`, `cu_seqlens` over tokens, or `rewards` and
    `group_ids` over sequences. `gamma` and `lam` without a jaxtyping annotation are drawn as per-token tensors only
    if they have no default; otherwise pass `options={"gamma": 0.9}`, or a decay over gaps is not detected.

    Args:     loop: the definition for one sequence (or one group) over Python lists, see `laws.equals_loop`. No other
              law checks the formula, e.g. detects a wrong factor.
              Others as in `check_loss`.
    """

    def wanted(s: Subject) -> list[Law]:
        grouped = s.takes("group_ids") and not s.takes("mask")
        return [*(GROUP_BASELINE if grouped else ESTIMATOR), *([] if loop is None else [estimators.equals_loop(loop)])]

    return _check("check_estimator", fn, wanted, **how)


def check_kl(
    fn: Callable[..., Any], *, value: kl.Divergence = kl.forward, gradient: kl.Divergence = kl.forward, **how: Any
) -> Report:
    """Check a KL estimator of sampled tokens, print the results to `out` (stdout) and return them.

    `fn` takes `logp`, `ref_logp`, optionally `old_logp` (samples are then drawn from it) and `mask`.

    Args:     value, gradient: the divergence of (policy logits, reference logits) that the value's and the gradient's
              expectations must equal: `laws.forward` (KL(policy || ref)), `laws.backward`, `laws.nothing` (0).
              Others as in `check_loss`; skip "non_negative" for an estimator that may be negative.
    """
    wanted = [*LOSS, structure.all_count, kl.non_negative, kl.expectation(value), kl.gradient_expectation(gradient)]
    return _check("check_kl", fn, lambda _: wanted, **how)


def check_weights(fn: Callable[..., Any], **how: Any) -> Report:
    """Check loss weights (a correction, an aggregation, a filter), print the results and return them.

    `fn` takes `log_ratio`, `mask`, `cu_seqlens`, ..; it returns one detached weight per token, 0 where the mask is
    False. A statistic of the whole batch (a mean, a count) is an argument, given in `statistics`:
    `check_weights(mine, statistics={"mean": lambda case: case.ratio.mean()})`.

    Args:     as in `check_loss`; for an aggregation add `laws.sums_to_one`.
    """
    return _check("check_weights", fn, lambda _: WEIGHT, **how)


def examine(s: Any, laws: Sequence[Law], *, skip: Mapping[str, str] | None = None, max_examples: int = 60) -> Report:
    """Check each law on a subject, without printing. Laws share their cases; only a failing one searches further."""
    if unknown := set(skip or {}) - {law.name for law in laws}:
        raise ValueError(f"skip must name laws of this check, {[x.name for x in laws]}; got {sorted(unknown)}")
    drawn: dict[Any, list[Any]] = {}
    results = []
    for x in laws:
        if (reason := x.why_not(s)) is not None:
            results.append(Result(x.name, "does not apply", reason, x.statement))
        elif x.name in (skip or {}):
            results.append(Result(x.name, "skipped", (skip or {})[x.name], x.statement))
        else:
            if x.draw not in drawn:
                drawn[x.draw] = sample(x.cases(s), max_examples)
            counterexample = next((c for c in (x.broken_by(s, case) for case in drawn[x.draw]) if c is not None), None)
            if counterexample is not None:
                counterexample = x.search(s, max_examples=max_examples) or counterexample
            note = "" if counterexample is None else report(s, counterexample)
            results.append(Result(x.name, "holds" if counterexample is None else "fails", note, x.statement))
    return Report(results)


def failures(results: Report) -> Report:
    """The laws that do not hold: `assert not failures(check_loss(my_loss))`."""
    return Report([r for r in results if r.outcome == "fails"], title=results.title)


def text(title: str, results: Report) -> str:
    """The results as lines, without the laws that do not apply."""
    lines = [title]
    for r in results:
        if r.outcome == "does not apply":
            continue
        if r.outcome == "fails":
            lines += [f"FAILS    {r.law}: {r.statement}", *(f"       {line}" for line in r.note.splitlines())]
        else:
            lines.append(f"{r.outcome:8} {r.law}" + (f" ({r.note})" if r.note else ""))
    counts = [f"{sum(r.outcome == o for r in results)} {w}" for o, w in (("holds", "hold"), ("fails", "fail"))]
    return "\n".join([*lines, ", ".join([*counts, f"{sum(r.outcome == 'skipped' for r in results)} skipped"])])


def _as_returned(s: Subject) -> Subject:
    """The subject with the axis of its actual output: a loss may return one number."""
    try:
        outputs = tensors(s(numerics.fixed_case(s)))
    except Exception:  # the laws will say how it fails
        return s
    return replace(s, axis="") if s.axis in ("T", "N") and all(x.ndim == 0 for x in outputs) else s


def _check(
    title: str,
    fn: Callable[..., Any],
    wanted: Callable[[Subject], Sequence[Law]],
    *,
    laws: Sequence[Law] = (),
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    max_examples: int = 60,
    out: TextIO | None = None,
    **options: Any,
) -> Report:
    """The check that the public functions share, see `check_loss`; `options` are those of `subject`."""
    s = subject(fn, **options)
    checked = [*wanted(s), *laws, *([transforms.compiles()] if compile else [])]
    returned = _as_returned(s)
    results = examine(returned, checked, skip=skip, max_examples=max_examples)
    if returned is not s:  # report the reduction once, by the law `shape`, and check the other laws on the number
        results[0] = examine(s, checked[:1], max_examples=1)[0]
    results.title = f"{title}({s.name})"
    (sys.stdout if out is None else out).write(f"{results}\n")
    return results
