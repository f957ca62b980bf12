"""What trackers have after a run, read from their own files and databases: every step once, also after an outage."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import get_args

import nightly
import pytest
import screens

from rlkit.run import tracking
from rlkit.run.cores import Usage
from rlkit.run.trackers import TRACKERS
from rlkit.run.tracking import System, track
from rlkit.scripts import cli
from rlkit.settings import TAKE_MODELS, Tracker


def test_each_tracker_has_a_name_on_the_command_line_and_a_reader_here():
    assert TRACKERS.keys() == {*get_args(Tracker)} == READ.keys()


ARGS = {"lr": 0.1, "env": None, "run": "ab12", **{f"flag_{i}": i for i in range(120)}}


def need(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed (make test-trackers)")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Everything that a tracker keeps is in the folder of the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)


def write(folder, *rows):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(b"".join(b"\0" + bytes(3 * width) for _ in range(height)))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path):
    """A run that has ended: two steps, samples, the picture, a model."""
    folder = tmp_path / "my run"
    write(folder, {"step": 0, "eval/greedy": 0.5}, {"step": 1, "loss": 2.0, "kl": float("nan")})
    (folder / "args.json").write_text(json.dumps(ARGS | {"track_model": True, "track_project": "sums"}))
    (folder / "trajectories").mkdir()
    rows = [{"prompt": f"{i}+1", "completion": "<b>|\x1b[31m 7 |", "reward": i / 2} for i in range(40)]
    (folder / "trajectories" / "train_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.png").write_bytes(png(7, 5))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder


# What each tracker has: arguments, {step: numbers}, answers of the table, the picture, files of the model.


def read_mlflow(folder):
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    steps = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            steps.setdefault(metric.step, []).append((key, metric.value))
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/train_000001.json")).read_text())
    answers = [row[table["columns"].index("completion")] for row in table["data"]]
    picture = Path(client.download_artifacts(run.info.run_id, "metrics.png")).read_bytes()
    (version,) = client.search_model_versions("name = 'my-run'")
    models = [path.name for path in Path(version.source).iterdir()]
    return run.data.params["lr"], steps, answers, picture, models


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps = {}
    for key in events.Tags()["scalars"]:
        for event in events.Scalars(key):
            steps.setdefault(event.step, []).append((key, event.value))
    lr = json.loads(events.Tensors("args")[0].tensor_proto.string_val[0])["lr"]
    lines = events.Tensors("samples/train")[0].tensor_proto.string_val[0].decode().splitlines()
    at = lines[0].split(" | ").index("completion")
    answers = [line.replace("\\|", "¦").split(" | ")[at].replace("\\", "").replace("¦", "|") for line in lines[2:]]
    picture = events.Images("curves")
    assert (picture[0].width, picture[0].height) == (7, 5)
    return str(lr), steps, [x.replace("x1b", "\\x1b") for x in answers], picture[0].encoded_image_string, None


def read_trackio(folder):
    database = sqlite3.connect(Path("trackio") / "sums.db")
    steps, answers = {}, []
    for step, data in database.execute("select step, metrics from metrics order by id"):
        row = json.loads(data)
        steps.setdefault(step, []).extend((k, v) for k, v in row.items() if isinstance(v, float))
        answers += [x["completion"] for x in row.get("samples/train", {}).get("_value", ())]
    (config,) = database.execute("select config from configs").fetchall()
    (manifest,) = database.execute("select manifest from artifact_versions").fetchall()
    pictures = [*Path("trackio").rglob("*.png")]
    return (
        str(json.loads(config[0])["lr"]),
        steps,
        answers,
        pictures[0].read_bytes(),
        [x["path"] for x in json.loads(manifest[0])],
    )


def read_wandb(folder):
    lr, steps, answers, models = None, {}, [], []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("run") and lr is None:
                lr = next(x.value_json for x in record.run.config.update if x.key == "lr")
                assert (record.run.project, record.run.display_name) == ("sums", "my run")
            elif record.HasField("history"):
                row = {(x.key or ".".join(x.nested_key)): json.loads(x.value_json) for x in record.history.item}
                numbers = [(k, float(v)) for k, v in row.items() if k in ("loss", "kl", "eval/greedy")]
                steps.setdefault(row["_step"], []).extend(numbers)
            elif record.HasField("artifact") and record.artifact.type == "model":
                models += [entry.path for entry in record.artifact.manifest.contents]
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/samples/train*.json")
    read = json.loads(table.read_text())
    answers = [row[read["columns"].index("completion")] for row in read["data"]]
    (picture,) = folder.glob("wandb/offline-run-*/files/media/images/curves*.png")
    return lr, steps, answers, picture.read_bytes(), models


def records(path):
    """The records of an offline run: LevelDB's log format after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(whole)
            whole = b""


READ = {"wandb": read_wandb, "mlflow": read_mlflow, "tensorboard": read_tensorboard, "trackio": read_trackio}


@pytest.mark.parametrize("name", nightly.only(TRACKERS, "tensorboard"))
def test_a_tracker_has_a_run_once_and_a_second_call_continues(name, folder):
    need(name)
    assert track(folder, to=name) == 2
    write(folder, {"step": 0, "eval/greedy": 0.5}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0})
    assert track(folder, to=name) == 1
    assert track(folder, to=name) == 0
    lr, steps, answers, picture, models = READ[name](folder)
    assert lr == "0.1"
    found = {step: numbers for step, numbers in steps.items() if numbers}
    assert found == {0: [("eval/greedy", 0.5)], 1: [("loss", 2.0)], 2: [("loss", 1.0)]}
    assert answers == ["<b>|\\x1b[31m 7 |"] * 16
    assert picture == png(7, 5)
    assert models == (["config.json"] if name in TAKE_MODELS else None)


def test_following_sends_new_lines_and_survives_lost_steps(tmp_path):
    need("tensorboard")
    folder = tmp_path / "run"
    write(folder, *({"step": s, "loss": float(s)} for s in range(1, 4)))
    later = iter([range(1, 3), range(1, 6)])  # killed after step 3, resumed from step 2

    def again():
        steps = next(later, None)
        if steps is not None:
            write(folder, *({"step": s, "loss": float(s)} for s in steps))
        return steps is not None

    assert track(folder, to="tensorboard", again=again) == 5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(s, float(s)) for s in range(1, 6)]


def test_the_answers_of_each_evaluation_are_sent(tmp_path):
    need("tensorboard")
    folder, kinds = tmp_path / "run", ("eval_greedy", "eval_sampled_easy_sums", "eval_sampled_hard")
    write(folder, {"step": 2, "loss": 1.0})
    (folder / "trajectories").mkdir()
    for kind in (*kinds, "train"):  # of step 2, no answers are printed
        row = {"group": 0, "prompt": "a", "completion": kind, "reward": 1.0}
        (folder / "trajectories" / f"{kind}_000002.jsonl").write_text(json.dumps(row) + "\n")
    assert track(folder, to="tensorboard") == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {tag for tag in events.Tags()["tensors"] if "samples" in tag} == {f"samples/{kind}" for kind in kinds}


def flags(task, output, *more):
    sizes = "--prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-steps 0 --steps 3"
    files = f"--model {task / 'model'} --data {task / 'rows.jsonl'} --reward {task / 'reward.py'}:score"
    return ["grpo", *files.split(), *sizes.split(), "--output", str(output), *more]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_run_tracks_itself_and_closes_the_tracker(task, tmp_path):
    need("tensorboard")
    cli.main(flags(task, tmp_path / "run", "--track", "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event.value for event in events.Scalars("reward/mean")] == pytest.approx([x["reward/mean"] for x in lines])
    assert 0 <= events.Scalars("system/cpu")[0].value <= 1.1
    assert events.Scalars("system/memory")[0].value > 0.1
    assert "samples/train" in events.Tags()["tensors"]
    assert json.loads((tmp_path / "run" / ".track_tensorboard.json").read_text())["step"] == 3


@pytest.mark.usefixtures("no_pictures")
def test_an_outage_does_not_end_a_run_and_the_rest_is_sent_later(task, tmp_path, monkeypatch, capfd):
    need("mlflow")
    monkeypatch.setattr(tracking, "_CLOSE_S", 1.0)
    with monkeypatch.context() as down:
        down.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        cli.main(flags(task, tmp_path / "my run", "--track", "mlflow", "--track-project", "sums"))
    assert (tmp_path / "my run" / "model" / "config.json").exists()
    said = " ".join(capfd.readouterr().out.split())
    assert f"not all was sent to mlflow: it took too long; later: rlkit track '{tmp_path}/my run' --to mlflow" in said
    assert track(tmp_path / "my run", to="mlflow") == 3
    import mlflow

    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("sums").experiment_id])
    assert run.data.metrics["reward/mean"] >= 0


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_a_tracker_that_fails_is_named_with_its_error(task, tmp_path, capfd):
    need("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file in the way")
    cli.main(flags(task, tmp_path / "run", "--track", "tensorboard"))
    said = " ".join(capfd.readouterr().out.split())
    assert "not all was sent to tensorboard: " in said
    assert f"later: rlkit track {tmp_path}/run --to tensorboard" in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_nobody_logged_in_is_said_before_a_model_is_loaded(task, tmp_path, monkeypatch):
    need("wandb")
    monkeypatch.delenv("WANDB_MODE")
    code = f"from rlkit.scripts import cli; cli.main({flags(task, tmp_path / 'run', '--track', 'wandb')!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    fix = "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"
    assert f"error: --track wandb: nobody is logged in to Weights & Biases: {fix}" in " ".join(found.stderr.split())
    assert (found.returncode, found.stdout) == (2, "")


@pytest.mark.slow
def test_a_tracker_that_is_not_installed_and_a_folder_without_a_run_are_named(task, tmp_path, monkeypatch):
    assert "holds no metrics" in screens.refused(cli.main, ["track", str(tmp_path), "--to", "wandb"])
    write(tmp_path, {"step": 1})
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install wandb" in screens.refused(cli.main, ["track", str(tmp_path), "--to", "wandb"])
    assert "pip install wandb" in screens.refused(cli.main, flags(task, tmp_path / "run", "--track", "wandb"))
    assert not (tmp_path / "run").exists()


def test_the_use_of_the_machine_is_the_mean_of_the_readings(monkeypatch):
    now = iter([(0.0, 10.0), (2.0, 11.0), (4.0, 15.0)])  # s, CPU seconds
    monkeypatch.setattr(tracking, "usage", lambda: Usage(*next(now), 0.0))
    monkeypatch.setattr(tracking, "num_cores", lambda: 2)
    system = System()
    system.read()
    system.read()
    assert system.means()["system/cpu"] == (0.25 + 1.0) / 2
    assert system.means() == {}
