"""Memory of training and sampling per GPU, counted on paper from a model's sizes; see `rlkit plan`.

Terms of a training step, for `rlkit.model.parallelize(dtype=bf16)`:

    states       16 bytes a parameter, cut over shard * cp * tp: fp32 master weights, gradients, two AdamW moments. Of
                 pipeline stages, each has its layers' (`cut_layers`), the first the embedding's, the last the head's
    gathered     bf16 weights in use: two layers (one computing, one on its way; all of them without
                 `reshard_after_forward`; of experts, expert parallel ranks gather only their own), embedding and head;
                 in the backward also their gradients until they are summed: embedding and head in bf16, one layer in
                 bf16 and fp32. On one rank, without offload, a bf16 copy of all weights, and the largest gradient
    activations  kept for the backward, by T / cp tokens. Each norm keeps an fp32 copy, because transformers computes it
                 in fp32. Tensor parallel cuts heads and hidden units, or the tokens of experts, not the residual
                 stream.
                 With checkpointing: each layer's input, and all of one layer while it is computed again. Stage s of
                 S keeps those of S - s micro-batches
    loss         linear_logp keeps the hidden states, their gradient and two tiles of logits of 256 MiB; whole logits,
                 which are avoided, would take T * V * 8 bytes: fp32 log-softmax and its gradient. On the last stage

With `offload` the states are in host memory: 16 bytes a parameter over all hosts. An engine beside the trainer holds
the weights in bf16 and 2 * 2 * layers * kv_heads * head_dim bytes of keys and values per token, over a server's GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rlkit.kernels.linear_logp.chunked import TILE_BYTES
from rlkit.parallel.pipeline import cut_layers

USABLE = 0.9  # of a GPU: CUDA context, NCCL buffers and fragmentation take the rest
LEAST_TOKENS = 2048  # of a micro-batch, in `fitted`


@dataclass(frozen=True)
class Shape:
    """What the count needs to know of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active: int = 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer; `intermediate` is that of one expert where there are experts."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (q + kv) + self.qkv_bias * (q + 2 * kv) + self.qk_norm * 2 * self.head_dim
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Expert parameters per layer, which expert parallelism leaves on their ranks."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def replicated_parameters(self) -> int:
        """Parameters per layer that tensor parallelism does not cut: norms, and the router of experts."""
        return 2 * self.hidden + self.qk_norm * 2 * self.head_dim + self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All of them, a tied head once."""
        return self.layers * self.layer_parameters + self.hidden + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def layer_flops(self) -> int:
        """FLOPs of a token's forward in the matrices of one layer."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return 2 * (attention + 3 * self.hidden * self.intermediate * max(1, self.active) + self.hidden * self.experts)

    def stages(self, num: int) -> list[Stage]:
        """The pipeline stages of the model (see `rlkit.parallel.pipeline.stage_cuts`)."""
        cuts = cut_layers([self.layer_flops] * self.layers, num, head=2 * self.vocab * self.hidden)
        return [Stage(self, end - start, start == 0, end == self.layers) for start, end in pairwise(cuts)]

    def activation_bytes(self, *, tp: int = 1, cp: int = 1, size: int = 2) -> float:
        """Bytes that one layer keeps for the backward, per token of a rank; `size` 2 for bf16, 4 for fp32.

        Context parallel gathers keys and values, so it keeps those of `cp` ranks (by Ulysses it would not).
        """
        wide = 4 if size == 2 else 0  # the norms' fp32 copy; under fp32 it is the input itself
        residual = 2 * ((wide + size if wide else 2 * size) + size) * self.hidden + 2 * 4
        q, kv = self.heads * self.head_dim / tp, self.kv_heads * self.head_dim / tp
        norms = self.qk_norm * ((wide + size if wide else 2 * size) * (q + kv) + 4 * (self.heads + self.kv_heads) / tp)
        attention = size * (2 * q + 2 * kv * cp) + 4 * self.heads / tp
        copies = 2 * size * self.hidden if self.experts else 0  # of a token, before and after each of its experts
        per_expert = 4 * size * self.intermediate + copies
        return residual + norms + attention + max(1, self.active) * per_expert / tp

    def kv_bytes(self) -> int:
        """Bytes of an engine's cache per token, in bf16, over all its GPUs."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: some layers, on the first the embedding, on the last the final norm and the head."""

    shape: Shape
    layers: int
    first: bool
    last: bool

    @property
    def vocab_parameters(self) -> int:
        """Parameters of embedding and head in this stage; if tied, the first and the last stage have a copy each."""
        once = self.shape.tied and self.first and self.last
        return (self.first + self.last - once) * self.shape.vocab * self.shape.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.shape.layer_parameters + self.last * self.shape.hidden + self.vocab_parameters


def shape_of(config: Any) -> Shape:
    """The sizes in a transformers config of a model type that `parallelize` covers."""
    from rlkit.model.parallelize import COVERED

    text, kind = config.get_text_config(), config.model_type
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    return Shape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        intermediate=text.moe_intermediate_size if experts else text.intermediate_size,
        vocab=text.vocab_size,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        tied=bool(text.tie_word_embeddings),
        qkv_bias=kind == "qwen2",
        qk_norm=COVERED.get(kind) is not None,
        experts=experts,
        active=text.num_experts_per_tok if experts else 0,
    )


@dataclass(frozen=True)
class Layout:
    """How a step is run: the sizes of the mesh, and tokens of a micro-batch over one data parallel place."""

    gpus: int = 8
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    replicate: int = 1
    tokens: int = 32768
    checkpointing: bool = True
    reshard_after_forward: bool = True
    offload: bool = False

    @property
    def cut(self) -> int:
        """Ranks over which the parameters and states of a stage are cut."""
        return self.gpus // (self.replicate * self.pp)


def stage_bytes(stage: Stage, layout: Layout, *, in_flight: int = 1) -> dict[str, float]:
    """Bytes on one GPU of a stage at the fullest moment of a step, by what they hold; `in_flight` micro-batches."""
    shape, tokens = stage.shape, layout.tokens / layout.cp
    outside = stage.vocab_parameters / layout.tp
    layer = (shape.layer_parameters - shape.expert_parameters) / layout.tp + shape.expert_parameters / layout.ep
    in_use = min(2, stage.layers) if layout.reshard_after_forward else stage.layers
    gathered = 2 * (in_use * layer + outside) + (2 + 4) * layer + 2 * outside
    if layout.gpus == 1 and not layout.offload:
        gathered = 2 * stage.parameters + 2 * outside
    one = tokens * shape.activation_bytes(tp=layout.tp, cp=layout.cp)
    inputs = tokens * 2 * shape.hidden * stage.layers
    return {
        "states": 0.0 if layout.offload else 16 * stage.parameters / layout.cut,
        "gathered": gathered,
        "activations": in_flight * inputs + one if layout.checkpointing else in_flight * stage.layers * one,
        "loss": stage.last * (tokens * shape.hidden * (2 + 4) + 2 * TILE_BYTES),
    }


def step_bytes(shape: Shape, layout: Layout) -> list[dict[str, float]]:
    """`stage_bytes` of every pipeline stage: as many micro-batches are in flight as stages from it to the end."""
    stages = shape.stages(layout.pp)
    return [stage_bytes(stage, layout, in_flight=layout.pp - i) for i, stage in enumerate(stages)]


def fitted(shape: Shape, layout: Layout, *, room: float) -> Layout | None:
    """The layout if a step fits into `room` bytes, else with checkpointing, else with fewer tokens; None if none fits.

    Tokens of a micro-batch are halved down to `LEAST_TOKENS`. One micro-batch of one long sequence cannot be split: it
    may need more.
    """
    tokens = layout.tokens
    ways = [layout, replace(layout, checkpointing=True)]
    while tokens >= 2 * LEAST_TOKENS:
        tokens //= 2
        ways.append(replace(layout, checkpointing=True, tokens=tokens))
    fits = (way for way in ways if max(sum(parts.values()) for parts in step_bytes(shape, way)) <= room)
    return next(fits, None)


def engine_bytes(shape: Shape, *, engine_tp: int) -> float:
    """Weights of an engine beside the trainer, in bf16, per GPU."""
    return 2 * shape.parameters / engine_tp
