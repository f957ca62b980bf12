"""Resuming: what is refused in one line, what is skipped and named, and what a full disk cannot take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import screens
import warm
from safetensors.torch import load_file
from small_disk import NOT_ALLOWED

from rlkit.scripts import cli

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


def flags_of(task, script, output, *flags):
    reward = ["--reward", f"{task / 'reward.py'}:score"] if FLAGS[script] is SAMPLED else []
    data = task / ("labelled.jsonl" if script == "kto" else "rows.jsonl")
    return [
        *script.split(), "--model", str(task / "model"), "--data", str(data), "--output", str(output),
        "--save-steps", "2", "--steps", "6", "--lr", "1e-3", *FLAGS[script].split(), *reward, *flags,
    ]  # fmt: skip


def run(*given, start=warm.run, **options):
    return start([sys.executable, "-m", "rlkit.scripts", *flags_of(*given)], env=ENV, text=True, **options)


def refused(*given):
    return screens.refused(cli.main, flags_of(*given))


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
    said = refused(task, script, tmp_path / "typo", "--resume")
    assert said.startswith(f"error: {tmp_path / 'typo'}: there is no run to resume")
    assert not (tmp_path / "typo").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("script", FLAGS)
def test_a_damaged_checkpoint_is_skipped_and_named(task, tmp_path, script):
    """The run goes on from the one before it, to the same numbers; without any that is whole it changes nothing."""
    output = tmp_path / "run"
    run(task, script, output, check=True)
    whole = numbers(output)
    older, newest = sorted((output / "checkpoints").iterdir())
    flip_a_byte(newest / "__0_0.distcp")
    done = run(task, script, output, "--resume", check=True, stdout=subprocess.PIPE)
    skipped = f"skipped a checkpoint: {newest}: __0_0.distcp changed after it was written"
    said = [line for line in done.stdout.splitlines() if not line.startswith(("model:", "critic:"))]
    assert said[:2] == [skipped, "going on from the checkpoint of step 4"]
    assert [line["step"] for line in numbers(output)] == [line["step"] for line in whole]
    if "--overlap" not in script:  # its steps depend on timing
        assert numbers(output) == whole
    if script == "sft":
        for where in ("terminal", "latin-1"):
            flip_a_byte(newest / "__0_0.distcp")
            found = screens.said(lambda: cli.main(flags_of(task, script, output, "--resume")), where)
            assert f"{skipped} going on from the checkpoint of step 4" in " ".join(found.out.split())
        before = (output / "metrics.jsonl").read_bytes()
        os.truncate(newest / "__0_0.distcp", 100)
        flip_a_byte(older / "state.pt")
        said = refused(task, script, output, "--resume")
        assert said.startswith(
            f"error: {output / 'checkpoints'}: no checkpoint is whole: {newest}: __0_0.distcp is damaged: it has 100"
        )
        assert f"{older}: state.pt changed" in said
        assert (output / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_that_is_open_keeps_its_args(task, tmp_path):
    output = tmp_path / "run"
    with run(task, "sft", output, "--steps", "100000", start=warm.Popen, stdout=subprocess.PIPE) as process:
        try:
            assert [process.stdout.readline()[:6] for _ in range(2)] == ["model:", "  step"]
            found = screens.everywhere(lambda: cli.main(flags_of(task, "sft", output, "--resume", "--lr", "0.9")))
        finally:
            process.kill()
    assert screens.errors(found.err)[0].startswith(f"error: {output}: another process writes to this run folder")
    assert "resumed with " not in found.out
    assert json.loads((output / "args.json").read_text())["lr"] == 1e-3


FULL_DISK = """
import json, shutil, sys
from contextlib import suppress
from pathlib import Path
import screens
from small_disk import mount_small
from rlkit.scripts import cli

folder, other_flags, same_flags = json.loads(sys.argv[1])
folder, mount = Path(folder), Path(folder, "mount")
output, filler = mount / "run", mount / "filler"

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
refused = [screens.refused(cli.main, flags) for flags in (other_flags, same_flags)]
kept = state() == before
filler.unlink()
freed = screens.said(lambda: cli.main(other_flags), "pipe")
shutil.copy(output / "metrics.jsonl", folder)
print(json.dumps([*refused, kept, repr(freed.error), freed.out]))
"""


@pytest.mark.timeout(1000)
@pytest.mark.slow
def test_a_full_disk_on_resume_is_one_line_and_loses_nothing(task, tmp_path):
    """Filled while the run is away; freed again, the run goes on to the numbers of one that was left alone."""
    (tmp_path / "mount").mkdir()
    output, left_alone = tmp_path / "mount/run", tmp_path / "left_alone"
    run(task, "sft", output, check=True)
    output.rename(left_alone)
    given = [flags_of(task, "sft", output, *flags) for flags in (["--resume", "--keep", "3"], ["--resume"])]
    job = json.dumps([str(tmp_path), *given])
    line = [sys.executable, "-c", FULL_DISK, job]
    env = ENV | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"}
    done = warm.run(line, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode == NOT_ALLOWED:
        pytest.skip("this machine does not allow mounting a small filesystem")
    assert done.returncode == 0, done.stderr
    args, other, *freed = json.loads(done.stdout)
    assert args.startswith(f"error: {output}: cannot save the run, the disk is full: it needs ")
    assert re.search(r" needs 65\.5 kB, 0\.0 kB are free\. Free space there and resume", args)
    assert "the disk is full: it needs" in other
    assert str(output) in other
    assert freed[:2] == [True, "None"]
    assert "resumed with keep 3 (it was 2)" in freed[2]
    assert numbers(tmp_path) == numbers(left_alone)


def test_a_resumed_run_has_its_own_weight_decay(task, tmp_path):
    norms = {}
    for decay in ("0", "5"):
        cli.main(flags_of(task, "sft", tmp_path / decay, "--steps", "2", "--device", "cpu"))
        more = ["--steps", "4", "--device", "cpu", "--resume", "--weight-decay", decay]
        cli.main(flags_of(task, "sft", tmp_path / decay, *more))
        weights = load_file(tmp_path / decay / "model/model.safetensors")
        norms[decay] = sum(float(x.square().sum()) for x in weights.values())
    assert norms["5"] < norms["0"]
