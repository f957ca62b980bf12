"""The command line of a benchmark: flags, `--help`, and what is missing (a server, a package, a file) in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from typing import Any

import tyro

NoFlags: Any = make_dataclass("NoFlags", [])


def run_script(main: Callable[[Any], Any], kind: type, doc: str | None) -> None:
    """`main(flags)`, where the flags are those of the dataclass `kind`: a script's last line."""
    flags = tyro.cli(kind, description=doc)
    with in_one_line():
        main(flags)


@contextmanager
def in_one_line() -> Iterator[None]:
    """End with `error: ...` where a package, a file or a server is missing."""
    try:
        yield
    except (ImportError, OSError) as error:  # an engine that is gone is an OSError, too
        raise SystemExit(f"error: {' '.join(str(error).split())}") from None
