"""Context parallelism: the tokens of a packed stream spread over ranks, with every segment still seeing all its keys.

The stream is cut into 2 * cp chunks of one size, and rank r holds chunks r and 2 cp - 1 - r. Early chunks see few keys
and late ones many, so each rank has about the same work on one long sequence, and exactly as many tokens. Only
attention looks across ranks, in one of two ways:

    gather_keys   all-gather keys and values, each rank computes its own queries: any head count, O(stream) memory for
                  one layer's keys, and for every layer's until the backward without activation checkpointing
    ulysses       all-to-all from tokens to heads and back: each rank computes all tokens of its heads; the volume falls
                  as 1 / cp, and cp must divide the heads (arXiv:2309.14509)

Everything after the log-probs is as without it: they are gathered (4 bytes a token), every rank computes the same loss
on all of them, and takes the gradient of its own tokens back. Losses that couple the tokens of a sequence need nothing
special.

Differs: ring attention (RL2, OpenRLHF, prime-rl) sends keys around in cp steps, which pays only where one layer's keys
do not fit; verl and AReaL with FSDP have Ulysses, and cut the log-probs before the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.parallel.attention import AttentionPlan, Segment, moved, plan, segments
from rlkit.parallel.collectives import Exchanged, Gathered, GatheredSum
from rlkit.parallel.mesh import Mesh
from rlkit.types import Batch


class Layout(NamedTuple):
    """Where the tokens of a batch are. Without context parallelism `rows` is None and all are here.

    `[S]` is the joined stream of prefixes and sequences, `[R]` the rows of this rank, `[T]` the batch's own tokens:
    they start at row `start` of the stream.
    """

    plan: AttentionPlan
    start: int
    rows: Int[Tensor, "R"] | None = None
    place: Int[Tensor, "T"] | None = None  # of each token in the rows of all ranks, one rank after the other
    size: int = 0
    group: dist.ProcessGroup | None = None

    def local(self, stream: Tensor) -> Tensor:
        """`[S]` to `[R]`; rows past the end repeat the last token, and only they see it."""
        return stream if self.rows is None else stream[self.rows.clamp(max=stream.shape[0] - 1)]

    def head_rows(self, hidden: Float[Tensor, "R D"]) -> Tensor:
        """The rows that a head must look at."""
        return hidden[self.start :] if self.rows is None else hidden

    def spread(self, x: Tensor) -> Tensor:
        """A `[T]` stream at the head's rows, 0 (False) where they are no token of the batch."""
        if self.rows is None:
            return x
        whole = x.new_zeros(self.size)
        whole[self.start : self.start + x.shape[0]] = x
        return whole[self.rows]

    def collect(self, x: Tensor) -> Tensor:
        """What the head says about its rows, as `[T]` on every rank."""
        return x if self.rows is None else Gathered.apply(x, self.group)[self.place]

    def empty(self) -> Layout:
        """The same rows with no token among them."""
        if self.place is None:
            return self._replace(start=2**62)
        return self._replace(start=self.size, place=self.place[:0])


def plan_layout(batch: Batch, mesh: Mesh | None, *, device: torch.device, flash: bool = False) -> Layout:
    """The rows of this rank and the attention plan over them."""
    spans = segments(batch)
    prefix, num_rows = batch.prefix_tokens.numel(), batch.prefix_tokens.numel() + batch.num_tokens
    if mesh is None or mesh.sizes.cp == 1:
        return Layout(plan(spans, flash=flash).to(device), prefix)
    cp, rank, group = mesh.sizes.cp, mesh.cp_rank, mesh.group("cp")
    chunk = -(-num_rows // (2 * cp))
    size = 2 * cp * chunk
    spans = [*spans, Segment(num_rows, size - num_rows, [(num_rows, size - num_rows)])]
    order = torch.cat([_rows_of(r, cp, chunk) for r in range(cp)])
    place = order.argsort()
    if mesh.sizes.ulysses:
        made = plan(spans, flash=flash)
        out = order if isinstance(made.out_index, slice) else made.out_index[order]
        made = made._replace(q_index=place[made.q_index], out_index=out)
    else:
        made = plan(_mine(spans, rank, cp, chunk), flash=flash)
    exchange = partial(ulysses if mesh.sizes.ulysses else gather_keys, group=group)
    made = made._replace(k_index=place[made.k_index], exchange=exchange)
    layout = Layout(made, prefix, _rows_of(rank, cp, chunk), place[prefix:num_rows], size, group)
    return moved(layout, device)


def gather_keys(
    q: Float[Tensor, "R H D"],
    k: Float[Tensor, "R Hk D"],
    v: Float[Tensor, "R Hk D"],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    group: dist.ProcessGroup,
) -> Float[Tensor, "R H D"]:
    """This rank's queries over the keys of all ranks. Backward: one reduce-scatter."""
    both = GatheredSum.apply(torch.stack((k.to(v.dtype), v), 1), group)  # fp32 norms under autocast leave k in fp32
    return attend(q, both[:, 0], both[:, 1])


def ulysses(
    q: Float[Tensor, "R H D"],
    k: Float[Tensor, "R Hk D"],
    v: Float[Tensor, "R Hk D"],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    group: dist.ProcessGroup,
) -> Float[Tensor, "R H D"]:
    """The tokens of all ranks, for this rank's share of the heads. Backward: the same exchanges the other way."""
    ranks = dist.get_world_size(group)
    one_each = [1] * ranks
    shares = (x.unflatten(1, (ranks, -1)).transpose(0, 1) for x in (q, k, v))
    out = attend(*(Exchanged.apply(x, one_each, one_each, group).flatten(0, 1) for x in shares))
    parts = Exchanged.apply(out.unflatten(0, (ranks, -1)), one_each, one_each, group)
    return parts.transpose(0, 1).flatten(1, 2)


def _rows_of(rank: int, cp: int, chunk: int) -> Tensor:
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * cp - 1 - rank)])


def _mine(spans: Sequence[Segment], rank: int, cp: int, chunk: int) -> list[Segment]:
    """The parts of the segments in this rank's two chunks, each with the keys up to its own last row."""
    found = []
    for base, c in ((0, rank), (chunk, 2 * cp - 1 - rank)):
        first, last = c * chunk, (c + 1) * chunk
        for start, n, keys in spans:
            a, b = max(start, first), min(start + n, last)
            if a < b:
                found.append(Segment(base + a - first, b - a, [*keys[:-1], (start, b - start)]))
    return found
