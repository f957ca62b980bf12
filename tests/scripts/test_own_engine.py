"""`--engine FILE.py:FUNCTION`: the engine of docs/engines.md from the command line, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import screens

from rlkit.scripts import grpo
from rlkit.scripts.cli import run

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
CODE = "\n".join(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "Naive" in block)
FLAGS = "--steps 2 --prompts-per-step 2 --group-size 2 --max-new-tokens 4 --max-prompt-tokens 32 --eval-steps 0"


def train(task, folder, *flags):
    given = ["--model", str(task / "model"), "--data", str(task / "rows.jsonl"), "--output", str(folder)]
    run(grpo.main, grpo.Args, None, argv=[*given, "--reward", f"{task / 'reward.py'}:score", *FLAGS.split(), *flags])


@pytest.mark.slow_cases("async ")
@pytest.mark.parametrize("how", ["", "async "])
def test_the_engine_of_the_docs_trains(task, tmp_path, no_pictures, how):
    code = CODE.replace("def make(path):", f"{how}def make(path, max_len):\n    assert max_len == 36")
    (tmp_path / "mine.py").write_text(code)
    train(task, tmp_path / "run", "--engine", f"{tmp_path / 'mine.py'}:make")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/abs_mean"] < 1e-4 for line in lines)
    assert max(line["grad_norm"] for line in lines) > 0


@pytest.mark.slow
def test_what_is_no_engine_is_refused(task, tmp_path):
    (tmp_path / "mine.py").write_text("class Half:\n    generate = close = None\ndef make(path):\n    return Half()\n")
    given = f"{tmp_path / 'mine.py'}"
    said = screens.refused(lambda: train(task, tmp_path / "a", "--engine", f"{given}:mak"))
    assert said == f"error: --engine {given}:mak: {given} has no 'mak'; it has ['Half', 'make']"
    said = screens.refused(lambda: train(task, tmp_path / "b", "--engine", f"{given}:make"))
    assert said == (
        f"error: --engine {given}:make must return an engine (rlkit.types.Engine), got Half without abort, "
        "update_weights, progress"
    )
    said = screens.refused(lambda: train(task, tmp_path / "c", "--engine", "vlm"))
    assert said == "error: --engine must be one of local, sglang, vllm or FILE.py:FUNCTION, got vlm"
    said = screens.refused(lambda: train(task, tmp_path / "d", "--engine", f"{given}:make", "--max-batch", "8"))
    assert said == f"error: --max-batch is for --engine local, not {given}:make"
