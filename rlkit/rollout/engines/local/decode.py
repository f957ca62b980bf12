"""Prefill and one-token decoding with a slotted key-value cache, over the weights of a Hugging Face model as they are.

Covers the dense Llama family (see `why_unsupported`): RMS norms before attention and MLP, rotary positions, grouped
queries, gated MLP. Only the rotary table and weights with a LoRA adapter are copied: every step reads the parameters,
so the next token sees an optimizer step (of an adapter: after `refresh`). It is faster than the model's own forward
because it has fewer operators, shaped for one new token per row: on SmolLM2-135M in fp32 (two threads, 64 tokens after
prompts of 32, steps of both in turns, three repeats) `CachedForward` takes 1.21 to 1.24 times as long with 32 rows and
1.09 to 1.16 times with 8. `compile` needs a forward of its own, and `FusedDecoder` shares its weights and slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rlkit._util.ranks import reshard
from rlkit._util.tensors import upcast
from rlkit.model.lora import adapter_of, is_low_rank, merged
from rlkit.model.quantized import Quantized
from rlkit.parallel.attention import causal_sdpa, sdpa

KEEP_BYTES = 64 << 20
TALL = range(16, 257)
HALF = (torch.bfloat16, torch.float16)
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


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


class Weights(NamedTuple):
    """All parameters of a model."""

    embed: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


class Rotary(NamedTuple):
    """cos, and sin with the sign of its half, for each token: [T, 1, head_dim]."""

    cos: Tensor
    sin: Tensor


class Decoder:
    """Keys and values of up to `max_batch` sequences, and the two forwards that fill and use them.

    `reserve` makes room, `prefill` writes keys and values of whole prompts into slots, `copy` those of a shared prompt
    into further slots, and `decode` reads one token per row 0..B-1 (row = slot) and gives the logits of the next; B is
    one of `sizes`.

    With `compile` a decoding step is one compiled graph for all lengths and batch sizes.

    Attributes:
        keeps_states: whether a slot holds what cannot be cut to fewer tokens (False: keys and values can).
    """

    keeps_states = False
    reads_images = False

    def experts(self, slot: int, length: int) -> None:
        """None: the models that it decodes are dense."""

    def __init__(self, model: Any, *, max_batch: int, max_len: int, compile: bool = False) -> None:
        self._model, self._max_len = model, max_len
        config, device = model.config, model.device
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self.refresh()
        self._compiled = compile
        smallest = (2, 4) if self._compiled else (1, 2, 4)  # a compiler takes 1 for a constant
        self.sizes = sorted({*(n for n in smallest if n < max_batch), *range(8, max_batch, 8), max_batch})
        # one call of C++ per step on the CPU, where the Python around short operators counts
        options = {"cpp_wrapper": device.type == "cpu"}
        self._step = torch.compile(step, options=options) if self._compiled else step
        self._eps = config.rms_norm_eps
        self._arenas = [self._weights.embed.new_zeros(0) for _ in range(2 * config.num_hidden_layers)]
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._table = Rotary(self._arenas[0], self._arenas[0])

    def refresh(self) -> None:
        """Look the parameters up again: needed after they were replaced (sharded, assigned) or an adapter changed."""
        self._weights = weights_of(self._model)

    def release(self, *, whole: bool = False) -> None:
        """Drop the cache and free its memory unless it is small: page faults cost 5% of a short batch. Of a `whole` one
        nothing stays: it may hold NaN."""
        self._cache = []
        if whole or sum(arena.nbytes for arena in self._arenas) > KEEP_BYTES:
            self._arenas = [arena.new_zeros(0) for arena in self._arenas]

    @torch.inference_mode()
    def reserve(self, rows: int, length: int, *, keep: int) -> None:
        """Make room for `length` positions in slots 0..rows-1; slots below `keep` keep what they hold.

        The keys and values of a layer, [slots, kv heads, capacity, head_dim] each, are laid out again in their arenas
        when the capacity grows by a step or is no longer used, so that what attention reads lies densely: on the CPU
        the same products over half-empty lanes take up to twice as long. Keys in fp32 lie transposed, as the product
        with the queries wants them: a step at 200 places takes 0.87 of the time. Places that were never written hold
        finite numbers: a masked one weighs 0, but 0 * nan is nan.
        """
        slots, had = (self._cache[0][0].shape[0], self._cache[0][0].shape[2]) if self._cache else (0, 0)
        if slots >= rows and length <= had < 2 * length + 32:
            return
        capacity = had
        if not length <= had < 2 * length + 32:
            capacity = max(length, min(-(-max(length, 9 * length // 8 - 16) // 16) * 16, self._max_len))
        shape = (rows, self._kv_heads, capacity, self._head_dim)
        blocks = []
        for i, arena in enumerate(self._arenas):
            old = self._cache[i // 2][i % 2][:keep, :, :capacity].clone() if keep else None
            if arena.numel() < math.prod(shape):
                self._arenas[i] = arena = arena.new_zeros(math.prod(shape))
            block = arena[: math.prod(shape)].view(shape)
            if i % 2 == 0 and arena.dtype not in HALF:
                block = block.view(rows, self._kv_heads, self._head_dim, capacity).transpose(2, 3)
            if old is not None:
                block[:keep, :, : old.shape[2]] = old
            blocks.append(block)
        self._cache = list(zip(blocks[::2], blocks[1::2], strict=True))
        self._lanes = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._cache]
        self._range = torch.arange(capacity, device=self._weights.embed.device)
        if self._table.cos.shape[0] < capacity:
            self._table = self._rotary(min(2 * capacity, self._max_len))

    def _rotary(self, length: int) -> Rotary:
        """The table of the first `length` positions, on the device and in the dtype of the embedding."""
        embed = self._weights.embed
        positions = torch.arange(length, device=embed.device)
        cos, sin = (t[0, :, None] for t in self._model.model.rotary_emb(embed[None, :1], positions[None]))
        half = cos.shape[-1] // 2
        return Rotary(cos, torch.cat([-sin[..., :half], sin[..., half:]], -1))

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Write the keys and values of each prompt into its slot."""
        longest, layers = max(map(len, prompts)), self._weights.layers
        tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=self._weights.embed.device)
        rows = torch.tensor(slots, device=tokens.device)
        x = F.embedding(tokens.flatten(), self._weights.embed)
        table = Rotary(*(t[:longest].repeat(len(prompts), 1, 1) for t in self._table))
        for layer, (keys, values) in zip(layers, self._cache, strict=True):
            q, k, v = _project(x, layer, table, self._eps)
            q, k, v = (t.unflatten(0, (len(prompts), -1)).transpose(1, 2) for t in (q, k, v))
            keys[rows, :, :longest], values[rows, :, :longest] = k, v
            if layer is not layers[-1]:  # whose output is not needed: the last prompt token is decoded
                out = causal_sdpa(q, k, v)
                x = _finish(x, out.transpose(1, 2).reshape(x.shape[0], -1), layer, self._eps)

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> None:
        """Write the keys and values of further tokens of slots that hold `starts` positions."""
        device, layers = self._weights.embed.device, self._weights.layers
        ids, positions = (x.to(device) for x in padded_turns(tokens, starts))
        rows, end = torch.tensor(slots, device=device), int(positions.max()) + 1
        seen = (torch.arange(end, device=device) <= positions[:, :, None])[:, None]
        x = F.embedding(ids.flatten(), self._weights.embed)
        table = Rotary(*(t.index_select(0, positions.flatten()) for t in self._table))
        for layer, (keys, values) in zip(layers, self._cache, strict=True):
            q, k, v = (t.unflatten(0, ids.shape) for t in _project(x, layer, table, self._eps))
            keys[rows[:, None], :, positions], values[rows[:, None], :, positions] = k, v
            if layer is not layers[-1]:
                out = causal_sdpa(q.transpose(1, 2), keys[rows, :, :end], values[rows, :, :end], seen)
                x = _finish(x, out.transpose(1, 2).reshape(x.shape[0], -1), layer, self._eps)

    @property
    def _place(self) -> int:
        """Bytes of a token in the cache."""
        return 2 * self._kv_heads * self._head_dim * self._weights.embed.itemsize * len(self._weights.layers)

    def held_bytes(self, length: int) -> int:
        """Size of what `hold` copies."""
        return length * self._place

    @torch.inference_mode()
    def hold(self, slot: int, length: int) -> list[Tensor]:
        """A copy of the first `length` positions of a slot, for `restore`."""
        return [block[slot, :, :length].clone() for kv in self._cache for block in kv]

    @torch.inference_mode()
    def restore(self, held: Sequence[Tensor], slot: int) -> None:
        """Write what `hold` has copied into a slot."""
        for block, x in zip((block for kv in self._cache for block in kv), held, strict=True):
            block[slot, :, : x.shape[1]] = x

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source slot into its target slot."""
        source, target = (torch.tensor(slots, device=self._weights.embed.device) for slots in (sources, targets))
        for block in (t[:, :, :length] for kv in self._cache for t in kv):
            block.index_copy_(0, target, block.index_select(0, source))

    @torch.inference_mode()
    def decode(self, tokens: Int[Tensor, "B"], positions: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits after reading `tokens[i]` at `positions[i]` of slot i."""
        if self._lanes[0][0].shape[0] != tokens.shape[0] * self._kv_heads:
            self._lanes = [(k[: len(tokens)].flatten(0, 1), v[: len(tokens)].flatten(0, 1)) for k, v in self._cache]
        if self._compiled:
            for t in (tokens, positions, self._range, *self._table):
                torch._dynamo.maybe_mark_dynamic(t, 0)
            for t in (t for layer in self._lanes for t in layer):
                torch._dynamo.maybe_mark_dynamic(t, (0, 1))
        return self._step(tokens, positions, self._weights, self._lanes, self._table, self._range, self._eps)


def free_bytes(device: torch.device) -> float:
    """What a GPU and torch's allocator have left. On other devices it is not counted: inf."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def padded_turns(tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Token ids and positions [n, longest]; shorter rows repeat their last token at its position, which computes and
    writes the same again."""
    longest = max(map(len, tokens))
    index = [[min(i, len(row) - 1) for i in range(longest)] for row in tokens]
    ids = torch.tensor([[row[i] for i in places] for row, places in zip(tokens, index, strict=True)])
    return ids, torch.tensor(index) + torch.tensor(starts)[:, None]


def step(
    tokens: Tensor,
    positions: Tensor,
    weights: Weights,
    cache: list[tuple[Tensor, Tensor]],
    table: Rotary,
    places: Tensor,
    eps: float,
) -> Tensor:
    """One token of each row through the model: keys and values into the cache, logits out.

    A layer's cache is its keys and its values, [B * kv heads, length, head_dim]; `places` is arange(length).
    """
    x = F.embedding(tokens, weights.embed)
    lane = torch.arange(len(cache[0][0]), device=tokens.device).view(len(tokens), -1)
    place = positions[:, None].expand_as(lane)
    bias = torch.where(places <= positions[:, None], 0.0, -torch.inf).to(weights.embed.dtype)[:, None]
    angles = Rotary(*(t.index_select(0, positions) for t in table))
    for layer, (keys, values) in zip(weights.layers, cache, strict=True):
        q, keys[lane, place], values[lane, place] = _project(x, layer, angles, eps)
        x = _finish(x, _attend(q, keys, values, bias), layer, eps)
    return upcast(F.linear(F.rms_norm(x, weights.norm.shape, weights.norm, eps), weights.head))


def _attend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """One query [B, heads, head_dim] per row over keys and values [B * kv heads, L, head_dim], with bias [B, 1, L]."""
    rows, (lanes, length, head_dim) = q.shape[0], keys.shape
    q = q.view(lanes, -1, head_dim)
    if q.dtype in HALF:  # which must not round the scores
        q, k, v = (t.view(rows, -1, *t.shape[1:]) for t in (q, keys, values))
        return sdpa(q, k, v, attn_mask=bias[:, None]).reshape(rows, -1)
    scores = torch.bmm(q, keys.transpose(1, 2)).view(rows, -1, length)
    probs = torch.add(bias, scores, alpha=head_dim**-0.5).softmax(-1)
    return torch.bmm(probs.view(lanes, -1, length), values).view(rows, -1)


def _project(x: Tensor, layer: Layer, angles: Rotary, eps: float) -> tuple[Tensor, ...]:
    """Queries, keys and values [T, heads, head_dim] of one layer, normed and turned to their positions."""
    h, head_dim = F.rms_norm(x, layer.norm.shape, layer.norm, eps), angles.cos.shape[-1]
    projections = (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)
    q, k, v = (F.linear(h, *p).view(len(x), -1, head_dim) for p in projections)
    return _rotate(q, layer.q_norm, angles, eps), _rotate(k, layer.k_norm, angles, eps), v


def _rotate(x: Float[Tensor, "T H n"], norm: Tensor | None, angles: Rotary, eps: float) -> Float[Tensor, "T H n"]:
    """Each head RMS-normed to y (if there is a norm), then rotated to its position: y * cos + swap(y) * sin, where swap
    exchanges the halves; `sin` has the sign of its half."""
    cos, sin = angles
    x = x.to(cos.dtype)
    y = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
    return (y * cos).addcmul_(y.roll(y.shape[-1] // 2, -1), sin)


def _finish(x: Tensor, attended: Tensor, layer: Layer, eps: float) -> Tensor:
    """The rest of a layer: output projection, gated MLP, residuals."""
    x = F.linear(attended, layer.o, layer.o_bias).add_(x)
    h = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, eps)
    if x.device.type == "cpu" and (torch.compiler.is_compiling() or x.shape[0] in TALL):
        h = h.t()  # weight @ h.T is up to 1.4x faster than h @ weight.T while there are few rows
        return torch.addmm(x, F.silu(torch.mm(layer.gate, h)).mul_(torch.mm(layer.up, h)).t(), layer.down.t())
    return F.linear(F.silu(F.linear(h, layer.gate)).mul_(F.linear(h, layer.up)), layer.down).add_(x)


def why_unsupported(model: Any, max_len: int) -> str | None:
    """Why `Decoder` cannot run this model, in words, or None if it can."""
    config = model.config
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
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral" and window is not None and window < max_len:
        return f"its sliding window {window} is shorter than max_len {max_len}"
    projections = [(n, m) for n, m in model.model.layers.named_modules() if n.endswith("_proj")]
    linear = all(type(m) is nn.Linear or is_low_rank(m) for _, m in projections)
    if not linear or any(".mlp." in n and m.bias is not None for n, m in projections):
        return "a projection is not a plain nn.Linear, or the MLP has biases"
    if any(isinstance(m.weight, Quantized) for _, m in projections):
        return "its copy of the weights would be in fp32, not in 8 or 4 bits"
    return None


def weights_of(model: Any, *, layers: Callable[[Iterator[Layer]], Any] = list) -> Weights:
    """The parameters, without copies except those of `plain` and `weight_of`; with `layers=iter` layer by layer, to be
    read once."""
    reshard(model)  # free what a forward has gathered
    body = model.model
    return Weights(
        embed=plain(body.embed_tokens.weight),
        layers=layers(map(_layer_weights, body.layers)),
        norm=plain(body.norm.weight),
        head=plain(model.lm_head.weight),
    )


def _layer_weights(layer: Any) -> Layer:
    """The weights of a decoder layer of transformers; see `weight_of`."""
    a, mlp = layer.self_attn, layer.mlp
    q, k, v, o = ((weight_of(p, "weight"), weight_of(p, "bias")) for p in (a.q_proj, a.k_proj, a.v_proj, a.o_proj))
    norms = (a._modules.get(name) for name in ("q_norm", "k_norm"))
    head_norms = (None if norm is None else weight_of(norm, "weight") for norm in norms)
    others = (layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    first = weight_of(layer.input_layernorm, "weight")
    return Layer._make([first, *q, *k, *v, *head_norms, *o, *(weight_of(m, "weight") for m in others)])


def plain(p: Any) -> Any:
    """A parameter as a plain tensor; None stays None.

    A DTensor gives its own memory on a mesh of size 1, and else a gathered copy (a collective), which follows the
    parameter only from one `refresh` to the next.
    """
    if not hasattr(p, "full_tensor"):
        return p
    return p.to_local() if p.device_mesh.size() == 1 else p.full_tensor()


def weight_of(module: Any, name: str) -> Any:
    """The weight or bias of a module: see `plain`; of a projection with an adapter a copy of both, merged."""
    adapter, p = adapter_of(module), plain(getattr(module, name))
    return merged(p.detach(), adapter) if adapter is not None and name == "weight" else p
