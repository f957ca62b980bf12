"""Draw the curves of one run, or of several runs in one picture.

    rlkit plot runs/grpo                       metrics.png in the run folder
    rlkit plot runs/a runs/b -o both.pdf

A panel is drawn for what any of the runs has measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlkit.scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Flags."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, each with a metrics.jsonl"""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """file to write: .png, .pdf or .svg; None: metrics.png in the first folder"""
    title: str | None = None
    """title of the picture; None: the names of the runs"""


def main(args: Args) -> None:
    """Draw, and print the picture's path."""
    from rlkit.run.report.plot import plot_run

    sys.stdout.write(f"{plot_run(*args.folders, out=args.out, title=args.title)}\n")


if __name__ == "__main__":
    run(main, Args, __doc__)
