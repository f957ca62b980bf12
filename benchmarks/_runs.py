"""Runs of `rlkit grpo` on random models in processes of their own: their files and their commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def write_task(folder: Path, **sizes: Any) -> None:
    """A tiny model of these sizes and 64 prompts."""
    from rlkit.data.tiny import tiny_model, tiny_tokenizer
    from rlkit.model.weights import export_hf

    tokenizer = tiny_tokenizer()
    export_hf(tiny_model(tokenizer, seed=0, **sizes), tokenizer, folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i:06d}"}) + "\n" for i in range(64)))


def digits(folder: Path) -> list[str]:
    """The flag of a reward for digits."""
    (folder / "reward.py").write_text("def digits(completion, row):\n    return sum(map(str.isdigit, completion))\n")
    return ["--reward", f"{folder / 'reward.py'}:digits"]


def grpo(folder: Path, flags: list[str]) -> list[str]:
    """The command for the model and the rows in the folder."""
    files = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl")]
    return [sys.executable, "-m", "rlkit.scripts", "grpo", *files, *flags]
