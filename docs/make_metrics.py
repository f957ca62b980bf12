"""Write the tables of keys in docs/metrics.md from rlkit/run/report/assets/metrics.tsv, which the page reads too.

Run `python docs/make_metrics.py` after changing a row; a test fails if the page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlkit.run.report.meanings import SECTIONS

PAGE = Path(__file__).with_name("metrics.md")


def page(text: str) -> str:
    """The page with the table below each section's title written again."""
    for title, rows in SECTIONS.items():
        lines = ["| key | unit | meaning |", "|---|---|---|"]
        for row in rows:
            healthy = f". Healthy: {row.healthy}" if row.healthy else ""
            keys = " ".join(f"`{key}`" for key in row.keys)
            lines.append(f"| {keys} | {row.unit} | {row.meaning}{healthy} |")
        table = "\n".join(lines) + "\n"
        pattern = rf"(#+ {re.escape(title)}\n(?:(?!\|).*\n)*?)\| key \| unit \|.*\n(?:\|.*\n)*"
        text, count = re.subn(pattern, lambda found, table=table: found[1] + table, text)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} tables of keys under the title {title!r}, not one")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
