"""Fixtures of tests in several folders."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A tiny model, rows that every script can read, and a reward."""
    from rlkit.data.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("task")
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {"prompt": f"{i}+1", "response": f"{i + 1}", "chosen": f"{i + 1}", "rejected": "x", "completion": "y",
         "label": i % 2 == 0}
        for i in range(16)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def score(completion, row):\n    return len(set(completion)) / 8\n")
    return folder
