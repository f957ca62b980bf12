"""The run folder: complete, each step once, readable by a person, whatever interrupts the run."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.run.folder import (
    drop_after,
    keep_args,
    new_metrics,
    open_run,
    read_metrics,
)
from rlkit.run.report.plot import draw
from rlkit.run.saving import restore

ROOT = Path(__file__).parents[2]


def python(script: str, *args: object, **kwargs) -> subprocess.Popen:
    """A child process running `script`, with pipes."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **kwargs)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_in_the_file_when_log_returns(tmp_path):
    with open_run(tmp_path / "run", steps=2) as run:
        run.log(1, {"reward/mean": torch.tensor(0.1), "count": 3, "time/step": 0.25})
        before = time.time()
        (row,) = read_metrics(tmp_path / "run")
        assert list(row) == ["step", "reward/mean", "count", "time/step", "time/unix"]
        assert abs(row.pop("time/unix") - before) < 60
        assert row == {"step": 1, "reward/mean": 0.10000000149011612, "count": 3, "time/step": 0.25}


def test_a_file_that_grows_is_read_on_from_where_it_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert new_metrics(tmp_path, 0) == ([], 0)
    path.write_bytes(b'{"step": 1, "x": 1.0}\n{"step": 2, "x"')
    rows, at = new_metrics(tmp_path, 0)
    assert ([row["step"] for row in rows], at) == ([1], 22)
    assert new_metrics(tmp_path, at) == ([], 22)
    with path.open("ab") as file:
        file.write(b': 2.0}\n{"step": 3, "x": 3.0}\n')
    rows, at = new_metrics(tmp_path, at)
    assert ([row["step"] for row in rows], at) == ([2, 3], 66)
    path.write_bytes(b'{"step": 1, "x": 1.0}\n')  # a resumed run has dropped what came later
    assert new_metrics(tmp_path, at)[1] == 22


@given(st.lists(st.floats(), min_size=1, max_size=5))
def test_floats_come_back_bit_for_bit(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run") / "run"
    with open_run(folder, steps=1) as run:
        run.log(1, {str(i): x for i, x in enumerate(values)})
    (row,) = read_metrics(folder)
    for i, x in enumerate(values):
        assert row[str(i)] == x or (math.isnan(row[str(i)]) and math.isnan(x))
        assert math.copysign(1, row[str(i)]) == math.copysign(1, x) or math.isnan(x)


def test_a_metric_that_is_not_a_number_is_an_error_with_its_key(tmp_path):
    wrong = pytest.raises(TypeError, match="metric 'reward/mean' must be a number, got str: 'high'")
    with open_run(tmp_path / "run", steps=1) as run, wrong:
        run.log(1, {"reward/mean": "high"})


def test_half_a_character_of_a_row_is_kept_in_the_trajectories(tmp_path):
    with open_run(tmp_path / "run", steps=1) as run:
        run.trajectories(1, [{"gold": "a\ud83d", "text": "é"}])
    (path,) = (tmp_path / "run" / "trajectories").glob("*.jsonl")
    assert path.read_bytes() == '{"gold": "a\\ud83d", "text": "é"}\n'.encode()
    assert json.loads(path.read_text())["gold"] == "a\ud83d"


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    folder = tmp_path / "run"
    with open_run(folder, steps=5) as run:
        for step in range(5):
            run.trajectories(step, [{"i": step}])
            run.trajectories(step, [{"i": -step}], kind="eval")
            run.log(step, {"x": 0.1 * step})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x": 0.')  # the process died inside this line
    first_lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]
    with open_run(folder, steps=5, start=2, resume=True) as run:
        assert (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True) == first_lines
        run.log(3, {"x": 7})
    assert [(r["step"], r["x"]) for r in read_metrics(folder)] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 7)]
    dumps = sorted(p.name for p in (folder / "trajectories").iterdir())
    assert dumps == [f"{kind}_{step:06d}.jsonl" for kind in ("eval", "train") for step in range(3)]
    with open_run(folder, steps=5, start=-1, resume=True):  # no checkpoint had been written
        assert read_metrics(folder) == []
        assert not list((folder / "trajectories").iterdir())


def test_a_broken_line_in_the_middle_is_named_and_dropped_on_resume(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n{"step": 2}\n{"step"')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    assert (
        "metrics.jsonl, line 2 is left out, it is not what a run writes: b'\\x00\\x00\\x00'" in capsys.readouterr().out
    )
    drop_after(tmp_path, 9)
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == r"dropped a broken line of metrics.jsonl: b'\x00\x00\x00\n'"
    assert said.err == ""
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_lines_that_are_missing_on_resume_are_reported(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}}}\n' for i in range(5)))
    drop_after(tmp_path, 4)
    drop_after(tmp_path, 0)
    assert capsys.readouterr().out == ""
    drop_after(tmp_path, 3)
    assert capsys.readouterr().out == f"{path} has no lines of steps 1 to 3, which were trained: they are lost\n"


def test_step_0_is_no_step_that_was_trained(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/')
    drop_after(tmp_path, 1)
    assert "has no lines of steps 1 to 1, which were trained" in capsys.readouterr().out


def test_dropping_lines_is_atomic_and_needs_no_space_at_the_end_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {i}}}\n'.encode() for i in range(9)]
    path.write_bytes(b"".join(lines))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    drop_after(tmp_path, 3)
    assert path.read_bytes() == b"".join(lines[:4])
    before = b"".join([lines[7], *lines[:4]])  # the line to drop is the first one
    path.write_bytes(before)
    with pytest.raises(OSError, match="No space"):
        drop_after(tmp_path, 3)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


RUN = """
import os, random, sys
from pathlib import Path
from rlkit.run.folder import holds_run, open_run
folder, start, steps = Path(sys.argv[1]), int(sys.argv[2]), 40
with open_run(folder, steps=steps, start=start, resume=holds_run(folder), active=True) as run:  # active: no torch
    for step in range(max(start, 0) + 1, steps + 1):
        noise = random.Random(step)
        for sample in range(3):
            run.trajectories(step, [{"sample": sample, "reward": noise.random()}])
        run.log(step, {"x": noise.random() / 3})
        if step % 5 == 0:
            run.sync()
            (folder / "new").write_text(str(step))
            (folder / "new").replace(folder / "checkpoint")
"""


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """SIGKILL at moments spread over the run; everything but the clock is then as in the run that was left alone."""

    def contents(folder: Path) -> list:
        metrics = [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_metrics(folder)]
        dumps = {p.name: p.read_text() for p in (folder / "trajectories").iterdir()}
        return [metrics, dumps]

    (tmp_path / "a").mkdir()
    assert python(RUN, tmp_path / "a", -1).wait() == 0
    (tmp_path / "b").mkdir()
    metrics, checkpoint = tmp_path / "b" / "metrics.jsonl", tmp_path / "b" / "checkpoint"
    for kill_at in (2, 13, 26, 33, None):
        child = python(RUN, tmp_path / "b", int(checkpoint.read_text()) if checkpoint.exists() else -1)
        while kill_at and child.poll() is None:
            if metrics.exists() and f'"step": {kill_at},' in metrics.read_text():
                child.kill()
                break
            time.sleep(0.0005)
        child.communicate()
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert [r["step"] for r in read_metrics(tmp_path / "b")] == list(range(1, 41))


def test_a_folder_with_a_run_is_refused_unless_resumed(tmp_path):
    with open_run(tmp_path, steps=1) as run:
        run.log(1, {})
    with pytest.raises(FileExistsError, match="already holds a run: resume it"), open_run(tmp_path, steps=1):
        pass
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileExistsError, match="already holds a run"), open_run(tmp_path, steps=1):
        pass


@pytest.mark.slow
def test_one_process_at_a_time_and_the_lock_dies_with_it(tmp_path):
    holder = """
        import os, sys, time
        from rlkit.run.folder import open_run
        with open_run(sys.argv[1], steps=1, active=True) as run:
            if os.fork() == 0:  # a reward worker that outlives a killed run must not hold the folder
                os.close(1), os.close(2)
                time.sleep(300)
                os._exit(0)
            run.say("open")
            time.sleep(300)
    """
    child = python(holder, tmp_path / "run", start_new_session=True)
    assert child.stdout.readline() == "open\n"
    held = pytest.raises(BlockingIOError, match="another process writes to this run folder")
    with held, open_run(tmp_path / "run", steps=1, resume=True):
        pass
    child.kill()
    child.communicate()
    with open_run(tmp_path / "run", steps=1, resume=True) as run:
        run.log(1, {})
    os.killpg(child.pid, signal.SIGKILL)


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    with open_run(tmp_path / "run", steps=3, active=False) as run:
        run.log(1, {"x": 1.0})
        run.trajectories(1, [{}])
        run.status("x"), run.say("x"), run.sync()
        assert draw(run) is None
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")


def test_sync_reaches_every_open_file(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with open_run(tmp_path / "run", steps=3) as run:
        run.log(1, {})
        run.trajectories(2, [{}])
        run.sync()
    files = ("metrics.jsonl", "trajectories/train_000002.jsonl")
    assert synced == [(tmp_path / "run" / name).stat().st_ino for name in files]


def test_rows_are_in_the_file_before_the_run_is_closed(tmp_path):
    with open_run(tmp_path, steps=1) as run:
        run.trajectories(12, [{"prompt": "häh?"}])
        run.trajectories(12, [{"reward": float("nan")}, {"reward": 1.0}])
        read = rows_of(tmp_path / "trajectories" / "train_000012.jsonl")
    assert len(read) == 3
    assert math.isnan(read[1]["reward"])
    assert "häh?" in (tmp_path / "trajectories" / "train_000012.jsonl").read_text(), "texts stay readable"


def test_a_full_disk_cuts_no_line_and_is_explained(tmp_path):
    with open_run(tmp_path, steps=3) as run:
        run.log(1, {"x": 0.5})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            with pytest.raises(
                OSError, match=r"cannot save metrics.jsonl, a file would pass .* Free space there and resu"
            ):
                run.log(2, {"y" * 50: 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        run.log(2, {"x": 0.25})
    assert [r["x"] for r in read_metrics(tmp_path)] == [0.5, 0.25]


def test_reading_runs_and_plots_needs_no_torch():
    child = python(
        "import sys, rlkit.run.report.plot; print({'torch', 'transformers', 'rich', 'matplotlib'} & set(sys.modules))"
    )
    out, err = child.communicate()
    assert out == "set()\n", err


def test_a_run_resumed_with_other_arguments_names_them(tmp_path, capsys):
    def keep(lr=1e-6, *, resume):
        keep_args(tmp_path, {"lr": lr, "output": tmp_path, "resume": resume}, script="a.py", resume=resume)

    keep(resume=False)
    keep(resume=True)
    assert capsys.readouterr().out == ""
    keep(lr=0.5, resume=True)
    assert capsys.readouterr().out == "resumed with lr 0.5 (it was 1e-06)\n"
    with open_run(tmp_path, steps=1, start=0, resume=True):
        pass
    later = {"lr": 0.5, "output": tmp_path, "added": "", "used": "x", "resume": True}  # flags of a later version
    keep_args(tmp_path, later, script="a.py", resume=True)
    assert capsys.readouterr().out == "resumed with used 'x' (it was None)\n"
    assert json.loads((tmp_path / "args.json").read_text())["lr"] == 0.5
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="--resume"):
        keep(resume=False)
    assert json.loads((tmp_path / "args.json").read_text())["lr"] == 0.5


def test_args_are_those_that_trained_where_a_resumed_run_trains_nothing(tmp_path):
    """All steps are done, or the run is refused before it opens its folder: another model, no memory."""
    keep_args(tmp_path, {"lr": 1e-6}, script="a.py", resume=False)
    kept = (tmp_path / "args.json").read_bytes()
    keep_args(tmp_path, {"lr": 0.5}, script="a.py", resume=True)
    assert (tmp_path / "args.json").read_bytes() == kept
    with open_run(tmp_path, steps=3, start=3, resume=True):
        assert (tmp_path / "args.json").read_bytes() == kept
    with open_run(tmp_path, steps=4, start=3, resume=True):  # of no `keep_args`
        assert (tmp_path / "args.json").read_bytes() == kept


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    for refused in (
        lambda folder: keep_args(folder, {}, script="a.py", resume=True),
        lambda folder: open_run(folder, steps=1, resume=True).__enter__(),
        lambda folder: restore(folder, model=None, optimizer=None, reference=None),
    ):
        with pytest.raises(FileNotFoundError, match="there is no run to resume in this folder") as caught:
            refused(tmp_path / "runs" / "typo")
        assert caught.value.filename == str(tmp_path / "runs" / "typo")
    assert not list(tmp_path.iterdir())
    with open_run(tmp_path / "run", steps=1):  # ends before it has logged anything
        pass
    with open_run(tmp_path / "run", steps=1, start=-1, resume=True) as run:
        run.log(1, {})


@pytest.mark.slow
def test_args_are_not_written_into_a_run_that_another_process_has_open(tmp_path, capsys):
    """From `keep_args` on, while the model is still being loaded, the folder is held."""
    other = """
        import sys, time
        from rlkit.run.folder import keep_args, open_run
        keep_args(sys.argv[1], {"lr": 1e-6}, script="a.py", resume=False)
        print("kept", flush=True)
        sys.stdin.readline()
        with open_run(sys.argv[1], steps=1):
            print("open", flush=True)
            sys.stdin.readline()
    """

    child = python(other, tmp_path / "run", stdin=subprocess.PIPE)
    for said in ("kept\n", "open\n"):
        assert child.stdout.readline() == said
        for resume in (True, False):
            with pytest.raises(BlockingIOError, match="another process writes to this run folder"):
                keep_args(tmp_path / "run", {"lr": 0.9}, script="a.py", resume=resume)
        assert json.loads((tmp_path / "run/args.json").read_text())["lr"] == 1e-6
        child.stdin.write("\n")
        child.stdin.flush()
    assert child.wait() == 0
    assert capsys.readouterr().out == ""
    keep_args(tmp_path / "run", {"lr": 0.9}, script="a.py", resume=True)
    assert capsys.readouterr().out == "resumed with lr 0.9 (it was 1e-06)\n"
    with open_run(tmp_path / "run", steps=1, start=-1, resume=True):
        assert json.loads((tmp_path / "run/args.json").read_text())["lr"] == 0.9


def test_a_run_of_another_script_or_format_or_with_damaged_args_is_refused(tmp_path):
    def resumed(script="sft.py"):
        keep_args(tmp_path, {"lr": 0.1}, script=script, resume=True)

    keep_args(tmp_path, {"lr": 0.1}, script="sft.py", resume=False)
    with pytest.raises(ValueError, match=r"is a run of sft.py: resume it with that, or give another `output`"):
        resumed("dpo.py")
    kept = json.loads((tmp_path / "args.json").read_text())
    for other in ({"format": 99}, {}):
        (tmp_path / "args.json").write_text(json.dumps({k: v for k, v in kept.items() if k != "format"} | other))
        with pytest.raises(
            ValueError, match=r"was written in format (99|None), and this version reads format 1: resume"
        ):
            resumed()
    (tmp_path / "args.json").write_text("{")
    with pytest.raises(ValueError, match=r"args.json is damaged \(.*\): delete it"):
        resumed()
