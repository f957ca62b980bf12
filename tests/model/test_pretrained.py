"""Model folders that are damaged or incomplete: one line with the folder, what is wrong and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model
from rlkit.model.pretrained import load_tokenizer
from rlkit.rollout.engines.local import LocalEngine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"model '.*' has no tokenizer with a vocabulary: copy tokenizer\.json and"):
        load_tokenizer(folder)


def test_a_tokenizer_file_without_its_parts(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"its tokenizer cannot be read: .*; copy or download tokenizer\.json again"):
        load_tokenizer(folder)


def test_weights_with_nan_are_not_called_not_causal(folder: Path) -> None:
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"computes NaN: its weights are damaged, model\.layers\.1\.mlp\.up_proj\.wei"):
        LocalEngine(load_model(folder))


def test_a_path_that_is_none() -> None:
    with pytest.raises(TypeError, match="path must be the folder of a model or a hub id, got None"):
        load_model(None)  # type: ignore[arg-type]
