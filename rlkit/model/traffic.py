"""Collectives of training per GPU, counted on paper from a model's sizes; see `rlkit plan`.

Those of one micro-batch, forward and backward, of a model from `rlkit.model.parallelize`:

    FSDP    a unit for each layer, one for the embedding unless it is tied or cut by `tp`, and the root (final norm,
            head, other embeddings). For each unit two all-gathers in `dtype`, for forward and backward; only one for
            the root, and for all without `reshard_after_forward`. A reduce-scatter of the gradients in fp32; over
            replicas also an all-reduce of the rank's part of them
    tp      an all-reduce of the tokens behind the embedding, attention and MLP, and of their gradients before
            attention, MLP and head. With checkpointing again behind attention. The gradients of q_norm and k_norm, and
            an all-gather of four numbers per token at the head
    cp      an all-gather of keys and values, with checkpointing twice, and a reduce-scatter of their gradients; an
            all-gather of log-probs and one of entropies
    ep      two all-to-alls in the forward and two in the backward of a copy of each token for each of its experts, and
            one of their counts; with checkpointing the forward's twice. Bytes are those of even routing
    pp      sends of the tokens to the next stage, and of their gradients to the one before

Bytes are those that a rank receives: (n - 1) / n of the larger tensor of an all-gather, reduce-scatter or all-to-all
over n ranks, and twice that of an all-reduce, as in a ring.

Not counted: adapters, Ulysses, and the few numbers that `optimizer_step` all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlkit.model.memory import Layout, Stage

GRADIENT = 4  # bytes of an element of a gradient when it is summed


class Collectives(NamedTuple):
    """`num` collectives of one kind over `ranks`, each of a tensor of `size` bytes."""

    kind: str
    ranks: int
    num: int
    size: float

    @property
    def received(self) -> float:
        """Bytes that a rank receives in all of them."""
        if self.kind == "send":
            return self.num * self.size
        return self.num * self.size * (self.ranks - 1) / self.ranks * (2 if self.kind == "all-reduce" else 1)


def microbatch_traffic(stage: Stage, layout: Layout, *, size: int = 2) -> dict[str, tuple[int, float]]:
    """Kind of collective: how many a rank of `stage` takes part in for one micro-batch, and the bytes it receives.

    `size`: bytes of an element of the compute `dtype`. Errors: ValueError for tensor parallel experts.
    """
    if layout.tp > 1 and stage.shape.experts:
        raise ValueError(f"tp={layout.tp} with experts: their collectives are counted for tp=1 only")
    total: dict[str, tuple[int, float]] = {}
    for op in [*_of_parameters(stage, layout, size), *_of_tokens(stage, layout, size)]:
        if op.ranks > 1 and op.num:
            num, received = total.get(op.kind, (0, 0.0))
            total[op.kind] = num + op.num, received + op.received
    return total


def _of_parameters(stage: Stage, layout: Layout, size: int) -> Iterator[Collectives]:
    shape, ranks = stage.shape, layout.cut // layout.tp
    experts = shape.expert_parameters if layout.ep > 1 else 0
    uncut = shape.replicated_parameters
    layer = uncut + (shape.layer_parameters - uncut - experts) / layout.tp
    embedding = shape.vocab * shape.hidden if stage.first and not shape.tied and layout.tp == 1 else 0
    root = (stage.vocab_parameters - embedding) / layout.tp + stage.last * shape.hidden
    twice = 2 if layout.reshard_after_forward else 1
    units = [(stage.layers, layer, ranks, twice), (1, embedding, ranks, twice), (1, root, ranks, 1)]
    units.append((stage.layers, experts / layout.ep, layout.cut // layout.ep, twice))
    for num, parameters, over, gathers in units:
        if parameters:
            yield Collectives("all-gather", over, num * gathers, size * parameters)
            yield Collectives("reduce-scatter", over, num, GRADIENT * parameters)
            yield Collectives("all-reduce", layout.replicate, num, GRADIENT * parameters / over)


def _of_tokens(stage: Stage, layout: Layout, size: int) -> Iterator[Collectives]:
    shape, again = stage.shape, layout.checkpointing
    rows = layout.tokens / layout.cp
    hidden = rows * shape.hidden * size
    yield Collectives("all-reduce", layout.tp, (4 + again) * stage.layers + stage.first + stage.last, hidden)
    yield Collectives("all-reduce", layout.tp, 2 * shape.qk_norm * stage.layers, shape.head_dim * size)
    yield Collectives("all-gather", layout.tp, int(stage.last), layout.tp * rows * 4 * 4)  # of four fp32 statistics
    keys = layout.tokens * 2 * shape.kv_heads * shape.head_dim / layout.tp * size
    yield Collectives("all-gather", layout.cp, (1 + again) * stage.layers, keys)
    yield Collectives("reduce-scatter", layout.cp, stage.layers, keys)
    yield Collectives("all-gather", layout.cp, 2, layout.tokens * 4)
    yield Collectives("all-to-all", layout.ep, (4 + 2 * again) * stage.layers, shape.active * hidden)
    yield Collectives("all-to-all", layout.ep, (1 + again) * stage.layers, shape.experts * 8)
    yield Collectives("send", layout.pp, (not stage.last) + (not stage.first), hidden)
