"""A small copy of a model's config: the same architecture, built and run in a fraction of a second."""

from __future__ import annotations

import copy
import re
from typing import Any

VOCAB, WINDOW, SOFTCAP, HEAD_DIM = 64, 4, 2.0, 16
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
    "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "decoder_num_key_value_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "embedding_dim")
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_encoder_layers",
)  # fmt: skip
_CAPS = {  # (pattern of the name, largest value of the small config)
    r"(unpadded_)?vocab_size.*|n_words": VOCAB,
    r".*(intermediate|ffn|inner|feed_forward|mlp)_?(size|dim|hidden_size).*|n_inner": 32,
    r"(n|num|moe_num)_(local_|routed_)?experts": 4,
    r".*experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|n_group|num_expert_group": 2,
    r".*shared_experts|topk_group": 1,
    r"[HL](_bp)?_cycles": 1,  # each runs the layers once more, and multiplies the rounding
    r"rotary_dim": 8,
    r"hidden_size_per_layer_input": 16,
    r"(q|kv)_lora_rank|adapter_rank": 16,
    r"(mamba_)?n_?groups": 2,
    r"(mamba_)?chunk_size": 8,  # of a recurrent layer: shorter than the test sequences
    r"sliding_window|(local_)?attention_window(_size)?|window_size|attention_chunk_size": WINDOW,
    r"attn_logit_softcapping|final_logit_softcapping|attn_logit_cap|logits_soft_cap": SOFTCAP,
}


def shrunk(config: Any) -> Any:
    """A small config of the same architecture, for a model that is built and run in a fraction of a second.

    Widths, heads, vocabulary, experts and layers shrink, but keep the ratios that model code depends on: multi-head,
    grouped-query or multi-query attention, and whether the heads fill the hidden size. Windows become shorter than the
    test sequences, and softcaps small enough to change the logits. One layer of each kind remains, at least two in all.
    """
    return type(config).from_dict(_shrunk(config.to_dict()))


def _shrunk(old: dict[str, Any]) -> dict[str, Any]:
    """`shrunk` for a config's dictionary and the configs nested in it."""
    new = {k: _shrunk(v) if isinstance(v, dict) and "model_type" in v else v for k, v in copy.deepcopy(old).items()}
    _narrow(new)
    _shorten(new)
    for name, x in new.items():
        if name.endswith(("_token_id", "_token_index")):
            big = max(x) if isinstance(x, list) and x else x
            new[name] = 0 if isinstance(big, int) and big >= VOCAB else x
        else:
            for cap in (cap for pattern, cap in _CAPS.items() if re.fullmatch(pattern, name)):
                new[name] = [_capped(y, cap) for y in x] if isinstance(x, list) else _capped(x, cap)
    if isinstance(new.get("vision_config"), dict) and isinstance(new.get("text_config"), dict):
        _narrow_vision(new, new["vision_config"])
    return new


def _narrow_vision(config: dict[str, Any], vision: dict[str, Any]) -> None:
    """Shrink a vision tower to two layers that fit the language model, and place its tokens before those of text."""
    sizes: dict[str, Any] = {"depth": 2, "patch_size": 4, "num_position_embeddings": 16, "image_size": 16}
    sizes |= {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": config["text_config"]["hidden_size"]}
    sizes["deepstack_visual_indexes"] = [0, 1]
    if "embed_dim" in vision:  # its `hidden_size` is that of its output
        sizes["hidden_size"] = config["text_config"]["hidden_size"]
    vision |= {name: x for name, x in sizes.items() if vision.get(name)}
    tokens = {"vision_start_token_id": 0, "vision_end_token_id": 0, "image_token_id": 1, "video_token_id": 2}
    tokens |= {"mm_tokens_per_image": 4, "boi_token_index": 0, "eoi_token_index": 0, "image_token_index": 1}
    config |= {name: x for name, x in tokens.items() if name in config}
    rope = config["text_config"].get("rope_parameters")
    if "spatial_merge_size" in vision and isinstance(rope, dict):
        rope.setdefault("mrope_section", [2, 3, 3])


def _capped(x: Any, cap: float) -> Any:
    return min(x, cap) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _narrow(config: dict[str, Any]) -> None:
    """Shrink heads and widths."""
    heads, kv, width = (next((n for n in names if config.get(n)), None) for names in (_HEADS, _KV_HEADS, _WIDTHS))
    if width is None or (heads is not None and not isinstance(config[heads], int)):
        return
    num_heads = config[heads] if heads is not None else 4
    num_kv = config[kv] if kv is not None else num_heads
    head_dim, old = config.get("head_dim") or config[width] // num_heads, config[width]
    expand = (config.get("expand") or 1) if config.get("expand", 1) * old == num_heads * head_dim else 1  # Mamba 2
    filled = expand * old == num_heads * head_dim
    small_kv = min(num_kv, 2)
    small = 4 if num_kv == num_heads else 2 * small_kv
    config |= {n: small for n in _HEADS if config.get(n)}
    config |= {n: small if num_kv == num_heads else small_kv for n in _KV_HEADS if config.get(n)}
    config |= {n: HEAD_DIM for n in ("head_dim", "attention_head_size", "global_head_dim", "d_head") if config.get(n)}
    config |= {n: small * HEAD_DIM // expand + (0 if filled else HEAD_DIM) for n in _WIDTHS if config.get(n)}
    _narrow_parts(config, head_dim=head_dim, kv_heads=small if num_kv == num_heads else small_kv)
    if inner := config.get("attention_hidden_size"):
        size = config["attention_hidden_size"] = inner * config[width] // old
        config |= {"attention_head_dim": size // small} if "attention_head_dim" in config else {}
    for rope in _ropes(config):
        if section := rope.get("mrope_section"):
            rope["mrope_section"] = [HEAD_DIM // 2 * n // sum(section) for n in section]
        for name in ("short_factor", "long_factor"):
            if isinstance(x := rope.get(name), list):
                rope[name] = x[:: max(1, head_dim // HEAD_DIM)][: len(x) * HEAD_DIM // head_dim]


def _narrow_parts(config: dict[str, Any], *, head_dim: int, kv_heads: int) -> None:
    """Shrink the heads of latent attention (MLA), of Mamba layers, and of layers that differ from the others."""
    if latent := [config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim") if config.get(n)]:
        sizes = dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), HEAD_DIM)
        sizes |= {"qk_rope_head_dim": 8, "qk_head_dim": HEAD_DIM + 8}
        sizes["head_dim"] = {sum(latent): HEAD_DIM + 8, latent[-1]: 8}.get(head_dim, HEAD_DIM)
        config |= {n: size for n, size in sizes.items() if config.get(n)}
    for count, size in (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim")):
        if config.get(count) and config.get(size):
            inner = config["mamba_expand"] * config["hidden_size"]
            config |= {count: 4, size: 8 if config.get("mamba_d_ssm") else inner // 4}
            config |= {"mamba_d_ssm": 32} if config.get("mamba_d_ssm") else {}
    for layer in (config.get("per_layer_config") or {}).values():
        sizes = {n: min(kv_heads, 2) for n in (*_HEADS, *_KV_HEADS)}
        sizes |= {"qk_nope_head_dim": HEAD_DIM, "kv_lora_rank": 16}
        sizes["head_dim"] = HEAD_DIM if layer.get("head_dim") == head_dim else 2 * HEAD_DIM
        layer |= {n: size for n, size in sizes.items() if layer.get(n)}


def _ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of rotary positions: one, or one per layer type."""
    ropes = [x for x in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(x, dict)]
    return [config, *ropes, *(x for rope in ropes for x in rope.values() if isinstance(x, dict))]


def _shorten(config: dict[str, Any]) -> None:
    """Keep the first layer of each kind, where kinds differ in the config's lists with one entry per layer."""
    count = next((config[n] for n in _LAYERS if isinstance(config.get(n), int)), 0)
    if count <= 2:
        return
    lists = {n: x for n, x in config.items() if isinstance(x, list) and len(x) == count}
    shared = config.get("num_kv_shared_layers") or 0  # the last layers use keys and values of earlier ones
    each = {int(i): x for i, x in (config.get("per_layer_config") or {}).items()}  # what differs in a layer
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([i >= count - shared, each.get(i), *(x[i] for x in lists.values())]), i)
    layers = sorted(kinds.values()) if len(kinds) < 9 else [*range(8)]
    step = max([1, *(config.get(n) or 1 for n in ("decoder_sparse_step", "moe_layer_interval"))])
    size = max(2, len(layers), step)
    layers = sorted({*layers, *[i for i in range(count) if i not in layers][: size - len(layers)]})
    config |= {n: [x[i] for i in layers] for n, x in lists.items()}
    config |= {"per_layer_config": {i: each[old] for i, old in enumerate(layers) if old in each}} if each else {}
    config |= {n: size for n in _LAYERS if isinstance(config.get(n), int)}
    config |= {"num_kv_shared_layers": sum(i >= count - shared for i in layers)} if shared else {}
    for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if isinstance(config.get(name), int):
            config[name] = size if config[name] >= count else min(config[name], 1)
    if isinstance(config.get("moe_layer_end_index"), int):
        config["moe_layer_end_index"] = size - 1
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [0]
