"""A run that is resumed with other data begins at its first row, and one with the same data where it was."""

import importlib
import json

import nightly
import pytest

from rlkit.data import order
from rlkit.data.sources import identity
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.scripts import cli

SMALL = {"hidden": 16, "layers": 1, "intermediate": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}
RL = ["--reward", "r.py:score", "--max-new-tokens", "2", "--prompts-per-step", "4", "--max-prompt-tokens", "64"]
COMMANDS = {
    "grpo": [*RL, "--group-size", "2"], "ppo": RL, "distill": [*RL[2:], "--teacher", "in"],
    "sft": ["--batch-size", "4"], "sft --stream": ["--batch-size", "4", "--stream"], "dpo": ["--batch-size", "4"],
    "kto": ["--batch-size", "4"], "reward_model": ["--batch-size", "4"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for x in (tiny_model(tiny_tokenizer(), **SMALL), tiny_tokenizer()):
        x.save_pretrained("in")
    (tmp_path / "r.py").write_text("def score(completion, row):\n    return float(len(completion))\n")
    for name, num in (("a", 8), ("b", 20)):
        sft = [{"prompt": f"{name}{i}", "response": "x"} for i in range(num)]
        pairs = [{"prompt": f"{name}{i}", "chosen": "x", "rejected": "y"} for i in range(num)]
        for kind, rows in (("sft", sft), ("pairs", pairs)):
            (tmp_path / f"{name}_{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def visited(monkeypatch, command, data, *argv):
    """The rows of each place of the stream that a run takes."""
    seen, real = {}, order.mixed_index

    def noted(position, **how):
        seen[position] = real(position, **how)
        return seen[position]

    kind = "pairs" if command in ("dpo", "kto", "reward_model") else "sft"
    files = [f"{name}_{kind}.jsonl{weight}" for name, weight in data]
    shared = ["--model", "in", "--device", "cpu", "--output", "o", "--eval-steps", "0", "--warmup-steps", "0"]
    with monkeypatch.context() as patch:
        for module in ("rlkit.data.order", "rlkit.loops.task"):
            patch.setattr(importlib.import_module(module), "mixed_index", noted)
        cli.main([command.split()[0], *shared, "--data", *files, *COMMANDS[command], *argv])
    return seen


@pytest.mark.slow_cases("grpo", "sft", "dpo", "reward_model", "kto")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", nightly.only(COMMANDS, *({*COMMANDS} - {"ppo", "distill"})))
def test_a_changed_file_begins_at_its_first_row(command, folder, monkeypatch, capfd):
    per = 2 if command == "kto" else 1  # its pairs are two responses
    visited(monkeypatch, command, [("a", "")], "--steps", "1")
    capfd.readouterr()
    rows = visited(monkeypatch, command, [("b", "")], "--steps", "3", "--resume")
    n = 20 * per
    assert [rows[place] for place in range(4, 12)] == order.epoch_order(n, seed=0, epoch=0)[:8]
    assert ".jsonl is new or has changed: it begins at its first row" in capfd.readouterr().out


@pytest.mark.slow_cases("grpo")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", ["grpo", "sft"])
def test_an_added_file_leaves_the_place_of_the_other(command, folder, monkeypatch, capfd):
    first = visited(monkeypatch, command, [("a", "")], "--steps", "1")
    rows = visited(monkeypatch, command, [("a", "=1"), ("b", "=1")], "--steps", "3", "--resume")
    of_a = [rows[place] for place in range(4, 12) if rows[place] < 8]
    assert sorted([first[place] for place in range(4)] + of_a) == [*range(8)]
    assert "a_sft.jsonl goes on after 4 rows" in capfd.readouterr().out
    again = visited(monkeypatch, command, [("a", "=1"), ("b", "=1")], "--steps", "4", "--resume")
    of_b = [row - 8 for seen in (rows, again) for place, row in sorted(seen.items()) if place >= 4 and row >= 8]
    assert of_b == order.epoch_order(20, seed=0, epoch=0, part=1)[: len(of_b)]
    assert "begins at" not in capfd.readouterr().out, "said once"


@pytest.mark.slow_cases("b-grpo", "b-sft", "a-grpo")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", ["grpo", "sft"])
@pytest.mark.parametrize("new", ["a", "b"])
def test_a_run_of_a_version_that_kept_no_places_goes_on(command, new, folder, monkeypatch):
    module = importlib.import_module("rlkit.loops.rl" if command == "grpo" else "rlkit.loops.supervised")
    with monkeypatch.context() as patch:
        patch.setattr(module, "to_save", lambda *_, **__: None)
        visited(monkeypatch, command, [("a", "")], "--steps", "1")
    rows = visited(monkeypatch, command, [(new, "")], "--steps", "2", "--resume")
    whole = order.epoch_order(8 if new == "a" else 20, seed=0, epoch=0)
    assert [rows[place] for place in range(4, 8)] == (whole[4:8] if new == "a" else whole[:4])


def test_the_identity_of_files_is_their_contents(tmp_path):
    big = bytes(range(256)) * 8192
    for name, data in (("x", b"one\n"), ("y", b"one\n"), ("z", b"two\n"), ("big", big), ("big2", big[:-1] + b"!")):
        (tmp_path / name).write_bytes(data)
    number = {name: identity([tmp_path / name]).rpartition(" ")[2] for name in ("x", "y", "z", "big", "big2")}
    assert number["x"] == number["y"]
    assert len({*number.values()}) == 4
    assert identity([tmp_path / "x", tmp_path / "z"]) != identity([tmp_path / "z", tmp_path / "x"])
    assert identity(["owner/name:train"]).startswith("owner/name:train ")
