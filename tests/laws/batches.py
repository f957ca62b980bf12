"""Few batches that say much: what `make test` checks the table on. Nightly, Hypothesis draws its own.

A batch has five sequences, so that one holds what takes several of Hypothesis' small cases: an empty sequence beside
long ones, gaps in the mask, a group of several and one alone, values inside and outside of a clip.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from rlkit.testing import Case, Stream, Subject
from rlkit.testing.cases import replaced
from rlkit.testing.law import Law, own_cases
from rlkit.testing.laws_numerics import fixed_case
from rlkit.testing.strategies import EXTREMES

EXAMPLES = 2
NUM_SEQS = 5


def batch(s: Subject, seed: int, *, extreme: bool = False) -> Case:
    """A batch of the streams of `s`; the same for the same seed. Every second one has int32 bounds."""
    random = torch.Generator().manual_seed(seed)
    lens = torch.randint(8, (NUM_SEQS,), generator=random)
    case = fixed_case(s, lens=tuple(lens.tolist()), seed=seed)
    change = _extreme if extreme else _near_zero
    floats = {k: x for k, x in case.streams.items() if x.is_floating_point()}
    return replaced(case, **{k: change(x, s.streams[k], random) for k, x in floats.items()})._replace(
        mask=torch.rand(case.num_tokens, generator=random) < 0.5,
        cu_seqlens=case.cu_seqlens.to((torch.int64, torch.int32)[seed % 2]),
        group_ids=torch.randint(3, (NUM_SEQS,), generator=random).unique(return_inverse=True)[1],
    )


def on_batches(law: Law) -> Law:
    """The law on the first `EXAMPLES` batches; as it is, if its cases are not batches of the function's streams."""
    draws = {"pure": _untouched_batches, "finite": _extreme_batches}
    draw = draws.get(law.name) or (_batches if law.draw is own_cases else law.draw)
    return replace(law, draw=draw)


def _near_zero(x: Tensor, stream: Stream, random: torch.Generator) -> Tensor:
    """A third of the values from the focus of the stream, if it has one, and a third from six times its width."""
    scale = stream.focus / stream.high * torch.tensor([1.0, 6.0], dtype=x.dtype)
    which = torch.randint(3, x.shape, generator=random)
    return torch.where(which == 2, x, x * scale[which.clamp(max=1)]) if stream.focus else x


def _extreme(x: Tensor, stream: Stream, random: torch.Generator) -> Tensor:
    legal = torch.tensor([v for v in EXTREMES if stream.hard_low <= v <= stream.hard_high], dtype=x.dtype)
    return legal[torch.randint(len(legal), x.shape, generator=random)]


def _batches(s: Subject) -> SearchStrategy[Case]:
    return st.integers(0, EXAMPLES - 1).map(partial(batch, s))


def _untouched_batches(s: Subject) -> SearchStrategy[Case]:
    """Made anew: a function that writes into its arguments has changed those of the other laws."""
    return _batches(s)


def _extreme_batches(s: Subject) -> SearchStrategy[Case]:
    return st.integers(0, EXAMPLES - 1).map(partial(batch, s, extreme=True))
