"""The dense Llama family (Llama, Mistral, Qwen2, Qwen3) on the CPU: a packed forward in few operators.

`hidden_states` computes what the Hugging Face model computes, from its own parameters, with fewer operators and 0.6 of
the saved activations. A layer is two autograd functions with attention between them:

    project   q, k, v = rotate(norm(W_qkv norm(x)))
    finish    y = x + W_o attention;  z = y + W_down (silu(W_gate norm(y)) * W_up norm(y))

Gradients are functions of their own, so that several operators share one autograd function. A shared prompt needs only
keys and values in the last layer.
Everything else (GPUs, sharded models, adapters, hooks, frozen parameters) runs the model's own forward; `covers`
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlkit.parallel.attention import AttentionPlan, attend

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
BF16_ROWS = 128  # oneDNN compiles and keeps a kernel of a few hundred KB for each shape of a bf16 product
_LEAVES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)


class Layer(NamedTuple):
    """The weights of a decoder layer."""

    norm: Tensor
    q: Tensor
    q_bias: Tensor | None
    k: Tensor
    k_bias: Tensor | None
    v: Tensor
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


FIRST = Layer._fields.index("o")  # number of weights before attention


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
    eps = base.config.rms_norm_eps
    for layer in base.layers:
        weights = weights_of(layer)
        q, k, v, x = _Project.apply(dtype, x, cos, sin, eps, *weights[:FIRST])
        if layer is base.layers[-1]:
            plan, x = last, x[len(tokens) - num_tokens : len(tokens)]
            x = x if dtype == x.dtype else _padded(x)
        out = attend(q, k, v, plan, scale=layer.self_attn.scaling).flatten(1)
        x = _Finish.apply(x, out, eps, *weights[FIRST:])
    return base.norm(x[:num_tokens])


def weights_of(layer: Any, get: Callable[[Any, str], Any] = getattr) -> Layer:
    """The weights of a decoder layer of transformers, where `get(module, name)` reads a "weight" or a "bias"."""
    a, mlp = layer.self_attn, layer.mlp
    projections = [get(p, name) for p in (a.q_proj, a.k_proj, a.v_proj) for name in ("weight", "bias")]
    head_norms = [None if norm is None else get(norm, "weight") for norm in map(a._modules.get, ("q_norm", "k_norm"))]
    norm, mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
    others = [get(module, "weight") for module in (mlp_norm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    return Layer(
        get(norm, "weight"), *projections, *head_norms, *(get(a.o_proj, n) for n in ("weight", "bias")), *others
    )


def _padded(x: Tensor) -> Tensor:
    """Zeros after the last row, up to a multiple of `BF16_ROWS`: such rows are computed, and read by no other row."""
    return F.pad(x, (0, 0, 0, -len(x) % BF16_ROWS))


class _Project(torch.autograd.Function):
    """q, k, v = W norm(x) as [T, heads, head_dim], q and k normed and rotated, with products in `dtype`; and x itself,
    so that its two gradients are added in one pass."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, cos: Tensor, sin: Tensor, eps: float, *weights: Any) -> Any:
        norm, q_w, q_b, k_w, k_b, v_w, v_b, q_norm, k_norm = weights
        with torch.autocast("cpu", enabled=False):
            h, scale = rms_norm(x, norm, eps)
            bias = None if q_b is None else torch.cat((q_b, k_b, v_b)).to(dtype)
            y = F.linear(h.to(dtype), torch.cat((q_w, k_w, v_w)).to(dtype), bias)
            q, k, v = _heads(y, q_w, k_w, v_w, cos)
            q, k = (rotary(t, w, cos, sin, eps=eps).to(dtype) for t, w in ((q, q_norm), (k, k_norm)))
        ctx.save_for_backward(x, scale, y, norm, q_w, k_w, v_w, q_norm, k_norm, cos, sin)
        ctx.has_bias, ctx.eps = q_b is not None, eps
        return q, k, v, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, y, norm, q_w, k_w, v_w, q_norm, k_norm, cos, sin = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            dy = torch.empty_like(y)
            (q, k, _), (dq, dk, dv) = (_heads(t, q_w, k_w, v_w, cos) for t in (y, dy))
            d_q, d_q_norm = rotary_backward(grads[0], q, q_norm, cos, sin, eps=ctx.eps)
            d_k, d_k_norm = rotary_backward(grads[1], k, k_norm, cos, sin, eps=ctx.eps)
            for part, grad in zip((dq, dk, dv), (d_q, d_k, grads[2]), strict=True):
                part.copy_(grad)
            dh = torch.mm(dy, torch.cat((q_w, k_w, v_w)).to(dy.dtype)).to(x.dtype)
            dx, d_norm, h = rms_norm_backward(dh, x, norm, scale, grads[3])
            sizes = [len(q_w), len(k_w), len(v_w)]
            d_weights = torch.mm(dy.t(), h.to(dy.dtype)).to(norm.dtype).split(sizes)
            d_biases = dy.sum(0, dtype=norm.dtype).split(sizes) if ctx.has_bias else (None,) * 3
        projections = (t for pair in zip(d_weights, d_biases, strict=True) for t in pair)
        return None, dx, None, None, None, d_norm, *projections, d_q_norm, d_k_norm


def _heads(y: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor) -> list[Tensor]:
    """Queries, keys and values [S, heads, head_dim]: views of the stacked product with their weights."""
    return [t.unflatten(1, (-1, cos.shape[-1])) for t in y.split([len(q), len(k), len(v)], 1)]


class _Finish(torch.autograd.Function):
    """y = x + attended W_o^T, then y + (silu(W_gate norm(y)) * W_up norm(y)) W_down^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, eps: float, *weights: Any) -> Tensor:
        o, o_bias, norm, gate, up, down = weights
        with torch.autocast("cpu", enabled=False):
            dtype = attended.dtype
            y = _add_product(x, attended, o)
            y = y if o_bias is None else y.add_(o_bias)
            h, scale = rms_norm(y, norm, eps)
            gate_up = torch.mm(h.to(dtype), torch.cat((gate, up)).to(dtype).t())
            gate, up = gate_up.tensor_split(2, 1)
            z = _add_product(y, F.silu(gate).mul_(up), down)
        ctx.save_for_backward(attended, y, scale, gate_up, *weights)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attended, y, scale, gate_up, o, o_bias, norm, gate, up, down = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            dz, dtype = grads[0].contiguous(), gate_up.dtype
            low = dz.to(dtype)
            (g, u), d_gate_up = gate_up.tensor_split(2, 1), torch.empty_like(gate_up)
            d_g, d_u = d_gate_up.tensor_split(2, 1)
            activated, grad = F.silu(g), torch.mm(low, down.to(dtype))
            torch.mul(grad, activated, out=d_u)
            torch.ops.aten.silu_backward.grad_input(grad.mul_(u), g, grad_input=d_g)
            activated.mul_(u)
            d_down = torch.mm(low.t(), activated).to(down.dtype)
            dh = torch.mm(d_gate_up, torch.cat((gate, up)).to(dtype)).to(y.dtype)
            dy, d_norm, h = rms_norm_backward(dh, y, norm, scale, dz)
            d_gate, d_up = torch.mm(d_gate_up.t(), h.to(dtype)).to(norm.dtype).tensor_split(2)
            low = dy.to(dtype)
            d_attended, d_o = torch.mm(low, o.to(dtype)), torch.mm(low.t(), attended).to(o.dtype)
            d_o_bias = None if o_bias is None else dy.sum(0)
        return dy, d_attended, None, d_o, d_o_bias, d_norm, d_gate, d_up, d_down


def rotary_table(base: Any, x: Tensor, positions: Int[Tensor, "T"]) -> tuple[Tensor, Tensor]:
    """cos, and sin with the sign of its half, [T, 1, head_dim], on the device and in the dtype of `x`."""
    cos, sin = (t[0, :, None] for t in base.rotary_emb(x[None], positions[None]))
    half = cos.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def rms_norm(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "D"], eps: float
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T 1"]]:
    """x * scale * weight with scale = 1 / sqrt(mean(x^2) + eps) of each row, and the scale."""
    scale = _inverse_rms(x, eps)
    return (x * scale).mul_(weight), scale


def rms_norm_backward(
    grad: Float[Tensor, "T D"],
    x: Float[Tensor, "T D"],
    weight: Float[Tensor, "D"],
    scale: Float[Tensor, "T 1"],
    residual: Float[Tensor, "T D"],
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "D"], Float[Tensor, "T D"]]:
    """Gradients of x (plus `residual`, its gradient from elsewhere) and of `weight`, and the output again.

        dx = scale * (g - n * mean(g * n)) + residual      g = grad * weight, n = x * scale
    """  # fmt: skip
    normed = x * scale
    d_weight = (grad * normed).sum(0)
    dx = _through_norm(grad * weight, normed, scale).add_(residual)
    return dx, d_weight, normed.mul_(weight)


def rotary(
    x: Float[Tensor, "T H n"],
    norm: Float[Tensor, "n"] | None,
    cos: Float[Tensor, "T 1 n"],
    sin: Float[Tensor, "T 1 n"],
    *,
    eps: float,
) -> Float[Tensor, "T H n"]:
    """Each head RMS-normed to y (if there is a norm), then rotated to its position: y * cos + swap(y) * sin, where swap
    exchanges the halves; `sin` has the sign of its half."""
    x = x.to(cos.dtype)
    y = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
    return (y * cos).addcmul_(y.roll(y.shape[-1] // 2, -1), sin)


def rotary_backward(
    grad: Float[Tensor, "T H n"],
    x: Float[Tensor, "T H n"],
    norm: Float[Tensor, "n"] | None,
    cos: Float[Tensor, "T 1 n"],
    sin: Float[Tensor, "T 1 n"],
    *,
    eps: float,
) -> tuple[Float[Tensor, "T H n"], Float[Tensor, "n"] | None]:
    """The gradients of x and of the norm's weight, from that of `rotary`."""
    grad, x, d_norm = grad.to(cos.dtype), x.to(cos.dtype), None
    dy = (grad * cos).add_((grad * sin).roll(grad.shape[-1] // 2, -1))
    if norm is not None:
        scale = _inverse_rms(x, eps)
        normed = x * scale
        d_norm = (dy * normed).sum((0, 1))
        dy = _through_norm(dy.mul_(norm), normed, scale)
    return dy, d_norm


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row, in fewer operators than F.rms_norm has on the CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _through_norm(grad: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x, where normed = x * scale, from that of `normed`, which it overwrites."""
    return grad.addcmul_(normed, (grad * normed).mean(-1, keepdim=True), value=-1).mul_(scale)


def _add_product(x: Tensor, h: Tensor, weight: Tensor) -> Tensor:
    """x + h weight^T, in the dtype of x."""
    return torch.addmm(x, h, weight.t()) if h.dtype == x.dtype else torch.mm(h, weight.to(h.dtype).t()).add(x)
