"""Pipeline parallelism: layers are split into stages, with several micro-batches in flight.

    torchrun --nproc-per-node 4 -m rlkit.scripts.grpo --parallel.pp 2 ...

    with pipelined(mesh) as backward:                     # any mesh, or None
        for micro, w in rank_microbatches((batch, weights), mesh=mesh, max_tokens=16384):
            out = forward(model, micro)
            backward((w * -out.logp).sum())               # instead of `loss.backward()`

A stage is the model without the other stages' layers. It receives the hidden states of the previous stage and sends its
output to the next one; in the backward, gradients flow in reverse. Communication happens inside the forward and
backward of a micro-batch, so every stage runs the same loop. Only the last stage has log-probs; on the others they are
zeros, and a loss computed from them is ignored. `summed`, `reduce_metrics` and `score` send the last stage's numbers to
all stages.

`pipelined` delays the backward of a stage by as many micro-batches as there are later stages. This is the 1F1B
schedule: M micro-batches on S stages leave (S - 1) / (M + S - 1) of the time idle, and a stage keeps the activations of
at most S micro-batches. With plain `loss.backward()` only one micro-batch is in flight.

Differs: Megatron and torch.distributed.pipelining own the loop, and require micro-batches padded to one shape.
Reference: arXiv:2104.04473
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit.parallel.mesh import Mesh

_IN_FLIGHT = 2  # unfinished sends per direction; a further send waits for the oldest


@contextmanager
def pipelined(mesh: Mesh | None) -> Iterator[Callable[[Tensor], None]]:
    """Context manager that yields a replacement for `loss.backward()`, delayed as the 1F1B schedule requires.

    After the block all gradients are complete, except that of a tied weight, whose two parts are summed in
    `optimizer_step` (see `sum_copies`).
    """
    ahead = 0 if mesh is None else mesh.sizes.pp - 1 - mesh.pp_rank
    waiting: deque[Tensor] = deque()

    def backward(loss: Tensor) -> None:
        waiting.append(loss)
        if len(waiting) > ahead:
            waiting.popleft().backward()

    yield backward
    while waiting:
        waiting.popleft().backward()


def cut_layers(costs: Sequence[int], stages: int, *, head: int = 0) -> list[int]:
    """The layers at which stages begin and end: stage s has layers `cuts[s]` to `cuts[s + 1] - 1`, at least one.

        cost of a stage = sum of its layers' costs, on the last stage + head

    The slowest stage sets the pace of a pipeline, so the largest cost of a stage is as small as possible, then the
    second largest, and so on. Of equal cuts, the one with fewer layers on the first stages, which keep the activations
    of more micro-batches. A head that costs more than its share leaves one layer on the last stage, never none.

    >>> cut_layers([2] * 28, 4, head=20)  # as Qwen3-0.6B's: the head costs as much as ten layers
    [0, 9, 18, 27, 28]

    Errors: ValueError for fewer layers than stages.
    """
    if len(costs) < stages:
        raise ValueError(f"pp={stages} needs at least as many layers; the model has {len(costs)}")
    sums = [0, *accumulate(costs)]

    @cache
    def best(first: int, left: int) -> tuple[list[int], list[int]]:
        """The costs, largest first, and the ends of the last `left` stages, which have the layers from `first`."""
        if left == 1:
            return [sums[-1] - sums[first] + head], [len(costs)]
        splits = []
        for end in range(first + 1, len(costs) - left + 2):
            others, ends = best(end, left - 1)
            splits.append((sorted([sums[end] - sums[first], *others], reverse=True), [end, *ends]))
        return min(splits)

    return [0, *best(0, stages)[1]]


def stage_cuts(model: Any, stages: int) -> list[int]:
    """`cut_layers` of a transformers model, whole or on the meta device, by the FLOPs of a token's forward.

        2 * elements of each matrix; of fused experts [E, ...], of those that a token goes to

    The embedding is free. The head counts as if every token were trained, which with shared prompts nearly all are;
    attention's products of queries and keys, which grow with the length of a sequence, are not counted.
    """
    active = getattr(model.config, "num_experts_per_tok", 0)

    def flops(module: nn.Module) -> int:
        sizes = [
            p.numel() // p.shape[0] * active if p.ndim == 3 else p.numel() for p in module.parameters() if p.ndim > 1
        ]
        return 2 * sum(sizes)

    head = sum(flops(module) for module in model.children() if module is not model.base_model)
    return cut_layers([flops(layer) for layer in model.base_model.layers], stages, head=head)


def cut_stage(model: Any, mesh: Mesh, *, dtype: torch.dtype) -> dist.ProcessGroup | None:
    """Reduce `model`, in place, to this rank's stage: its layers (see `stage_cuts`), the embedding on the first stage,
    the final norm and the head on the last. Parameters keep their names; hidden states are sent in `dtype`.

    A head tied to the embedding uses a copy of its weight, under the embedding's name (see `sum_copies`). Returns the
    group of the first and the last stage where this rank has such a copy, else None.

    Errors: ValueError for fewer layers than stages.
    """
    base, stage, count = model.base_model, mesh.pp_rank, mesh.sizes.pp
    first, end = stage_cuts(model, count)[stage : stage + 2]
    for i in [*range(first), *range(end, len(base.layers))]:
        base.layers[i] = _Elsewhere()
    link, head, embedding = _Link(mesh), model.get_output_embeddings(), base.embed_tokens
    tied = head is not None and head.weight is embedding.weight
    if stage > 0:
        base.embed_tokens = _NoEmbedding(model.config.get_text_config().hidden_size, dtype)
        if tied and stage + 1 == count:
            base.embed_tokens.weight = embedding.weight
        base.layers[first - 1] = _Receive(link)
    if stage + 1 < count:
        base.layers[end] = _Send(link, dtype)
        base.norm = _Elsewhere()
        for name, module in model.named_children():
            if module is not base:
                setattr(model, name, None)
    return mesh.ends_group() if tied else None  # called on the stages between, too


@torch.no_grad()
def sum_copies(p: Any, group: dist.ProcessGroup) -> None:
    """Sum the gradient of a tied weight over the first and the last stage, which hold a copy each: their `group`.

    Both ranks must call it once per step, before they use the gradient. Both copies then take the same step, bit for
    bit.
    """
    grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
    has_grad = grad.to_local().new_tensor(p.grad is not None)
    dist.all_reduce(has_grad, group=group)
    dist.all_reduce(grad.to_local(), group=group)
    p.grad = grad if has_grad else None


class _Link:
    """Sends and receives between neighbouring stages. Each direction has its own group: NCCL runs the operations
    between two ranks of a group in issue order, and both ranks may start with a send."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.pp_rank
        self._groups = {1: mesh.group("pp"), -1: mesh.backward_group()}
        self._sent: dict[int, deque[Any]] = {1: deque(), -1: deque()}

    def send(self, x: Tensor, step: int) -> None:
        """Send to the next stage (`step` 1) or the previous one (-1), asynchronously."""
        sent, x = self._sent[step], x.detach().contiguous()
        sent.append((dist.isend(x, group=self._groups[step], group_dst=self._rank + step), x))
        if len(sent) > _IN_FLIGHT:
            sent.popleft()[0].wait()

    def receive(self, x: Tensor, step: int) -> Tensor:
        """Receive from the previous stage (`step` 1) or the next one (-1), as a tensor like `x`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.recv(out, group=self._groups[step], group_src=self._rank - step)
        return out


class _Elsewhere(nn.Module):
    """Placeholder for a module of another stage."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class _NoEmbedding(nn.Module):
    """Placeholder for the embedding: a tensor like the one to be received."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.size)


class _Receive(nn.Module):
    """Replaces the layer before this stage's first: receives its output."""

    def __init__(self, link: _Link) -> None:
        super().__init__()
        self.link = link

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        got = self.link.receive(hidden, 1)
        if torch.is_grad_enabled():
            got.requires_grad_().register_hook(lambda grad: self.link.send(grad, -1))
        return got


class _Send(nn.Module):
    """Replaces the layer after this stage's last: sends its input."""

    def __init__(self, link: _Link, dtype: torch.dtype) -> None:
        super().__init__()
        self.link, self.dtype = link, dtype

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return _Sent.apply(hidden.to(self.dtype), self.link)


class _Sent(torch.autograd.Function):
    """Send and return zeros. Their gradient is ignored; the real one is received from the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        link.send(hidden, 1)
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.link.receive(grad, -1), None
