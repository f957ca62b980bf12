"""Which keys each query sees, as index tensors: made once per micro-batch, used in every layer.

A plan says, for each segment of the query stream, which rows of the key stream it sees. Packing is "its own rows"; a
group that shares a prompt is "the prompt's rows, then its own"; context parallelism is "also those of other ranks".
Segments never see anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlkit.segments import cumulative, seq_lens
from rlkit.types import Batch

X = TypeVar("X")
Rows = Int[Tensor, "R"] | slice
FEW_QUERIES = 16  # up to which plain matrix products beat the CPU's fused attention: 2.7x at 7 queries over 25 keys
_SLACK = 1.25  # a bucket may hold this many times the query-key pairs of its segments,
_FREE_PAIRS = 8192  # or this many more: what one more call costs


class Segment(NamedTuple):
    """Queries `start .. start + length` of the query stream, and the ranges of key rows `(start, length)` they see."""

    start: int
    length: int
    keys: list[tuple[int, int]]

    @property
    def num_keys(self) -> int:
        """Rows that its last query sees."""
        return sum(n for _, n in self.keys)


class Bucket(NamedTuple):
    """Segments that are attended to in one call, left-padded to `q_len` queries over `k_len` keys each."""

    size: int
    q_len: int
    k_len: int
    mask: Bool[Tensor, "B 1 q_len k_len"] | None  # None: plain causal with q_len == k_len


class Varlen(NamedTuple):
    """Boundaries of the segments, as flash kernels read them (int32), and the longest ones."""

    cu_q: Int[Tensor, "N1"]
    cu_k: Int[Tensor, "N1"]
    max_q: int
    max_k: int


class AttentionPlan(NamedTuple):
    """Made once per micro-batch, used in every layer. `*_index` are rows of the packed streams, segment by segment.

    On the CPU (and in fp32) the segments are padded into buckets; flash kernels take them end to end.
    `exchange(q, k, v, attend)`: how context parallel ranks share the work of one call (see `rlkit.parallel.context`).
    """

    q_index: Rows
    k_index: Rows
    out_index: Rows
    buckets: tuple[Bucket, ...] = ()
    varlen: Varlen | None = None
    exchange: Callable[..., Tensor] | None = None

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        return moved(self, device)


def moved(made: X, device: torch.device | str) -> X:
    """The same tuple with its tensors on `device`. No copy waits for what a GPU has still to do."""
    ahead = torch.device(device).type != "cpu"
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=ahead), made)


def segments(batch: Batch) -> list[Segment]:
    """What sees what in `[prefixes, sequences]` (see `rlkit.packing.join`): a sequence sees its prefix and itself."""
    prefixes = list(zip(batch.prefix_cu.tolist(), seq_lens(batch.prefix_cu).tolist()))
    starts = batch.prefix_cu[-1] + batch.cu_seqlens
    sequences = zip(starts.tolist(), seq_lens(batch.cu_seqlens).tolist())
    out = [Segment(*prefix, [prefix]) for prefix in prefixes]
    return out + [Segment(*own, [prefixes[p], own]) for own, p in zip(sequences, batch.prefix_ids.tolist())]


def plan(spans: Sequence[Segment], *, flash: bool = False) -> AttentionPlan:
    """A plan from segments, on the CPU, for `flash` kernels or (default) for padded buckets.

    Causality is bottom-right: the last query of a segment sees all its keys, the one before all but the last, and so
    on. The queries must tile the stream, of at least one; a segment needs at least as many keys as queries.
    """
    spans = [s for s in spans if s.length]
    for i, s in enumerate(spans):
        if s.length > s.num_keys:
            raise ValueError(f"segment {i} has {s.num_keys} keys for {s.length} queries; a query sees at least itself")
    return _varlen_plan(spans) if flash else _bucket_plan(spans)


def _varlen_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [s.num_keys for s in spans]
    q = torch.from_numpy(_rows([s[:2] for s in spans]))
    k = torch.from_numpy(_rows([r for s in spans for r in s.keys]))
    cu_q, cu_k = (cumulative(torch.tensor(x, dtype=torch.int32)) for x in (q_lens, k_lens))
    varlen = Varlen(cu_q, cu_k, max(q_lens), max(k_lens))
    return AttentionPlan(_as_slice(q), _as_slice(k), _as_slice(q.argsort()), varlen=varlen)


def _as_slice(index: Tensor) -> Rows:
    """Rows that are taken in order are a view, where gathering them costs a pass over memory each way."""
    return slice(len(index)) if torch.equal(index, torch.arange(len(index))) else index


def _bucket_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_rows, k_rows, is_real = [], [], []
    buckets: list[Bucket] = []
    for members in _bucketed(sorted(spans, key=lambda s: (s.length > FEW_QUERIES, s.num_keys, s.length))):
        q_lens, k_lens = torch.tensor([s.length for s in members]), torch.tensor([s.num_keys for s in members])
        a, b = int(q_lens.max()), int(k_lens.max())
        q_rows.append(_left_padded([[s[:2]] for s in members], a))
        k_rows.append(_left_padded([s.keys for s in members], b))
        is_real.append(torch.arange(a) >= a - q_lens[:, None])
        plain = int(q_lens.min()) == b  # as many queries as keys, in all of them
        buckets.append(Bucket(len(members), a, b, None if plain else _mask(q_lens, k_lens, a, b)))
    q, k, real = (torch.cat([x.flatten() for x in parts]) for parts in (q_rows, k_rows, is_real))
    place = torch.empty(sum(s.length for s in spans), dtype=torch.long)
    place[q[real]] = real.nonzero()[:, 0]
    return AttentionPlan(q, k, place, tuple(buckets))


def _bucketed(spans: Sequence[Segment]) -> list[list[Segment]]:
    """Cut the sorted segments into runs whose padding stays inside the slack; few queries and many stay apart."""
    runs: list[list[Segment]] = []
    pairs = widest = 0
    for s in spans:
        run = runs[-1] if runs else []
        pairs, widest = pairs + s.length * s.num_keys, max(widest, s.length)
        padded = (len(run) + 1) * widest * s.num_keys
        alike = bool(run) and (run[0].length <= FEW_QUERIES) == (s.length <= FEW_QUERIES)
        if alike and padded <= max(_SLACK * pairs, pairs + _FREE_PAIRS):
            run.append(s)
        else:
            runs.append([s])
            pairs, widest = s.length * s.num_keys, s.length
    return runs


def _rows(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.arange(s, s + n) for s, n in ranges])


def _left_padded(ranges: list[list[tuple[int, int]]], width: int) -> Tensor:
    """Row indices `[B, width]`; padding repeats the segment's own first row, so that no other document is ever read."""
    rows = []
    for parts in ranges:
        row = _rows(parts)
        rows.append(np.concatenate([row[:1].repeat(width - row.size), row]))
    return torch.from_numpy(np.stack(rows))


def _mask(q_lens: Tensor, k_lens: Tensor, a: int, b: int) -> Tensor:
    """Bottom-right causal; keys of the left padding are hidden, and padded queries see the last key (their rows are
    dropped, but a row without keys would be NaN)."""
    i, j = torch.arange(a)[:, None], torch.arange(b)
    seen = (j <= i + (b - a)) & (j >= b - k_lens[:, None, None])
    padded = (i < a - q_lens[:, None, None]) & (j == b - 1)
    return (seen | padded)[:, None]
