"""Resuming: what is refused in one line, what is skipped and named, and what a full disk cannot take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from small_disk import NOT_ALLOWED

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SAMPLED = "--prompts-per-step 2 --group-size 2 --max-prompt-tokens 32 --max-new-tokens 4 --eval-steps 0"
FLAGS = {
    "sft": "--batch-size 4",
    "dpo": "--batch-size 4",
    "kto": "--batch-size 4",
    "reward_model": "--batch-size 4",
    "grpo": SAMPLED,
    "ppo": SAMPLED,
    "grpo --overlap": SAMPLED,
}


def command(task, script, output, *flags):
    reward = ["--reward", f"{task / 'reward.py'}:score"] if FLAGS[script] is SAMPLED else []
    data = task / ("labelled.jsonl" if script == "kto" else "rows.jsonl")
    return [
        sys.executable, "-m", *f"rlkit.scripts.{script}".split(), "--model", str(task / "model"), "--data",
        str(data), "--output", str(output), "--save-steps", "2", "--steps", "6", "--lr", "1e-3",
        *FLAGS[script].split(), *reward, *flags,
    ]  # fmt: skip


def run(task, script, output, *flags):
    return warm.run(
        command(task, script, output, *flags), env=ENV, capture_output=True, text=True, timeout=280, check=False
    )


def numbers(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


SLOW = {"dpo", "kto", "reward_model", "ppo", "grpo --overlap"}
EACH = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FLAGS]


@pytest.mark.parametrize("script", EACH)
def test_a_folder_without_a_run_is_not_resumed(task, tmp_path, script):
    done = run(task, script, tmp_path / "typo", "--resume")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {tmp_path / 'typo'}: there is no run to resume")
    assert done.stdout == ""
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("script", EACH)
def test_a_damaged_checkpoint_is_skipped_and_named(task, tmp_path, script):
    """The run goes on from the one before it, to the same numbers; without any that is whole it changes nothing."""
    output = tmp_path / "run"
    assert run(task, script, output, "--steps", "6").returncode == 0
    whole = numbers(output)
    older, newest = sorted((output / "checkpoints").iterdir())
    flip_a_byte(newest / "__0_0.distcp")
    done = run(task, script, output, "--resume")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith(("model:", "critic:"))]
    assert said[0] == f"skipped a checkpoint: {newest}: __0_0.distcp changed after it was written"
    assert said[1] == "going on from the checkpoint of step 4"
    assert [line["step"] for line in numbers(output)] == [line["step"] for line in whole]
    if "--overlap" not in script:  # its steps depend on timing
        assert numbers(output) == whole
    if script == "sft":
        before = (output / "metrics.jsonl").read_bytes()
        os.truncate(newest / "__0_0.distcp", 100)
        flip_a_byte(older / "state.pt")
        done = run(task, script, output, "--resume")
        assert done.returncode == 2
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith(
            f"error: {output / 'checkpoints'}: no checkpoint is whole: {newest}: __0_0.distcp is damaged: it has 100"
        )
        assert f"{older}: state.pt changed" in last
        assert (output / "metrics.jsonl").read_bytes() == before


def test_a_run_that_is_open_keeps_its_args(task, tmp_path):
    output = tmp_path / "run"
    with warm.Popen(
        command(task, "sft", output, "--steps", "100000"), env=ENV, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert [process.stdout.readline()[:6] for _ in range(2)] == ["model:", "  step"]
            done = run(task, "sft", output, "--resume", "--lr", "0.9")
        finally:
            process.kill()
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: {output}: another process writes to this run folder")
    assert "resumed with " not in done.stdout
    assert json.loads((output / "args.json").read_text())["lr"] == 1e-3


FULL_DISK = """
import json, os, runpy, shutil, sys
from contextlib import suppress
from pathlib import Path
from small_disk import mount_small

folder, other_flags, same_flags = json.loads(sys.argv[1])
folder, mount = Path(folder), Path(folder, "mount")
output, filler = mount / "run", mount / "filler"

def run(command, name):
    "The exit status of `python -m ...`, whose output goes into two files of this name."
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        for fd, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}.{end}", os.O_WRONLY | os.O_CREAT), fd)
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def state():
    return (output / "args.json").read_bytes(), (output / "metrics.jsonl").read_bytes().splitlines()[:4]

mount_small(mount, "3m")
shutil.copytree(folder / "left_alone", output)
shutil.rmtree(output / "model")
shutil.rmtree(output / "checkpoints/step_00000006")
(output / "metrics.png").unlink()
before = state()
with suppress(OSError), open(filler, "wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
statuses = [run(other_flags, "other_flags"), run(same_flags, "same_flags")]
kept = state() == before
filler.unlink()
statuses.append(run(other_flags, "freed"))
shutil.copy(output / "metrics.jsonl", folder / "after")
print(json.dumps([statuses, kept]))
"""


@pytest.mark.timeout(1000)
def test_a_full_disk_on_resume_is_one_line_and_loses_nothing(task, tmp_path):
    """Filled while the run is away; freed again, the run goes on to the numbers of one that was left alone."""
    (tmp_path / "mount").mkdir()
    output, left_alone = tmp_path / "mount/run", tmp_path / "left_alone"
    assert run(task, "sft", output).returncode == 0
    output.rename(left_alone)
    commands = (command(task, "sft", output, *flags) for flags in (["--resume", "--keep", "3"], ["--resume"]))
    job = json.dumps([str(tmp_path), *commands])
    line = [sys.executable, "-c", FULL_DISK, job]
    env = ENV | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"}
    done = warm.run(line, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == NOT_ALLOWED:
        pytest.skip("this machine does not allow mounting a small filesystem")
    assert json.loads(done.stdout) == [[2, 2, 0], True], done
    last = (tmp_path / "other_flags.err").read_text().strip().splitlines()[-1]
    assert last.startswith(f"error: {output}: cannot save the run, the disk is full: it needs ")
    assert re.search(r" needs 65\.5 kB, 0\.0 kB are free\. Free space there and resume", last)
    last = (tmp_path / "same_flags.err").read_text().strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "the disk is full: it needs" in last
    assert str(output) in last
    assert "resumed with keep 3 (it was 2)" in (tmp_path / "freed.out").read_text()
    strip = [{k: v for k, v in json.loads(x).items() if k[:5] != "time/"} for x in (tmp_path / "after").open()]
    assert strip == numbers(left_alone)
