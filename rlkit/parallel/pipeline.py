"""Pipeline parallelism: the layers in stages, several micro-batches in flight between them.

    torchrun --nproc-per-node 4 -m rlkit.scripts.grpo --parallel.pp 2 ...

    with pipelined(mesh) as backward:                     # any mesh, or None
        for micro, w in rank_microbatches((batch, weights), mesh=mesh, max_tokens=16384):
            out = forward(model, micro)
            backward((w * -out.logp).sum())               # instead of `loss.backward()`

A stage is the model without the other stages' layers. It receives the hidden states of the stage before it, and sends
its own on; in the backward, gradients go the other way. All of this is inside the forward and backward of one
micro-batch, so every stage runs the same loop. Log-probs exist on the last stage only: elsewhere they are zeros, whose
gradient is ignored, and so is the loss made of them. `summed`, `reduce_metrics` and `score` bring the last stage's
numbers to all.

`pipelined` delays the backward of a stage until as many further micro-batches are forwarded as there are stages after
it: the 1F1B schedule, in which M micro-batches on S stages leave (S - 1) / (M + S - 1) of the time idle, and a stage
keeps the activations of at most S micro-batches. With plain `loss.backward()` one micro-batch is in flight at a time.

Differs: Megatron and torch.distributed.pipelining take over the loop, and want micro-batches padded to one shape.
Reference: arXiv:2104.04473
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit.parallel.mesh import Mesh

_IN_FLIGHT = 2  # tensors on their way to a neighbour before the next one waits


@contextmanager
def pipelined(mesh: Mesh | None) -> Iterator[Callable[[Tensor], None]]:
    """A function that backwards a loss: at once, or under pipeline parallelism as late as the schedule wants.

    On leaving the block all gradients are there; that of a tied weight in two parts, until `optimizer_step` (see
    `sum_copies`).
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


def cut_stage(model: Any, mesh: Mesh, *, dtype: torch.dtype) -> None:
    """Leave of `model`, in place, what this rank's stage holds: its layers, the embedding on the first stage, the last
    norm and the head on the last. Parameters keep their names; hidden states travel in `dtype`.

    A head that is tied to the embedding works on a copy of its weight, under the embedding's name (see `sum_copies`).

    Errors: ValueError for too few layers.
    """
    base, stage, count = model.base_model, mesh.pp_rank, mesh.sizes.pp
    if len(base.layers) < count:
        raise ValueError(f"pp={count} needs at least as many layers; the model has {len(base.layers)}")
    first, end = (len(base.layers) * i // count for i in (stage, stage + 1))
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
    if tied:
        model.rlkit_ends = mesh.ends_group()


def mark_copies(model: Any) -> None:
    """Note on a tied weight that two stages hold which these are; its parameter is then the one that stays."""
    if group := getattr(model, "rlkit_ends", None):
        model.base_model.embed_tokens.weight.rlkit_ends = group


@torch.no_grad()
def sum_copies(params: Iterable[Any]) -> list[Any]:
    """Sum the gradient of a tied weight over the first stage and the last, which hold a copy each (else do nothing).

    All ranks call it once a step, before anything is made of the gradients, with all parameters of the optimizer. Both
    copies then take the same step, bit for bit. Returns the parameters without the last stage's copy: for the norm.
    """
    own = []
    for p in params:
        group = getattr(p, "rlkit_ends", None)
        if group is not None:
            grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
            found = grad.to_local().new_tensor(p.grad is not None)
            dist.all_reduce(found, group=group)
            dist.all_reduce(grad.to_local(), group=group)
            p.grad = grad if found else None
        if group is None or group.rank() == 0:
            own.append(p)
    return own


class _Link:
    """To and from the neighbouring stages. Each direction has a group of its own: NCCL runs what two ranks of a group
    say to each other in the order in which each of them issued it, and both may begin with a send."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.pp_rank
        self._groups = {1: mesh.group("pp"), -1: mesh.backward_group()}
        self._sent: dict[int, deque[Any]] = {1: deque(), -1: deque()}

    def send(self, x: Tensor, step: int) -> None:
        """To the next stage (`step` 1) or to the one before (-1), without waiting for it."""
        sent, x = self._sent[step], x.detach().contiguous()
        sent.append((dist.isend(x, group=self._groups[step], group_dst=self._rank + step), x))
        if len(sent) > _IN_FLIGHT:
            sent.popleft()[0].wait()

    def receive(self, x: Tensor, step: int) -> Tensor:
        """What the stage before (`step` 1) or the next one (-1) sends, as a tensor like `x`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.recv(out, group=self._groups[step], group_src=self._rank - step)
        return out


class _Elsewhere(nn.Module):
    """In place of what another stage holds."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class _NoEmbedding(nn.Module):
    """In place of the embedding: a tensor like the one to be received."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.size)


class _Receive(nn.Module):
    """In place of the layer before this stage's first."""

    def __init__(self, link: _Link) -> None:
        super().__init__()
        self.link = link

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        got = self.link.receive(hidden, 1)
        if torch.is_grad_enabled():
            got.requires_grad_().register_hook(lambda grad: self.link.send(grad, -1))
        return got


class _Send(nn.Module):
    """In place of the layer after this stage's last."""

    def __init__(self, link: _Link, dtype: torch.dtype) -> None:
        super().__init__()
        self.link, self.dtype = link, dtype

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return _Sent.apply(hidden.to(self.dtype), self.link)


class _Sent(torch.autograd.Function):
    """Zeros in place of what was sent. Their gradient is ignored: the one that counts comes from the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, link: _Link) -> Tensor:
        ctx.link = link
        link.send(hidden, 1)
        return torch.zeros_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.link.receive(grad, -1), None
