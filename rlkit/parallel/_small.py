"""A transformers config made small: narrow, a few layers, every kind of layer and everything that changes the maths."""

from __future__ import annotations

import copy
import re
from typing import Any

VOCAB, WINDOW, SOFTCAP, HEAD_DIM = 64, 4, 2.0, 16
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "decoder_num_key_value_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_CAPS = {  # (pattern of the name, largest value of the small config)
    r"vocab_size.*|n_words": VOCAB,
    r".*(intermediate|ffn|inner|feed_forward|mlp)_?(size|dim|hidden_size).*|n_inner": 32,
    r"(n|num|moe_num)_(local_|routed_)?experts": 4,
    r".*experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|n_group|num_expert_group": 2,
    r".*shared_experts|topk_group": 1,
    r"[HL](_bp)?_cycles": 1,  # each runs the layers once more, and multiplies the rounding
    r"rotary_dim": 8,
    r"hidden_size_per_layer_input": 16,
    r"sliding_window|(local_)?attention_window(_size)?|window_size|attention_chunk_size": WINDOW,
    r"attn_logit_softcapping|final_logit_softcapping|attn_logit_cap|logits_soft_cap": SOFTCAP,
}


def shrunk(config: Any) -> Any:
    """A small config of the same architecture, for a model that is built and run in a fraction of a second.

    Widths, heads, vocabulary, experts and layers shrink. Ratios that the code looks at stay: grouped, single or as many
    key-value heads; heads that fill the hidden size or not. A window becomes shorter than a test's sequences and a
    softcap small enough to bend its logits. A layer of each kind stays, at least two in all.
    """
    return type(config).from_dict(_shrunk(config.to_dict()))


def _shrunk(old: dict[str, Any]) -> dict[str, Any]:
    """The same of the config's own and nested dictionaries."""
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
    return new


def _capped(x: Any, cap: float) -> Any:
    return min(x, cap) if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _narrow(config: dict[str, Any]) -> None:
    """Heads and widths."""
    heads, kv, width = (next((n for n in names if config.get(n)), None) for names in (_HEADS, _KV_HEADS, _WIDTHS))
    if heads is None or width is None or not isinstance(config[heads], int):
        return
    num_heads = config[heads]
    num_kv = config[kv] if kv is not None else num_heads
    head_dim = config.get("head_dim") or config[width] // num_heads
    filled = config[width] == num_heads * head_dim
    small_kv = min(num_kv, 2)
    small = 4 if num_kv == num_heads else 2 * small_kv
    config |= {n: small for n in _HEADS if config.get(n)}
    config |= {n: small if num_kv == num_heads else small_kv for n in _KV_HEADS if config.get(n)}
    config |= {n: HEAD_DIM for n in ("head_dim", "attention_head_size", "global_head_dim") if config.get(n)}
    config |= {n: small * HEAD_DIM + (0 if filled else HEAD_DIM) for n in _WIDTHS if config.get(n)}
    for rope in _ropes(config):
        if section := rope.get("mrope_section"):
            rope["mrope_section"] = [HEAD_DIM // 2 * n // sum(section) for n in section]
        for name in ("short_factor", "long_factor"):
            if isinstance(x := rope.get(name), list):
                rope[name] = x[:: max(1, head_dim // HEAD_DIM)][: len(x) * HEAD_DIM // head_dim]


def _ropes(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of rotary positions: one, or one per layer type."""
    found = [x for x in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(x, dict)]
    return [config, *found, *(x for rope in found for x in rope.values() if isinstance(x, dict))]


def _shorten(config: dict[str, Any]) -> None:
    """Layers: of those with different entries in the lists that have one per layer, the first of each."""
    count = next((config[n] for n in _LAYERS if isinstance(config.get(n), int)), 0)
    if count <= 2:
        return
    lists = {n: x for n, x in config.items() if isinstance(x, list) and len(x) == count}
    shared = config.get("num_kv_shared_layers") or 0  # the last layers use keys and values of earlier ones
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([i >= count - shared, *(x[i] for x in lists.values())]), i)
    kept = sorted(kinds.values()) if len(kinds) < 9 else [*range(8)]
    step = max([1, *(config.get(n) or 1 for n in ("decoder_sparse_step", "moe_layer_interval"))])
    size = max(2, len(kept), step)
    kept = sorted({*kept, *[i for i in range(count) if i not in kept][: size - len(kept)]})
    config |= {n: [x[i] for i in kept] for n, x in lists.items()}
    config |= {n: size for n in _LAYERS if isinstance(config.get(n), int)}
    config |= {"num_kv_shared_layers": sum(i >= count - shared for i in kept)} if shared else {}
    for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if isinstance(config.get(name), int):
            config[name] = size if config[name] >= count else min(config[name], 1)
    if isinstance(config.get("moe_layer_end_index"), int):
        config["moe_layer_end_index"] = size - 1
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [0]
