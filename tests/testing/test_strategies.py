"""What the strategies draw, and what they shrink to."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from rlkit.testing import Stream, strategies
from rlkit.testing.law import sample

PHASES = [Phase.generate, Phase.shrink]
STREAMS = {"log_ratio": Stream(low=-3.0, high=3.0, focus=0.5), "logits": Stream(size=(4,)), "rewards": Stream(axis="N")}


def smallest(strategy, holds=lambda x: True):
    return find(strategy, holds, settings=settings(max_examples=20, database=None, phases=PHASES))


def test_each_strategy_shrinks_to_its_documented_value() -> None:
    assert smallest(strategies.numbers(-2, 2)) == 0
    assert smallest(strategies.numbers(1, 2)) == 1
    assert smallest(strategies.numbers(0.9, 0.99)) == 0.9375
    assert smallest(strategies.numbers(0.01, 0.1)) == 0.0625
    assert smallest(strategies.extremes()) == 0
    assert smallest(strategies.extremes(0.6, 0.9)) in (0.6, 0.9)
    assert smallest(strategies.lengths()) == [1]
    assert smallest(strategies.cu_seqlens()).tolist() == [0, 1]
    assert smallest(strategies.cu_seqlens()).dtype == torch.int64
    assert smallest(strategies.masks(3)).tolist() == [True, True, True]
    assert smallest(strategies.group_ids(3)).tolist() == [0, 0, 0]
    assert smallest(strategies.measurements()) == [0]
    assert all((x == 0).all() for x in smallest(strategies.vocabularies()))


def test_a_case_shrinks_to_one_unmasked_token_of_zeros() -> None:
    case = smallest(strategies.cases(STREAMS))
    assert case.cu_seqlens.tolist() == [0, 1]
    assert case.mask.tolist() == [True]
    assert case.group_ids.tolist() == [0]
    assert case.tokens["log_ratio"].tolist() == [0]
    assert case.tokens["logits"].tolist() == [[0, 0, 0, 0]]
    assert case.seqs["rewards"].tolist() == [0]


@given(strategies.cases(STREAMS))
def test_a_case_is_a_packed_batch(case) -> None:
    cu = case.cu_seqlens
    assert cu[0] == 0
    assert cu[-1] == case.num_tokens
    assert (cu.diff() >= 0).all()
    assert cu.dtype in (torch.int32, torch.int64)
    assert case.tokens["logits"].shape == (case.num_tokens, 4)
    assert case.seqs["rewards"].shape == (case.num_seqs,)
    assert case.group_ids.unique().tolist() == list(range(int(case.group_ids.max()) + 1))
    assert all(torch.equal(x, x.bfloat16().double()) for x in case.streams.values())


@cache
def drawn():
    return sample(strategies.cases(STREAMS), 100)


@pytest.mark.slow_cases("empty sequence")
@pytest.mark.parametrize(
    "shape",
    [
        lambda c: (c.cu_seqlens.diff() == 0).any(),
        lambda c: c.num_tokens and not c.mask.any(),
        lambda c: any(not c.mask[t] and c.mask[t - 1] and c.mask[t + 1] for t in range(1, c.num_tokens - 1)),
        lambda c: c.num_seqs > 2 and (c.group_ids.bincount() == 1).any() and (c.group_ids.bincount() > 1).any(),
        lambda c: (c.group_ids.diff() < 0).any(),
        lambda c: c.cu_seqlens.dtype == torch.int32,
        lambda c: (c.tokens["log_ratio"].abs() < 0.1).any() and (c.tokens["log_ratio"].abs() > 2).any(),
    ],
    ids=["empty sequence", "nothing trainable", "gap", "ragged groups", "unordered groups", "int32", "near and far"],
)
def test_the_awkward_batches_are_drawn(shape) -> None:
    assert sum(bool(shape(case)) for case in drawn()) >= 2


def test_extreme_cases_hold_huge_and_tiny_values() -> None:
    drawn = torch.cat([c.tokens["log_ratio"] for c in sample(strategies.cases(STREAMS, extreme=True), 50)])
    assert {1e6, -1e6, 1e-30} <= set(drawn.tolist())


def test_samples_are_the_same_every_time() -> None:
    assert sample(st.integers(0, 10**6), 20) == sample(st.integers(0, 10**6), 20)
