"""What each tracker is given, and how: Weights & Biases, MLflow, TensorBoard and Trackio.

`rlkit.run.tracking` opens one of `TRACKERS` in a process beside the run.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Tracker(NamedTuple):
    """An open run of a tracker.

    Attributes:
        id: its id there, which opens the same run again.
        numbers: send the numbers of a step.
        table: send rows of equal keys, with the table's name, at a step.
        picture: send a PNG.
        model: send the folder of a model as a new version; None where the tracker keeps no files.
        sure: what is sent has arrived when the call returns; else when the run is closed.
    """

    id: str
    numbers: Callable[[int, dict[str, float]], object]
    table: Callable[[int, str, Sequence[Row]], object]
    picture: Callable[[Path], object]
    model: Callable[[Path], object] | None
    sure: bool


@contextmanager
def wandb(folder: Path, project: str, run_id: str | None, args: Row) -> Iterator[Tracker]:
    """Weights & Biases; log in with `wandb login` first. Its own files are in `FOLDER/wandb`."""
    module = load("wandb")
    run = module.init(
        project=project, name=folder.name, id=run_id, resume="allow", config=args, dir=str(folder),
        settings=module.Settings(console="off"),
    )  # fmt: skip
    with _of_artifacts(folder, module, run) as send:
        yield send(
            run.id, lambda rows: module.Table(columns=[*rows[0]], data=[[*x.values()] for x in rows]), sure=False
        )


@contextmanager
def _of_artifacts(folder: Path, module: Any, run: Any) -> Iterator[Callable[..., Tracker]]:
    """A function from id, table of rows and `sure` to the tracker of a run with the methods of wandb's."""

    def model(path: Path) -> None:
        artifact = module.Artifact(_name(folder), type="model")
        artifact.add_dir(str(path))
        run.log_artifact(artifact)

    try:
        yield lambda run_id, table_of, sure: Tracker(
            run_id, lambda step, numbers: run.log(numbers, step=step),
            lambda step, name, rows: run.log({f"samples/{name}": table_of(rows)}, step=step),
            lambda path: run.log({"curves": module.Image(str(path))}), model, sure,
        )  # fmt: skip
    finally:
        run.finish()


@contextmanager
def mlflow(folder: Path, project: str, run_id: str | None, args: Row) -> Iterator[Tracker]:
    """MLflow, on the server or database of MLFLOW_TRACKING_URI; `project` is the experiment.

    The model becomes a version of the registered model with the name of the run folder.
    """
    module = load("mlflow")
    module.set_experiment(project)
    run = module.start_run(run_id=run_id, run_name=folder.name)

    def table(step: int, name: str, rows: Sequence[Row]) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        module.log_table(columns, f"samples/{name}_{step:06d}.json")

    def model(path: Path) -> None:
        client, name = module.MlflowClient(), _name(folder)
        module.log_artifacts(str(path), "model")
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        client.create_model_version(name, f"{run.info.artifact_uri}/model", run.info.run_id)

    try:
        if run_id is None:
            module.log_params({name: str(value)[:500] for name, value in args.items()})
        yield Tracker(
            run.info.run_id, lambda step, numbers: module.log_metrics(numbers, step=step), table,
            lambda path: module.log_artifact(str(path)), model, sure=True,
        )  # fmt: skip
    finally:
        module.end_run()


@contextmanager
def tensorboard(folder: Path, project: str, run_id: str | None, args: Row) -> Iterator[Tracker]:
    """TensorBoard: event files in `FOLDER/tensorboard`; `tensorboard --logdir` of a folder above compares runs."""
    writer = load("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder / "tensorboard"))
    event, of = load("tensorboard.compat.proto.event_pb2"), load("tensorboard.compat.proto.summary_pb2")
    tensor, dtype = load("tensorboard.compat.proto.tensor_pb2"), load("tensorboard.compat.proto.types_pb2")

    def add(step: int, **value: Any) -> None:
        summary = of.Summary(value=[of.Summary.Value(**value)])
        writer.add_event(event.Event(wall_time=time.time(), step=step, summary=summary))

    def text(step: int, name: str, markdown: str) -> None:
        plugin = of.SummaryMetadata(plugin_data=of.SummaryMetadata.PluginData(plugin_name="text"))
        content = tensor.TensorProto(dtype=dtype.DT_STRING, string_val=[markdown.encode()])
        add(step, tag=name, metadata=plugin, tensor=content)

    def send(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            add(step, tag=name, simple_value=value)
        writer.flush()

    def picture(path: Path) -> None:
        data = path.read_bytes()
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))  # of a PNG's first chunk
        image = of.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        add(0, tag="curves", image=image)

    try:
        if run_id is None:
            text(0, "args", f"    {json.dumps(args, indent=1)}".replace("\n", "\n    "))
        yield Tracker(
            project, send, lambda step, name, rows: text(step, f"samples/{name}", _markdown(rows)), picture, None, True
        )
    finally:
        writer.close()


@contextmanager
def trackio(folder: Path, project: str, run_id: str | None, args: Row) -> Iterator[Tracker]:
    """Trackio: a database on this machine (TRACKIO_DIR), which `trackio show` serves."""
    module = load("trackio")
    name = run_id or f"{folder.name}-{args.get('run', time.time_ns())}"  # its runs are told apart by their names
    run = module.init(project=project, name=name, config=args, resume="allow", auto_log_gpu=False, embed=False)
    with _of_artifacts(folder, module, run) as send:
        yield send(name, lambda rows: module.Table(dataframe=load("pandas").DataFrame(rows)), sure=True)


TRACKERS = {"wandb": wandb, "mlflow": mlflow, "tensorboard": tensorboard, "trackio": trackio}


def load(name: str) -> Any:
    """Import a tracker's module; ModuleNotFoundError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ModuleNotFoundError(f"{package} is not installed: pip install {package} ({error})") from None


def _name(folder: Path) -> str:
    """The name of the folder with characters that every registry takes."""
    return re.sub(r"[^\w.-]", "-", folder.name)


def _markdown(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown; a cell is one line, and none of its characters is markup."""

    def cell(value: Any) -> str:
        text = " ".join(str(value).split())
        return re.sub(r"([\\`*_{}\[\]<>()#+!|~-])", r"\\\1", text)

    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in (rows[0], *(row.values() for row in rows))]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
