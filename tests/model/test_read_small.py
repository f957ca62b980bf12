"""`read_small` gives the model that transformers' `from_pretrained` gives, or none."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlkit.model.forward import load_model
from rlkit.model.weights import read_small

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def saved(folder, family="qwen3", *, dtype=torch.float32, **config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | config), dtype=dtype)
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=[2, 3])
    model.save_pretrained(folder)
    return folder


def read(folder):
    return read_small(AutoConfig.from_pretrained(folder), folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "dtype", "config"), [
    ("llama", torch.float32, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("mistral", torch.bfloat16, {"sliding_window": None}),
    ("qwen2", torch.float32, {}),
    ("qwen3", torch.float16, {"attention_bias": True}),
])  # fmt: skip
def test_the_model_is_that_of_from_pretrained(tmp_path, family, dtype, config, tied):
    folder = saved(tmp_path / "m", family, dtype=dtype, tie_word_embeddings=tied, **config)
    before = torch.get_rng_state()
    ours, theirs = read(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    assert type(ours) is type(theirs)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert mine.keys() == other.keys()
        assert len(mine) > 1
        for name, x in mine.items():
            assert torch.equal(x, other[name]), name
            assert (x.dtype, x.requires_grad) == (other[name].dtype, other[name].requires_grad), name
    assert not any(module.training for module in ours.modules())
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.name_or_path == theirs.name_or_path
    tokens = torch.arange(10)[None]
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def edited(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("spoil", [
    lambda folder: edited(folder, lambda w: w.pop("model.norm.weight")),
    lambda folder: edited(folder, lambda w: w.update(more=torch.zeros(1))),
    lambda folder: edited(folder, lambda w: w.update({"model.norm.weight": torch.ones(31)})),
    lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"),
    lambda folder: (folder / "model.safetensors").unlink(),
    lambda folder: (folder / "generation_config.json").unlink(),
    lambda folder: (folder / "adapter_config.json").write_text("{}"),
    lambda folder: (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    ),
])  # fmt: skip
def test_anything_else_is_left_to_from_pretrained(tmp_path, spoil):
    folder = saved(tmp_path / "m")
    assert read(folder) is not None
    spoil(folder)
    assert read(folder) is None


def test_other_families_and_large_files_are_left_to_from_pretrained(tmp_path, monkeypatch):
    assert read(saved(tmp_path / "gemma", "gemma2")) is None
    folder = saved(tmp_path / "m")
    monkeypatch.setattr("rlkit.model.weights._SMALL", 100)
    assert read(folder) is None
    assert load_model(folder).lm_head.weight.shape == (61, 32)
