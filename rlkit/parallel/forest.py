"""Common beginnings of documents as a forest of segments, each forwarded once.

Samples share the prompt of their group, but often more: pieces of one episode repeat its earlier turns, branches of an
agent begin with the same turns, samples may have equal first tokens. In a forest each segment has a parent:

    attention of a segment = causal, to the keys of its ancestors, then to its own

A hidden state depends on the tokens before it only, so equal beginnings have equal hidden states, and the gradient of a
shared row is the sum over the documents that use it. A token on which several samples train is one row of the forward,
and has a row in the loss for each of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rlkit.parallel.attention import Segment
from rlkit.types import Batch

_WORTH = 0.95  # of the rows of a batch: a forest with more is not used


class Forest(NamedTuple):
    """`spans` tile the rows of the forest; `source` has the row of `[prefixes, sequences]` that each row is a copy of;
    `tokens` the row of each token of the batch."""

    spans: list[Segment]
    source: Int[Tensor, "R"]
    tokens: Int[Tensor, "T"]


def forest(batch: Batch, *, toll: int | None = None, images: Int[Tensor, "S"] | None = None) -> Forest | None:
    """The forest of a batch's documents, each a prefix and a sequence.

    None where it saves less than a twentieth of the rows that shared prompts leave, or where prompts are not shared.

    Args:
        toll: rows that must be saved for each segment that has a parent and is one, and that it has two tokens or more;
            None: it may have any number, as attention computes segments of all depths together.
        images: what else must be equal at each row of `[prefixes, sequences]`.
    """
    num_prefix = batch.prefix_tokens.numel()
    if not num_prefix or not batch.num_tokens:
        return None
    stream = _stream(batch, images)
    prefix_cu, cu = batch.prefix_cu.tolist(), (batch.cu_seqlens + num_prefix).tolist()
    rows = [np.r_[prefix_cu[p] : prefix_cu[p + 1], cu[i] : cu[i + 1]] for i, p in enumerate(batch.prefix_ids.tolist())]
    order = sorted(range(len(rows)), key=lambda i: stream[rows[i]].astype(">u8").tobytes())  # in order of the tokens
    rows = [rows[i] for i in order]
    common = [0, *(_common(stream[a], stream[b]) for a, b in pairwise(rows))]
    leaves = [i for i, n in enumerate([*common[1:], 0]) if n < len(rows[i])]  # no document goes on from them
    common = [common[i] for i in [0, *(last + 1 for last in leaves[:-1])]]
    common = common if toll is None else _worthwhile(common, toll)
    by_prompts = len(stream) - (len(rows) - len(prefix_cu) + 1)  # but for the last token of a prompt, a row per sample
    if sum(len(rows[i]) for i in leaves) - sum(common) > _WORTH * by_prompts:
        return None
    spans, source, places = _grow([rows[i] for i in leaves], common)
    places = [places[bisect_left(leaves, k)][: len(rows[k])] for k in np.argsort(order)]
    tokens = [place[len(place) - n :] for place, n in zip(places, np.diff(cu))]
    return Forest(spans, torch.from_numpy(np.concatenate(source)), torch.from_numpy(np.concatenate(tokens)))


def _stream(batch: Batch, images: Int[Tensor, "S"] | None) -> Int[np.ndarray, "S"]:
    """What must be equal for two rows to be one: the token, and where they are given, its image and its experts, of an
    image those of all its rows: the model reads it whole."""
    tokens = torch.cat([batch.prefix_tokens, batch.tokens]).cpu().numpy()
    experts = [x.cpu().flatten(1) for x in (batch.prefix_experts, batch.experts) if x is not None]
    columns = [torch.cat(experts).numpy()] if experts else []
    columns += [] if images is None else [images.cpu().numpy()[:, None]]
    if not columns:
        return tokens
    codes: dict[bytes, int] = {}
    rows = np.concatenate((tokens[:, None], *columns), 1)
    stream = np.array([codes.setdefault(row.tobytes(), len(codes)) for row in rows])
    if images is not None and experts:
        shown = images.cpu().numpy()
        ends = [*(np.flatnonzero(np.diff(shown)) + 1), len(rows)]
        for start, end in zip([0, *ends], ends):
            if shown[start] >= 0:
                stream[start:end] = codes.setdefault(rows[start:end].tobytes(), len(codes))
    return stream


def _common(a: Int[np.ndarray, "A"], b: Int[np.ndarray, "B"]) -> int:
    """The number of equal tokens at the beginning."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@dataclass
class _Fork:
    """Where documents part: after `depth` tokens, into `num` documents and further forks, of which `forks`.
    `at` are the documents that have `depth` tokens in common with the one before."""

    depth: int
    num: int = 0
    forks: int = 0
    at: list[int] = field(default_factory=list)

    def add(self, other: _Fork) -> None:
        self.num, self.forks, self.at = self.num + other.num, self.forks + other.forks, self.at + other.at


def _worthwhile(common: Sequence[int], toll: int) -> list[int]:
    """The `common` of `_grow` without forks that save fewer rows than they cost.

    A fork of num branches saves num - 1 copies of the tokens since the fork above it. It costs the toll if there is one
    above, else the toll of each fork below it. The branches of one that is left out part at the fork above.
    """
    depths, open_forks = [*common, 0], [_Fork(0)]
    for i in range(1, len(depths)):
        done = _Fork(0, num=1)  # the document before i
        while (last := open_forks[-1]).depth > depths[i]:
            open_forks.pop()
            last.add(done)
            above = max(open_forks[-1].depth, depths[i])
            length, price = last.depth - above, toll if above else toll * last.forks
            done = _Fork(0, num=1, forks=1)
            if (last.num - 1) * length <= price or (above and length == 1):
                for j in last.at:
                    depths[j] = above
                done = last
        if last.depth < depths[i]:
            open_forks.append(_Fork(depths[i]))
        open_forks[-1].add(done)
        open_forks[-1].at.append(i)
    return depths[:-1]


def _grow(
    documents: Sequence[Int[np.ndarray, "L"]], common: Sequence[int]
) -> tuple[list[Segment], list[np.ndarray], list[np.ndarray]]:
    """Segments, their rows of the stream, and for each document the rows of its tokens in the forest.

    `documents` are in the order of their tokens, and none is the beginning of another; `common[i]` is how many tokens
    document i has in common with the one before it.
    """
    spans: list[Segment] = []
    source: list[np.ndarray] = []
    places: list[np.ndarray] = []
    size, shared = 0, np.array(common)
    for i, document in enumerate(documents):
        after = np.minimum.accumulate(shared[i + 1 :])  # what it has in common with each later document
        ends = sorted({n for n in after.tolist() if n > common[i]} | {len(document)})
        place = np.concatenate([places[-1][: common[i]] if places else [], np.arange(len(document) - common[i]) + size])
        place = place.astype(np.int64)
        for start, end in zip([common[i], *ends], ends):
            if start < end:
                keys = [*_runs(place[:start]), (int(place[start]), end - start)]
                spans.append(Segment(int(place[start]), end - start, keys))
        source.append(document[common[i] :])
        places.append(place)
        size += len(document) - common[i]
    return spans, source, places


def _runs(rows: Int[np.ndarray, "R"]) -> list[tuple[int, int]]:
    """Consecutive rows as ranges (start, length)."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
    return [(int(part[0]), len(part)) for part in parts]
