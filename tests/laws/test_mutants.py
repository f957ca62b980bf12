"""The laws detect mistakes: each wrong variant fails the law of its row, which holds for the original."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mutant import Mutant
from mutants_losses import MUTANTS as LOSS_MUTANTS
from mutants_other import MUTANTS as OTHER_MUTANTS
from table import ROWS

from rlkit.testing import laws

MUTANTS = [*LOSS_MUTANTS, *OTHER_MUTANTS]
BY_NAME = {row.name: row for row in ROWS}


def mutated(subject: Any, mutant: Mutant) -> Any:
    """The row's subject with the wrong function."""
    if isinstance(subject, laws.Rule):
        return subject._replace(controller=mutant.fn())
    return replace(subject, fn=mutant.fn)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.original}: {m.mistake}" for m in MUTANTS])
def test_the_law_catches_it(mutant: Mutant) -> None:
    row = BY_NAME[mutant.original]
    (law,) = [x for x in row.laws if x.name == mutant.law]
    assert mutant.law not in row.skip
    assert law.search(row.subject, max_examples=10) is None
    wrong = law.search(mutated(row.subject, mutant), max_examples=100, shrink=False)
    assert wrong is not None
    assert "raised TypeError" not in wrong.problem, wrong.problem


def test_there_are_enough_of_them() -> None:
    assert len({(m.original, m.mistake) for m in MUTANTS}) == len(MUTANTS) >= 40
