"""Every public function obeys the laws of its row, and every listed exception is necessary."""

from __future__ import annotations

import shutil

import pytest
from batches import EXAMPLES, batch, on_batches
from row import Row
from table import ROWS, TRANSFORMS, public

from rlkit.testing import examine, failures, laws
from rlkit.testing.law import own_cases
from rlkit.testing.subject import Subject

NAMES = [row.name for row in ROWS]
SUBJECTS = {row.name: row.subject for row in ROWS if isinstance(row.subject, Subject)}
FEW = ("losses.ppo_clip", "losses.gspo", "losses.k3", "losses.token_mean", "losses.dpo", "advantages.gae")
FAST = ("vmaps",)  # the others take 0.3 s and more for a row; vmaps is over func.grad


def transforms(*, fails: bool) -> list[object]:
    """The laws of torch's transforms with the rows for which they hold, or fail; without a mark where they are fast."""
    return [
        pytest.param(law, name, id=f"{law.name}-{name}", marks=() if law.name in FAST else pytest.mark.slow)
        for law, exceptions in TRANSFORMS.items()
        for name in SUBJECTS
        if (name in exceptions) == fails
    ]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_the_laws_hold(row: Row) -> None:
    few = [on_batches(law) for law in row.laws]
    broken = failures(examine(row.subject, few, skip=row.skip, max_examples=EXAMPLES))
    assert not broken, "\n".join(f"{row.name} breaks {r.law}: {r.statement}\n{r.note}" for r in broken)


@pytest.mark.parametrize("row", [r for r in ROWS if r.skip], ids=[r.name for r in ROWS if r.skip])
def test_an_exception_is_one(row: Row) -> None:
    """Each law that a row lists as not applying does not hold there, and its reason is a sentence."""

    def holds(law: laws.Law) -> bool:
        """On 60 batches and, where the law has cases of its own or needs ties, on many that Hypothesis draws."""
        if law.draw is own_cases and any(law.broken_by(row.subject, batch(row.subject, i)) for i in range(60)):
            return False
        return law.search(row.subject, max_examples=400, shrink=False) is None

    skipped = [law for law in row.laws if law.name in row.skip]
    assert [law.name for law in skipped if holds(law)] == []
    assert {law.name for law in skipped} == set(row.skip)
    assert all(len(reason.split()) > 4 for reason in row.skip.values())


def test_every_public_function_has_a_row() -> None:
    rows = {id(row.fn) for row in ROWS}
    missing = sorted(name for name, f in public().items() if id(f) not in rows)
    assert not missing, f"add a row to tests/laws for {missing}"
    assert len(public()) > 150


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.slow_cases("compiles-losses.gspo", "exports-losses.gspo", "func_grad-losses.gspo")
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("law", [law for law in TRANSFORMS if law.name not in FAST], ids=lambda law: law.name)
def test_torch_transforms_it(law: laws.Law, name: str) -> None:
    law(SUBJECTS[name])


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # said by torch of the batches that vmap itself expands
@pytest.mark.parametrize(("law", "name"), transforms(fails=False))
def test_torch_transforms_every_row(law: laws.Law, name: str) -> None:
    law(SUBJECTS[name])


@pytest.mark.parametrize(("law", "name"), transforms(fails=True))
def test_an_exception_to_a_transform_is_one(law: laws.Law, name: str) -> None:
    assert law.search(SUBJECTS[name], shrink=False) is not None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", FEW)
def test_it_compiles_with_inductor(name: str) -> None:
    laws.compiles(backend="inductor")(SUBJECTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_the_laws_hold_on_many_cases(row: Row) -> None:
    broken = failures(examine(row.subject, row.laws, skip=row.skip, max_examples=150))
    assert not broken, "\n".join(f"{row.name} breaks {r.law}: {r.statement}\n{r.note}" for r in broken)
