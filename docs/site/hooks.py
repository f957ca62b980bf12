"""Hooks of mkdocs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The source below a docstring is not searched: the docstring stands in it again."""
    return html.replace(
        '<details class="mkdocstrings-source"', '<details data-search-exclude class="mkdocstrings-source"'
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The first page's code has the width of the menu; a recipe's page ends with its files, as in a folder."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith("recipes/"):
        folder = Path(page.file.abs_src_path).parent
        names = sorted(path.name for path in folder.iterdir() if path.suffix not in (".md", ".png"))
        markdown += "\n\n## Files\n\n" + ", ".join(f"[{name}]({name})" for name in names) + "\n"
    return markdown
