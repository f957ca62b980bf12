"""docs/gsm8k.md: its commands parse as they stand, and run in order on rows like GSM8K's with a tiny model."""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro
from pictures import no_pictures

from rlkit.run.console import COLUMNS
from rlkit.scripts import cli

PAGE = (Path(__file__).parents[2] / "docs" / "gsm8k.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
OURS = [command[1:] for command in COMMANDS if command[0] == "rlkit"]


def parsed(command: list[str]) -> tuple[Any, Any]:
    """The module of a command, and its flags; those after < and > are the shell's."""
    words = command[1 : min((command.index(sign) for sign in "<>" if sign in command), default=None)]
    module = importlib.import_module(cli.module_of(command[0]))
    return module, tyro.cli(module.Args, args=words)


def test_the_page_goes_from_training_to_upload() -> None:
    assert [c[0] for c in OURS] == ["grpo", "plot", "grpo", "eval", "chat", "chat", "chat"]
    assert [c[:3] for c in COMMANDS if c[0] != "rlkit"] == [
        ["python", "-m", "sglang.launch_server"],
        ["vllm", "serve", "runs/gsm8k/model"],
        ["hf", "auth", "login"],
        ["hf", "upload", "YOUR_NAME/gsm8k-grpo"],
    ]


def test_the_columns_of_the_page_are_those_of_the_screen() -> None:
    table = PAGE[PAGE.index("## The screen") : PAGE.index("## The run folder")]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)]
    assert named == [c.title for c in COLUMNS if c.title not in ("acc", "teacher")] + ["eval"]


def test_the_resumed_run_has_the_flags_of_the_first() -> None:
    first, resumed = (parsed(OURS[i])[1] for i in (0, 2))
    assert resumed.schedule.resume
    assert resumed.schedule.steps > first.schedule.steps
    schedule = replace(resumed.schedule, resume=False, steps=first.schedule.steps)
    assert replace(resumed, schedule=schedule) == first
    assert first.rollouts.prompts_per_step * 233 <= 7473 < first.rollouts.prompts_per_step * 234


@pytest.fixture
def folder(page_folder: Path) -> Path:
    """A working folder with a model and rows in the form of GSM8K."""
    rows = [{"question": f"Ann has {i} pens and buys 2.", "answer": f"{i}+2={i + 2}\n#### {i + 2}"} for i in range(8)]
    (page_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (page_folder / "questions.txt").write_text("1+1?\n2+2?\n")
    return page_folder


def call(command: list[str], *more: str, **replaced: str) -> None:
    module = importlib.import_module(cli.module_of(command[0]))
    words = [replaced.get(word, word) for word in command[1:]]
    with nullcontext() if command[0] == "plot" else no_pictures():
        cli.run(module.main, module.Args, None, argv=[*words, *more])


@pytest.mark.slow
def test_the_commands_run_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("matplotlib")
    rows = {f"openai/gsm8k:main:{split}": "rows.jsonl" for split in ("train", "test")}
    rows |= {"Qwen/Qwen2.5-0.5B-Instruct": "start"}
    small = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "6", "--max-prompt-tokens", "64"]
    small += ["--eval-limit", "2", "--device", "cpu", "--reward-timeout", "300"]

    call(OURS[0], *small, "--steps", "1", **rows)
    call(OURS[1])
    assert (folder / "runs/gsm8k/metrics.png").stat().st_size > 0
    call(OURS[2], *small, "--steps", "2", **rows)
    lines = [json.loads(line) for line in (folder / "runs/gsm8k/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    capsys.readouterr()
    call(OURS[3], "--eval-limit", "2", "--max-new-tokens", "6", "--device", "cpu", "--reward-timeout", "300", **rows)
    measured = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    sentence = PAGE[PAGE.index("It prints `sampled`") : PAGE.index("with their intervals")]
    assert sorted(measured) == sorted(re.findall("`(.*?)`", sentence))
    assert all("loss" in line for line in lines[1:]), "the table of the screen names it"
    for name in ("trajectories", "checkpoints", "model"):
        assert f"runs/gsm8k/{name}/" in PAGE
        assert (folder / "runs/gsm8k" / name).is_dir()
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    call(OURS[5], "--max-new-tokens", "6")
    monkeypatch.setattr(sys, "stdin", io.StringIO((folder / "questions.txt").read_text()))
    call(OURS[6][: OURS[6].index("<")], "--max-new-tokens", "6")
    assert capsys.readouterr().out.count("\n") >= 3
