"""The GPU programmes without a GPU: their names exist, their limits hold, and every stage runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def programme(monkeypatch):
    pytest.importorskip("triton")
    for folder in ("tools/gpu", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("programme")


def commands(programme, tmp_path):
    every = programme.programmes(tmp_path, rehearse=False, smollm="model")
    return [stage.command for stages in every.values() for stage in stages]


def given(command, flag):
    """The values of a flag."""
    rest = command[command.index(flag) + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    return list(rest[:end])


def test_what_stages_ask_for_exists(programme, tmp_path, monkeypatch):
    kernels, tune = importlib.import_module("gpu_kernels"), importlib.import_module("gpu_tune")
    training, grpo = importlib.import_module("gpu_training"), importlib.import_module("gpu_grpo")
    monkeypatch.setattr(kernels, "CUDA", True)
    names = {
        "gpu_kernels.py": ("--only", {name for _, name, _ in kernels.jobs(1.0)}),
        "gpu_training.py": ("--only", {case.name for case in training.cases()}),
        "gpu_tune.py": ("--groups", set(tune.groups())),
        "gpu_grpo.py": ("--size", set(grpo.SIZES)),
    }
    seen = set()
    for command in commands(programme, tmp_path):
        file = Path(command[0]).name
        if file in names:
            flag, known = names[file]
            assert set(given(command, flag)) <= known, command
            seen.add(file)
        files = [
            word for word in command if word.startswith(("tests/", "benchmarks/", "tools/", "examples/", "recipes/"))
        ]
        assert all((ROOT / word.partition(":")[0]).is_file() for word in files), command
    assert seen == set(names)


@pytest.mark.slow
def test_a_stage_at_its_limit_is_killed_with_its_children(programme, tmp_path, monkeypatch):
    stubborn = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(programme, "STOP", ((programme.signal.SIGINT, 0.2), (programme.signal.SIGKILL, 5.0)))
    stage = programme.Stage("stubborn", 3.0, ("-c", stubborn))
    log = tmp_path / "log"
    assert programme.run(stage, log, 3.0, dict(os.environ)) == "stopped"
    child = Path(f"/proc/{log.read_text().split()[0]}/stat")
    end = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.05)  # a killed process is there for a moment
    assert time.monotonic() < end
    assert programme.run(programme.Stage("bad", 9.0, ("-c", "exit(3)")), log, 9.0, dict(os.environ)) == "failed 3"


def test_results_are_archived_after_each_stage_and_resume_skips_what_ended_well(programme, tmp_path, monkeypatch):
    good = programme.Stage("good", 9.0, ("-c", "print('fine')"))
    bad = programme.Stage("bad", 9.0, ("-c", "exit(1)"))
    late = programme.Stage("late", 9e4, ("-c", "print('late')"))
    monkeypatch.setattr(programme, "programmes", lambda *_, **__: {"A": [good, bad, late]})
    monkeypatch.setattr(sys, "argv", ["programme.py", "A", "--out", str(tmp_path), "--seconds", "25"])
    with pytest.raises(SystemExit, match="True"):
        programme.main()
    said = {name: row["said"] for name, row in json.loads((tmp_path / "summary.json").read_text()).items()}
    assert said == {"A good": "ok", "A bad": "failed 1", "A late": "no time"}
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        assert "logs/A_good.log" in tar.getnames()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-2], "--resume"])
    (tmp_path / "logs/A_good.log").unlink()
    with pytest.raises(SystemExit, match="True"):
        programme.main()
    assert not (tmp_path / "logs/A_good.log").exists()
    assert (tmp_path / "logs/A_late.log").read_text() == "late\n"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["A", "B"])
def test_every_stage_runs_on_a_cpu(name, tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "1"} if name == "A" else os.environ
    command = [sys.executable, "tools/gpu/programme.py", name, "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
