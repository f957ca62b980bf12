"""The paper count of `rlkit plan` against a real forward of small models: bytes per layer and token.

python benchmarks/memory.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlkit.model.memory import Shape

MODELS = {
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 12288, 151936, qk_norm=True),
    "Qwen2.5-32B": Shape(64, 5120, 40, 8, 27648, 152064, qkv_bias=True),
    "Qwen3-32B": Shape(64, 5120, 64, 8, 25600, 151936, qk_norm=True),
    "Qwen2.5-72B": Shape(80, 8192, 64, 8, 29568, 152064, qkv_bias=True),
    "Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 768, 151936, qk_norm=True, experts=128, active=8),
}


def kept_bytes(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes that a real forward keeps for its backward, each storage once, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}
    alive = []  # else an address could come twice

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        forward()
    return sum(seen.values())


def measured_activation_bytes(shape: Shape, *, dtype: torch.dtype, tokens: int = 384) -> float:
    """Bytes per layer and token that a model's own layers keep, as on a GPU: the difference of four layers and two."""
    from rlkit.model.forward import forward, prepare_model
    from rlkit.packing import pack
    from rlkit.types import Trajectory

    sequence = Trajectory([1], [2] * tokens, [True] * tokens, [0.0] * tokens, [0] * tokens)
    found = []
    for layers in (2, 4):
        model = prepare_model(build(replace(shape, layers=layers))).to(dtype)
        found.append(kept_bytes(model, lambda model=model: forward(model, pack([[sequence]]))))
    return (found[1] - found[0]) / 2 / tokens


def build(shape: Shape) -> Any:
    """A transformers model of this shape."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts:
        experts = {"num_experts": shape.experts, "num_experts_per_tok": shape.active}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**common, moe_intermediate_size=shape.intermediate, **experts))
    if shape.qkv_bias:
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**common))
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**common))


SMALL = {
    "Qwen2": Shape(2, 256, 8, 4, 640, 300, head_dim=32, qkv_bias=True),
    "Qwen3": Shape(2, 256, 8, 2, 640, 300, head_dim=64, qk_norm=True),
    "Qwen3-MoE": Shape(2, 256, 8, 4, 96, 300, head_dim=32, qk_norm=True, experts=8, active=2),
}


def check(_: Any = None) -> None:
    """Print counted and measured bytes per layer and token. On the CPU packed attention keeps one more copy of q."""
    print(f"{'':12}{'dtype':>10}{'counted':>10}{'measured':>10}{'ratio':>8}")
    for name, shape in SMALL.items():
        for dtype in (torch.float32, torch.bfloat16):
            counted = shape.activation_bytes(size=dtype.itemsize) + dtype.itemsize * shape.heads * shape.head_dim
            measured = measured_activation_bytes(shape, dtype=dtype)
            kind = str(dtype).removeprefix("torch.")
            print(f"{name:12}{kind:>10}{counted:10.0f}{measured:10.0f}{measured / counted:8.3f}")


if __name__ == "__main__":
    from _cli import NoFlags, run_script  # a test reads this file without its folder

    run_script(check, NoFlags, __doc__)
