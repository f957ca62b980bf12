"""`--stream`: a run on rows that stay on the disk is, bit for bit, the run that holds them; also resumed."""

from __future__ import annotations

import json

import pytest
import screens

from rlkit.scripts import cli, offline

SFT = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(30)]
ALPACA = [{"instruction": f"Say {i}", "input": "", "output": "ok " * (i % 4 + 1)} for i in range(20)]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "no"} for i in range(20)]


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(sft=SFT, alpaca=ALPACA, pairs=PAIRS)


def run(task, output, command, *data, steps=4, flags=()):
    files = [str(task / name) for name in data]
    given = ["--model", str(task / "model"), "--data", *files, "--output", str(output), "--steps", str(steps)]
    how = ["--batch-size", "4", "--device", "cpu", "--lr", "1e-3", "--eval-steps", "0", "--save-steps", "2"]
    cli.main([command, *given, *how, *flags])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "data",
    [("sft.jsonl", "sft.jsonl"), ("sft.jsonl=1", "alpaca.jsonl=2")],
    ids=["joined", "mixed"],
)
def test_a_run_that_streams_takes_the_same_steps(task, tmp_path, data):
    constant = ["--lr-schedule", "constant"]
    held = run(task, tmp_path / "held", "sft", *data, flags=constant)
    run(task, tmp_path / "disk", "sft", *data, steps=2, flags=["--stream", *constant])
    assert run(task, tmp_path / "disk", "sft", *data, flags=["--stream", *constant, "--resume"]) == held


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", ["dpo", "reward_model"])
def test_pairs_stream_too(task, tmp_path, command):
    held = run(task, tmp_path / "held", command, "pairs.jsonl", steps=2)
    assert run(task, tmp_path / "disk", command, "pairs.jsonl", steps=2, flags=["--stream"]) == held


@pytest.mark.slow_cases(
    "sft-a.csv-flags3-{task}/a.csv: only files of JSONL and Parquet that are not",
    "sft-bad.jsonl-flags4-{task}/bad.jsonl, line 12: malformed JSON at column 1",
)
@pytest.mark.parametrize(
    ("command", "data", "flags", "message"),
    [
        ("kto", "pairs.jsonl", [], "--stream is for sft, dpo and reward_model: kto counts the labels of"),
        (
            "dpo",
            "pairs.jsonl",
            ["--precompute-reference"],
            "--precompute-reference excludes --stream: it reads all pairs",
        ),
        ("sft", "sft.jsonl", ["--max-tokens", "99"], "--stream: an example may have 2048 tokens, and --max"),
        ("sft", "a.csv", [], "{task}/a.csv: only files of JSONL and Parquet that are not"),
        ("sft", "bad.jsonl", [], "{task}/bad.jsonl, line 12: malformed JSON at column 1"),
    ],
)
def test_what_does_not_stream_is_one_line(task, tmp_path, monkeypatch, command, data, flags, message):
    monkeypatch.setattr("rlkit.scripts.offline.STREAM_HEAD", 5)
    (task / "a.csv").write_text("prompt,response\na,b\n")
    good = json.dumps(SFT[0]) + "\n"
    (task / "bad.jsonl").write_text(good * 11 + "oops\n" + good)
    given = ["--model", str(task / "model"), "--data", str(task / data), "--output", str(tmp_path / "run")]
    more = ["--steps", "1", "--batch-size", "13"] if data == "bad.jsonl" else []
    code = 1 if data == "bad.jsonl" else 2
    said = screens.refused(cli.main, [command, *given, "--stream", "--device", "cpu", *flags, *more], code=code)
    assert message.format(task=task) in said


@pytest.mark.slow_cases("30")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("head", [3, 30])
def test_what_is_odd_in_the_head_is_reported_and_that_the_rest_is_not_looked_at(
    make_task, tmp_path, caplog, monkeypatch, head
):
    rows = [{**row, "response": "a\r\nb"} for row in SFT[:2]] + SFT[2:]
    monkeypatch.setattr(offline, "STREAM_HEAD", head)
    run(make_task(sft=rows), tmp_path / "o", "sft", "sft.jsonl", steps=1, flags=["--stream"])
    (odd,) = [x for x in caplog.messages if "characters that are seldom meant" in x]
    assert f"kept 2 of {head} rows" in odd
    told = [x for x in caplog.messages if "first 3 rows of each file" in x]
    assert len(told) == (head == 3)
