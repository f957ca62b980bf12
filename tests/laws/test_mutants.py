"""The laws detect mistakes: each wrong variant fails the law of its row, which holds for the original."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from batches import EXAMPLES, on_batches
from mutant import Mutant
from mutants_losses import MUTANTS as LOSS_MUTANTS
from mutants_other import MUTANTS as OTHER_MUTANTS
from table import ROWS

from rlkit.testing import laws
from rlkit.testing.law import Counterexample

MUTANTS = [*LOSS_MUTANTS, *OTHER_MUTANTS]
NAMES = [f"{m.original}: {m.mistake}" for m in MUTANTS]
BY_NAME = {row.name: row for row in ROWS}


def mutated(subject: Any, mutant: Mutant) -> Any:
    """The row's subject with the wrong function."""
    if isinstance(subject, laws.Rule):
        return subject._replace(controller=mutant.fn())
    return replace(subject, fn=mutant.fn)


def law_of(mutant: Mutant) -> laws.Law:
    """The law of its row that must catch it."""
    (law,) = [x for x in BY_NAME[mutant.original].laws if x.name == mutant.law]
    return law


def caught(found: Counterexample | None) -> None:
    """Assert that the law failed, and not for a wrong signature."""
    assert found is not None
    assert "raised TypeError" not in found.problem, found.problem


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_law_catches_it(mutant: Mutant) -> None:
    """On the batches on which the table is checked; and the row itself obeys the law there."""
    row = BY_NAME[mutant.original]
    assert mutant.law not in row.skip
    law = law_of(mutant)
    few = on_batches(law)
    num = 16 if few.draw is law.draw else EXAMPLES  # a law that draws its own cases may need some to meet the mistake
    assert few.search(row.subject, max_examples=num, shrink=False) is None
    caught(few.search(mutated(row.subject, mutant), max_examples=num, shrink=False))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_law_catches_it_on_drawn_cases(mutant: Mutant) -> None:
    subject = mutated(BY_NAME[mutant.original].subject, mutant)
    caught(law_of(mutant).search(subject, max_examples=100, shrink=False))


def test_there_are_enough_of_them() -> None:
    assert len({(m.original, m.mistake) for m in MUTANTS}) == len(MUTANTS) >= 40
