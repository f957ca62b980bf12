"""Send a run's metrics to a tracker, during training or afterwards.

    rlkit track RUN --to wandb --follow

It runs in its own process and reads only `metrics.jsonl` and `args.json` of the run folder, so a tracker that is slow
or down cannot delay or end the run. The last step sent is stored in the folder; the next call continues after it, in
the same run of the tracker.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.files import replace_file
from rlkit.run.folder import read_args, read_metrics


class Tracker(NamedTuple):
    """An open run of a tracker: its id there, and how a step's numbers are sent."""

    id: str
    send: Callable[[int, dict[str, float]], object]


@contextmanager
def wandb(folder: Path, project: str, run_id: str | None, args: dict[str, Any]) -> Iterator[Tracker]:
    """Weights & Biases; log in with `wandb login` first."""
    run = _module("wandb").init(project=project, name=folder.name, id=run_id, resume="allow", config=args)
    try:
        yield Tracker(run.id, lambda step, numbers: run.log(numbers, step=step))
    finally:
        run.finish()


@contextmanager
def mlflow(folder: Path, project: str, run_id: str | None, args: dict[str, Any]) -> Iterator[Tracker]:
    """MLflow, on the server of MLFLOW_TRACKING_URI; `project` is the experiment."""
    module = _module("mlflow")
    module.set_experiment(project)
    run = module.start_run(run_id=run_id, run_name=folder.name)
    try:
        if run_id is None:
            module.log_params({name: str(value)[:500] for name, value in args.items()})
        yield Tracker(run.info.run_id, lambda step, numbers: module.log_metrics(numbers, step=step))
    finally:
        module.end_run()


@contextmanager
def tensorboard(folder: Path, project: str, run_id: str | None, args: dict[str, Any]) -> Iterator[Tracker]:
    """TensorBoard: event files in `FOLDER/tensorboard`; `tensorboard --logdir` of a folder above compares runs."""
    writer = _module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
    if run_id is None:
        writer.add_text("args", f"    {json.dumps(args, indent=1)}".replace("\n", "\n    "))

    def send(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    try:
        yield Tracker(project, send)
    finally:
        writer.close()


TRACKERS = {"wandb": wandb, "mlflow": mlflow, "tensorboard": tensorboard}


def track(folder: Path | str, *, to: str, project: str = "rlkit", again: Callable[[], bool] = lambda: False) -> int:
    """Send all steps that were not sent yet, and repeat while `again()` is true; returns the number of steps sent.

    Each step is sent once: the steps that a resumed run repeats have the same numbers. Numbers that are not finite are
    left out. Errors: FileNotFoundError for a folder without metrics, ModuleNotFoundError without the tracker's package.
    """
    folder = Path(folder)
    read_metrics(folder)
    note, count = folder / f".track_{to}.json", 0
    known: dict[str, Any] = json.loads(note.read_bytes()) if note.exists() else {"id": None, "step": -1}
    config = read_args(folder)
    with TRACKERS[to](folder.resolve(), project, known["id"], config) as tracker:
        while True:
            for row in read_metrics(folder):
                if (step := row.pop("step")) > known["step"]:
                    tracker.send(step, {name: x for name, x in row.items() if math.isfinite(x)})
                    known = {"id": tracker.id, "step": step}
                    count += 1
            replace_file(note, json.dumps(known).encode())
            if not again():
                return count


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.rpartition(".")[2]
        raise ModuleNotFoundError(f"{package} is not installed: pip install {package} ({error})") from None
