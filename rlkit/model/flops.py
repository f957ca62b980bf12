"""FLOPs of training on a token, and the tokens per second at which the GPUs would do nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlkit._util.ranks import world_size
from rlkit.model.sharding import mesh_of

# Dense bf16 matrix products per second, from the data sheets. The first name that the device's contains counts.
PEAKS = (
    ("B200", 2.25e15), ("H200", 9.89e14), ("H100 PCIe", 7.56e14), ("H100 NVL", 8.35e14), ("GH200", 9.89e14),
    ("H100", 9.89e14), ("A100", 3.12e14), ("L40S", 3.62e14), ("L40", 1.81e14), ("L4", 1.21e14), ("A40", 1.497e14),
    ("RTX 4090", 1.652e14), ("RTX A6000", 1.548e14), ("RTX 3090", 7.1e13),
)  # fmt: skip


def train_flops(*models: Any) -> int:
    """FLOPs of forward and backward per token, in the products with the weights of the models.

        sum over matrices of 2 * elements * (2 + trained)       trained: 1, of a frozen matrix 0

    Of experts [E, ...] those that a token goes to are counted. The embedding is free, and a head tied to it is not.
    Attention's products of queries and keys are not counted, nor is a forward that activation checkpointing repeats.
    """
    return sum(2 * used * (2 + p.requires_grad) for model in models for p, used in _used(model))


def _used(model: Any) -> Iterator[tuple[Any, int]]:
    """Each matrix of a model and the elements that a token is multiplied with."""
    active = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    for p in model.parameters():
        if p.ndim > 1 and (p is not embedding or (head is not None and head.weight is embedding)):
            yield p, p.numel() // p.shape[0] * active if p.ndim == 3 and active else p.numel()


def attention_share(model: Any) -> float:
    """FLOPs of a query and a key in the attention of all layers, over those of a token in the model's matrices.

        a = 4 layers heads head_dim / sum over matrices of 2 * elements

    A token that sees k keys costs 1 + a k tokens, forward and backward: 3.6e-5 of an 8 B model, so that attention takes
    as long as all matrices at 55,000 tokens (28,000 keys on average). Layers that `layer_types` names as windows or
    states count as none.
    """
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * getattr(text, "num_hidden_layers", 0)
    heads = getattr(text, "num_attention_heads", None) or 0
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return 4 * kinds.count("full_attention") * heads * head_dim / sum(2 * used for _, used in _used(model))


def peak_tokens(model: Any, *, dtype: str) -> float | None:
    """Tokens per second that the GPUs of all ranks could train at their peak in bf16, of a model or a ModuleDict.

    None for fp32, a device that is not in `PEAKS`, a module that is no model of transformers, and ranks that hold parts
    of a matrix (tensor or expert parallel) or of the layers (pipeline).
    """
    models = list(model.values()) if isinstance(model, torch.nn.ModuleDict) else [model]
    if dtype != "bf16" or not torch.cuda.is_available() or not all(hasattr(m, "get_input_embeddings") for m in models):
        return None
    sizes = [mesh.sizes for m in models if (mesh := mesh_of(m)) is not None]
    name = torch.cuda.get_device_name()
    peak = next((peak for part, peak in PEAKS if part in name), None)
    if peak is None or any(max(size.tp, size.pp, size.ep) > 1 for size in sizes):
        return None
    return peak * world_size() / train_flops(*models)
