"""Hooks of mkdocs."""

from __future__ import annotations

from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """The source below a docstring is not searched: the docstring stands in it again."""
    return html.replace(
        '<details class="mkdocstrings-source"', '<details data-search-exclude class="mkdocstrings-source"'
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The first page has no neighbours, and its code the width of their list."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    return markdown
