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

    `real` is where they are no padding (None: everywhere). `parents` are rows of the blocks before, whose documents
    these rows continue.
    """

    rows: Int[Tensor, "B L"]
    real: Bool[Tensor, "B L"] | None
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


def by_segment(batch: Batch) -> PaddedRows:
    """A row for each prompt, padded on the left, then one for each sample, padded on the right, with its parent."""
    spans = [Segment(s.start, s.length, s.keys[-1:]) for s in segments(batch)]
    num_prompts = len(batch.prefix_cu) - 1
    blocks, stream, place, order = _padded(spans[num_prompts:])
    if not batch.prefix_tokens.numel():
        return _laid(blocks, stream, place, order)
    first, stream_before, place_before, prompts = _padded(spans[:num_prompts], left=True)
    parents = torch.from_numpy(prompts.argsort()[batch.prefix_ids.cpu().numpy()[order]])
    parts = parents.split([len(b.rows) for b in blocks])
    blocks = [*first, *(b._replace(parents=p) for b, p in zip(blocks, parts, strict=True))]
    stream = np.concatenate([stream_before, stream])
    place = np.concatenate([place_before, place + sum(b.rows.numel() for b in first)])
    return _laid(blocks, stream, place, np.concatenate([prompts, num_prompts + order]))


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
        lens, own = np.array([[s.num_keys] for s in some]), np.array([[s.length] for s in some])
        width = max(_WIDTH, int(lens[0, 0]))
        column = np.arange(width) - (width - lens if left else 0)  # in the document
        real = (column >= 0) & (column < lens)
        most = max(len(s.keys) for s in some)
        ranges = np.array([[*s.keys, *[(0, 0)] * (most - len(s.keys))] for s in some])
        index = rows_at(ranges, column.clip(0, np.maximum(lens - 1, 0)))
        mine = real & (column >= lens - own)
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
