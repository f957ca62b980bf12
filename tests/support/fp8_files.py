"""Random checkpoints in FP8, with what their matrices are."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer

E4M3 = torch.float8_e4m3fn
OF_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
FORMS = {  # config.json's quantization_config, the rows and columns of a block (0: all), and what a scale is stored as
    "blocks": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, (24, 40), "weight_scale_inv", torch.float32),
    "powers of 2": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, (32, 32), "weight_scale_inv", torch.uint8),
    "tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, (0, 0), "weight_scale", torch.float32),
    "rows": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": OF_WEIGHTS | {"strategy": "channel"}, "targets": ["Linear"]}},
        },
        (1, 0),
        "weight_scale",
        torch.bfloat16,
    ),
}


def written(folder, form="blocks", model=None):
    """A random checkpoint in FP8; returns its matrices, name -> W in fp64, by a loop over the blocks of its files."""
    config, (height, width), suffix, kind = FORMS[form]
    model = tiny_model(tiny_tokenizer(), hidden=48, intermediate=100, layers=2) if model is None else model
    model.bfloat16().save_pretrained(folder)
    tensors, whole = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        w = tensors[name].double()
        high, wide = height or len(w), width or w.shape[1]
        codes, truth = torch.zeros(w.shape, dtype=E4M3), torch.zeros_like(w)
        scales = torch.zeros(-(-len(w) // high), -(-w.shape[1] // wide))
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale = w[at].abs().max() / 448
                byte = int(torch.log2(scale).ceil()) + 127
                scale = 2.0 ** (byte - 127) if kind == torch.uint8 else scale.to(kind).double()
                codes[at] = (w[at] / scale).to(E4M3)
                truth[at] = scale * codes[at].double()
                scales[i, j] = byte if kind == torch.uint8 else scale
        shape = () if (height, width) == (0, 0) else scales.shape
        scale = scales.to(kind).reshape(shape)
        tensors |= {name: codes, name.removesuffix("weight") + suffix: scale}
        if form == "tensors":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(())
        whole[name] = truth
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(changed))
    return whole
