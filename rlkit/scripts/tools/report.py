"""Write the report of a run as one HTML page, or compare several runs; a run also writes its own at its end.

    rlkit report runs/grpo                          runs/grpo/report.html
    rlkit report runs/a runs/b --out both.html
    rlkit report runs/grpo --serve                  follow a run while it trains

The page opens offline: curves, samples with their rewards, the numbers of their tokens. docs/report.md describes it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlkit.scripts.cli import run
from rlkit.settings import Range, Without, check


@dataclass(frozen=True)
class Args:
    """Flags."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, each with a metrics.jsonl"""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """file to write; None: report.html in the run folder, of several runs in the current folder"""
    force: bool = False
    """replace a file that exists. A run's own report.html needs no force"""
    serve: Annotated[bool, Without("out", "force", why="it writes no file")] = False
    """serve the page on --host and --port in place of writing it, with new steps as they come, until Ctrl-C"""
    host: str = "127.0.0.1"
    """address to serve on; whoever reaches it reads the run"""
    port: Annotated[int, Range("from 0 to 65535", lambda x: 0 <= x < 65536)] = 8000
    """port to serve on; 0: any free one"""

    def __post_init__(self) -> None:
        check(self)


def main(args: Args) -> None:
    """Write the page and print its path, or serve it."""
    from rlkit.run.report.page import write_report

    if not args.serve:
        sys.stdout.write(f"{write_report(*args.folders, out=args.out, force=args.force)}\n")
        return
    from rlkit.run.report.serve import server

    with server(*args.folders, host=args.host, port=args.port) as serving, suppress(KeyboardInterrupt):
        sys.stdout.write(
            f"http://{args.host}:{serving.server_port} follows {', '.join(map(str, args.folders))}; Ctrl-C ends it\n"
        )
        sys.stdout.flush()
        serving.serve_forever()


if __name__ == "__main__":
    run(main, Args, __doc__)
