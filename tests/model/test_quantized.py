"""Checkpoints of quantized weights are refused by name before their weights are read, in every loader."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model, prepare_model
from rlkit.model.heads import load_reward_model, load_value_model

SIZES = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
METHODS = {  # as published checkpoints have them
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
}
LOADERS = [load_model, load_value_model, load_reward_model]


def saved(folder, **extra):
    """A tiny model's folder, with further fields in config.json."""
    tiny_model(tiny_tokenizer(), **SIZES).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | extra))
    return folder


def with_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_is_refused_before_its_weights_are_read(tmp_path, method, load):
    folder = saved(tmp_path, quantization_config=METHODS[method])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"^model '.*' has {method} weights: rlkit trains no quantized weights, load"):
        load(folder)


def test_a_model_that_transformers_dequantized_is_refused(tmp_path):
    """Its export would be fp8 codes under a config that does not say so."""
    model = tiny_model(tiny_tokenizer(), **SIZES)
    model.config.quantization_config = METHODS["fp8"]
    with pytest.raises(ValueError, match="has fp8 weights"):
        prepare_model(model)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scales", "qweight", "qzeros", "weight_packed", "weight_scale"])
@pytest.mark.parametrize("load", LOADERS)
def test_scales_beside_the_weights_are_refused(tmp_path, suffix, load):
    """Without `quantization_config`: transformers reads the codes as weights."""
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    with_tensors(saved(tmp_path), lambda tensors: tensors | {name: torch.ones(1)})
    with pytest.raises(ValueError, match=f"1 tensors of quantized weights \\({name}\\)"):
        load(tmp_path)


def test_other_tensors_are_ignored(tmp_path):
    with_tensors(saved(tmp_path), lambda tensors: tensors | {"model.layers.0.rotary.inv_freq": torch.ones(8)})
    load_model(tmp_path)


def test_weights_of_another_shape_are_named(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    with_tensors(saved(tmp_path), lambda tensors: tensors | {name: torch.ones(48, 32)})
    with pytest.raises(ValueError, match=rf"{name} is \[48, 32\] there and \[64, 32\] in the model .*\(1 diff"):
        load_model(tmp_path)


def test_a_type_whose_export_cannot_be_read_is_refused():
    emu3 = pytest.importorskip("transformers").Emu3Config()
    from rlkit.model.families import check_causal_lm

    with pytest.raises(ValueError, match="'emu3' cannot be trained: an export would be of type 'emu3_text_model'"):
        check_causal_lm(emu3)
