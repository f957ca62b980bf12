"""Code blocks of the pages, and running one under the names that it uses."""

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block, also one with `await` at its top; returns the names with those that it leaves."""
    names = dict(names)
    awaited = eval(compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True), names)
    if awaited is not None:
        asyncio.run(awaited)
    return names
