"""Models of the CPU benchmarks: SmolLM2-135M-Instruct (`make smollm`), Gemma 3 270M (`make gemma`), random Qwen3s.

Those have 1.0 M (nano), 9.5 M (micro) and 44 M parameters (mid), or four layers as wide as Qwen2.5-0.5B's (wide: 196 M,
of which 136 M are its embedding).
"""

from __future__ import annotations

from typing import Any

import torch

from rlkit._util.files import cache_folder

PRETRAINED = {"smollm": "SmolLM2-135M-Instruct", "gemma": "gemma-3-270m"}
SHAPES = {  # hidden size, layers, heads, head size, MLP size, vocabulary
    "nano": (128, 4, 4, 32, 512, 263),
    "micro": (384, 6, 6, 64, 1024, 263),
    "mid": (640, 10, 10, 64, 1792, 4096),
    "wide": (896, 4, 14, 64, 4864, 151936),
}


def build(name: str) -> Any:
    """The model of this name, with the same weights in every call."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    if name in PRETRAINED:
        folder = cache_folder() / PRETRAINED[name]
        if not folder.exists():
            raise SystemExit(f"error: {folder} is missing; `make {name}` makes it")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    hidden, layers, heads, head_dim, mlp, vocab = SHAPES[name]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=mlp,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()
