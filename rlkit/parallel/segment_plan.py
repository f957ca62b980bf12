"""Which keys each query sees, as index tensors: made once per micro-batch, used in every layer.

A plan says, for each segment of the query stream, which rows of the key stream it sees. Packing is "its own rows"; a
group that shares a prompt is "the prompt's rows, then its own"; context parallelism is "also those of other ranks".
Segments never see anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlkit.segments import cumulative, seq_lens
from rlkit.types import Batch

FEW_QUERIES = 16  # up to which plain matrix products beat the CPU's fused attention: 2.7x at 7 queries over 25 keys
_SLACK = 1.25  # a bucket may hold this many times the query-key pairs of its segments,
_FREE_PAIRS = 8192  # or this many more: what one more call costs


class Segment(NamedTuple):
    """Queries `start .. start + length` of the query stream, and the ranges of key rows `(start, length)` they see."""

    start: int
    length: int
    keys: list[tuple[int, int]]


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


class Exchange(NamedTuple):
    """How the ranks of `group` share the work of one attention call: see `rlkit.parallel.context`."""

    run: Callable[..., Tensor]
    group: Any


class AttentionPlan(NamedTuple):
    """Made once per micro-batch, used in every layer. `*_index` are rows of the packed streams, segment by segment.

    On the CPU (and in fp32) the segments are padded into buckets; flash kernels take them end to end.
    """

    q_index: Int[Tensor, "Q"]
    k_index: Int[Tensor, "K"]
    out_index: Int[Tensor, "T"]
    buckets: tuple[Bucket, ...] = ()
    varlen: Varlen | None = None
    exchange: Exchange | None = None

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan with its tensors on `device`."""
        buckets = tuple(b._replace(mask=None if b.mask is None else b.mask.to(device)) for b in self.buckets)
        v = self.varlen
        varlen = None if v is None else v._replace(cu_q=v.cu_q.to(device), cu_k=v.cu_k.to(device))
        q, k, out = (x.to(device) for x in self[:3])
        return AttentionPlan(q, k, out, buckets, varlen, self.exchange)


def segments(batch: Batch) -> list[Segment]:
    """What sees what in `[prefixes, sequences]` (see `rlkit.packing.join`): a sequence sees its prefix and itself."""
    prefix_lens = seq_lens(batch.prefix_cu).tolist()
    lens, prefix_ids = seq_lens(batch.cu_seqlens).tolist(), batch.prefix_ids.tolist()
    prefix_starts, base = batch.prefix_cu.tolist(), int(batch.prefix_cu[-1])
    out = [Segment(s, n, [(s, n)]) for s, n in zip(prefix_starts, prefix_lens)]
    for start, n, p in zip(batch.cu_seqlens.tolist(), lens, prefix_ids):
        out.append(Segment(base + start, n, [(prefix_starts[p], prefix_lens[p]), (base + start, n)]))
    return out


def plan(spans: Sequence[Segment], *, device: torch.device | str = "cpu", flash: bool = False) -> AttentionPlan:
    """A plan from segments, for `flash` kernels or (default) for padded buckets.

    Causality is bottom-right: the last query of a segment sees all its keys, the one before all but the last, and so
    on. The queries must tile the stream; a segment needs at least as many keys as queries.
    """
    spans = [s for s in spans if s.length]
    for i, s in enumerate(spans):
        if s.length > (b := _num_keys(s)):
            raise ValueError(f"segment {i} has {b} keys for {s.length} queries; a query sees at least itself")
    made = _varlen_plan(spans) if flash else _bucket_plan(spans)
    return made.to(device)


def _num_keys(s: Segment) -> int:
    return sum(n for _, n in s.keys)


def _varlen_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [_num_keys(s) for s in spans]
    q = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s, s + n) for s, n, _ in spans)])
    ranges = [r for s in spans for r in s.keys]
    k = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s, s + n) for s, n in ranges)])
    out = torch.empty_like(q)
    out[q] = torch.arange(q.numel())
    cu_q, cu_k = (cumulative(torch.tensor(x, dtype=torch.int32)) for x in (q_lens, k_lens))
    return AttentionPlan(q, k, out, varlen=Varlen(cu_q, cu_k, max(q_lens, default=0), max(k_lens, default=0)))


def _bucket_plan(spans: Sequence[Segment]) -> AttentionPlan:
    q_lens, k_lens = [s.length for s in spans], [_num_keys(s) for s in spans]
    order = sorted(range(len(spans)), key=lambda i: (q_lens[i] > FEW_QUERIES, k_lens[i], q_lens[i]))
    q_rows, k_rows = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
    buckets: list[Bucket] = []
    place = torch.empty(sum(q_lens), dtype=torch.long)
    done = 0
    for members in _bucketed(order, q_lens, k_lens):
        a, b = max(q_lens[i] for i in members), max(k_lens[i] for i in members)
        ql, kl = torch.tensor([q_lens[i] for i in members]), torch.tensor([k_lens[i] for i in members])
        q = _left_padded([[spans[i][:2]] for i in members], a)
        k = _left_padded([spans[i].keys for i in members], b)
        real = torch.arange(a) >= a - ql[:, None]
        place[q[real]] = done + real.flatten().nonzero().flatten()
        uniform = bool((ql == a).all() and (kl == b).all())
        buckets.append(Bucket(len(members), a, b, None if uniform and a == b else _mask(ql, kl, a, b)))
        q_rows.append(q.flatten())
        k_rows.append(k.flatten())
        done += q.numel()
    return AttentionPlan(torch.cat(q_rows), torch.cat(k_rows), place, tuple(buckets))


def _bucketed(order: list[int], q_lens: list[int], k_lens: list[int]) -> list[list[int]]:
    """Cut the sorted segments into runs whose padding stays inside the slack; few queries and many stay apart."""
    runs: list[list[int]] = []
    pairs = widest = 0
    for i in order:
        pairs, widest = pairs + q_lens[i] * k_lens[i], max(widest, q_lens[i])
        padded = (len(runs[-1]) + 1 if runs else 1) * widest * k_lens[i]
        alike = bool(runs) and (q_lens[runs[-1][0]] <= FEW_QUERIES) == (q_lens[i] <= FEW_QUERIES)
        if alike and padded <= max(_SLACK * pairs, pairs + _FREE_PAIRS):
            runs[-1].append(i)
        else:
            runs.append([i])
            pairs, widest = q_lens[i] * k_lens[i], q_lens[i]
    return runs


def _left_padded(ranges: list[list[tuple[int, int]]], width: int) -> Tensor:
    """Row indices `[B, width]`; padding repeats the segment's own first row, so that no other document is ever read."""
    rows = []
    for parts in ranges:
        row = np.concatenate([np.arange(s, s + n) for s, n in parts])
        rows.append(np.concatenate([row[:1].repeat(width - row.size), row]))
    return torch.from_numpy(np.stack(rows))


def _mask(q_lens: Tensor, k_lens: Tensor, a: int, b: int) -> Tensor:
    """Bottom-right causal; keys of the left padding are hidden, and padded queries see the last key (their rows are
    dropped, but a row without keys would be NaN)."""
    i, j = torch.arange(a)[:, None], torch.arange(b)
    seen = (j <= i + (b - a)) & (j >= b - k_lens[:, None, None])
    padded = (i < a - q_lens[:, None, None]) & (j == b - 1)
    return (seen | padded)[:, None]
