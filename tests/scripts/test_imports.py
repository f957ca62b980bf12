"""What a run imports, and when; nothing of another library is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import screens

ROOT = Path(__file__).parents[2]
REWARD = """
def score(completion, row):
    return len(completion) % 3
"""


def python(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(train=[{"prompt": str(i)} for i in range(4)], reward=REWARD)


@pytest.mark.slow
def test_a_run_leaves_the_import_system_and_other_libraries_as_they_are(task, tmp_path):
    flags = [
        "--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--reward", f"{task / 'reward.py'}:score",
        "--output", str(tmp_path / "run"), "--steps", "2", "--prompts-per-step", "2", "--group-size", "2",
        "--max-new-tokens", "4", "--eval-steps", "0", "--device", "cpu",
    ]  # fmt: skip
    code = f"""
import gc, sys
before = [*sys.meta_path], gc.isenabled(), gc.get_freeze_count()
from rlkit.scripts.grpo import *
run(main, Args, None, argv={flags!r})
added = [finder for finder in sys.meta_path if finder not in before[0]]
print([finder for finder in added if type(finder).__module__.startswith("rlkit")])
print(before[1:] == (gc.isenabled(), gc.get_freeze_count()))
import torch._dynamo, transformers.utils
print(type(torch._dynamo).__name__, transformers.utils.is_torch_distributed_available.__module__)
print({{"matplotlib", "datasets"}} & sys.modules.keys())  # the plot is drawn in a process of its own
"""
    *_, added, collects, dynamo, heavy = python(code).splitlines()
    assert (added, collects, heavy) == ("[]", "True", "set()")
    assert dynamo == "module transformers.utils.import_utils"
    assert (tmp_path / "run" / "metrics.png").read_bytes().startswith(b"\x89PNG")


WRONG = [
    ("--model", "{task}/none", "no folder"),
    ("--model", "{task}/smol.gguf", "is a GGUF file"),
    ("--output", "{task}", "holds a run"),
    ("--data", "{task}/none.jsonl", "no such file"),
    ("--data", "{task}/broken.jsonl", "broken.jsonl, line 2"),
    ("--rename", "answer prompt", "answer: no file has that column"),
]


@pytest.mark.slow
@pytest.mark.parametrize("where", screens.EVERYWHERE)
def test_a_mistake_is_answered_before_torch_is_loaded(task, tmp_path, where):
    (task / "broken.jsonl").write_text('{"prompt": "1"}\n{"prompt": \n')
    (task / "metrics.jsonl").write_text("")
    given = {"--model": f"{task}/model", "--data": f"{task}/train.jsonl", "--output": f"{tmp_path}/run"}
    given["--reward"] = f"{task}/reward.py:score"
    argv = []
    for flag, value, _ in WRONG:
        flags = given | {flag: value.format(task=task)}
        argv.append(["grpo", *(word for name, text in flags.items() for word in (name, *text.split()))])
    for line, (flag, _, said) in zip(screens.refused_early(argv, where, cwd=ROOT), WRONG, strict=True):
        assert said in line, flag


def test_the_spin_count_is_set_before_torch_is_imported(task, tmp_path):
    flags = ["--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--output", str(tmp_path / "run")]
    flags += ["--reward", f"{task / 'reward.py'}:score"]
    code = f"""
import builtins, os, sys
real = builtins.__import__
def spy(name, *args, **kwargs):
    if name == "torch" and "torch" not in sys.modules:
        print(os.environ.get("GOMP_SPINCOUNT"))
        os._exit(0)
    return real(name, *args, **kwargs)
builtins.__import__ = spy
os.environ.pop("OMP_WAIT_POLICY", None); os.environ.pop("GOMP_SPINCOUNT", None)
from rlkit.scripts.grpo import *
run(main, Args, None, argv={flags!r})
"""
    assert python(code) == "10000\n"
