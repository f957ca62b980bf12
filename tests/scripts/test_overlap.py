"""The asynchronous script as a user runs it: its engine in a process of its own, killed and resumed."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE

import nightly
import psutil
import pytest
import warm

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task(make_task):
    rng = random.Random(0)
    rows = [{"prompt": f"{i:02}{rng.randrange(100):02}", "answer": "7"} for i in range(90)]
    reward = "return sum(map(str.isascii, completion)) / 8 + 0.01 * len(row['prompt'])"
    return make_task(train=rows, reward=f"def score(completion, row):\n    {reward}\n")


def start(task, output, *more):
    command = [
        sys.executable, "-m", "rlkit.scripts.grpo", "--overlap", "--model", str(task / "model"), "--data",
        str(task / "train.jsonl"), "--reward", f"{task / 'reward.py'}:score", "--output", str(output),
        "--steps", "9", "--save-steps", "2", "--prompts-per-step", "4", "--group-size", "4",
        "--max-prompt-tokens", "32", "--max-new-tokens", "6", "--lr", "1e-3", "--minibatches", "2",
        "--device", "cpu", *more,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    streams = {"stdout": PIPE, "stderr": PIPE, "text": True}
    return warm.Popen(command, env=env, start_new_session=True, spawns=True, plots=False, **streams)


def lines_of(output):
    """The whole lines: the last one may still be being written."""
    path = output / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def wait_for(condition, process, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def gone(children):
    end = time.monotonic() + 100
    while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
        assert time.monotonic() < end
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("number", nightly.only([signal.SIGKILL, signal.SIGINT]))
def test_stopped_and_resumed_it_trains_on_every_group_once(task, tmp_path, number):
    output = tmp_path / "run"
    process = start(task, output)
    wait_for(lambda: len(lines_of(output)) >= 5, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "the engine is a process of its own"
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=200)
    assert gone(children), "and ends with the script"
    if number == signal.SIGINT:
        assert process.returncode == -signal.SIGINT, err
        assert "--resume" in out
    before = lines_of(output)
    assert len(before) < 9
    process = start(task, output, "--resume")
    _, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    lines = lines_of(output)
    assert [line["step"] for line in lines] == list(range(1, 10))
    saved = (len(before) // 2 * 2) if number == signal.SIGKILL else len(before)
    assert [line["time/unix"] for line in lines[: saved - 2]] == [line["time/unix"] for line in before[: saved - 2]]
    assert max(line["staleness/max"] for line in lines) == 1
    groups = [
        json.loads(line)["group"]
        for path in (output / "trajectories").glob("train_*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    assert len(groups) == 4 * len(set(groups)), "nothing is written twice"
    assert len(set(groups)) >= 9 * 4
    assert (output / "model" / "model.safetensors").exists()
