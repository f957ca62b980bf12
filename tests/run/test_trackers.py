"""What trackers are sent: every step once, with its numbers, in one run of theirs, also after a resume."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from rlkit.run.trackers import track
from rlkit.scripts import cli


class Wandb:
    """The part of wandb that is used, which writes down what it is given."""

    def __init__(self):
        self.calls = []

    def init(self, **kwargs):
        self.calls.append(("init", kwargs))
        log = lambda numbers, step: self.calls.append((step, numbers))
        return SimpleNamespace(id=kwargs["id"] or "new", log=log, finish=lambda: self.calls.append(("finish", {})))


def write(folder, *rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def wandb(monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_every_step_is_sent_once_and_a_second_call_continues(tmp_path, wandb):
    (tmp_path / "args.json").write_text('{"lr": 0.1}')
    write(tmp_path, {"step": 0, "eval/greedy": 0.5}, {"step": 1, "loss": 2.0, "kl": float("nan")})
    assert track(tmp_path, to="wandb", project="p") == 2
    opened = {"project": "p", "name": tmp_path.name, "id": None, "resume": "allow", "config": {"lr": 0.1}}
    assert wandb.calls == [("init", opened), (0, {"eval/greedy": 0.5}), (1, {"loss": 2.0}), ("finish", {})]
    wandb.calls.clear()
    write(tmp_path, {"step": 0, "eval/greedy": 0.5}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0})
    assert track(tmp_path, to="wandb", project="p") == 1
    assert wandb.calls == [("init", {**opened, "id": "new"}), (2, {"loss": 1.0}), ("finish", {})]


def test_following_sends_new_lines_and_survives_lost_steps(tmp_path, wandb):
    write(tmp_path, *({"step": s, "loss": float(s)} for s in range(1, 4)))
    later = iter([range(1, 3), range(1, 6)])  # killed after step 3, resumed from step 2

    def again():
        steps = next(later, None)
        if steps is not None:
            write(tmp_path, *({"step": s, "loss": float(s)} for s in steps))
        return steps is not None

    assert track(tmp_path, to="wandb", again=again) == 5
    assert [call for call in wandb.calls if isinstance(call[0], int)] == [(s, {"loss": float(s)}) for s in range(1, 6)]


def test_mlflow_gets_the_arguments_once(tmp_path, monkeypatch):
    calls = []
    note = lambda name: (
        lambda *args, **kwargs: calls.append((name, args, kwargs)) or SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    )
    names = ("set_experiment", "start_run", "log_params", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**{name: note(name) for name in names}))
    (tmp_path / "args.json").write_text('{"lr": 0.1, "env": null}')
    for step in (1, 2):
        write(tmp_path, *({"step": s, "loss": 0.5 * s} for s in range(1, step + 1)))
        assert track(tmp_path, to="mlflow", project="p") == 1
    assert [name for name, _, _ in calls] == [*names, *(n for n in names if n != "log_params")]
    assert calls[2][1] == ({"lr": "0.1", "env": "None"},)
    assert calls[6][2]["run_id"] == "r1"
    assert calls[7] == ("log_metrics", ({"loss": 1.0},), {"step": 2})


def test_a_tracker_that_is_not_installed_and_a_folder_without_a_run_are_named(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["track", str(tmp_path), "--to", "wandb"])
    assert "holds no metrics" in capsys.readouterr().err
    write(tmp_path, {"step": 1})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["track", str(tmp_path), "--to", "wandb"])
    assert "pip install wandb" in capsys.readouterr().err
