"""Build the documentation site into build/site/html, or into FOLDER/html: `python docs/site/make_site.py [FOLDER]`.

The pages are those of the repository, in its own folders, so that a relative link leads to the same file here, on a
code host and in a clone. What is added: a page for each public module, whose docstrings mkdocstrings reads from the
source, and the menu, which follows docs/README.md.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import docstrings
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("docs", "recipes", "examples", "launch")
LINK = re.compile(r"\]\(((?!https?:)[^)#\s]+)|^\[[\w-]+\]: ((?!https?:)[^#\s]+)", re.MULTILINE)


def links(page: Path) -> Iterator[Path]:
    """The files that a page links to."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for inline, reference in LINK.findall(text):
        yield (page.parent / (inline or reference)).resolve()


def lay_out(pages: Path) -> None:
    """Copy the pages, the folders that they describe, and each other file that a page links to."""
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for name in FILES:
        shutil.copy(ROOT / name, pages)
    for name in FOLDERS:
        own = ["site", "*.tsv", "make_*.py", "plot_*.py", "check_*.py"] * (name == "docs")
        shutil.copytree(ROOT / name, pages / name, ignore=shutil.ignore_patterns("__pycache__", *own))
    shutil.copytree(HERE / "assets", pages / "assets")
    todo = [ROOT / page.relative_to(pages) for page in pages.rglob("*.md")]
    for page in todo:
        for target in links(page):
            copy = pages / target.relative_to(ROOT)
            if target.is_file() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, copy)
                todo += [target] * (target.suffix == ".md")


class Module(NamedTuple):
    """A module with a page: what it is about, and the names that it defines for others."""

    name: str
    package: bool
    about: str
    public: list[str]


def modules() -> Iterator[Module]:
    """Every module that others may import, from its source. Scripts have `--help`."""
    for path in sorted((ROOT / "rlkit").rglob("*.py")):
        package = path.name == "__init__.py"
        file = path.parent if package else path.with_suffix("")
        parts = file.relative_to(ROOT).parts
        if any(part.startswith("_") or part in ("scripts", "on_server") for part in parts):
            continue
        tree = ast.parse(path.read_text())
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
        listed = re.search(r"^__all__ = (\[[^\]*]*?\])", path.read_text(), re.MULTILINE)
        public = [name for name in named if not listed or name in ast.literal_eval(listed[1])]
        if public or package:
            about = (ast.get_docstring(tree) or "").partition("\n")[0]
            yield Module(".".join(parts), package, about, public)


def core(found: list[Module]) -> Iterator[str]:
    """Links to the names that `import rlkit` gives, at the modules that define them."""
    source = (ROOT / "rlkit" / "__init__.py").read_text()
    names = ast.literal_eval(re.search(r"^_NAMES = (\{.*?\})$", source, re.MULTILINE | re.DOTALL)[1])
    for home, some in names.items():
        for name in some.split():
            inside = (f"rlkit.{home}", f"rlkit.{home}.")
            module = next(
                m for m in found if name in m.public and (m.name == inside[0] or m.name.startswith(inside[1]))
            )
            yield f"[`{name}`][{module.name}.{name}]"


def api(folder: Path) -> list[Any]:
    """Write the page of each module; return the menu of them, nested as the packages are."""
    found = list(modules())
    rows = []
    for module in found:
        path = Path(*module.name.split("."), "README.md" if module.package else "")
        page = folder / (path if module.package else path.with_suffix(".md"))
        page.parent.mkdir(parents=True, exist_ok=True)
        members = f"    options:\n      members: {module.public or 'false'}\n"
        page.write_text(f"---\ntitle: {module.name}\n---\n\n::: {module.name}\n{members}")
        about = docstrings.markdown(module.about).replace("|", "\\|")
        rows.append(f"| [`{module.name}`]({page.relative_to(folder)}) | {about} |")
    text = "# API\n\nEach docstring states the equation, shapes, units, limits, errors and the source.\n\n"
    text += f"`rlkit` itself has the names of a loop: {', '.join(core(found))}.\n\n| module | |\n|---|---|\n"
    (folder / "README.md").write_text(text + "\n".join(rows) + "\n")

    def menu(package: str) -> list[Any]:
        entries: list[Any] = []
        for module in found:
            above, _, short = module.name.rpartition(".")
            if above == package:
                page = f"api/{module.name.replace('.', '/')}"
                entries.append({short: [f"{page}/README.md", *menu(module.name)] if module.package else f"{page}.md"})
        return entries

    return ["api/README.md", {"rlkit": "api/rlkit/README.md"}, *menu("rlkit")]


def menu_of_pages() -> list[Any]:
    """The menu of the pages: the sections and links of docs/README.md, each page where it is named first."""
    index = (ROOT / "docs" / "README.md").read_text()
    seen: set[str] = set()
    menu: list[Any] = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        entries: list[str] = []
        for link in re.findall(r"\]\(([^)#]+\.md)\)", text):
            page = (ROOT / "docs" / link).resolve().relative_to(ROOT).as_posix()
            if page not in seen and page != "README.md":
                seen.add(page)
                entries.append(page)
        menu.append({title: entries})
    return menu


def main(build: Path) -> None:
    """Lay the pages out and run mkdocs: any warning is an error."""
    pages = build / "pages"
    lay_out(pages)
    nav = [{"rlkit": "README.md"}, {"Overview": "docs/README.md"}, *menu_of_pages(), {"API": api(pages / "api")}]
    config = {"INHERIT": str(HERE / "mkdocs.yml"), "docs_dir": str(pages), "site_dir": str(build / "html")}
    config |= {"hooks": [str(HERE / "hooks.py")], "nav": [*nav, {"Changes": "CHANGELOG.md"}]}
    (build / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    os.environ["RLKIT_SOURCES"] = str(ROOT)
    from mkdocs.__main__ import cli

    cli(["build", "--strict", "--quiet", "--config-file", str(build / "mkdocs.yml")])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").absolute())
