"""docs/benchmarks.md has the figures of benchmarks/results, and README's sentence and chart are theirs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def make() -> Any:
    spec = importlib.util.spec_from_file_location("make_benchmarks", ROOT / "docs" / "make_benchmarks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(make: Any) -> None:
    text = PAGE.read_text()
    assert make.page(text) == text, "run python docs/make_benchmarks.py"
    with pytest.raises(ValueError, match=r"benchmarks\.md has 0 tables marked 'trl', not one"):
        make.page(text.replace("<!-- trl -->", ""))


def test_every_file_of_results_is_named_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    named = {path.stem for path in RESULTS.glob("*.json") if path.name in pages}
    assert {path.stem for path in RESULTS.glob("*.json")} - named <= {
        "changed_weights"
    }  # its figures: negative-results.md


def test_the_memory_of_the_readme_and_the_bars_are_those_of_the_files(make: Any) -> None:
    name = "trl_cpu_SmolLM2-135M-Instruct_{}.json"
    found = [json.loads((RESULTS / name.format(s)).read_text()) for s in ("4x8x32", "4x8x128", "2x8x32_prefix")]
    of = [{row["figure"]: row for row in run["table"]} for run in found]
    shares = [run["peak RSS, MB"]["rlkit"][0] / run["peak RSS, MB"]["trl"][0] for run in of]
    low, high = re.findall(r"takes ([\d.]+) to ([\d.]+) times the memory", (ROOT / "README.md").read_text())[0]
    assert (float(low), float(high)) == pytest.approx((min(shares), max(shares)), abs=0.005)
    speeds = [run["step, s"]["trl"][0] / run["step, s"]["rlkit"][0] for run in of]
    assert [bar[1] for bar in make.bars()[:3]] == pytest.approx(speeds, rel=0.03)  # medians of ratios, ratio of medians
