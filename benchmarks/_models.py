"""Random Qwen3 models of the CPU benchmarks: nano (1.0 M parameters), micro (9.5 M) and mid (44 M)."""

from __future__ import annotations

from typing import Any

import torch

SHAPES = {  # hidden size, layers, heads, head size, MLP size, vocabulary
    "nano": (128, 4, 4, 32, 512, 263),
    "micro": (384, 6, 6, 64, 1024, 263),
    "mid": (640, 10, 10, 64, 1792, 4096),
}


def build(name: str) -> Any:
    """The model of this name, with the same weights in every call."""
    from transformers import AutoModelForCausalLM, Qwen3Config

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
