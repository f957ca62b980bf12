"""Model folders that are damaged or incomplete: one line with the folder, what is wrong and the fix."""

from __future__ import annotations

import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model
from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.model.source import stored
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


def test_a_config_that_is_wrong_is_not_called_a_wrong_tokenizer(folder: Path) -> None:
    """transformers reads the config for the tokenizer too, and scripts load that first."""
    text = (
        r"its config cannot be read: .*`num_hidden_layers` \(7\) must be .* `layer_types` \(4\); correct config\.json"
    )
    change(folder, num_hidden_layers=7)
    for load in (load_config, load_tokenizer):
        with pytest.raises(ValueError, match=text):
            load(folder)


def test_the_length_in_a_tokenizers_config_is_not_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers says that longer texts "result in indexing errors"; the limits of a run are its own."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 3}))
    logging.getLogger("transformers").addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, "transformers")  # other tests make it quiet
    try:
        tokenizer = load_tokenizer(folder)
        assert len(tokenizer.encode("more than three tokens")) > tokenizer.model_max_length == 3
        assert caplog.text == ""
        tokenizer.deprecation_warnings.clear()
        tokenizer.encode("more than three tokens")
        assert "longer than the specified maximum" in caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


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


def change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def save_index(folder: Path, names: Any, file: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))


def test_two_sets_of_weights_with_other_names_are_refused(folder: Path) -> None:
    names = [*load_file(folder / "model.safetensors")]
    save_index(folder, names, "model-00001-of-00001.safetensors")
    load_config(folder)
    save_index(folder, names[1:], "model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match=rf"an index of other weights, .* \({names[0]} is in one of them\): delete"):
        load_config(folder)


def test_two_sets_of_weights_with_the_same_names_are_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An index of the single file, and one whose files are gone, are no second set."""
    names, part = [*load_file(folder / "model.safetensors")], "model-00001-of-00001.safetensors"
    for file in ("model.safetensors", part):
        save_index(folder, names, file)
        load_config(folder)
    assert caplog.text == ""
    shutil.copy(folder / "model.safetensors", folder / part)
    for _ in range(2):
        load_config(folder)
    assert caplog.text.count("twice, in model.safetensors and in the files of model.safetensors.index.json; ") == 1
    assert f"model.safetensors is read, and {part} is not: delete the one that is not meant" in caplog.text


def test_weights_that_no_index_names_are_none_of_the_model(folder: Path) -> None:
    """Mistral's repositories hold them again in another format; an export would carry them on."""
    single, part = folder / "model.safetensors", folder / "model-00001-of-00001.safetensors"
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    names = {*load_file(single)}
    assert stored(folder).keys() == names
    shutil.move(single, part)
    save_index(folder, names, part.name)
    assert stored(folder).keys() == names
    (folder / "model.safetensors.index.json").unlink()
    assert stored(folder).keys() == names | {"layers.0.attention.wq.weight"}


@pytest.mark.parametrize(
    ("key", "name", "why"),
    [
        ("attn_implementation", "sdp", "which transformers does not have"),
        ("_attn_implementation", "sdp", "which transformers does not have"),
        ("_experts_implementation", "group_mm", "which transformers does not have"),
        pytest.param(
            "_attn_implementation", "flash_attention_2", "which is not installed",
            marks=pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed"),
        ),
    ],
)  # fmt: skip
def test_a_kernel_that_transformers_lacks_is_refused_by_its_key(folder: Path, key: str, name: str, why: str) -> None:
    for fine in ("eager", "sdpa", "grouped_mm" if "experts" in key else "flex_attention", None):
        change(folder, **{key: fine})
        load_config(folder)
    change(folder, **{key: name})
    with pytest.raises(ValueError, match=rf"config\.json names the kernel '{name}', {why}: remove {key} there"):
        load_config(folder)


OF_CHECKPOINTS = {  # keys that no class reads, of real config.json files
    "_name_or_path": "x", "auto_map": {}, "unsloth_version": "1", "torch_dtype": "float32", "pretraining_tp": 1,
    "rope_theta": 1e4, "rope_scaling": None, "tie_encoder_decoder": False, "eod_token_id": 1, "sep_token_id": None,
    "use_cache": True, "mlp_bias": False, "head_dimension_of_mine": 3, "num_key_value_head": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "near"), [("num_key_value_head", "num_key_value_heads"), ("rope_thetaa", "rope_theta")]
)
def test_a_key_that_is_misspelt_is_named_once(folder: Path, key: str, near: str, caplog: Any) -> None:
    """Only where the key that is read is not there."""
    caplog.set_level(logging.WARNING, "rlkit.model")
    change(folder, **OF_CHECKPOINTS, eos_token_id=1)
    load_config(folder)
    assert [line for line in caplog.messages if "misspelt" in line] == []
    config = json.loads((folder / "config.json").read_text()) | {key: 2}
    (folder / "config.json").write_text(json.dumps({k: x for k, x in config.items() if k != near}))
    for _ in range(2):
        load_config(folder)
    line = f"{str(folder)!r}: config.json has {key}, which Qwen3Config does not read, and no {near}: is it misspelt?"
    assert [line for line in caplog.messages if "misspelt" in line] == [line]


def test_two_chat_templates_that_differ_are_named_once(folder: Path, caplog: Any) -> None:
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    assert own.is_file()
    for other, said in ((own.read_text() + "\n", 0), ("{{ messages }}", 1), ("{{ messages }}", 1)):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": other}))
        load_tokenizer(folder)
        lines = [
            line
            for line in caplog.messages
            if "has two chat templates that differ; chat_template.jinja is read" in line
        ]
        assert len(lines) == said


@pytest.mark.parametrize(
    "normalizer", [{"type": "Lowercase"}, {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}, None]
)
def test_a_tokenizer_without_capital_letters_is_named(folder: Path, caplog: Any, normalizer: Any) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": normalizer}))
    load_tokenizer(folder)
    lines = [
        line for line in caplog.messages if "writes all text in small letters, so that no answer has others" in line
    ]
    assert len(lines) == (normalizer is not None)
