"""docs/data.md begins with rows and the command of each: the command reads the row."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rlkit.scripts import cli

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
ROWS = re.findall(r"^\| `(\{.*?\})` \| (.*?) \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("row", "commands"), ROWS)
def test_the_command_beside_a_row_reads_it(
    row: str, commands: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(json.loads(row)) + "\n")
    for command in re.findall("`(.*?)`", commands):
        _, name, *flags = shlex.split(command)
        flags = flags[: flags.index("--reward")] if "--reward" in flags else flags
        cli.main(["data", str(file), *flags])
        (line,) = re.findall(rf"^  rlkit [\w, ]*\b{name}\b[\w, ]*  (?=\S)(.*)", capsys.readouterr().out, re.MULTILINE)
        assert not line.startswith("no: "), (command, line)


def test_the_table_has_rows_of_every_command_that_reads_files() -> None:
    named = {command.split()[1] for _, commands in ROWS for command in re.findall("`(.*?)`", commands)}
    assert named == {"grpo", "sft", "dpo", "kto", "reward_model"}
