"""Padded rows of a packed stream, for what cannot run packed: recurrent layers, and models that run unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlkit.parallel.attention import Segment, rows_at, segments
from rlkit.types import Batch

_SLACK = 1.25  # a block may hold this many times the tokens of its rows
_WIDTH = 2  # transformers' recurrent layers take a row of one token for a step of decoding


class Block(NamedTuple):
    """Rows that are computed in one call: rows of the stream; in padding, one of the same document.

    `real` is where they are no padding (None: everywhere). The rows continue those of the blocks `after`: `parents` are
    their numbers among the rows of these blocks.
    """

    rows: Int[Tensor, "B L"]
    real: Bool[Tensor, "B L"] | None
    after: tuple[int, ...] = ()
    parents: Int[Tensor, "B"] | None = None


class PaddedRows(NamedTuple):
    """Blocks, the place of each row of the stream that they compute in their flattened outputs, and the segments in the
    order of the blocks' rows."""

    blocks: tuple[Block, ...]
    back: Int[Tensor, "S"]
    order: Int[Tensor, "N"]


def by_sequence(batch: Batch) -> PaddedRows:
    """A row for each sample, with its whole prompt, padded on the right; `back` has the batch's tokens."""
    return _laid(*_padded(segments(batch)[len(batch.prefix_cu) - 1 :]))


def by_document(batch: Batch) -> PaddedRows:
    """A row for each prompt and one for each sample with its whole prompt, padded on the right."""
    return _laid(*_padded(segments(batch)))


def by_segment(spans: Sequence[Segment]) -> PaddedRows:
    """A row for each segment, with its own tokens, in this order:

    segments without a parent that others continue      padded on the left, where a mask keeps the state at 0
    segments with a parent that others continue         by depth; a block has one length: padding changes a state
    segments that none continues                        padded on the right
    """
    spans = [s for s in spans if s.length]
    parents = _parents(spans)
    blocks: list[Block] = []
    streams, places, orders, size = [], [], [], 0
    block_of, row_of = np.zeros((2, len(spans)), np.int64)
    for (depth, _), members in sorted(_alike(spans, parents).items()):
        tails = [Segment(s.start, s.length, s.keys[-1:]) for s in (spans[i] for i in members)]
        own_blocks, stream, place, order = _padded(tails, left=depth == 0)
        streams.append(stream)
        places.append(place + size)
        orders.append(np.array(members)[order])
        for block, some in zip(own_blocks, np.split(orders[-1], np.cumsum([len(b.rows) for b in own_blocks])[:-1])):
            block_of[some], row_of[some] = len(blocks), np.arange(len(some))
            if (above := np.array([parents[i] for i in some]))[0] >= 0:
                after, which = np.unique(block_of[above], return_inverse=True)
                starts = np.cumsum([0, *(len(blocks[b].rows) for b in after)])
                rows = torch.from_numpy(starts[which] + row_of[above])
                block = block._replace(after=tuple(after.tolist()), parents=rows)
            blocks.append(block)
            size += block.rows.numel()
    return _laid(blocks, *(np.concatenate(x) for x in (streams, places, orders)))


def _alike(spans: Sequence[Segment], parents: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """Segments that are padded together; the keys are in the order of `by_segment`."""
    groups: dict[tuple[int, int], list[int]] = {}
    inner, depths = {*parents}, [-1] * (len(spans) + 1)  # the last is that of no parent, -1
    for i, (s, parent) in enumerate(zip(spans, parents)):
        depth = depths[i] = depths[parent] + 1
        ends = (len(spans), parent < 0)  # those without a parent apart: they start from no state
        groups.setdefault((depth, s.length if depth else 0) if i in inner else ends, []).append(i)
    return groups


def _parents(spans: Sequence[Segment]) -> list[int]:
    """The segment that each one continues, which stands before it; -1: it begins a document."""
    ends = {s.start + s.length: i for i, s in enumerate(spans)}
    before = [[r for r in s.keys[:-1] if r[1]] for s in spans]
    return [ends[sum(ranges[-1])] if ranges else -1 for ranges in before]


def _laid(
    blocks: Sequence[Block], stream: Int[np.ndarray, "R"], place: Int[np.ndarray, "R"], order: Int[np.ndarray, "N"]
) -> PaddedRows:
    return PaddedRows(tuple(blocks), torch.from_numpy(place[stream.argsort()]), torch.from_numpy(order))


def _padded(
    spans: Sequence[Segment], *, left: bool = False
) -> tuple[list[Block], Int[np.ndarray, "R"], Int[np.ndarray, "R"], Int[np.ndarray, "N"]]:
    """Blocks of all keys of each span, the longest first; for each query its row of the stream and its place in the
    flattened blocks; and the spans in the order of the blocks."""
    order = np.array(sorted(range(len(spans)), key=lambda i: -spans[i].num_keys), np.int64)
    blocks, stream, place, done = [], [], [], 0
    for part in _parts([spans[i].num_keys for i in order]):
        some = [spans[i] for i in order[part]]
        lens, q_lens = np.array([[s.num_keys] for s in some]), np.array([[s.length] for s in some])
        width = max(_WIDTH, int(lens[0, 0]))
        column = np.arange(width) - (width - lens if left else 0)  # in the document
        real = (column >= 0) & (column < lens)
        most = max(len(s.keys) for s in some)
        ranges = np.array([[*s.keys, *[(0, 0)] * (most - len(s.keys))] for s in some])
        index = rows_at(ranges, column.clip(0, np.maximum(lens - 1, 0)))
        mine = real & (column >= lens - q_lens)
        blocks.append(Block(torch.from_numpy(index), None if real.all() else torch.from_numpy(real)))
        stream.append(index[mine])
        place.append(done + mine.ravel().nonzero()[0])
        done += index.size
    return blocks, np.concatenate(stream), np.concatenate(place), order


def _parts(lens: Sequence[int]) -> list[slice]:
    """Runs of rows, longest first, that waste little on padding."""
    cuts, real = [0], 0
    for i, n in enumerate(lens):
        real += n
        if (i + 1 - cuts[-1]) * lens[cuts[-1]] > _SLACK * real:
            cuts.append(i)
            real = n
    return [slice(*bounds) for bounds in zip(cuts, [*cuts[1:], len(lens)])]
