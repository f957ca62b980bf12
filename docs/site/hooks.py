"""Hooks of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The source below a docstring is not searched: the docstring stands in it again."""
    return html.replace(
        '<details class="mkdocstrings-source"', '<details data-search-exclude class="mkdocstrings-source"'
    )


def titled(markdown: str, folder: Path) -> str:
    """A link whose text is the name of a page, `[losses.md](losses.md)`, has the page's title as its text."""

    def link(found: re.Match[str]) -> str:
        page = folder / found[2]
        title = re.search(r"^# (.+)", page.read_text(), re.MULTILINE) if page.is_file() else None
        return f"[{title[1].replace('`', '')}]({found[1]})" if title else found[0]

    parts = re.split(r"(^```.*?^```|`[^`\n]*`)", markdown, flags=re.DOTALL | re.MULTILINE)  # every other one is code
    parts[::2] = [re.sub(r"\[[\w./-]+\.md\]\((([^)#\s]*\.md)(#[^)\s]*)?)\)", link, x) for x in parts[::2]]
    return "".join(parts)


def with_bars(markdown: str) -> str:
    """Code in a table, where code hosts ask for a bar as `\\|`, has the bar alone, as Python-Markdown reads it."""
    in_code = lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])  # noqa: E731
    return re.sub(r"^\|.*", in_code, markdown, flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The first page's code has the width of the menu; a recipe's page ends with its files, as in a folder."""
    markdown = titled(with_bars(markdown), Path(page.file.abs_src_path).parent)
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith("recipes/"):
        folder = Path(page.file.abs_src_path).parent
        names = sorted(path.name for path in folder.iterdir() if path.suffix not in (".md", ".png"))
        markdown += "\n\n## Files\n\n" + ", ".join(f"[{name}]({name})" for name in names) + "\n"
    return markdown
