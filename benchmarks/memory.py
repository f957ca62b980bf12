"""Memory of a training step per GPU, counted on paper: what fits on how many GPUs, and what takes the room.

    python benchmarks/memory.py                          # the table: six models, 8 to 64 GPUs of 80 GB
    python benchmarks/memory.py --model Qwen3-32B --gpus 16 --tp 4 --tokens 65536
    python benchmarks/memory.py --check                  # the formulas against a real step of a small model

COMPUTED, NOT MEASURED, except under --check. Terms, for `rlkit.model.parallelize(dtype=bf16)`:

    states       16 bytes a parameter, cut over shard * cp * tp: fp32 master weights, gradients, two AdamW moments
    gathered     bf16 weights in use: two layers (one computing, one on its way; of experts, expert parallel ranks
                 gather only their own), embedding and head; in the backward
                 also their gradients until they are summed: embedding and head in bf16, one layer in bf16 and fp32
    activations  kept for the backward, by T / cp tokens. Each norm keeps an fp32 copy, because transformers computes it
                 in fp32. Tensor parallel cuts heads and hidden units, or the tokens of experts, not the residual
                 stream.
                 With checkpointing: each layer's input, and all of one layer while it is computed again
    loss         linear_logp keeps the hidden states, their gradient and two tiles of logits of 256 MiB; whole logits
                 (column `logits`, avoided) would take T * V * 8 bytes: fp32 log-softmax and its gradient

--offload puts the states into host memory: 16 bytes a parameter over all hosts.
GPU memory counts as full at 90% of 80 GiB: CUDA context, NCCL buffers and fragmentation take the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro

from rlkit.kernels.linear_logp.chunked import TILE_BYTES

GIB = 2**30


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
        """Those of a layer's experts, which expert parallelism leaves on their ranks."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def parameters(self) -> int:
        """All of them, a tied head once."""
        return self.layers * self.layer_parameters + self.hidden + (1 if self.tied else 2) * self.vocab * self.hidden

    def activation_bytes(self, *, tp: int = 1, cp: int = 1, size: int = 2) -> float:
        """Bytes that one layer keeps for the backward, per token of a rank; `size` 2 for bf16, 4 for fp32.

        Context parallel gathers keys and values, so it keeps those of `cp` ranks (by Ulysses it would not).
        """
        wide = 4 if size == 2 else 0  # the norms' fp32 copy; under fp32 it is the input itself
        residual = 2 * ((wide + size if wide else 2 * size) + size) * self.hidden + 2 * 4
        q, kv = self.heads * self.head_dim / tp, self.kv_heads * self.head_dim / tp
        norms = self.qk_norm * ((wide + size if wide else 2 * size) * (q + kv) + 4 * (self.heads + self.kv_heads) / tp)
        attention = size * (2 * q + 2 * kv * cp) + 4 * self.heads / tp
        per_expert = 4 * size * self.intermediate + self.experts_extra(size)
        return residual + norms + attention + max(1, self.active) * per_expert / tp

    def experts_extra(self, size: int) -> float:
        """A token's copy for each expert that it goes to, before and after."""
        return 2 * size * self.hidden if self.experts else 0.0

    def kv_bytes(self) -> int:
        """Of an engine's cache, per token, in bf16, over all its GPUs."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


MODELS = {
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 12288, 151936, qk_norm=True),
    "Qwen2.5-32B": Shape(64, 5120, 40, 8, 27648, 152064, qkv_bias=True),
    "Qwen3-32B": Shape(64, 5120, 64, 8, 25600, 151936, qk_norm=True),
    "Qwen2.5-72B": Shape(80, 8192, 64, 8, 29568, 152064, qkv_bias=True),
    "Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 768, 151936, qk_norm=True, experts=128, active=8),
}


@dataclass(frozen=True)
class Layout:
    """How a step is run: the sizes of the mesh, and tokens of a micro-batch over one data parallel place."""

    gpus: int = 8
    tp: int = 1
    cp: int = 1
    ep: int = 1
    replicate: int = 1
    tokens: int = 32768
    checkpointing: bool = True
    offload: bool = False

    @property
    def cut(self) -> int:
        """Ranks over which parameters and states are cut."""
        return self.gpus // self.replicate


def step_bytes(shape: Shape, layout: Layout) -> dict[str, float]:
    """Bytes on one GPU at the fullest moment of a step, by what they hold."""
    tokens = layout.tokens / layout.cp
    states = 16 * shape.parameters / layout.cut
    outside = (1 if shape.tied else 2) * shape.vocab * shape.hidden / layout.tp
    layer = (shape.layer_parameters - shape.expert_parameters) / layout.tp + shape.expert_parameters / layout.ep
    one = tokens * shape.activation_bytes(tp=layout.tp, cp=layout.cp)
    kept = tokens * 2 * shape.hidden * shape.layers
    return {
        "states": 0.0 if layout.offload else states,
        "gathered": 2 * (2 * layer + outside) + (2 + 4) * layer + 2 * outside,
        "activations": kept + one if layout.checkpointing else shape.layers * one,
        "loss": tokens * shape.hidden * (2 + 4) + 2 * TILE_BYTES,
    }


def logits_bytes(shape: Shape, layout: Layout) -> float:
    """What a loss over whole logits would take on top: fp32 log-softmax and its gradient."""
    return layout.tokens / layout.cp * shape.vocab / layout.tp * 8


def engine_bytes(shape: Shape, *, engine_tp: int) -> float:
    """Weights of an engine beside the trainer, in bf16, per GPU."""
    return 2 * shape.parameters / engine_tp


def plan(name: str, layout: Layout, *, memory: float = 80 * GIB) -> dict[str, object]:
    """One row: what a GPU holds, whether it fits, why not, and what an engine on the same GPUs may keep."""
    shape, room = MODELS[name], 0.9 * memory
    parts = step_bytes(shape, layout)
    total = sum(parts.values())
    largest = max(parts, key=lambda k: parts[k])
    engine_tp = next(n for n in (1, 2, 4, 8) if engine_bytes(shape, engine_tp=n) < 0.5 * memory)
    beside = room - (parts["states"] + engine_bytes(shape, engine_tp=engine_tp))
    return {
        "model": name,
        **{k: v / GIB for k, v in parts.items()},
        "total": total / GIB,
        "fits": total <= room,
        "why": f"{100 * total / room:.0f}% of {room / GIB:.0f} GiB, most for {largest}",
        "logits avoided": logits_bytes(shape, layout) / GIB,
        "kv tokens beside": max(0, int(beside * engine_tp / shape.kv_bytes())),
        "engine tp": engine_tp,
    }


def default_layouts(gpus: int, shape: Shape) -> list[Layout]:
    """The usual choices: cut everything; matrices or experts in a node; long sequences by context; no checkpointing."""
    inside = {"ep": 8} if shape.experts else {"tp": min(8, shape.kv_heads)}
    both = {"tp": 2, "cp": 4, "ep": 8} if shape.experts else {"tp": 2, "cp": 4}
    return [
        Layout(gpus),
        Layout(gpus, checkpointing=False, tokens=8192),
        Layout(gpus, **inside),
        Layout(gpus, **inside, tokens=16384),
        Layout(gpus, **both, tokens=131072),
        Layout(gpus, cp=8, tokens=131072),
        Layout(gpus, cp=8, tokens=32768),
        Layout(gpus, offload=True),
    ]


def describe(layout: Layout) -> str:
    """The flags of a layout, as one writes them."""
    shard = layout.gpus // (layout.tp * layout.cp * layout.replicate)
    names = {"replicate": layout.replicate, "shard": shard, "cp": layout.cp, "tp": layout.tp, "ep": layout.ep}
    flags = [f"{k} {v}" for k, v in names.items() if v > 1]
    flags += ["checkpointing"] * layout.checkpointing + ["offload"] * layout.offload
    return f"{', '.join(flags)}, {layout.tokens // 1024}k tokens"


def print_table(rows: list[tuple[Layout, dict[str, object]]]) -> None:
    """GiB per GPU."""
    names = ("states", "gathered", "activations", "loss", "total")
    print("computed, GiB per GPU; kv: tokens of cache that an engine on the same GPUs may keep during training")
    print(f"{'':16}{'':>5} {'':48}" + "".join(f"{n:>12}" for n in names) + f"{'fits':>6}{'logits':>8}{'kv':>9}  why")
    for layout, row in rows:
        cells = "".join(f"{row[n]:12.1f}" for n in names)
        fits = "yes" if row["fits"] else "NO"
        more = f"{fits:>6}{row['logits avoided']:8.1f}{row['kv tokens beside']:9d}  {row['why']}"
        print(f"{row['model']:16}{layout.gpus:5d} {describe(layout):48}{cells}{more}")


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


def check() -> None:
    """Print counted and measured bytes per layer and token. On the CPU packed attention keeps one more copy of q."""
    print(f"{'':12}{'dtype':>10}{'counted':>10}{'measured':>10}{'ratio':>8}")
    for name, shape in SMALL.items():
        for dtype in (torch.float32, torch.bfloat16):
            counted = shape.activation_bytes(size=dtype.itemsize) + dtype.itemsize * shape.heads * shape.head_dim
            measured = measured_activation_bytes(shape, dtype=dtype)
            kind = str(dtype).removeprefix("torch.")
            print(f"{name:12}{kind:>10}{counted:10.0f}{measured:10.0f}{measured / counted:8.3f}")


@dataclass
class Args:
    """What to count. Without a model: the table."""

    model: str = ""
    """one of the models, for a single row"""
    gpus: int = 8
    tp: int = 1
    cp: int = 1
    ep: int = 1
    replicate: int = 1
    tokens: int = 32768
    """tokens of a micro-batch over one data parallel place; at least the longest sequence"""
    checkpointing: bool = True
    offload: bool = False
    check: bool = False
    """compare the formulas with a real step of small models"""


def main(args: Args) -> None:
    """Print what was asked for."""
    if args.check:
        check()
        return
    if args.model and args.model not in MODELS:
        raise SystemExit(f"--model {args.model} is not one of {', '.join(MODELS)}")
    if args.model:
        names = ("gpus", "tp", "cp", "ep", "replicate", "tokens", "checkpointing", "offload")
        rows = [(args.model, Layout(**{k: getattr(args, k) for k in names}))]
    else:
        rows = [(m, x) for m, shape in MODELS.items() for n in (8, 16, 32, 64) for x in default_layouts(n, shape)]
    print_table([(layout, plan(name, layout)) for name, layout in rows])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
