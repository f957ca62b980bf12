"""The examples in rlkit's docstrings print what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "rlkit").rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_an_example_prints_what_it_shows(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
