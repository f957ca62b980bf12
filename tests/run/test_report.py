"""What the report page is made of: its data, its file, and what is refused in one line."""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import math
import random
import shutil
import tarfile
from pathlib import Path

import pytest

from rlkit.run import trajectories
from rlkit.run.folder import open_run
from rlkit.run.report import page as report
from rlkit.scripts import cli

OLD = Path(__file__).parent / "old" / "runs_0.1.0.tar.xz"


def lines(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(step: int, group: int, i: int, **more) -> dict:
    row = {
        "step": step,
        "group": group,
        "gold": "7",
        "prompt": f"<user>question {group}<end>",
        "completion": f"answer {i}",
    }
    row |= {"reward": float(i % 2), "rewards": {"format": 1.0}, "score": None, "length": i + 1, "versions": [step - 1]}
    return row | {"finish_reason": "stop", "info": {}, "advantage": i - 0.5, **more}


def write_run(folder: Path, *, steps=3, prompts=4, size=2, script="grpo.py", **args) -> Path:
    lines(
        folder / "metrics.jsonl", [{"step": s, "reward/mean": s / steps, "time/step": 1.0} for s in range(1, steps + 1)]
    )
    (folder / "args.json").write_text(json.dumps({"format": 1, "script": script, "steps": steps, "lr": 1e-3, **args}))
    for step in range(1, steps + 1):
        rows = [sample(step, group, i) for group in range(prompts) for i in range(size)]
        lines(folder / f"trajectories/train_{step:06d}.jsonl", rows)
    return folder


def unpacked(blocks: list[str]) -> list:
    return [json.loads(gzip.decompress(base64.b64decode(block))) for block in blocks]


def test_the_page_has_every_sample_of_a_small_run(tmp_path):
    run = write_run(tmp_path / "run")
    index, *chunks = unpacked(report.data(run))
    assert index["runs"][0]["notes"] == []
    rows = []
    for _, kind, step, row, chunk, place, title, rewards, lengths, tokens in index["groups"]:
        group = chunks[chunk][place]
        assert (kind, title, tokens) == ("train", str(row), 0), "what all prompts share is not in the title"
        assert (rewards, lengths) == ([0.0, 1.0], [1, 2])
        assert group["prompt"] == f"<user>question {row}<end>"
        rows += [
            {"step": step, "group": row, "gold": group["gold"], "prompt": group["prompt"], **x} for x in group["rows"]
        ]
    written = [json.loads(x) for p in run.glob("trajectories/*") for x in p.read_text().splitlines()]
    assert len(rows) == len(written)
    assert all(row in rows for row in written)


def test_pieces_of_an_episode_count_once_and_the_text_of_tokens_is_there_once(tmp_path):
    run = write_run(tmp_path / "run", steps=1, prompts=0)
    tokens = {"text": ["ans", "wer 0"], "logp": [-0.5, -1.0], "mask": 1}
    rows = [sample(1, 0, 0, tokens=tokens), sample(1, 0, 1, continues=True), sample(1, 0, 2)]
    lines(run / "trajectories/train_000001.jsonl", rows)
    index, chunk = unpacked(report.data(run))
    ((*_, rewards, lengths, has_tokens),) = index["groups"]
    assert (rewards, lengths, has_tokens) == ([1.0, 0.0], [2, 3], 1)
    first, second, _ = chunk[0]["rows"]
    assert "completion" not in first
    assert first["tokens"] == tokens
    assert second["completion"] == "answer 1"


def test_numbers_that_are_none_are_texts(tmp_path):
    run = write_run(tmp_path / "run", steps=1, prompts=0)
    lines(run / "metrics.jsonl", [{"step": 1, "reward/mean": math.nan}, {"step": 2, "reward/mean": 0.5}])
    lines(run / "trajectories/train_000001.jsonl", [sample(1, 0, 0, reward=math.nan, rewards={"a": -math.inf})])
    index, chunk = unpacked(report.data(run))
    assert index["runs"][0]["series"]["reward/mean"] == [[1, 2], [None, 0.5]]
    assert chunk[0]["rows"][0]["reward"] == "nan"
    assert chunk[0]["rows"][0]["rewards"] == {"a": "-inf"}


def test_many_samples_are_taken_in_whole_groups_of_the_same_prompts(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", steps=5, prompts=200)
    kept = {"text": ["a"], "logp": -1.0}
    rows = [sample(3, group, i) | ({"tokens": kept} if group == 150 else {}) for group in range(200) for i in range(2)]
    lines(run / "trajectories/train_000003.jsonl", rows)
    monkeypatch.setattr(trajectories, "MAX_SAMPLES", 400)
    found = trajectories.read_trajectories(run)
    assert not found.whole
    assert 250 < sum(len(group.rows) for group in found.groups) < 550
    assert {len(group.rows) for group in found.groups} == {2}
    by_step = [{group.row for group in found.groups if group.step == step} for step in range(1, 6)]
    assert 150 in by_step[2]
    assert by_step[0] == by_step[1] == by_step[2] - ({150} - by_step[0])
    note = unpacked(report.data(run))[0]["runs"][0]["notes"][0]
    assert "of samples; this page has" in note
    monkeypatch.setattr(trajectories, "MAX_READ", 3 * (run / "trajectories/train_000001.jsonl").stat().st_size)
    assert {group.step for group in trajectories.read_trajectories(run).groups} == {1, 3, 5}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gigabyte_of_samples_makes_a_page_that_can_be_mailed(tmp_path):
    run = write_run(tmp_path / "run", steps=1, prompts=0)
    words = [f"{random.Random(i).randrange(10**6)} " for i in range(2000)]
    for step in range(1, 21):
        with (run / f"trajectories/train_{step:06d}.jsonl").open("w") as file:
            for group in range(500):
                text = "".join(random.Random(f"{step} {group}").choices(words, k=1000))
                file.write(f"{json.dumps(sample(step, group, step, completion=text * 2))}\n" * 8)
    size = sum(path.stat().st_size for path in run.glob("trajectories/*"))
    assert size > 1e9
    page = report.write_report(run)
    assert page.stat().st_size < 20e6
    index = unpacked(report.data(run))[0]
    assert f"wrote {size / 1e9:.1f} GB of samples" in index["runs"][0]["notes"][0]
    assert len({group[2] for group in index["groups"]}) > 4


def test_a_half_written_run_has_a_page(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "trajectories/train_000003.jsonl", "trajectories/train_000002.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 4, "group"')
    index = unpacked(report.data(run))[0]
    assert index["runs"][0]["facts"]["Steps"] == "3 of 3"
    assert len(index["groups"]) == 12


def test_a_run_of_the_first_version_has_a_page(tmp_path):
    with lzma.open(OLD) as file, tarfile.open(fileobj=file) as old:
        old.extractall(tmp_path, filter="data")
    runs = sorted({path.parent for path in tmp_path.rglob("metrics.jsonl")})
    assert len(runs) > 1
    for run in runs:
        assert report.write_report(run) == run / "report.html"


def test_runs_are_compared_and_their_arguments(tmp_path):
    a, b = write_run(tmp_path / "x/run", seed=1), write_run(tmp_path / "y/run", seed=2, steps=4)
    lines(b / "starts.jsonl", [{"step": 0, "command": "rlkit ppo"}, {"step": 2, "command": "rlkit ppo --resume"}])
    index = unpacked(report.data(a, b))[0]
    assert [run["name"] for run in index["runs"]] == ["x/run", "y/run"]
    assert index["differences"] == {"steps": ["3", "4"], "seed": ["1", "2"]}
    assert index["runs"][1]["facts"]["Steps"] == "4 of 4, resumed after step 2"
    assert index["runs"][1]["command"] == "rlkit ppo"
    assert {group[0] for group in index["groups"]} == {0, 1}


def error(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", *map(str, argv)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", script="dpo.py")
    lines(other / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (tmp_path / "empty").mkdir()
    assert error(capsys, "none") == "none holds no metrics.jsonl: give the folder of a run"
    assert error(capsys, "empty") == "empty holds no metrics.jsonl: give the folder of a run"
    assert error(capsys, "run/args.json") == "run/args.json is a file: give its folder, run"
    assert error(capsys, run, other).startswith("run is a run of grpo and other of dpo, which measure different things")
    assert error(capsys, run, run) == "a run folder is given twice: give each once"
    assert error(capsys, run, "--out", "no/page.html") == "--out no/page.html: there is no folder no"
    assert error(capsys, run, "--out", "empty").startswith("--out empty is a folder: give a file")
    assert error(capsys, run, "--serve", "--port", "99999") == "--port must be from 0 to 65535, got 99999"
    assert error(capsys, run, "--serve", "--force") == "--serve excludes --force: it writes no file"
    (run / "args.json").write_text('{"format": 9}')
    assert (
        error(capsys, run)
        == f"{run} was written in format 9, and this version reads format 1: use the version that wrote it"
    )
    (run / "args.json").unlink()
    path = run / "trajectories/train_000002.jsonl"
    path.write_text("no sample\n" + path.read_text())
    assert error(capsys, run) == f"{path}, line 1 is not a sample: b'no sample\\n'; delete that line"
    (run / "metrics.jsonl").write_text("")
    assert "metrics.jsonl holds no finished step" in error(capsys, run)


def test_a_file_is_replaced_with_force_only_unless_it_is_the_runs_own_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for _ in range(2):
        cli.main(["report", str(a)])
    assert capsys.readouterr().out == f"{a}/report.html\n" * 2
    (a / "report.html").write_text("mine")
    assert "is there already" in error(capsys, a)
    assert (a / "report.html").read_text() == "mine"
    cli.main(["report", str(a), str(b)])
    assert "is there already" in error(capsys, a, b)
    cli.main(["report", str(a), str(b), "--force"])
    assert (tmp_path / "report.html").exists()


def test_a_failed_report_is_one_line_and_the_run_continues(tmp_path, monkeypatch, capsys):
    with open_run(tmp_path / "run", steps=2, active=True) as run:
        run.log(1, {"reward/mean": 1.0})
        monkeypatch.setattr(report, "_asset", lambda name: (_ for _ in ()).throw(RuntimeError("broken:\nread more")))
        report.report(run)
        run.log(2, {"reward/mean": 1.0})
    shown = capsys.readouterr().out.splitlines()
    assert shown[2] == "no report: RuntimeError: broken:"
    assert shown[3].split() == ["2", "1.000"]


def test_each_start_of_a_run_leaves_its_command_without_passwords(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--engine-urls", "http://me:secret@host:1"])
    for start in (-1, 1, 1):  # the second start from step 1 replaces the first
        with open_run(tmp_path / "run", steps=2, active=True, resume=start > 0, start=start) as run:
            run.log(max(1, start + 1), {"reward/mean": 1.0})
    first, second = map(json.loads, (tmp_path / "run/starts.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 1)
    assert first["command"] == "python train.py --engine-urls 'http://me:***@host:1'"
    assert first["machine"]["cores"] >= 1
    assert first["versions"]["rlkit"]
    page = report.write_report(tmp_path / "run").read_text()
    shutil.rmtree(tmp_path / "run")
    assert "secret" not in page
