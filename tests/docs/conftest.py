"""What the tests of pages share."""

from pathlib import Path

import pytest

from rlkit.data.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a tiny model in `start`."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=48)
    for x in (model, tokenizer):
        x.save_pretrained(tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    return tmp_path
