"""docs/start.md: its files and commands, in order, with a tiny model, leave the report that it promises."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest
from pictures import no_pictures

from rlkit.scripts import cli

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = (
    "--steps",
    "2",
    "--prompts-per-step",
    "2",
    "--eval-limit",
    "2",
    "--max-new-tokens",
    "6",
    "--group-size",
    "2",
    "--device",
    "cpu",
)


@pytest.fixture
def folder(page_folder: Path) -> Path:
    """A working folder with the page's files, and a model."""
    for code, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE, re.DOTALL):
        (page_folder / name).write_text(code)
    return page_folder


def call(command: list[str], *more: str) -> None:
    module = importlib.import_module(cli.module_of(command[0]))
    words = ["start" if word == MODEL else word for word in command[1:]]
    with no_pictures():
        cli.run(module.main, module.Args, None, argv=[*words, *more])


def test_the_page_goes_from_data_to_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [command[:2] for command in COMMANDS] == [
        ["python", "make_data.py"], ["rlkit", "data"], ["rlkit", "grpo"], ["rlkit", "chat"],
    ]  # fmt: skip
    runpy.run_path("make_data.py")
    assert [len((folder / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "test")] == [40, 10]
    call(COMMANDS[1][1:])
    assert "train.jsonl: 40 rows" in capsys.readouterr().out
    call(COMMANDS[2][1:], *SMALL)
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [f"report {folder}/runs/short/report.html", f"exported {folder}/runs/short/model"]
    for name in re.findall(r"^    (runs/short/\S+)", PAGE, re.MULTILINE):
        assert (folder / name).exists(), name
    metrics = (folder / "runs/short/metrics.jsonl").read_text()
    assert "words" in metrics
    capsys.readouterr()
    call(COMMANDS[3][1:], "--max-new-tokens", "4")
    assert capsys.readouterr().out.strip()


def test_the_reward_of_the_page_prefers_short_sentences(folder: Path) -> None:
    short = runpy.run_path("my_rewards.py")["short"]
    row = {"most": 4}
    rewards = [short(text, row)["reward"] for text in ("A b c d.", "A b c d e f g h.", "A b c d", "", "Thunder.")]
    assert rewards == [1.0, 0.5, 0.0, 0.0, 0.25]
