"""Context parallelism: the tokens of a packed stream are split over ranks; every segment still attends to all its keys.

The stream is cut into 2 * cp chunks of equal size, and rank r holds chunks r and 2 cp - 1 - r. Early chunks see few
keys and late ones many, so on one long sequence the ranks have about equal work; they have equal numbers of tokens.
Only attention communicates, in one of two ways:

    gather_keys   all-gather keys and values; each rank computes its own queries. Any head count. O(stream) memory for
                  the keys of one layer, or of all layers until the backward without activation checkpointing
    ulysses       all-to-all from tokens to heads and back; each rank computes all tokens of its heads. The volume falls
                  as 1 / cp; cp must divide the heads (arXiv:2309.14509)

The log-probs are gathered (4 bytes per token), and every rank computes the same loss on all of them; the backward takes
the gradient of the rank's own tokens. Losses that couple the tokens of a sequence work unchanged.

Differs: ring attention (RL2, OpenRLHF, prime-rl) passes keys around in cp steps, which pays only if one layer's keys do
not fit; verl and AReaL with FSDP use Ulysses, and split the log-probs before the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from rlkit.parallel.attention import AttentionPlan, Rows, Segment, as_slice, plan, segments, to_device
from rlkit.parallel.collectives import Exchanged, Gathered, GatheredSum
from rlkit.parallel.forest import Forest
from rlkit.parallel.mesh import Mesh
from rlkit.types import Batch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values to their attention


class Layout(NamedTuple):
    """The rows of this rank, and the batch's tokens among them.

    `[S]` is the joined stream of prefixes and sequences, `[R]` the rows of this rank: those at `source`, by default
    all. `[T]` are the batch's tokens, `[H]` the rows of a head: row `tokens[i]` is that of the batch's token
    `token_of[i]` (-1: of none). Without context parallelism `token_of` is None: they are all tokens.
    """

    plan: AttentionPlan
    tokens: Rows
    source: Int[Tensor, "R"] | None = None
    token_of: Int[Tensor, "H"] | None = None
    place: Int[Tensor, "T"] | None = None  # of each token in the head's rows of all ranks
    group: dist.ProcessGroup | None = None

    def local(self, stream: Tensor) -> Tensor:
        """`[S, ...]` to `[R, ...]`."""
        return stream if self.source is None else stream[self.source]

    def spread(self, x: Tensor) -> Tensor:
        """A `[T, ...]` stream at the head's rows; 0 (False) at those of no token."""
        return x if self.token_of is None else torch.cat((x, x.new_zeros(1, *x.shape[1:])))[self.token_of]

    def collect(self, x: Tensor) -> Tensor:
        """The head's outputs of all ranks, as `[T]` on every rank."""
        return x if self.token_of is None else Gathered.apply(x, self.group)[self.place]

    def empty(self) -> Layout:
        """The same layout with zero tokens."""
        if self.token_of is None or self.place is None:
            return self._replace(tokens=slice(0, 0))
        return self._replace(token_of=torch.full_like(self.token_of, -1), place=self.place[:0])


def plan_layout(
    batch: Batch, mesh: Mesh | None, *, device: torch.device, flash: bool = False, tree: Forest | None = None
) -> Layout:
    """The rows of this rank and the attention plan over them, of the forest `tree`; by default prompts are shared.

    Under context parallelism rows past the end repeat the last one, and are attended to only by each other.
    """
    num_prefix, num_rows = batch.prefix_tokens.numel(), batch.prefix_tokens.numel() + batch.num_tokens
    spans = segments(batch) if tree is None else tree.spans
    if mesh is None or mesh.sizes.cp == 1:
        tokens, source = (slice(num_prefix, None), None) if tree is None else (tree.tokens, tree.source)
        return to_device(Layout(plan(spans, flash=flash), tokens, source), device)
    source, tokens = (torch.arange(num_rows), torch.arange(num_prefix, num_rows)) if tree is None else tree[1:]
    num_rows = len(source)
    cp, rank, group = mesh.sizes.cp, mesh.cp_rank, mesh.group("cp")
    chunk = -(-num_rows // (2 * cp))
    size = 2 * cp * chunk
    spans = [*spans, Segment(num_rows, size - num_rows, [(num_rows, size - num_rows)])]
    order = torch.cat([_rows_of(r, cp, chunk) for r in range(cp)])
    inverse = order.argsort()
    if mesh.sizes.ulysses:
        made, exchange = _by_rank(plan(spans, flash=flash), inverse, order), ulysses
    else:
        made, exchange = _by_rank(plan(_local_segments(spans, rank, cp, chunk), flash=flash), inverse), gather_keys
    made = made._replace(exchange=partial(exchange, group=group))
    source = source[_rows_of(rank, cp, chunk).clamp(max=num_rows - 1)]
    tokens, token_of, place = _head_rows(inverse[tokens], rank, cp, 2 * chunk)
    return to_device(Layout(made, tokens, source, token_of, place, group), device)


def _head_rows(
    places: Int[Tensor, "T"], rank: int, cp: int, size: int
) -> tuple[Int[Tensor, "H"], Int[Tensor, "H"], Int[Tensor, "T"]]:
    """`tokens`, `token_of` and `place` of a `Layout`; `places`: the tokens' rows among `size` rows of each rank.

    Every rank has as many rows in its head as the one with the most tokens.
    """
    ranks = places // size
    counts = ranks.bincount(minlength=cp)
    most = int(counts.max())
    order = ranks.argsort(stable=True)
    place = torch.empty_like(places)
    place[order] = torch.cat([r * most + torch.arange(n) for r, n in enumerate(counts.tolist())])
    mine = order[ranks[order] == rank]
    spare = most - len(mine)
    tokens = torch.cat([places[mine] - rank * size, places.new_zeros(spare)])
    return tokens, torch.cat([mine, places.new_full((spare,), -1)]), place


def _by_rank(made: AttentionPlan, inverse: Tensor, order: Tensor | None = None) -> AttentionPlan:
    """The plan for keys, and with `order` queries, of all ranks, one rank after the other instead of in the order of
    the stream: row `order[i]` of the stream is row i there."""
    if (shared := made.shared) is not None:
        prompts = shared.prompts._replace(k_index=as_slice(inverse[shared.prompts.k_index]))
        prompts = prompts if order is None else prompts._replace(q_index=inverse[prompts.q_index])
        shared = shared._replace(tails=_by_rank(shared.tails, inverse, order), prompts=prompts)
    made = made._replace(k_index=inverse[made.k_index], shared=shared, reads=None)  # of other rows
    if order is None:
        return made
    out = order if isinstance(made.out_index, slice) else made.out_index[order]
    return made._replace(q_index=inverse[made.q_index], out_index=out)


def gather_keys(q: Tensor, k: Tensor, v: Tensor, attend: Attend, *, group: dist.ProcessGroup) -> Tensor:
    """Attention of this rank's queries `[R, H, D]` to the keys of all ranks, here `[R, Hk, D]`.

    Backward: one reduce-scatter.
    """
    both = GatheredSum.apply(torch.stack((k.to(v.dtype), v), 1), group)  # under autocast, fp32 norms return k in fp32
    return attend(q, both[:, 0], both[:, 1])


def ulysses(q: Tensor, k: Tensor, v: Tensor, attend: Attend, *, group: dist.ProcessGroup) -> Tensor:
    """Attention of the tokens of all ranks, for this rank's share of the heads; shapes as in `gather_keys`.

    Backward: the reverse exchanges.
    """
    ranks = dist.get_world_size(group)
    one_each = [1] * ranks
    shares = (rearrange(x, "rows (ranks heads) d -> ranks rows heads d", ranks=ranks) for x in (q, k, v))
    got = (Exchanged.apply(x, one_each, one_each, group) for x in shares)
    out = attend(*(rearrange(x, "ranks rows heads d -> (ranks rows) heads d") for x in got))
    parts = rearrange(out, "(ranks rows) heads d -> ranks rows heads d", ranks=ranks)
    return rearrange(Exchanged.apply(parts, one_each, one_each, group), "ranks rows heads d -> rows (ranks heads) d")


def _rows_of(rank: int, cp: int, chunk: int) -> Tensor:
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in (rank, 2 * cp - 1 - rank)])


def _local_segments(spans: Sequence[Segment], rank: int, cp: int, chunk: int) -> list[Segment]:
    """The parts of the segments in this rank's two chunks, each with the keys up to its last row."""
    local = []
    for base, c in ((0, rank), (chunk, 2 * cp - 1 - rank)):
        first, last = c * chunk, (c + 1) * chunk
        for start, n, keys in spans:
            a, b = max(start, first), min(start + n, last)
            if a < b:
                local.append(Segment(base + a - first, b - a, [*keys[:-1], (start, b - start)]))
    return local
