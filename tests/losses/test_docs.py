"""The page on losses names every policy-loss function, and each name is public in one module."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import pytest

from rlkit import advantages, losses

MODULES = ("corrections", "diagnostics", "entropy", "kl", "policy", "policy_batch", "ratios", "weights")


def test_the_page_names_every_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    mine = {n for n in losses.__all__ if inspect.getmodule(getattr(losses, n)).__name__.split(".")[-1] in MODULES}
    assert len(mine) > 60
    assert {n for n in mine if n not in page} == set()


@pytest.mark.parametrize("room", [advantages, losses])
def test_a_public_name_is_of_one_module_and_hides_none(room: ModuleType) -> None:
    """The package's names are those of its modules; `import *` would silently overwrite duplicates."""
    modules = [m for m in vars(room).values() if inspect.ismodule(m) and m.__name__.startswith(f"{room.__name__}.")]
    own = [name for m in modules if not m.__name__.split(".")[-1].startswith("_") for name in m.__all__]
    assert sorted(room.__all__) == sorted(set(own)) == sorted(own)
    assert not {*own} & {m.__name__.split(".")[-1] for m in modules}
    assert {n for n in own if getattr(room, n).__module__.rpartition(".")[0] != room.__name__} == set()
