"""Aggregation weights against the plain definitions: loops over sequences, then over tokens."""

from __future__ import annotations

import pytest
import torch

from rlkit import losses
from rlkit.losses import (
    constant_length,
    per_source_mean,
    prompt_mean,
    seq_mean,
    seq_mean_token_sum,
    token_mean,
)

LENS = [3, 0, 1, 4, 2, 2]
CU = torch.tensor([0, 3, 3, 4, 8, 10, 12])
MASK = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1]).bool()  # the fifth sequence is fully masked
GROUPS = torch.tensor([0, 1, 0, 2, 3, 2])
SOURCES = torch.tensor([1, 0, 0, 1, 1, 2])
LOSS = torch.tensor([3.0, 99, -1, 2, 0.5, 4, 99, 1.5, 99, 99, -2, 6], dtype=torch.float64)


def kept() -> list[list[float]]:
    out, start = [], 0
    for n in LENS:
        part = slice(start, start + n)
        out.append([v for v, m in zip(LOSS[part].tolist(), MASK[part].tolist(), strict=True) if m])
        start += n
    return out


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


SEQS = [s for s in kept() if s]
EXPECTED = {
    "token_mean": (lambda: token_mean(MASK), mean([v for s in SEQS for v in s])),
    "seq_mean": (lambda: seq_mean(MASK, cu_seqlens=CU), mean([mean(s) for s in SEQS])),
    "seq_mean_token_sum": (lambda: seq_mean_token_sum(MASK, cu_seqlens=CU), mean([sum(s) for s in SEQS])),
    "constant_length": (
        lambda: constant_length(MASK, cu_seqlens=CU, max_length=50),
        mean([sum(s) / 50 for s in SEQS]),
    ),
    "prompt_mean": (
        lambda: prompt_mean(MASK, group_ids=GROUPS, cu_seqlens=CU),
        mean([mean(kept()[0] + kept()[2]), mean(kept()[3] + kept()[5])]),
    ),
    "per_source_mean": (
        lambda: per_source_mean(MASK, source_ids=SOURCES, source_weights=torch.tensor([0.5, 0.2, 0.3]), cu_seqlens=CU),
        0.5 * mean(kept()[2]) + 0.2 * mean(kept()[0] + kept()[3]) + 0.3 * mean(kept()[5]),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_weighted_sum_is_the_mean_of_the_definition(name: str) -> None:
    make, expected = EXPECTED[name]
    weights = make()
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert (weights[~MASK] == 0).all()
    assert (weights.double() * LOSS).sum().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["token_mean", "seq_mean", "prompt_mean"])
def test_means_sum_to_one(name: str) -> None:
    assert EXPECTED[name][0]().sum().item() == pytest.approx(1, rel=1e-6)


def parts() -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    """The batch cut after the second, third and fourth sequence."""
    out = []
    for first, last in ((0, 2), (2, 3), (3, 4), (4, 6)):
        start, end = CU[first].item(), CU[last].item()
        out.append((CU[first : last + 1] - start, torch.arange(first, last), slice(start, end)))
    return out


def test_parts_with_global_counts_are_slices_of_the_whole() -> None:
    """The wrong denominator under accumulation, the most reported bug of the field, cannot happen."""
    own = torch.tensor([3, 0, 3, 5, 0, 5])  # trainable tokens of each sequence's whole group
    totals = torch.tensor([1, 5, 2])  # trainable tokens of each source
    shares = torch.tensor([0.5, 0.2, 0.3])
    for cu, seqs, at in parts():
        m = MASK[at]
        got = {
            "token_mean": token_mean(m, num_tokens=8),
            "seq_mean": seq_mean(m, cu_seqlens=cu, num_seqs=4),
            "seq_mean_token_sum": seq_mean_token_sum(m, cu_seqlens=cu, num_seqs=torch.tensor(4)),
            "constant_length": constant_length(m, cu_seqlens=cu, max_length=50, num_seqs=4),
            "prompt_mean": prompt_mean(m, group_ids=GROUPS[seqs], cu_seqlens=cu, num_groups=2, group_tokens=own[seqs]),
            "per_source_mean": per_source_mean(
                m, source_ids=SOURCES[seqs], source_weights=shares, cu_seqlens=cu, num_tokens=totals
            ),
        }
        for name, weights in got.items():
            assert torch.equal(weights, EXPECTED[name][0]()[at]), name


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_to_train_on_gives_zeros(name: str) -> None:
    nothing = MASK & False
    options = {"cu_seqlens": CU}
    options |= {"constant_length": {"max_length": 9}, "prompt_mean": {"group_ids": GROUPS}}.get(name, {})
    if name == "per_source_mean":
        options |= {"source_ids": SOURCES, "source_weights": torch.ones(3)}
    if name.startswith("token"):
        options = {}
    assert getattr(losses, name)(nothing, **options).tolist() == [0.0] * 12


def test_token_weights_take_any_shape() -> None:
    assert token_mean(MASK.view(3, 4)).shape == (3, 4)
    assert token_mean(MASK.view(3, 4), num_tokens=torch.tensor(16)).sum().item() == 0.5


def test_one_source_is_the_token_mean() -> None:
    one = per_source_mean(MASK, source_ids=torch.zeros(6).long(), source_weights=torch.ones(1), cu_seqlens=CU)
    assert torch.equal(one, token_mean(MASK))


def test_a_missing_global_count_raises_when_several_ranks_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    calls = {
        "num_tokens": lambda: token_mean(MASK),
        "num_seqs": lambda: seq_mean(MASK, cu_seqlens=CU),
        "num_groups": lambda: prompt_mean(MASK, group_ids=GROUPS, cu_seqlens=CU),
        "mean must": lambda: losses.batch_normalized(torch.ones(2)),
        "threshold": lambda: losses.top_entropy_mask(torch.ones(2)),
        "mean_logp": lambda: losses.token_covariance(torch.ones(2), torch.ones(2)),
    }
    for match, call in calls.items():
        with pytest.raises(ValueError, match=match):
            call()
    assert token_mean(MASK, num_tokens=8).sum().item() == 1


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match="mask must be bool"):
        token_mean(torch.ones(3))
    with pytest.raises(ValueError, match="num_tokens must be at least 0"):
        token_mean(MASK, num_tokens=-1)
    with pytest.raises(ValueError, match=f"num_tokens is 0, and this mask alone has {int(MASK.sum())}"):
        token_mean(MASK, num_tokens=0)
    with pytest.raises(ValueError, match="max_length must be positive"):
        constant_length(MASK, cu_seqlens=CU, max_length=0)
    longest = max(map(len, kept()))
    assert constant_length(MASK, cu_seqlens=CU, max_length=longest).sum() > 0
    with pytest.raises(ValueError, match=f"max_length is {longest - 1}, and a sequence has {longest} trainable tokens"):
        constant_length(MASK, cu_seqlens=CU, max_length=longest - 1)
    with pytest.raises(ValueError, match="group_ids must have one entry for each value"):
        prompt_mean(MASK, group_ids=GROUPS[:2], cu_seqlens=CU)
    with pytest.raises(ValueError, match="cu_seqlens must end at"):
        seq_mean(MASK, cu_seqlens=CU[:-1])


def test_compiles_without_graph_break() -> None:
    for f in (lambda: token_mean(MASK), lambda: seq_mean(MASK, cu_seqlens=CU, num_seqs=4)):
        assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(), f())


FEW = {  # counts below those of the mask alone: tokens, groups, and no sequence at all
    "token_mean": (lambda: token_mean(MASK, num_tokens=int(MASK.sum()) - 1), "num_tokens"),
    "token_mean, a tensor": (lambda: token_mean(MASK, num_tokens=torch.tensor(1)), "num_tokens"),
    "seq_mean": (lambda: seq_mean(MASK, cu_seqlens=CU, num_seqs=0), "num_seqs"),  # 1: pieces of one episode
    "seq_mean_token_sum": (lambda: seq_mean_token_sum(MASK, cu_seqlens=CU, num_seqs=0), "num_seqs"),
    "constant_length": (lambda: constant_length(MASK, cu_seqlens=CU, max_length=9, num_seqs=0), "num_seqs"),
    "prompt_mean": (
        lambda: prompt_mean(MASK, group_ids=torch.arange(len(CU) - 1), cu_seqlens=CU, num_groups=1), "num_groups",
    ),
    "per_source_mean": (
        lambda: per_source_mean(
            MASK, source_ids=torch.zeros(len(CU) - 1, dtype=torch.long), source_weights=torch.ones(1), cu_seqlens=CU,
            num_tokens=torch.tensor([1]),
        ), r"num_tokens\[0\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_a_count_of_the_step_below_that_of_the_mask_is_refused(name):
    call, argument = FEW[name]
    given = int(MASK.sum()) - 1 if name == "token_mean" else 0 if argument == "num_seqs" else 1
    with pytest.raises(ValueError, match=f"^{argument} is {given}, .*this mask alone has.*whole step"):
        call()


def test_a_count_is_not_read_in_a_compiled_loss():
    compiled = torch.compile(lambda m: token_mean(m, num_tokens=100), backend="aot_eager", fullgraph=True)
    assert compiled(MASK).sum().item() == pytest.approx(int(MASK.sum()) / 100)
