"""Send the metrics of a run folder to Weights & Biases, MLflow or TensorBoard.

    rlkit track runs/grpo --to wandb --project sorting
    rlkit track runs/grpo --to tensorboard --follow     while the run trains

Steps that were sent before are not sent again.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rlkit.scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Flags."""

    folder: tyro.conf.Positional[Path]
    """run folder with a metrics.jsonl"""
    to: Literal["wandb", "mlflow", "tensorboard"]
    """the tracker; its package must be installed"""
    project: str = "rlkit"
    """project (wandb) or experiment (mlflow)"""
    follow: bool = False
    """continue until Ctrl-C, looking for new steps every five seconds"""


def main(args: Args) -> None:
    """Send the steps, and print how many."""
    from rlkit.run.trackers import track

    def again() -> bool:
        if args.follow:
            time.sleep(5)
        return args.follow

    with suppress(KeyboardInterrupt):
        count = track(args.folder, to=args.to, project=args.project, again=again)
        sys.stdout.write(f"{count} steps sent to {args.to}\n")


if __name__ == "__main__":
    run(main, Args, __doc__)
