"""Send a run folder to Weights & Biases, MLflow, TensorBoard or Trackio, which `--track` does while it trains.

    rlkit track runs/grpo --to wandb --project sorting
    rlkit track runs/grpo --to tensorboard --follow     while the run trains

Sent are the arguments, metrics, sampled answers, the picture, and the model of a run with `--track-model`; nothing
twice.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlkit.scripts.cli import run
from rlkit.settings import Tracker


@dataclass(frozen=True)
class Args:
    """Flags."""

    folder: tyro.conf.Positional[Path]
    """run folder with a metrics.jsonl"""
    to: Tracker
    """the tracker; its package must be installed"""
    project: str | None = None
    """project (wandb, trackio) or experiment (mlflow). None: that of the run, else rlkit"""
    follow: bool = False
    """continue until Ctrl-C, looking for new steps every five seconds"""


def main(args: Args) -> None:
    """Send the steps, and print how many."""
    from rlkit.run.tracking import track

    def again() -> bool:
        try:
            time.sleep(5 if args.follow else 0)
        except KeyboardInterrupt:
            return False
        return args.follow

    count = track(args.folder, to=args.to, project=args.project, again=again)
    sys.stdout.write(f"{count} steps sent to {args.to}\n")


if __name__ == "__main__":
    run(main, Args, __doc__)
