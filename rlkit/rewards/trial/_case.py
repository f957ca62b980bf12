"""What a trial of a reward function is made of: the function on a row, and the texts that it has been given."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from rlkit.data.schema import GOLD
from rlkit.rewards.answers import FORMS, LONGEST, forms_of, short
from rlkit.rewards.call import Reward, RewardError, needs_of
from rlkit.rewards.failures import is_ours, unwrapped
from rlkit.rewards.text import gold_answer

AMONG = 1000  # rows of which others are tried
RUN = "rlkit_runs_text"  # a name that no program has
COMPARE = "compare how the function reads an answer with how the data writes it"
_SHOWN = 60  # characters of an answer


@dataclass(frozen=True)
class Trial:
    """What a reward function gave: texts with the words for what they are, and the result of each.

    `place` is the row's, and `note` says that the gold answer gets no more than the others, also that of another row
    only, or no more than a wrong answer near it, that a text's reward depends on its place in the batch, or that two
    calls give it two (empty: none of these, or the function does not compare with the gold answer). `values` are all
    rewards that it gave.
    """

    place: str
    tried: Sequence[tuple[str, str, Reward | RewardError]]
    note: str = ""
    values: Set[float] = frozenset()

    @property
    def failures(self) -> list[tuple[str, RewardError]]:
        """What the function failed on, in words, and the error."""
        return [(label, result) for _, label, result in self.tried if isinstance(result, RewardError)]


@dataclass(frozen=True)
class Case:
    """A function with its name, how to call it on a row's texts, and the columns that it has read; the rows, the place
    of the one that is tried, and how to find gold answers (in which `column`, if in none of `GOLD`)."""

    function: Callable[..., Any]
    name: str
    call: Callable[..., Any]
    seen: set[str]
    rows: Sequence[dict[str, Any]]
    index: int
    gold_of: Callable[[Mapping[str, Any]], Any] = gold_answer
    column: str = ""

    @cached_property
    def gold(self) -> str | None:
        return text_of(self.gold_of(self.rows[self.index])) or None

    @cached_property
    def answer(self) -> str:
        """What the gold answer ends with, where it is a longer text, else it; empty without one."""
        return self.short(self.gold or "") or self.gold or ""

    @cached_property
    def other(self) -> str | None:
        texts = (text_of(self.gold_of(row)) for row in self.rows)
        return next((text for text in texts if text not in (None, self.gold, "")), None)

    @cached_property
    def golds(self) -> dict[int, str]:
        """The gold answers of the first rows, by their places."""
        return {i: x for i, row in enumerate(islice(self.rows, AMONG)) if (x := text_of(self.gold_of(row)))}

    @cached_property
    def forms(self) -> list[str]:
        return [*FORMS] if is_ours(self.function) else forms_of(self.function)

    def answer_of(self, at: int) -> str:
        return self.short(self.golds[at]) or self.golds[at]

    def short(self, gold: str) -> str:
        return short(gold, mathematics=module_of(self.function) == "rlkit.rewards.math")

    async def numbers(self, texts: Sequence[str], *, at: int | None = None) -> list[float]:
        return [*map(number, await self.call(texts, at=self.index if at is None else at))]


async def form_that_counts(
    case: Case, texts: Sequence[str], nothing: float, *, at: int | None = None
) -> tuple[str, str, Reward] | None:
    """The form in which one of a gold answer's `texts` gets more than `nothing` and than another answer (not `at`
    another row), its text, and its reward."""
    forms = [(form, text) for text in texts if len(text) < LONGEST for form in case.forms]
    tried = await case.call([form.format(text) for form, text in forms], at=case.index if at is None else at)
    results = [*zip(forms, tried)]
    better = [(form, result) for form, result in results if isinstance(result, Reward) and result.reward > nothing]
    if not better:
        return None
    (form, text), best = max(better, key=lambda one: one[1].reward)
    others = [] if case.other is None or at is not None else [form.format(case.short(case.other) or case.other)]
    if any(best.reward <= x for x in await case.numbers(others)):
        return None
    return form, form.format(text), best


def module_of(function: Callable[..., Any]) -> str:
    """The module of the function that partials and wrappers call; empty without one."""
    return str(getattr(unwrapped(function), "__module__", ""))


def reads_gold(case: Case) -> bool:
    """Whether the function has read a gold answer of a row, or gets it as an argument (of another system)."""
    named = {name for need in needs_of(case.function) for name in ((need,) if isinstance(need, str) else need)}
    parameters = {*inspect.signature(unwrapped(case.function)).parameters}
    return bool(case.column or (case.seen | named | parameters) & {*GOLD})


def text_of(gold: Any) -> str | None:
    """A gold answer as a policy would write it: of a list its first entry."""
    if isinstance(gold, list | tuple) and gold:
        return text_of(gold[0])
    return gold if isinstance(gold, str | None) else str(gold) if not isinstance(gold, dict) else json.dumps(gold)


def shown(text: str) -> str:
    """A text in quotes, of a long one the beginning."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def number(result: Reward | RewardError) -> float:
    """The reward; NaN for an error."""
    return math.nan if isinstance(result, RewardError) else result.reward + 0.0  # no -0
