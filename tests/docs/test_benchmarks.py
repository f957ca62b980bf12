"""docs/benchmarks.md has the figures of benchmarks/results, and README's sentence and chart are theirs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
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
    """Also in which rows measure code that has changed since."""
    text = PAGE.read_text()
    try:
        make.changed("trl_cpu_SmolLM2-135M-Instruct_4x8x32")
    except LookupError as error:
        pytest.skip(f"a clone without the history: {error}")
    assert make.page(text) == text, "run python docs/make_benchmarks.py"
    with pytest.raises(ValueError, match=r"benchmarks\.md has 0 tables marked 'trl', not one"):
        make.page(text.replace("<!-- trl -->", ""))


def test_every_file_of_results_is_named_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    named = {path.stem for path in RESULTS.glob("*.json") if path.name in pages}
    others = {path.stem for path in RESULTS.glob("*.json")} - named
    assert others <= {"changed_weights"}  # its figures: sglang.md


def test_the_memory_of_the_readme_and_the_bars_are_those_of_the_files(make: Any) -> None:
    name = "trl_cpu_SmolLM2-135M-Instruct_{}.json"
    found = [json.loads((RESULTS / name.format(s)).read_text()) for s in ("4x8x32", "4x8x128", "2x8x32_prefix")]
    of = [{row["figure"]: row for row in run["table"]} for run in found]
    shares = [run["peak RSS, MB"]["rlkit"][0] / run["peak RSS, MB"]["trl"][0] for run in of]
    low, high = re.findall(r"takes ([\d.]+) to ([\d.]+) times the memory", (ROOT / "README.md").read_text())[0]
    assert (float(low), float(high)) == pytest.approx((min(shares), max(shares)), abs=0.005)
    speeds = [run["step, s"]["trl"][0] / run["step, s"]["rlkit"][0] for run in of]
    assert [bar[1] for bar in make.bars()[:3]] == pytest.approx(speeds, rel=0.03)  # medians of ratios, ratio of medians


def test_every_row_names_its_processor_its_commit_and_what_it_measures(make: Any) -> None:
    for path in RESULTS.glob("*.json"):
        about = json.loads(path.read_text())["machine"]
        assert about["cpu"], path
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", about["commit"]), path
    used = {key: [x for x in RESULTS.glob("*.json") if x.stem.startswith(key)] for key in make.MEASURES}
    assert [key for key, found in used.items() if not found] == []
    assert [path for paths in make.MEASURES.values() for path in paths if not (ROOT / path).exists()] == []


def test_a_row_is_marked_where_its_code_has_changed(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a comment or a docstring has, or a file that it does not measure."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    folder = tmp_path / "rlkit" / "kernels"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text('"""Doc."""\n\n\ndef f():\n    """Text."""\n    return 1  # why\n')
    (tmp_path / "other.py").write_text("x = 1\n")

    def call(*command: str) -> str:
        done = subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        call(*command)
    head = call("rev-parse", "--short", "HEAD")
    found = {"machine": {"cpu": "AMD EPYC", "commit": head}}
    (tmp_path / "x_cpu.json").write_text(json.dumps(found))
    monkeypatch.setattr(make, "ROOT", tmp_path)
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    monkeypatch.setattr(make, "MEASURES", {"x": ("rlkit/kernels",)})

    def now() -> tuple[str, ...]:
        make.changed.cache_clear()
        make.git.cache_clear()
        call("add", "-A")
        return make.changed("x_cpu")

    (folder / "a.py").write_text('"""Other."""\n\n\ndef f():\n    return 1\n')
    (tmp_path / "other.py").write_text("x = 2\n")
    assert now() == ()
    assert make.source("x_cpu") == f"[json](../benchmarks/results/x_cpu.json), AMD EPYC, {head}"
    (folder / "b.py").write_text("")
    assert now() == ("rlkit/kernels/b.py",)
    (folder / "a.py").write_text("def f():\n    return 2\n")
    assert now() == ("rlkit/kernels/a.py", "rlkit/kernels/b.py")
    assert make.source("x_cpu").endswith(", **changed since**")
    (folder / "a.py").unlink()
    assert now() == ("rlkit/kernels/a.py", "rlkit/kernels/b.py")


def test_the_readme_says_so_while_its_figures_are_of_other_code(make: Any) -> None:
    names = [name for name in make.TRL if name.startswith(make.SMOLLM) and not name.endswith("defaults")]
    try:
        stale = any(map(make.changed, names))
    except LookupError as error:
        pytest.skip(f"a clone without the history: {error}")
    assert ("The code has changed since these" in (ROOT / "README.md").read_text()) == stale
