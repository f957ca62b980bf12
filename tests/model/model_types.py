"""Every causal language model of the installed transformers: a config of it, and whether rlkit trains it."""

from __future__ import annotations

import re
import warnings
from typing import Any, NamedTuple

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlkit.model import vision
from rlkit.model.families import check_architecture, check_causal_lm
from rlkit.model.forward import forward
from rlkit.model.lora import adapters, add_lora
from rlkit.model.parallelize import COVERED
from rlkit.model.routing import num_experts
from rlkit.model.small_copy import shrunk
from rlkit.rollout.engines.local.backends import CachedForward, Decoder, Recompute, pick_decoder

MODEL_TYPES = tuple(dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *vision.TYPES]))
_GRANITE = {
    "logits_scaling": 8.0,
    "attention_multiplier": 0.03,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
}
_CONV = ["conv", "full_attention"] * 4
OVERRIDES: dict[str, dict[str, Any]] = {  # what a default config lacks, and what published checkpoints set
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "falcon_h1": {"lm_head_multiplier": 0.25, "key_multiplier": 0.5, "ssm_out_multiplier": 2.0},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hyperclovax": {"logits_scaling": 0.125},
    "lfm2": {"layer_types": _CONV, "num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": _CONV, "num_hidden_layers": 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
    "reformer": {"is_decoder": True},
}
FAMILIES = {  # what is special -> a model type of each
    "llama-like": ["llama", "qwen3"],
    "sliding and full layers": ["qwen2", "gemma3_text"],
    "softcaps": ["gemma2"],
    "mixture of experts": ["qwen3_moe", "mixtral"],
    "scaled logits": ["cohere", "granite", "hyperclovax"],
    "learned positions": ["gpt2"],
    "gated delta net and attention": ["qwen3_5_text"],
    "Mamba 2 and attention": ["nemotron_h", "falcon_h1"],
    "layers that ignore a given state": ["jamba", "minimax"],
    "convolutions": ["lfm2"],
    "latent attention": ["deepseek_v2", "deepseek_v3"],
    "sinks": ["gpt_oss"],
    "layers of different shapes": ["gemma4_text"],
    "arguments that do not reach attention": ["stablelm"],
    "recurrent layers only": ["mamba", "rwkv"],
    "chunked attention": ["llama4_text"],
    "ALiBi": ["bloom"],
    "no position_ids": ["bart"],
    "two heads or more": ["modernbert-decoder"],
    "text and images": ["qwen2_5_vl", "qwen3_vl", "qwen3_5"],
    "images that see both ways": ["gemma3"],
    "bidirectional": ["bert"],
}


class Found(NamedTuple):
    """`status`: "packed", "unpacked" or "refused" for a `reason`, or "not built" from a small config.

    `images`: how it is trained on images, "" where it reads text only.
    """

    status: str
    reason: str = ""
    images: str = ""


class Use(NamedTuple):
    """What else works with a trained type: `layouts` beside replicate and shard, `lora`, and the embedded `engine`."""

    layouts: str = ""
    lora: str = ""
    engine: str = ""


def config_of(model_type: str) -> Any:
    return CONFIG_MAPPING[model_type](**OVERRIDES.get(model_type, {}))


def verdict(model_type: str) -> Found:
    """What rlkit says of a model type."""
    try:
        config = config_of(model_type)
    except Exception:
        return Found("not built", "no default config")
    try:
        check_causal_lm(config)
        checked = check_architecture(config, forward)
    except ValueError as error:
        reason = str(error).removeprefix(f"model type {config.model_type!r} cannot be trained: ")
        return Found("refused", re.sub(r" by \S+ nats", "", reason))
    if checked is None:
        return Found("not built", "no small model from the default config")
    images = ""
    if vision.reads_images(config):
        images = checked.images or ("packed" if config.model_type != "gemma3" else "unpacked")
    return Found("packed" if checked.packed else "unpacked", re.sub(r" by \S+ nats", "", checked.reason), images)


def use(model_type: str, found: Found) -> Use:
    """What works with a type of this verdict; nothing where it is not trained."""
    if found.status not in ("packed", "unpacked"):
        return Use()
    small = shrunk(config_of(model_type))
    layouts = "" if model_type not in COVERED else "tp cp pp ep" if num_experts(small) > 1 else "tp cp pp"
    with torch.device("meta"):
        model = vision.auto_class(small).from_config(small, dtype=torch.float32)
    try:
        add_lora(model, rank=2)
    except ValueError:
        lora = "no"
    else:
        lora = "yes" if all(name.endswith(".weight") for name in adapters(model)) else "with experts"
    decoder = pick_decoder(filled(model_type, seed=0), max_batch=2, max_len=64)
    return Use(layouts, lora, {Decoder: "fast", CachedForward: "cache", Recompute: "whole"}[type(decoder)])


def filled(model_type: str, *, seed: int, std: float = 0.1) -> Any:
    """A small copy of the default config with random weights, matrices of this standard deviation."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = shrunk(config_of(model_type))
        model = vision.auto_class(small).from_config(small, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=std) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
    return model.eval()
