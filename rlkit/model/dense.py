"""The dense Llama family (Llama, Mistral, Qwen2, Qwen3) on the CPU: a packed forward in few operators.

`hidden_states` computes what the Hugging Face model computes, from its own parameters, with fewer operators and 0.6 of
the saved activations. A layer is two autograd functions with attention between them:

    project   q, k, v = rotate(norm(W_qkv norm(x)))
    finish    y = x + W_o attention;  z = y + W_down (silu(W_gate norm(y)) * W_up norm(y))

The weight of a norm before a product scales the product's columns instead of its rows, which are many more. Prompts
that a group shares give only keys and values in the last layer. Everything else (GPUs, sharded models, adapters, hooks,
frozen parameters) runs the model's own forward; `covers` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlkit.parallel.attention import AttentionPlan, attend

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
BF16_ROWS = 128  # oneDNN compiles and keeps a kernel of a few hundred KB for each shape of a bf16 product
_LEAVES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)


def covers(model: Any) -> bool:
    """Whether `hidden_states` may stand in for `model.base_model`: all of it is as transformers made it, on the CPU."""
    base, config = model.base_model, model.base_model.config
    if torch.compiler.is_compiling() or model.device.type != "cpu" or why_not_dense(config) is not None:
        return False
    if getattr(config, "sliding_window", None) is not None or getattr(config, "mlp_bias", False):
        return False
    if base.training and config.attention_dropout:
        return False
    own = (f"transformers.models.{config.model_type}.modeling_{config.model_type}", "transformers.activations")
    modules = [base, *base.children()]
    for layer in base.layers:
        modules += layer, *layer._modules.values(), *layer.self_attn._modules.values(), *layer.mlp._modules.values()
    weights = [p for m in modules for p in m._parameters.values() if p is not None]
    dtype, trains = weights[0].dtype, weights[0].requires_grad  # whatever the mode, so that scoring takes the same path
    return (
        dtype in (torch.float32, torch.float64)
        and all(type(p) is nn.Parameter and p.dtype == dtype and p.requires_grad == trains for p in weights)
        and all(_is_plain(m, own) for m in modules)
    )


def _is_plain(module: Any, own: tuple[str, ...]) -> bool:
    """Whether a module runs the forward of a class that transformers gave it, in the files `own`, without hooks."""
    state = vars(module)
    return (
        "forward" not in state
        and not (state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"])
        and not (state["_backward_pre_hooks"] or state.get("gradient_checkpointing"))
        and (type(module) in _LEAVES or type(module).__module__ in own)
    )


def why_not_dense(config: Any) -> str | None:
    """Why a model of this config is not of the family, in words, or None. Weights and windows are the caller's."""
    if config.model_type not in SUPPORTED:
        return f"model type {config.model_type!r} is not one of {', '.join(SUPPORTED)}"
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        return f"its layer types are {sorted(layer_types)}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if "dynamic" in rope or rope == "longrope":
        return f"its rotary frequencies depend on the length ({rope})"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act!r}"
    return None


def hidden_states(
    base: Any,
    tokens: Int[Tensor, "S"],
    positions: Int[Tensor, "S"],
    plan: AttentionPlan,
    last: AttentionPlan,
    *,
    dtype: torch.dtype,
) -> Float[Tensor, "T D"]:
    """The last hidden states of `base`, a transformers decoder without head, over a packed stream.

    `last` is the plan of the last layer: its queries, and the result, may be the end of the stream, T of S rows.
    dtype: of the products; bf16 products round their inputs and outputs, while norms and residuals stay as they are.
    """
    x, num_tokens = base.embed_tokens(tokens), len(last.out_index)  # type: ignore[arg-type]
    dtype = x.dtype if dtype == torch.float32 else dtype
    if dtype != x.dtype:
        x, positions = _padded(x), _padded(positions[:, None])[:, 0]
        plan, last = (p._replace(out_index=_padded(p.out_index[:, None])[:, 0]) for p in (plan, last))  # type: ignore
    with torch.no_grad():
        cos, sin = rotary_table(base, x, positions)
    eps = torch.tensor(base.config.rms_norm_eps, dtype=x.dtype)
    for layer in base.layers:
        a, mlp = layer.self_attn, layer.mlp
        norms = [getattr(getattr(a, name, None), "weight", None) for name in ("q_norm", "k_norm")]
        projections = (a.q_proj, a.k_proj, a.v_proj)
        weights, biases = [p.weight for p in projections], [p.bias for p in projections]
        q, k, v = _Project.apply(x, layer.input_layernorm.weight, *weights, *biases, *norms, cos, sin, eps, dtype)
        if layer is base.layers[-1]:
            plan, x = last, x[len(tokens) - num_tokens : len(tokens)]
            x = x if dtype == x.dtype else _padded(x)
        out = attend(q, k, v, plan, scale=a.scaling).flatten(1)
        weights, norm = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight], layer.post_attention_layernorm
        x = _Finish.apply(x, out, a.o_proj.weight, a.o_proj.bias, norm.weight, *weights, eps)
    return base.norm(x[:num_tokens])


def _padded(x: Tensor) -> Tensor:
    """Zeros after the last row, up to a multiple of `BF16_ROWS`: such rows are computed, and read by no other row."""
    return F.pad(x, (0, 0, 0, -len(x) % BF16_ROWS))


class _Project(torch.autograd.Function):
    """Queries, keys and values [S, heads, head_dim] from the residual stream [S, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        *weights_and_more: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_w, k_w, v_w, q_b, k_b, v_b, q_norm, k_norm, cos, sin, eps, dtype = weights_and_more
        with torch.autocast("cpu", enabled=False):
            head_dim = cos.shape[-1]
            scale = inverse_rms(x, eps)
            h = (x * scale).to(dtype)
            weight = _scaled((q_w, k_w, v_w), norm, dtype)
            bias = None if q_b is None else torch.cat((q_b, k_b, v_b)).to(dtype)
            y = F.linear(h, weight, bias).view(x.shape[0], -1, head_dim)
            heads, both = q_w.shape[0] // head_dim, (q_w.shape[0] + k_w.shape[0]) // head_dim
            qk, v = y[:, :both].to(x.dtype), y[:, both:]
            normed = qk_scale = None
            if q_norm is not None:
                qk_scale = inverse_rms(qk, eps)
                normed = qk * qk_scale
                qk = normed * _per_head(q_norm, k_norm, heads, both)
            out = rotate(qk, cos, sin).to(dtype)
        ctx.save_for_backward(h, scale, norm, q_w, k_w, v_w, q_norm, k_norm, normed, qk_scale, cos, sin)
        ctx.has_bias = q_b is not None
        return out[:, :heads], out[:, heads:], v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, scale, norm, q_w, k_w, v_w, q_norm, k_norm, normed, qk_scale, cos, sin = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            heads, both, dtype = grads[0].shape[1], grads[0].shape[1] + grads[1].shape[1], h.dtype
            d_qk = _rotate_back(torch.cat(grads[:2], 1).to(cos.dtype), cos, sin)
            d_q_norm = d_k_norm = None
            if normed is not None:
                d_norms = (d_qk * normed).sum(0)
                d_q_norm, d_k_norm = d_norms[:heads].sum(0), d_norms[heads:].sum(0)
                d_qk = _norm_backward(d_qk.mul_(_per_head(q_norm, k_norm, heads, both)), normed, qk_scale)
            dy = torch.cat((d_qk.to(dtype), grads[2]), 1).flatten(1)
            dx = _norm_backward(torch.mm(dy, _scaled((q_w, k_w, v_w), norm, dtype)), h, scale)
            d_weights, d_norm = _scaled_backward(torch.mm(dy.t(), h), (q_w, k_w, v_w), norm)
            d_biases = dy.sum(0, dtype=norm.dtype).split([len(w) for w in d_weights]) if ctx.has_bias else (None,) * 3
        return dx, d_norm, *d_weights, *d_biases, d_q_norm, d_k_norm, None, None, None, None


class _Finish(torch.autograd.Function):
    """The rest of a layer: output projection, gated MLP, both residuals."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, o: Tensor, o_bias: Tensor | None, *others: Tensor) -> Tensor:
        norm, gate, up, down, eps = others
        with torch.autocast("cpu", enabled=False):
            dtype = attended.dtype
            y = _add_product(x, attended, o)
            y = y if o_bias is None else y.add_(o_bias)
            scale = inverse_rms(y, eps)
            h = (y * scale).to(dtype)
            gate_up = torch.mm(h, _scaled((gate, up), norm, dtype).t())
            g, u = gate_up.tensor_split(2, 1)
            z = _add_product(y, F.silu(g).mul_(u), down)
        ctx.save_for_backward(attended, o, h, scale, norm, gate, up, down, gate_up)
        ctx.has_bias = o_bias is not None
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attended, o, h, scale, norm, gate, up, down, gate_up = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            (dz,), dtype = grads, h.dtype
            low, (g, u) = dz.to(dtype), gate_up.tensor_split(2, 1)
            activated, d_act = F.silu(g), torch.mm(low, down.to(dtype))
            d_gate_up = torch.empty_like(gate_up)
            d_g, d_u = d_gate_up.tensor_split(2, 1)
            torch.mul(d_act, activated, out=d_u)
            torch.ops.aten.silu_backward.grad_input(d_act.mul_(u), g, grad_input=d_g)
            d_down = torch.mm(low.t(), activated.mul_(u)).to(down.dtype)
            d_weights, d_norm = _scaled_backward(torch.mm(d_gate_up.t(), h), (gate, up), norm)
            dy = _norm_backward(torch.mm(d_gate_up, _scaled((gate, up), norm, dtype)), h, scale).add_(dz)
            low = dy.to(dtype)
            d_attended, d_o = torch.mm(low, o.to(dtype)), torch.mm(low.t(), attended).to(o.dtype)
            d_o_bias = dy.sum(0) if ctx.has_bias else None
        return dy, d_attended, d_o, d_o_bias, d_norm, *d_weights, d_down, None


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row; with eps as a tensor in fewer operators than F.rms_norm has on the CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _norm_backward(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x, where normed = x * scale, from that of `normed`, which is overwritten if dtypes allow."""
    grad, normed = grad.to(scale.dtype), normed.to(scale.dtype)
    along = (grad * normed).mean(-1, keepdim=True)
    return grad.addcmul_(normed, along, value=-1).mul_(scale)


def _scaled(weights: Sequence[Tensor], norm: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights stacked, with columns scaled by `norm`, so that W (norm * h) = (W * norm) h."""
    return torch.cat(list(weights)).mul_(norm).to(dtype)


def _scaled_backward(grad: Tensor, weights: Sequence[Tensor], norm: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of the weights and of the norm from that of `_scaled`."""
    parts = grad.to(norm.dtype).split([len(w) for w in weights])
    d_norm = sum((part * w).sum(0) for part, w in zip(parts, weights, strict=True))
    return tuple(part * norm for part in parts), d_norm


def _per_head(q_norm: Tensor, k_norm: Tensor, heads: int, both: int) -> Tensor:
    return torch.cat((q_norm.expand(heads, -1), k_norm.expand(both - heads, -1)))


def rotary_table(base: Any, x: Tensor, positions: Int[Tensor, "T"]) -> tuple[Tensor, Tensor]:
    """cos, and sin with the sign of its half, [T, 1, head_dim], on the device and in the dtype of `x`."""
    cos, sin = (t[0, :, None] for t in base.rotary_emb(x[None], positions[None]))
    half = cos.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; `sin` has the sign of its half."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _rotate_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (grad * cos).add_((grad * sin).roll(grad.shape[-1] // 2, -1))


def _add_product(x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """x + h weight^T, in the dtype of x."""
    return torch.addmm(x, h, weight.t()) if h.dtype == x.dtype else torch.mm(h, weight.to(h.dtype).t()).add(x)
