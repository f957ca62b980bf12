"""Which models `rlkit.rollout.engines.local.decode` can run, and the parameters that it reads of one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from rlkit.model.lora import adapter_of, merged
from rlkit.ranks import reshard

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


class Layer(NamedTuple):
    """The parameters of one decoder layer (no copies); biases and q/k norms are None where there are none."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """All parameters of a model."""

    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


def why_unsupported(model: Any, max_len: int) -> str | None:
    """Why `Decoder` cannot run this model, in words, or None if it can."""
    config = model.config
    if config.model_type not in SUPPORTED:
        return f"model type {config.model_type!r} is not one of {', '.join(SUPPORTED)}"
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral" and window is not None and window < max_len:
        return f"its sliding window {window} is shorter than max_len {max_len}"
    if layer_types != {"full_attention"}:
        return f"its layer types are {sorted(layer_types)}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if "dynamic" in rope or rope == "longrope":
        return f"its rotary frequencies depend on the length ({rope})"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act!r}"
    projections = [(n, m) for n, m in model.model.layers.named_modules() if n.endswith("_proj")]
    linear = all(type(m) is nn.Linear or (hasattr(model, "rlkit_lora") and adapter_of(m)) for _, m in projections)
    if not linear or any(".mlp." in n and m.bias is not None for n, m in projections):
        return "a projection is not a plain nn.Linear, or the MLP has biases"
    return None


def weights_of(model: Any) -> Weights:
    """The parameters as they are, nothing copied; see `plain` and `weight_of` for what is."""
    reshard(model)  # what a forward has gathered is freed later
    body = model.model
    return Weights(
        embed=plain(body.embed_tokens.weight),
        layers=[_layer(layer) for layer in body.layers],
        norm=plain(body.norm.weight),
        head=plain(model.lm_head.weight),
    )


def plain(p: Any) -> Any:
    """A parameter as a plain tensor; None stays None.

    A DTensor gives its own memory on a mesh of size 1, and else a gathered copy (a collective), which follows the
    parameter only from one `refresh` to the next.
    """
    if not hasattr(p, "full_tensor"):
        return p
    return p.to_local() if p.device_mesh.size() == 1 else p.full_tensor()


def weight_of(linear: Any) -> Tensor:
    """The weight of a projection, with its adapter where it has one: see `plain`, and of an adapter a merged copy."""
    adapter, weight = adapter_of(linear), plain(linear.weight)
    return weight if adapter is None else merged(weight.detach(), adapter)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        norm=plain(layer.input_layernorm.weight),
        q=weight_of(attention.q_proj),
        k=weight_of(attention.k_proj),
        v=weight_of(attention.v_proj),
        o=weight_of(attention.o_proj),
        q_bias=plain(attention.q_proj.bias),
        k_bias=plain(attention.k_proj.bias),
        v_bias=plain(attention.v_proj.bias),
        o_bias=plain(attention.o_proj.bias),
        q_norm=plain(q_norm.weight) if q_norm is not None else None,
        k_norm=plain(k_norm.weight) if k_norm is not None else None,
        mlp_norm=plain(layer.post_attention_layernorm.weight),
        gate=weight_of(mlp.gate_proj),
        up=weight_of(mlp.up_proj),
        down=weight_of(mlp.down_proj),
    )
