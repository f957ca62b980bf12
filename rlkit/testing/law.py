"""A law: a statement, a check of one case, and the search for the smallest counterexample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from rlkit.testing.cases import describe, short, smaller
from rlkit.testing.strategies import cases
from rlkit.testing.subject import Subject, subject


class Counterexample(NamedTuple):
    """A case that breaks a law, and the failed assertion."""

    case: Any
    problem: str


def own_cases(s: Subject) -> SearchStrategy:
    """Batches of the function's streams, shared by the laws of one check."""
    return cases(s.streams) if "T" in s.axes or not s.streams else cases(s.streams, max_seqs=7)


@dataclass(frozen=True)
class Law:
    """A property of functions: `law(fn)` raises AssertionError with the smallest counterexample, or returns.

    `check(subject, case)` raises AssertionError if the case breaks the law. The law applies only to functions with the
    arguments `needs` and results on one of `axes` (none: any); `draw` is the strategy of its cases, or a function of
    the subject that returns it.
    """

    name: str
    statement: str
    check: Callable[[Any, Any], None]
    needs: tuple[str, ...] = ()
    draw: SearchStrategy | Callable[[Any], SearchStrategy] = own_cases
    axes: tuple[str, ...] = ()

    def __call__(self, fn: Callable[..., Any] | Subject, *, max_examples: int = 25, **options: Any) -> None:
        """Raise AssertionError with the smallest counterexample. `options`: arguments of `subject`."""
        s = subject(fn, **options) if callable(fn) else fn
        if (counterexample := self.search(s, max_examples=max_examples)) is not None:
            raise AssertionError(f"{s.name} breaks {self.name}: {self.statement}\n{report(s, counterexample)}")

    def why_not(self, s: Any) -> str | None:
        """Why the law does not apply to this function; None if it applies."""
        missing = [name for name in self.needs if not s.takes(name)]
        if missing:
            return f"takes no {' and no '.join(missing)}"
        return "has no result of a token or sequence" if self.axes and s.axis not in self.axes else None

    def search(self, s: Any, *, max_examples: int = 25, shrink: bool = True) -> Counterexample | None:
        """The smallest counterexample found (without `shrink` the first), or None. Deterministic."""
        failures: list[Counterexample] = []

        @_settings(max_examples, [Phase.generate, Phase.shrink] if shrink else [Phase.generate])
        @given(self.cases(s))
        def attempt(case: Any) -> None:
            if (broken := self.broken_by(s, case)) is not None:
                failures.append(broken)
                raise AssertionError(broken.problem)

        try:
            attempt()
        except (AssertionError, HypothesisException):
            if not failures:  # of the strategies
                raise
            return self.minimized(s, failures[-1]) if shrink else failures[-1]
        return None

    def minimized(self, s: Any, counterexample: Counterexample) -> Counterexample:
        """The counterexample without unnecessary sequences and tokens, of which Hypothesis leaves some."""
        for case in smaller(counterexample.case):
            if (broken := self.broken_by(s, case)) is not None:
                return self.minimized(s, broken)
        return counterexample

    def broken_by(self, s: Any, case: Any) -> Counterexample | None:
        """The counterexample if the case breaks the law, by any exception; otherwise None."""
        try:
            self.check(s, case)
        except AssertionError as problem:
            return Counterexample(case, str(problem) or "assertion failed")
        except Exception as error:  # any exception of the function under test breaks the law
            first = str(error).splitlines()[:1] or [""]
            return Counterexample(case, f"raised {type(error).__name__}: {first[0]}")
        return None

    def cases(self, s: Any) -> SearchStrategy:
        """The strategy of this law's cases for this subject."""
        return self.draw(s) if callable(self.draw) else self.draw


def law(
    *,
    needs: tuple[str, ...] = (),
    draw: SearchStrategy | Callable[[Any], SearchStrategy] = own_cases,
    axes: tuple[str, ...] = (),
) -> Callable[[Callable[[Any, Any], None]], Law]:
    """Decorator: a check as a law. Its name is the function's, its statement the docstring's first paragraph."""

    def make(check: Callable[[Any, Any], None]) -> Law:
        statement = " ".join((check.__doc__ or "").split("\n\n")[0].split())
        return Law(check.__name__, statement, check, needs, draw, axes)

    return make


def sample(strategy: SearchStrategy, num: int) -> list[Any]:
    """`num` cases. Deterministic."""
    out: list[Any] = []

    @_settings(num, [Phase.generate])
    @given(strategy)
    def collect(case: Any) -> None:
        out.append(case)

    collect()
    return out


def report(s: Any, counterexample: Counterexample) -> str:
    """The problem and the case, line by line."""
    return f"  {counterexample.problem}\n  smallest counterexample:\n{describe(counterexample.case, hide=s.hidden)}"


def same(got: Tensor, want: Tensor, label: str, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """`got` equals `want`, by default bit for bit, with NaN equal to NaN; the error names the first difference."""
    if got.shape != want.shape:
        raise AssertionError(f"{label} has shape {list(got.shape)}, expected {list(want.shape)}")
    a, b = got.detach().to(torch.float64), want.detach().to(torch.float64)
    equal = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if not equal.all():
        index = (~equal).nonzero()[0].tolist()
        at = f" at [{', '.join(map(str, index))}]" if index else ""
        raise AssertionError(f"{label} is {short(a[tuple(index)])}{at}, expected {short(b[tuple(index)])}")


def near(got: Tensor, want: Tensor, label: str, *, tolerance: float = 1e-9) -> None:
    """`got` equals `want` up to `tolerance`, relative or absolute; the default allows for the rounding of fp64 sums."""
    same(got, want, label, rtol=tolerance, atol=tolerance)


def _settings(max_examples: int, phases: list[Phase]) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )
