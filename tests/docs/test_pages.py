"""What README.md and docs/*.md name is there: files, functions, make targets, flags; and the numbers they print."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkit.scripts.cli import COMMANDS, module_of
from rlkit.scripts.flags import help_text

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "rlkit|tests|docs|benchmarks|examples|recipes|tools|launch"


def exists(dotted: str) -> bool:
    """Whether `rlkit.a.b` can be imported, the last names as attributes."""
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        with contextlib.suppress(AttributeError):
            for name in parts[i:]:
                found = getattr(found, name)
            return True
        return False
    return False


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_every_name_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    dotted = set(re.findall(r"\brlkit(?:\.\w+)+", text))
    paths = {m.rstrip(".") for m in re.findall(rf"(?<!cache/)\b(?:{FOLDERS})/[\w/.*-]+", text)}
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in sorted(dotted) if not exists(name)] == []
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []
    assert [name for name in sorted(targets) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(code)


def links_of(text: str) -> set[str]:
    """Where a page's links and pictures lead, inline or by reference, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)|^\[[\w-]+\]: (\S+)$", text, re.MULTILINE)
    return {inline or reference for inline, reference in found}


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_every_link_and_picture_of_a_page_leads_somewhere(page: Path) -> None:
    """In a clone, without a network: a file of the repository and a heading in it, or an address outside."""
    for link in links_of(page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = page if not path else page.parent / path
        assert target.resolve().is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_reference_of_the_readme_is_defined_and_used() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"\]\[(\w+)\]", text)) == set(re.findall(r"^\[(\w+)\]: ", text, re.MULTILINE))


def test_no_file_gives_the_repository_an_address_that_it_does_not_have() -> None:
    """Once there is one, the package index needs it in README's links, too."""
    placeholder = re.compile("github" + r"(usercontent)?\.com/[\w.-]+/" + "rlkit(?![\\w-])")
    files = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "Makefile", "CHANGELOG.md")]
    assert [str(f) for f in [*files, *PAGES] if placeholder.search(f.read_text())] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.md)", index)) == {p.name for p in PAGES[2:]} - {"README.md"}


def args_of(script: str) -> Any:
    """The dataclass with the flags of a command or an example."""
    name = module_of(script) if script in COMMANDS else f"examples.{script}"
    path = ROOT / f"{name.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(f"page_{script}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Args


def flags_of(script: str) -> set[str]:
    """The flags that --help lists."""
    shown = help_text(args_of(script), None, program=script, width=100).replace("[no-]", "no-")
    listed = set(re.findall(r"--[\w.-]+", shown))
    return {"--help"} | listed | {re.sub(r"(--|\.)no-", r"\1", flag) for flag in listed}


def test_the_commands_of_the_pages_have_flags_that_exist() -> None:
    used: dict[str, set[str]] = {}
    commands = r"(?:rlkit |rlkit\.scripts\.|examples/)(" + "|".join([*COMMANDS, "demo", "tool_use"]) + r")(?:\.py)?\b"
    for page in PAGES:
        for script, rest in re.findall(rf"{commands}([^`|\n]*)", page.read_text().replace("\\\n", " ")):
            given = rest.split("#")[0].split(" -- ")[0]
            used.setdefault(script, set()).update(re.findall(r" (--[a-z][\w.-]*)", given))
    wrong = {name: sorted(flags - flags_of(name)) for name, flags in used.items() if flags}
    assert len(wrong) >= 6
    assert not any(wrong.values()), wrong


def test_the_advantages_match_the_page() -> None:
    """Each expression with a comment of numbers: `f(x)   # [1.0, 0.5]: why` is compared to the digits shown."""
    names: dict[str, Any] = {}
    compared = 0
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "advantages.md").read_text(), re.DOTALL):
        for node in ast.parse(code).body:
            source = ast.get_source_segment(code, node) or ""
            comment = code.splitlines()[(node.end_lineno or 1) - 1].partition("#")[2].strip()
            shown = re.match(r"\[[^\]]*\]", comment)
            exec(source, names)
            if shown is None:
                continue
            target = names[node.targets[0].id] if isinstance(node, ast.Assign) else eval(source, names)
            torch.testing.assert_close(
                target.double(), torch.tensor(ast.literal_eval(shown[0])).double(), atol=1e-4, rtol=0
            )
            compared += 1
    assert compared == 6
