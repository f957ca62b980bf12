"""Hypothesis strategies for packed batches; each docstring says what the strategy shrinks to.

Numbers are multiples of a power of two in a small range, so that counterexamples are short and exact in bf16;
`extremes` draws values at which naive code overflows, underflows or divides by 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from rlkit.segments import cumulative
from rlkit.testing.cases import Case, Stream, Vocab

EXTREMES = (0.0, 1e-30, -1e-30, 1.0, -1.0, 20.5, -20.5, 100.0, -100.0, 1e6, -1e6)


def numbers(low: float, high: float, *, step: float = 0.125) -> SearchStrategy[float]:
    """Multiples of `step`, or of the first of its halves that has one, in [low, high]. Shrinks to 0, or to the end
    closer to 0."""
    while low < high and math.ceil(low / step) > math.floor(high / step):
        step /= 2
    return st.integers(math.ceil(low / step), math.floor(high / step)).map(lambda i: i * step)


def extremes(low: float = -math.inf, high: float = math.inf) -> SearchStrategy[float]:
    """Huge, tiny and ordinary numbers in [low, high]. Shrinks to 0, or to the first of `EXTREMES` in the range."""
    return st.sampled_from([x for x in EXTREMES if low <= x <= high] or [low, high])


def lengths(*, max_seqs: int = 4, max_len: int = 4) -> SearchStrategy[list[int]]:
    """Lengths of 1 to `max_seqs` sequences, some possibly empty. Shrinks to one sequence of one token."""
    return st.lists(st.sampled_from([*range(1, max_len + 1), 0]), min_size=1, max_size=max_seqs)


@st.composite
def cu_seqlens(draw: DrawFn, *, max_seqs: int = 4, max_len: int = 4) -> Tensor:
    """Bounds `[N+1]` of packed sequences, int64 or int32. Shrinks to [0, 1] in int64."""
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return cumulative(torch.tensor(draw(lengths(max_seqs=max_seqs, max_len=max_len)), dtype=dtype))


def masks(num_tokens: int) -> SearchStrategy[Tensor]:
    """Masks `[T]` with any gaps, also all False. Shrinks to all True."""
    bits = st.lists(st.sampled_from([True, False]), min_size=num_tokens, max_size=num_tokens)
    return bits.map(lambda x: torch.tensor(x, dtype=torch.bool))


def group_ids(num_seqs: int) -> SearchStrategy[Tensor]:
    """Dense ids `[N]` of ragged groups in any order, with singletons. Shrinks to one group."""
    labels = st.lists(st.integers(0, num_seqs // 2), min_size=num_seqs, max_size=num_seqs)
    return labels.map(lambda x: torch.tensor(x, dtype=torch.int64).unique(return_inverse=True)[1])


def values(stream: Stream, *, extreme: bool = False) -> SearchStrategy[Any]:
    """One row of a stream: a number, a bool, or a list of them. Shrinks to 0 (False), or to the end closer to 0."""
    if stream.dtype == torch.bool:
        one: SearchStrategy = st.booleans()
    elif extreme and stream.dtype.is_floating_point:
        one = extremes(stream.hard_low, stream.hard_high)
    else:
        one = numbers(stream.low, stream.high, step=stream.step)
        if stream.focus:
            near = numbers(-stream.focus, stream.focus, step=stream.step / 8)
            one = near | numbers(-6 * stream.focus, 6 * stream.focus, step=stream.step) | one
    num = math.prod(stream.size)
    return st.lists(one, min_size=num, max_size=num) if stream.size else one


def cases(
    streams: Mapping[str, Stream], *, max_seqs: int = 4, max_len: int = 4, extreme: bool = False
) -> SearchStrategy[Case]:
    """Packed batches with `streams`: any lengths, masks, gaps and groups; with `extreme`, any magnitude.

    Shrinks to one token, or to the fewest and shortest sequences that fail, unmasked, in one group, with values 0.
    """
    names = {axis: [k for k, s in streams.items() if s.axis == axis] for axis in ("T", "N")}
    rows = {k: values(s, extreme=extreme) for k, s in streams.items()}
    token = st.tuples(st.sampled_from([True, False]), *(rows[k] for k in names["T"]))
    tokens = st.tuples(st.lists(token, min_size=1, max_size=max_len), st.sampled_from([True] * 5 + [False]))
    seq = st.tuples(
        tokens.map(lambda x: x[0] if x[1] else []), st.integers(0, max_seqs // 2), *(rows[k] for k in names["N"])
    )
    seqs = st.lists(seq, min_size=1, max_size=max_seqs)
    ints = st.sampled_from([torch.int64, torch.int32])
    return st.builds(partial(_case, streams, names), seqs, ints, st.integers(0, 255))


def _case(
    streams: Mapping[str, Stream], names: Mapping[str, list[str]], seqs: list[tuple], ints: torch.dtype, seed: int
) -> Case:
    """The case from drawn sequences; each is its tokens, its group and its values, in the order of `names`."""
    tokens = [token for seq in seqs for token in seq[0]]

    def column(name: str, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=streams[name].dtype).reshape(len(values), *streams[name].size)

    return Case(
        tokens={name: column(name, [x[i] for x in tokens]) for i, name in enumerate(names["T"], start=1)},
        seqs={name: column(name, [x[i] for x in seqs]) for i, name in enumerate(names["N"], start=2)},
        mask=torch.tensor([x[0] for x in tokens], dtype=torch.bool),
        cu_seqlens=cumulative(torch.tensor([len(x[0]) for x in seqs], dtype=ints)),
        group_ids=torch.tensor([x[1] for x in seqs]).unique(return_inverse=True)[1],
        seed=seed,
    )


def vocabularies(*, size: int = 4) -> SearchStrategy[Vocab]:
    """Logits `[size]` of a policy, a reference and a sampling policy. Shrinks to three uniform distributions."""
    logits = values(Stream(low=-3.0, high=3.0, size=(size,))).map(lambda x: torch.tensor(x, dtype=torch.float64))
    return st.builds(Vocab, policy=logits, ref=logits, old=logits)


def measurements(*, low: float = 0.0, high: float = 4.0, max_size: int = 6) -> SearchStrategy[list[float]]:
    """A sequence of measurements for a controller. Shrinks to a single 0."""
    return st.lists(numbers(low, high), min_size=1, max_size=max_size)
