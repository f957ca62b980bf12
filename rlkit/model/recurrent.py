"""Recurrent and convolutional layers in a packed stream: each segment starts from the final state of its parent.

A layer of this kind (gated delta net, Mamba, short convolution) reads its tokens in order, so it cannot run over a pack
as attention does. Here the rows of a pack become padded rows, one per segment, for these layers only:

    prompts [G, longest]   ->  outputs, final states        padded on the left, where a mask keeps the state at 0
    turns [B, length]      ->  outputs, final states        of one length, from the states of their parents
    samples [N, longest]   ->  outputs                      padded on the right, from the states of their parents

Each state is computed once and has a gradient. All families of transformers share one interface between such a layer
and its cache, so there is no code per model: `States` is that cache, without writes in place.
Layers that ignore the state they are given (Mamba 1 and lightning attention in torch) are found by the check in
`rlkit.model.families`, and replay the prompt: each sample's row has its prompt again, in these layers only.

On CUDA the layer calls the kernels that transformers finds (flash-linear-attention, causal-conv1d, mamba-ssm), with
initial states and without `cu_seqlens`, which its implementations in torch ignore. Not run on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from rlkit._util.tensors import uncompiled
from rlkit.parallel.attention import current_plan, rows, segments
from rlkit.parallel.forest import Forest, forest
from rlkit.parallel.padded import PaddedRows, by_document, by_segment
from rlkit.types import Batch

_CACHES = ("cache", "cache_params", "past_key_values")  # names of the layers' argument in versions of transformers
TOLL = 64  # rows that a state between a parent and children must save: layers read in chunks of 64 tokens or more
_WRITES = ("update_conv_state(", "update_recurrent_state(", "set_linear_cache(")


class States:
    """The cache of one layer with the methods that transformers' layers call, for any number of rows.

    `conv` are the last inputs of each causal convolution, `recurrent` the states of the recurrence. In a forward
    both are replaced, never written in place, so that gradients flow through them; `write` is for sampling.
    """

    def __init__(self, conv: dict[int, Tensor] | None = None, recurrent: dict[int, Tensor] | None = None) -> None:
        self.conv, self.recurrent = dict(conv or {}), dict(recurrent or {})

    def of_rows(self, index: Tensor) -> States:
        """The states of these rows."""
        return self._mapped(lambda x: rows(x, index))

    def cleared(self, where: Tensor) -> States:
        """These states, and 0 in rows `where`."""
        return self._mapped(lambda x: x.masked_fill(where.view(-1, *[1] * (x.ndim - 1)), 0))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> States:
        return States(*({i: change(x) for i, x in held.items()} for held in (self.conv, self.recurrent)))

    def write(self, others: States, index: Tensor) -> None:
        """Replace these rows, in place."""
        for mine, new in ((self.conv, others.conv), (self.recurrent, others.recurrent)):
            for i, x in new.items():
                mine[i][index] = x.to(mine[i].dtype)

    def resize(self, count: int) -> None:
        """Have at least `count` rows; new ones are 0."""
        for held in (self.conv, self.recurrent):
            for i, x in held.items():
                held[i] = torch.cat((x, x.new_zeros(max(0, count - len(x)), *x.shape[1:])))

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        """The inputs before the first token; None at the start of a document."""
        return self.conv.get(state_idx)

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        """The state before the first token; None at the start of a document."""
        return self.recurrent.get(state_idx)

    def has_previous_state(self, _layer: int = 0, state_idx: int = 0) -> bool:
        """Whether the rows continue others."""
        return state_idx in self.conv

    def is_recording_past(self, _layer: int = 0) -> bool:
        """True: the layers' path for a single token writes in place."""
        return True

    def update_conv_state(
        self, x: Tensor, _layer: int = 0, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs; returns all that the convolution reads."""
        before, size = self.conv.get(state_idx), conv_kernel_size or x.shape[-1]
        whole = x if before is None else torch.cat((before, x), -1)
        if whole.shape[-1] < size:
            whole = nn.functional.pad(whole, (size - whole.shape[-1], 0))
        self.conv[state_idx] = whole[..., -size:]
        return whole

    def update_recurrent_state(self, x: Tensor, _layer: int = 0, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state after the last token."""
        self.recurrent[state_idx] = x
        return x


def joined(parts: Sequence[States]) -> States:
    """The states of the rows of all parts."""
    held = [[p.conv for p in parts], [p.recurrent for p in parts]]
    return States(*({i: torch.cat([x[i] for x in each]) for i in each[0]} for each in held))


def wrap(model: nn.Module, *, replay: bool = False, toll: int = TOLL) -> None:
    """Let the model's recurrent layers run by the plan of a packed forward, in place; elsewhere they are as before.

    `toll`: see `rlkit.parallel.forest.forest`. Where layers `replay` prompts, nothing else is shared.
    """
    unwrap(model)
    for layer, name in recurrent_layers(model):
        layer.forward = partial(_by_rows, layer.forward, name, None if replay else toll)


def recurrent_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The recurrent and convolutional layers of a model, with the name of their cache argument."""
    named = ((module, _of_class(cast(Any, type(module)))) for module in model.modules())
    return [(module, name) for module, name in named if name is not None]


def unwrap(model: nn.Module) -> None:
    """Undo `wrap`."""
    for module in filter(_is_wrapped, model.modules()):
        del module.forward


def plan_rows(
    model: nn.Module, batch: Batch, *, images: Int[Tensor, "S"] | None = None
) -> tuple[Forest | None, PaddedRows | None]:
    """The forest of the batch, and the rows in which recurrent layers run; None for a model that `wrap` found none in.

    `images`: see `rlkit.parallel.forest.forest`.
    """
    if (layer := next(filter(_is_wrapped, model.modules()), None)) is None:
        return forest(batch, images=images), None
    *_, toll = vars(layer)["forward"].args
    if toll is None:
        return None, by_document(batch)
    tree = forest(batch, toll=toll, images=images)
    return tree, by_segment(segments(batch) if tree is None else tree.spans)


def _is_wrapped(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _by_rows


@cache
def _of_class(kind: Any) -> str | None:
    """The name of the cache argument of a recurrent layer: one that writes states into its cache. Else None."""
    parameters = inspect.signature(kind.forward).parameters if hasattr(kind, "forward") else {}
    name = next((name for name in _CACHES if name in parameters), None)
    if name is None or not kind.__module__.startswith("transformers."):
        return None
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return None
    return name if any(call in source for call in _WRITES) else None


@uncompiled  # the number of blocks differs from call to call
def _by_rows(layer: Any, cache_name: str, toll: int | None, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    """The layer over padded rows of the stream `hidden_states [1, S, D]`, by the plan of this forward."""
    if (plan := current_plan()) is None:
        return layer(hidden_states, *args, **options)
    outputs: list[Tensor] = []
    continued = {i for block in plan.rows.blocks for i in block.after}
    finals: dict[int, States] = {}
    for i, block in enumerate(plan.rows.blocks):
        x = rows(hidden_states[0], block.rows.flatten()).unflatten(0, block.rows.shape)
        before = States() if block.parents is None else joined([finals[j] for j in block.after]).of_rows(block.parents)
        states = None if toll is None else before
        masked = {cache_name: states, "attention_mask": None if toll is None else block.real}
        out = layer(x, *args, **options | masked)
        outputs.append((out[0] if isinstance(out, tuple) else out).flatten(0, 1))
        if states is not None and i in continued:
            finals[i] = states
    result = rows(torch.cat(outputs), plan.rows.back)[None]
    return (result, *out[1:]) if isinstance(out, tuple) else result
