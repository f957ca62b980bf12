"""The example scripts under torchrun: the same numbers on any layout and two hosts; a rank that dies ends the job."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nodes import beside_two_nodes, can_make_networks

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.checkpoint import latest_checkpoint

REPO = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}
    tiny_model(tiny_tokenizer(), **sizes).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [{"prompt": f"{i}+{i}", "response": f"{2 * i}" * draw.randint(1, 5)} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def sft(files: Path, output: Path, *flags: str) -> list[str]:
    """The command line of an SFT run of four steps."""
    command = ["-m", "rlkit.scripts.sft", "--model", str(files / "model"), "--data", str(files / "data.jsonl")]
    command += ["--eval-data", str(files / "data.jsonl"), "--steps", "4", "--eval-steps", "2", "--batch-size", "16"]
    return [*command, "--lr", "1e-3", "--max-tokens", "300", "--device", "cpu", "--output", str(output), *flags]


def numbers(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def alone(files):
    """What one process logs."""
    subprocess.run(
        [sys.executable, *sft(files, files / "alone")], env=ENV, check=True, capture_output=True, timeout=280
    )
    return numbers(files / "alone")


def assert_alike(found: list[dict[str, float]], true: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in true] == [*range(true[0]["step"], 5)]
    for a, b in zip(found, true, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--parallel.tp", "2"], ["--parallel.cp", "2", "--parallel.offload"], ["--parallel.pp", "2"]]
)
def test_sft_logs_the_same_numbers_on_two_ranks(files, alone, tmp_path, flags):
    run = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *sft(files, tmp_path / "run", *flags)]
    done = subprocess.run(run, env=ENV, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("    4  ") == 1, "one rank prints"
    assert_alike(numbers(tmp_path / "run"), alone)
    assert (tmp_path / "run/model/config.json").exists()


REWARD = """
def score(completion, row):
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
"""


def grpo(files: Path, output: Path, *flags: str) -> list[str]:
    """The command line of a GRPO run with dynamic batches, two updates a rollout, evaluation and a moving reference."""
    (files / "reward.py").write_text(REWARD)
    command = ["-m", "rlkit.scripts.grpo", "--model", str(files / "model"), "--data", str(files / "data.jsonl")]
    command += ["--eval-data", str(files / "data.jsonl"), "--reward", f"{files / 'reward.py'}:score", "--lr", "1e-3"]
    command += ["--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--max-tokens", "200"]
    command += ["--minibatches", "2", "--kl-coef", "0.1", "--ref-sync-steps", "1", "--eval-steps", "2"]
    return [*command, "--save-steps", "2", "--device", "cpu", "--output", str(output), *flags]


@pytest.mark.slow
def test_grpo_samples_and_logs_the_same_and_resumes_on_another_layout(files, tmp_path):
    """Four steps in one process; then two steps on four ranks, and two more on two."""
    steps = ["--steps", "4"]
    alone = [sys.executable, *grpo(files, tmp_path / "alone", *steps)]
    subprocess.run(alone, env=ENV, check=True, capture_output=True, timeout=280)
    for ranks, flags in (
        ("4", ["--steps", "2", "--parallel.tp", "2", "--parallel.pp", "2", "--parallel.activation-checkpointing"]),
        ("2", [*steps, "--parallel.cp", "2", "--resume"]),
    ):
        run = [*TORCHRUN, "--standalone", "--nproc-per-node", ranks, *grpo(files, tmp_path / "run", *flags)]
        done = subprocess.run(run, env=ENV, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
    found, true = numbers(tmp_path / "run"), numbers(tmp_path / "alone")
    assert [line["step"] for line in found] == [line["step"] for line in true] == [0, 1, 2, 3, 4]
    sent = [line.pop("sync/bytes", 0) for line in found]  # ranks sample from a copy
    assert all(sent[1:])
    for a, b in zip(found, true, strict=True):
        rounding = {
            k for k in b if k.startswith(("mismatch/", "kl/", "ratio/kl_"))
        }  # sums of small terms of both signs
        exact = {k for k in b if k == "ratio/ratio_is_one"}  # counts differences of exactly 0: of 32 tokens, 15 or 16
        assert {k: v for k, v in a.items() if k not in rounding | exact} == pytest.approx(
            {k: v for k, v in b.items() if k not in rounding | exact}, rel=1e-3, abs=1e-6
        )
        assert all(abs(a[k] - b[k]) < 1e-4 for k in rounding)
        assert all(abs(a[k] - b[k]) < 0.1 for k in exact)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "is killed", "hangs"])
def test_a_rank_that_dies_ends_the_job_with_its_error(files, tmp_path, how):
    """Rank 1 fails in the middle of training, while rank 0 waits for it in a collective."""
    script = tmp_path / "fails.py"
    fail = {
        "raises": "raise ArithmeticError('the reason')",
        "is killed": "os.kill(os.getpid(), 9)",
        "hangs": "time.sleep(3600)",
    }[how]
    script.write_text(f"""
import os, runpy, sys, time
import rlkit.loops.supervised as loop
step = loop.optimizer_step
def failing(*args, **kwargs):
    if os.environ["RANK"] == "1":
        {fail}
    return step(*args, **kwargs)
loop.optimizer_step = failing
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
""")
    run = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script), *sft(files, tmp_path / "run")]
    run += ["--parallel.timeout-s", "20"] if how == "hangs" else []
    start = time.monotonic()
    done = subprocess.run(run, env=ENV, capture_output=True, text=True, timeout=280)
    assert done.returncode != 0
    assert time.monotonic() - start < 200, "no rank waits for the time-out of the collective"
    rank, reason = {
        "raises": (1, "ArithmeticError: the reason"),
        "is killed": (1, "Signal 9 (SIGKILL)"),
        "hangs": (0, "imed out"),
    }[how]
    assert f"rank      : {rank}" in done.stderr
    assert reason in done.stderr


KILLED = """
import os, runpy, sys
import rlkit.loops.updates as loop
step, calls = loop.optimizer_step, 0
def killed(*args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == "{victim}" and calls == {at}:
        os.kill(os.getpid(), 9)
    return step(*args, **kwargs)
if __name__ == "__main__":
    loop.optimizer_step = killed
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def on_four_ranks(*command: str) -> subprocess.CompletedProcess[str]:
    """Returns only when nothing is left of it: whatever lives on would hold the pipes open."""
    run = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", *command, "--steps", "6", "--parallel.tp", "2"]
    return subprocess.run(run, env=ENV, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def whole(files):
    """What six steps on four ranks log that nobody interrupts."""
    done = on_four_ranks(*grpo(files, files / "whole"))
    assert done.returncode == 0, done.stderr[-4000:]
    return numbers(files / "whole")


@pytest.mark.slow
@pytest.mark.timeout(2700)
@pytest.mark.parametrize(("victim", "at"), [(0, 8), (1, 5), (2, 9), (3, 12)])
def test_a_rank_killed_in_a_step_ends_the_job_and_resume_repeats_every_bit(files, whole, tmp_path, victim, at):
    """kill -9 before the `at`-th optimizer step, of which a rollout has two; every second one ends in a checkpoint."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(victim=victim, at=at))
    done = on_four_ranks(str(script), *grpo(files, tmp_path / "run"))
    assert done.returncode != 0
    assert f"rank      : {victim}" in done.stderr
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert [line["step"] for line in numbers(tmp_path / "run")] == list(range((at + 1) // 2))
    done = on_four_ranks(*grpo(files, tmp_path / "run", "--resume"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert numbers(tmp_path / "run") == whole


@pytest.mark.slow
def test_ctrl_c_reaches_the_ranks_twice_and_saves_once(files, tmp_path):
    """A terminal sends it to the whole process group, and torchrun passes it on."""
    run = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    run += [*sft(files, tmp_path / "run", "--steps", "2000", "--eval-steps", "0")]
    env = {**ENV, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "200"}
    with subprocess.Popen(
        run, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            end = time.monotonic() + 250
            while not (tmp_path / "run/metrics.jsonl").exists():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)
            said = process.communicate(timeout=200)[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    steps = [line["step"] for line in numbers(tmp_path / "run")]
    assert said.count("stopping after this step") == 1
    assert said.count(f"saved after step {steps[-1]}; go on with: ") == 1
    assert latest_checkpoint(tmp_path / "run/checkpoints").name == f"step_{steps[-1]:08d}"


ON_EACH_NODE = """
exec "$0" -m torch.distributed.run --nnodes 2 --node-rank $SLURM_NODEID --nproc-per-node 2 --master-addr node-0 "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="needs network namespaces")
@pytest.mark.timeout(900)
def test_two_hosts_log_the_same_numbers_as_one_process(files, alone, tmp_path):
    """Two network namespaces with a cable between them, two ranks in each: tp inside a host, shards across."""
    run = sft(files, tmp_path / "run", "--parallel.tp", "2")
    said, status = beside_two_nodes(tmp_path / "nodes", "srun", "bash", "-c", ON_EACH_NODE, sys.executable, *run)
    assert status == 0, said[-20000:]
    assert_alike(numbers(tmp_path / "run"), alone)
