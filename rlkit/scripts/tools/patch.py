"""Keep the weights that a server loads, on its machine, by the changes of each step.

    rlkit patch /shared/w /local/w      beside the server, until you end it
    rlkit grpo ... --weight-sync changes --weight-sync-folder /shared/w

A step changes about 1% of the weights in 16 bits, and the first folder carries only those: 1% to 3% of the bytes. A
copy that does not fit is found by its checksums, and gets whole files. It needs no GPU.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlkit.scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Flags."""

    folder: tyro.conf.Positional[Path]
    """--weight-sync-folder of the run"""
    copy: tyro.conf.Positional[Path]
    """folder on this machine's disk for the weights, the same path on all servers' machines"""


def main(args: Args) -> None:
    """Follow until it is interrupted; a line for each update."""
    from rlkit._util.changes import follow
    from rlkit.run.console import say

    while True:
        say(follow(args.folder, args.copy, name=socket.gethostname()))


if __name__ == "__main__":
    run(main, Args, __doc__)
