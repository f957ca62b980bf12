"""launch/slurm.sbatch: its flags, and its body on two network namespaces as two nodes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import REPO, SBATCH, STAND_INS, batch_script, beside_two_nodes, can_make_networks

from rlkit.model.checkpoint import latest_checkpoint
from rlkit.scripts import grpo
from rlkit.scripts.cli import parsed

needs_networks = pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
REWARD = """
def score(completion, row):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
"""


def test_shellcheck_finds_nothing() -> None:
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([tool, SBATCH, *STAND_INS.iterdir()], capture_output=True, text=True)
    assert not done.stdout


def test_the_command_that_users_edit_has_flags_that_exist() -> None:
    found = re.search(r"^TRAIN=\(\n(.*?)^\)", SBATCH.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    module, script, *flags = shlex.split(found[1])
    assert (module, script) == ("-m", "rlkit.scripts.grpo")
    args = parsed([*flags, "--output", "runs/a", "--resume"], grpo.Args)
    assert args.engine.engine == "sglang"
    assert args.schedule.save_steps > 0


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(data=[{"prompt": f"{i}+{i}"} for i in range(16)], reward=REWARD)


def train(task: Path, steps: int, *flags: str) -> list[str]:
    """The command that torchrun gets, without --output."""
    command = ["-m", "rlkit.scripts.grpo", "--model", str(task / "model"), "--data", str(task / "data.jsonl")]
    command += ["--reward", f"{task / 'reward.py'}:score", "--device", "cpu", "--lr", "1e-2", "--steps", str(steps)]
    command += ["--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--parallel.tp", "2"]
    return [*command, *flags]


def numbers(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.slow
@needs_networks
@pytest.mark.timeout(1800)
def test_two_nodes_of_two_ranks_log_what_one_machine_of_four_does(task, tmp_path):
    script = batch_script(tmp_path / "job", tmp_path / "run", train(task, 2))
    said, status = beside_two_nodes(tmp_path / "slurm", "bash", str(script))
    assert status == 0, said[-20000:]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run += [*train(task, 2), "--output", str(tmp_path / "alone")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    subprocess.run(run, env=env, check=True, capture_output=True, timeout=600)
    for found, true in zip(numbers(tmp_path / "run"), numbers(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(true, rel=1e-4, abs=1e-6)
    files = [{p.relative_to(f).as_posix() for p in f.rglob("*")} for f in (tmp_path / "run", tmp_path / "alone")]
    assert files[0] == files[1]
    assert {"args.json", "metrics.png", "model/config.json", "checkpoints/step_00000002"} <= files[0]
    assert not (tmp_path / "slurm/requeued").exists()


# SLURM's part: a signal to the batch script, here once the run has logged a step.
LIMIT = """
bash "$1" & job=$!
while [ ! -e "$2" ] && kill -0 $job; do sleep 0.1; done
kill -USR1 $job
wait $job
"""


@pytest.mark.slow
@needs_networks
@pytest.mark.timeout(1800)
def test_near_the_time_limit_the_job_saves_and_goes_back_to_the_queue_and_continues(task, tmp_path):
    output, slurm = tmp_path / "run", tmp_path / "slurm"
    script = batch_script(tmp_path / "job", output, train(task, 10_000))
    said, _ = beside_two_nodes(slurm, "sh", "-c", LIMIT, "sh", str(script), str(output / "metrics.jsonl"))
    steps = [line["step"] for line in numbers(output)]
    assert said.count("stopping after this step") == 1, said[-20000:]
    assert latest_checkpoint(output / "checkpoints").name == f"step_{steps[-1]:08d}"
    assert (slurm / "requeued").read_text() == "4242\n"

    batch_script(script, output, train(task, steps[-1] + 2))
    said, status = beside_two_nodes(slurm, "bash", str(script))
    assert status == 0, said[-20000:]
    assert [line["step"] for line in numbers(output)] == [*range(1, steps[-1] + 3)]
    assert (slurm / "requeued").read_text() == "4242\n", "a run that has ended is not queued again"


@pytest.mark.slow
@needs_networks
@pytest.mark.timeout(900)
def test_a_job_that_saves_nothing_before_the_limit_is_not_queued_again(task, tmp_path):
    """Its reward takes longer than torchrun waits; the next job would get no further."""
    (tmp_path / "slow.py").write_text("import time\ndef score(completion, row):\n    time.sleep(600)\n")
    output, slurm, flags = tmp_path / "run", tmp_path / "slurm", ["--reward", f"{tmp_path}/slow.py:score", "--no-trial"]
    script = batch_script(tmp_path / "job", output, train(task, 2, *flags, "--reward-timeout", "900"))
    script.write_text(re.sub(r"(?<=_SHUTDOWN_TIMEOUT=)\d+", "5", script.read_text()))
    said, status = beside_two_nodes(slurm, "sh", "-c", LIMIT, "sh", str(script), str(output / "args.json"))
    assert status != 0
    assert not (slurm / "requeued").exists(), said[-20000:]
