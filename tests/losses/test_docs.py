"""The page on losses names every policy-loss function there is."""

from __future__ import annotations

import inspect
from pathlib import Path

from rlkit import losses

MODULES = ("corrections", "diagnostics", "entropy", "kl", "policy", "policy_batch", "ratios", "weights")


def test_the_page_names_every_function() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    mine = {n for n in losses.__all__ if inspect.getmodule(getattr(losses, n)).__name__.split(".")[-1] in MODULES}
    assert len(mine) > 60
    assert {n for n in mine if n not in page} == set()
