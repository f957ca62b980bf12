"""--optimizer FILE.py:FUNCTION as a user gives it; what cannot be one is refused before the model is loaded."""

from __future__ import annotations

import pytest
import screens

from rlkit.run.folder import read_metrics
from rlkit.scripts import cli

FILE = """
import torch

def sgd(groups):
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)

def number(groups):
    return 3

def negative(groups):
    return torch.optim.SGD(groups, lr=-1.0)
"""


@pytest.fixture(scope="module")
def task(make_task):
    folder = make_task(rows=[{"prompt": "a", "response": "b" * 5}] * 4)
    (folder / "mine.py").write_text(FILE)
    return folder


def flags(optimizer, output):
    how = f"--batch-size 2 --warmup-steps 0 --lr-schedule constant --lr 0.2 --output {output} --device cpu --steps 3"
    return ["sft", "--model", "model", "--data", "rows.jsonl", "--optimizer", optimizer, *how.split()]


@pytest.mark.parametrize("optimizer", ["mine.py:sgd", "torch.optim:Adagrad", "muon"])
def test_a_run_trains_with_it(optimizer, task, tmp_path, monkeypatch):
    monkeypatch.chdir(task)
    cli.main(flags(optimizer, tmp_path / "run"))
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("mine.py:gone", "--optimizer mine.py:gone: mine.py has no 'gone'; it has"),
        (
            "mine.py:number",
            "--optimizer mine.py:number failed on a parameter group: TypeError: --optimizer: the function",
        ),
        ("mine.py:negative", "--optimizer mine.py:negative failed on a parameter group: ValueError: Invalid learning"),
    ],
)
def test_what_is_none_is_one_line(optimizer, message, task, tmp_path, monkeypatch):
    monkeypatch.chdir(task)
    said = screens.refused(cli.main, flags(optimizer, tmp_path / "run"))
    assert " ".join(said.split()).startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()
