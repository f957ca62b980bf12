"""How many tokens a sequence of a model may have: one function, which every command and engine asks.

positions(config)               of sampling and serving; None: no limit
positions(config, packed=True)  of training, where dynamic and longrope frequencies are those of short sequences
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_NO_LIMIT = ("bloom", "rwkv", "mamba", "mamba2", "falcon_mamba", "xlstm", "jamba", "nemotron_h", "zamba")
_WITHOUT = ("alibi", "nope", "none")  # values of `position_embedding_type`


def positions(config: Any, *, packed: bool = False) -> int | None:
    """The most tokens of a sequence that the model of this config reads; None: no limit.

        rope_type               max
        default, llama3, ...    max_position_embeddings (it has the factor already)
        yarn                    factor * original_max_position_embeddings, or max_position_embeddings if that is more
        linear, dynamic         factor * max_position_embeddings
        longrope                max_position_embeddings, or factor * original_max_position_embeddings
        a table of positions    its rows (`max_position_embeddings` and its other names)
        ALiBi, NoPE, Mamba      None

    Where layer types differ, the smallest. With `packed`, dynamic and longrope count without their factor: beyond it
    the frequencies of each sequence would depend on the longest one of the pack.
    Differs: vLLM derives the same, but for layer types that differ (Gemma 3), which it names; SGLang ignores the factor
    where `original_max_position_embeddings` is given.
    """
    text = getattr(config, "get_text_config", lambda: config)()
    num = next((n for name in _NAMES if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if num is None or _has_no_limit(text):
        return None
    return min((_of_rope(rope, num, packed=packed) for rope in ropes(text)), default=num)


def check_positions(num: int, config: Any, *, setting: str, fix: str = "lower it", packed: bool = True) -> None:
    """ValueError, with what raises the limit, where `setting` of `num` tokens is more than the model's positions."""
    limit = positions(config, packed=packed)
    if limit is not None and num > limit:
        raise ValueError(
            f"{setting} is {num}, and the model has {limit} positions: {fix}, or {_raise(config, num, limit)}"
        )


def _raise(config: Any, num: int, limit: int) -> str:
    """What raises the limit of a model to `num` tokens."""
    text = getattr(config, "get_text_config", lambda: config)()
    rotary = [*ropes(text)]
    if not rotary:
        return "take a model with more: no setting adds rows to its table of positions"
    if positions(config) != limit:
        kind = next(x["rope_type"] for x in rotary if x.get("rope_type") not in (None, "default"))
        return f"replace {kind} in config.json: its frequencies depend on the longest sequence of a batch"
    before: int = rotary[0].get("original_max_position_embeddings") or text.max_position_embeddings
    factor, plain = float(math.ceil(num / before)), len(rotary) == 1 and rotary[0].get("rope_type") in (None, "default")
    yarn = f'"rope_type": "yarn", "factor": {factor}, "original_max_position_embeddings": {before}'
    flag = f"by --yarn {factor:g} of a training, or " * plain
    return f"extend it {flag}in the model's config.json: rope_parameters {{{yarn}, ...}}"


def ropes(text: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a config: one, or one per layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    several = [x for x in rope.values() if isinstance(x, dict)]
    yield from several or ([rope] if rope else [])


def _of_rope(rope: dict[str, Any], num: int, *, packed: bool) -> int:
    """The positions under these rotary parameters, of a config that names `num`."""
    kind, factor = rope.get("rope_type") or "default", rope.get("factor") or 1.0
    original = rope.get("original_max_position_embeddings") or num
    if "dynamic" in kind:
        return num if packed else int(num * factor)
    if kind == "longrope":
        return original if packed else max(num, int(original * factor))
    if kind == "yarn":
        return max(num, int(original * factor))
    return int(num * factor) if kind == "linear" else num


def _has_no_limit(text: Any) -> bool:
    """Whether the model's positions have no end: ALiBi, no positions at all, or a state of fixed size."""
    attention = getattr(text, "attn_config", None)  # of MPT
    alibi = getattr(text, "alibi", False) or getattr(attention, "alibi", False)
    kind = getattr(text, "position_embedding_type", None)
    return bool(alibi) or kind in _WITHOUT or getattr(text, "model_type", None) in _NO_LIMIT
