"""Prefill and one-token decoding with a slotted key-value cache, over the weights of a Hugging Face model as they are.

Covers the dense Llama family (`SUPPORTED`): RMS norms before attention and MLP, rotary positions, grouped queries,
gated MLP. Nothing is copied from the model but tiny rotary tables: every step reads its parameters, so an optimizer
step is seen by the next token. What makes it faster than the model's own forward is fewer and better-shaped
operators for one new token per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


class Layer(NamedTuple):
    """The parameters of one decoder layer (views, never copies); biases and q/k norms are None where there are none."""

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


def plain(p: Any) -> Any:
    """A parameter as a plain tensor: a DTensor is gathered (no copy on a mesh of size 1), None stays None."""
    return p.full_tensor() if hasattr(p, "full_tensor") else p


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
    linears = [m for layer in model.model.layers for name, m in layer.named_modules() if name.endswith("_proj")]
    if any(type(m) is not nn.Linear for m in linears):
        return "a projection is not a plain nn.Linear"
    return None


class Decoder:
    """Keys and values of up to `max_batch` sequences, and the two forwards that fill and use them.

    `prefill` writes keys and values of whole prompts into slots, `copy` those of a shared prompt into further slots,
    and `decode` reads one token per row 0..B-1 (row = slot) and gives the logits of the next. The cache grows with
    the longest sequence, to at most `max_len`.
    """

    def __init__(self, model: Any, *, max_batch: int, max_len: int) -> None:
        self._model, self._max_batch, self._max_len = model, max_batch, max_len
        config = model.config
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._kv_heads, self._eps = config.num_key_value_heads, config.rms_norm_eps
        self._cache: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Look the parameters up again: needed after they were replaced (sharded, assigned), not after in-place steps."""
        body = self._model.model
        self._layers = [_layer(layer) for layer in body.layers]
        self._embed = plain(body.embed_tokens.weight)
        self._norm = plain(body.norm.weight)
        self._head = plain(self._model.lm_head.weight)

    def release(self) -> None:
        """Free the cache."""
        self._cache = None

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Write the keys and values of each prompt into its slot."""
        longest = max(map(len, prompts))
        cache = self._reserve(longest)
        padded = [list(p) + [0] * (longest - len(p)) for p in prompts]
        tokens = torch.tensor(padded, device=self._embed.device)
        rows = torch.tensor(slots, device=self._embed.device)
        x = F.embedding(tokens.flatten(), self._embed)
        cos, sin = (t[:longest].repeat(len(prompts), 1)[:, None] for t in self._tables)
        for i, layer in enumerate(self._layers):
            q, k, v = (_heads(t, len(prompts)) for t in self._project(layer, x, cos, sin))
            cache[i, 0, rows, :, :longest] = k
            cache[i, 1, rows, :, :longest] = v
            if i + 1 < len(self._layers):  # the last layer's output is not needed: the last prompt token is decoded
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = self._finish(layer, x, out.transpose(1, 2).reshape(x.shape[0], -1))

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` positions of each source slot, into its target slot."""
        cache = self._reserve(length)
        cache[:, :, torch.tensor(targets), :, :length] = cache[:, :, torch.tensor(sources), :, :length]

    @torch.inference_mode()
    def decode(self, tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"], longest: int) -> Float[Tensor, "B V"]:
        """Logits after reading `tokens[i]` at `positions[i]` of slot i; `longest` bounds the positions from above."""
        cache = self._reserve(longest)
        rows, kv_heads, capacity = tokens.shape[0], self._kv_heads, cache.shape[4]
        cos, sin = (t[positions][:, None] for t in self._tables)
        lanes = torch.arange(rows * kv_heads, device=tokens.device)
        index = lanes * capacity + positions.repeat_interleave(kv_heads)
        bias = torch.where(torch.arange(longest, device=tokens.device) <= positions[:, None], 0.0, -torch.inf)
        bias = bias.to(self._embed.dtype).repeat_interleave(kv_heads, 0)[:, None]
        x = F.embedding(tokens, self._embed)
        for layer, kv in zip(self._layers, cache, strict=True):
            q, k, v = self._project(layer, x, cos, sin)
            keys, values = kv.view(2, -1, self._head_dim)
            keys.index_copy_(0, index, k.reshape(-1, self._head_dim))
            values.index_copy_(0, index, v.reshape(-1, self._head_dim))
            keys, values = kv[:, :rows, :, :].flatten(1, 2)[:, :, :longest]
            q = q.reshape(rows * kv_heads, -1, self._head_dim)
            scores = torch.baddbmm(bias.expand(-1, q.shape[1], -1), q, keys.transpose(1, 2), alpha=self._head_dim**-0.5)
            out = torch.bmm(scores.softmax(-1), values)
            x = self._finish(layer, x, out.reshape(rows, -1))
        return F.linear(F.rms_norm(x, self._norm.shape, self._norm, self._eps), self._head).float()

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.rms_norm(x, layer.norm.shape, layer.norm, self._eps)
        q = F.linear(h, layer.q, layer.q_bias).unflatten(-1, (-1, self._head_dim))
        k = F.linear(h, layer.k, layer.k_bias).unflatten(-1, (-1, self._head_dim))
        v = F.linear(h, layer.v, layer.v_bias).unflatten(-1, (-1, self._head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, self._eps)
            k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, self._eps)
        heads = q.shape[1]
        qk = torch.cat([q, k], 1)
        qk = qk * cos + qk.roll(self._head_dim // 2, -1) * sin
        return qk[:, :heads], qk[:, heads:], v

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended, layer.o, layer.o_bias)
        h = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, self._eps)
        return x + F.linear(F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)

    def _reserve(self, length: int) -> Tensor:
        """The cache [layers, 2, slots, kv heads, capacity, head_dim], grown so that `length` positions fit."""
        old = self._cache
        if old is None or old.shape[4] < length:
            capacity = min(self._max_len, max(128, 2 * old.shape[4] if old is not None else 0, -(-length // 64) * 64))
            capacity = max(capacity, length)
            shape = (len(self._layers), 2, self._max_batch, self._kv_heads, capacity, self._head_dim)
            self._cache = self._embed.new_zeros(shape)
            if old is not None:
                self._cache[:, :, :, :, : old.shape[4]] = old
            position_ids = torch.arange(capacity, device=self._embed.device)[None]
            cos, sin = self._model.model.rotary_emb(self._embed[:1, None], position_ids)
            half = self._head_dim // 2
            self._tables = cos[0].clone(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        assert self._cache is not None
        return self._cache


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        norm=plain(layer.input_layernorm.weight),
        q=plain(attention.q_proj.weight),
        k=plain(attention.k_proj.weight),
        v=plain(attention.v_proj.weight),
        o=plain(attention.o_proj.weight),
        q_bias=plain(attention.q_proj.bias),
        k_bias=plain(attention.k_proj.bias),
        v_bias=plain(attention.v_proj.bias),
        o_bias=plain(attention.o_proj.bias),
        q_norm=plain(q_norm.weight) if q_norm is not None else None,
        k_norm=plain(k_norm.weight) if k_norm is not None else None,
        mlp_norm=plain(layer.post_attention_layernorm.weight),
        gate=plain(mlp.gate_proj.weight),
        up=plain(mlp.up_proj.weight),
        down=plain(mlp.down_proj.weight),
    )


def _heads(t: Tensor, batch: int) -> Tensor:
    """[B * L, heads, head_dim] -> [B, heads, L, head_dim]."""
    return t.unflatten(0, (batch, -1)).transpose(1, 2)
