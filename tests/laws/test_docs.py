"""docs/laws.md is current, and the tutorial prints what it shows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from rlkit.testing import check_estimator, check_loss

DOCS = Path(__file__).parents[2] / "docs"


def make_laws() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_laws", DOCS / "make_laws.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_numbers(text: str) -> str:
    """Which of several smallest counterexamples is found may change with Hypothesis; the words do not."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text)


def test_the_page_of_laws_is_current() -> None:
    assert (DOCS / "laws.md").read_text() == make_laws().page(), "run python docs/make_laws.py"


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer cases than it has by default."""
    for check in (check_loss, check_estimator):
        monkeypatch.setitem(check.__kwdefaults__, "max_examples", 15)
    text = (DOCS / "tutorial-new-loss.md").read_text()
    printed, reports = make_laws().tutorial(text)
    assert without_numbers(printed) == without_numbers(text), "run python docs/make_laws.py"
    broken = [sum(r.outcome == "fails" for r in report) for report in reports]
    assert broken[0] > broken[1] > broken[2] > broken[3] == 0
    assert broken[4] > broken[5] == 0
