"""The GRPO script as a user runs it: its own process, killed and resumed, interrupted, and given bad input."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import warm

from rlkit.scripts import cli, grpo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task(make_task):
    rng = random.Random(0)
    rows = [{"prompt": str(rng.randrange(1000)), "answer": "7"} for _ in range(40)]
    reward = "return sum(map(str.isascii, completion)) / 8 + 0.01 * len(row['prompt'])"
    return make_task(train=rows, reward=f"def score(completion, row):\n    {reward}\n")


def command(task, output, *more, reward="reward.py:score", data="train.jsonl"):
    return [
        sys.executable, "-m", "rlkit.scripts.grpo", "--model", str(task / "model"), "--data", str(task / data),
        "--reward", f"{task / reward}", "--output", str(output), "--eval-data", str(task / "train.jsonl"),
        "--steps", "9", "--save-steps", "2", "--eval-steps", "4", "--eval-limit", "4", "--prompts-per-step", "4",
        "--group-size", "4", "--max-prompt-tokens", "32", "--max-new-tokens", "6", "--lr", "1e-3", "--kl-coef", "0.01",
        "--ref-sync-steps", "3", "--minibatches", "2", "--device", "cpu", *more,
    ]  # fmt: skip


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*args, start=partial(warm.run, plots=False), **kwargs):
    return start(command(*args, **kwargs), env=environment(), capture_output=True, text=True, timeout=180, check=False)


def lines(output):
    """Metric lines without the clock's fields, as they stand in the file."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({k: v for k, v in row.items() if not k.startswith("time/")}) for row in rows]


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def num_lines(output):
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The uninterrupted run, in an interpreter of its own: the others repeat its bits with another hash seed."""
    output = tmp_path_factory.mktemp("whole") / "run"
    result = run(task, output, start=subprocess.run)
    assert result.returncode == 0, result.stderr
    return output, result


def test_a_run_writes_metrics_samples_plot_and_model(whole, task):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, result = whole
    rows = [json.loads(line) for line in lines(output)]
    assert [row["step"] for row in rows] == list(range(10))
    assert [row["step"] for row in rows if "eval/greedy" in row] == [0, 4, 8, 9]
    assert all(row["mismatch/abs_max"] < 1e-4 for row in rows[1:])
    assert len({row["reward/mean"] for row in rows[1:]}) > 3
    assert result.stdout.count("\n") >= 10
    dump = [json.loads(line) for line in (output / "trajectories" / "train_000003.jsonl").read_text().splitlines()]
    assert len(dump) == 16
    gold = {index: row["answer"] for index, row in enumerate(map(json.loads, (task / "train.jsonl").open()))}
    groups = {row["group"]: [r["reward"] for r in dump if r["group"] == row["group"]] for row in dump}
    for row in dump:
        assert (row["step"], row["gold"]) == (3, gold[row["group"]])
        assert row["advantage"] == pytest.approx(row["reward"] - fmean(groups[row["group"]]), abs=1e-6)
    assert (output / "metrics.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    assert AutoTokenizer.from_pretrained(output / "model").chat_template
    before = AutoModelForCausalLM.from_pretrained(task / "model")
    assert any((a != b).any() for a, b in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("after", [*(pytest.param(step, marks=pytest.mark.slow) for step in (0, 2)), 6])
def test_kill_and_resume_gives_the_same_lines_bit_for_bit(task, whole, tmp_path, after):
    output = tmp_path / "run"
    with warm.Popen(command(task, output), env=environment(), stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: (output / "args.json").exists() and num_lines(output) >= after, process)
        time.sleep(random.Random(after).random() * 0.1)
        process.kill()
    result = run(task, output, "--resume")
    assert result.returncode == 0, result.stderr
    assert lines(output) == lines(whole[0])


def test_ctrl_c_saves_and_prints_the_resume_command(task, whole, tmp_path):
    output = tmp_path / "run"
    streams = {"stdout": subprocess.PIPE, "text": True}
    with warm.Popen(command(task, output), env=environment(), plots=False, **streams) as process:
        wait_for(lambda: num_lines(output) >= 4, process)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
    assert process.returncode == -signal.SIGINT, "a shell's loop ends with it"
    assert "go on with:" in said
    assert "--resume" in said
    assert num_lines(output) < 10
    result = run(task, output, "--resume")
    assert result.returncode == 0, result.stderr
    assert lines(output) == lines(whole[0])


def test_a_finished_folder_is_not_overwritten(task, whole):
    before = lines(whole[0])
    result = run(task, whole[0])
    assert result.returncode != 0
    assert "already holds a run" in result.stderr
    assert lines(whole[0]) == before


REWARDS = {
    "raises": ("raise ZeroDivisionError('no luck')", "ZeroDivisionError"),
    "hangs": ("import time; time.sleep(60)", "timeout|timed out|longer than"),
    "nan": ("return float('nan')", "nan"),
    "none": ("pass", "None"),
    "text": ("return 'good'", "str"),
}


@pytest.mark.slow_cases("hangs", "none", "text", "nan")
@pytest.mark.parametrize("kind", REWARDS)
def test_a_bad_reward_function_ends_the_run_with_its_cause(task, tmp_path, kind):
    body, cause = REWARDS[kind]
    (task / f"{kind}.py").write_text(f"def score(completion, row):\n    {body}\n")
    flags = ["--reward-timeout", "0.5", "--eval-steps", "0", "--no-trial"]
    result = run(task, tmp_path / "run", *flags, reward=f"{kind}.py:score")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-6:]
    assert re.search(cause, "\n".join(last)), result.stderr
    assert "row" in "\n".join(last)


def call(*args, **kwargs):
    """The script in this process."""
    return cli.run(grpo.main, grpo.Args, None, argv=command(*args, **kwargs)[3:])


def refused(capsys, *args, **kwargs):
    """The last line on stderr, in this process."""
    with pytest.raises(SystemExit) as ended:
        call(*args, **kwargs)
    assert ended.value.code != 0
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_equal_rewards_are_reported_and_training_continues(task, tmp_path, capsys):
    (task / "equal.py").write_text("def score(completion, row):\n    return 0.5\n")
    flags = ("--kl-coef", "0", "--ref-sync-steps", "0", "--eval-steps", "0", "--steps", "3")
    call(task, tmp_path / "run", *flags, reward="equal.py:score")
    assert "all rewards are equal in every group (all 0.5)" in capsys.readouterr().out
    assert num_lines(tmp_path / "run") == 3


BAD_DATA = {
    "missing.jsonl": (None, "missing.jsonl"),
    "empty.jsonl": ("", "empty"),
    "broken.jsonl": ('{"prompt": "1", "answer": "1"}\n{"prompt": "2"\n', "line 2"),
    "column.jsonl": ('{"question": "1"}\n', "question"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_named(task, tmp_path, name, capsys):
    content, message = BAD_DATA[name]
    if content is not None:
        (task / name).write_text(content)
    assert message in refused(capsys, task, tmp_path / "run", data=name)


@pytest.mark.slow
def test_too_long_prompts_are_counted(task, tmp_path, capsys, caplog):
    rows = [{"prompt": "1" * n, "answer": ""} for n in (3, 50, 4, 60, 5, 6)]
    (task / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    call(task, tmp_path / "run", "--steps", "1", data="long.jsonl")
    assert "dropped 2 of 6" in caplog.text + capsys.readouterr().out


def test_an_unknown_model_is_named(task, tmp_path, capsys):
    assert "nothing" in refused(capsys, task, tmp_path / "run", "--model", str(tmp_path / "nothing"))
