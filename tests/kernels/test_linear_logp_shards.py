"""A vocabulary in uneven shards, in one process: statistics merge exactly, and gradients are those of the whole."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit.kernels.linear_logp import Partials, combine, finish, linear_logp, partials, shard_logp
from rlkit.kernels.linear_logp.reference import no_partials

SPLITS = [[20, 13], [1, 32], [7, 25, 1], [33, 0], [0, 11, 22], [33]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((11, 6), (33, 6), (33,))
    )
    return hidden, weight, bias, torch.randint(33, (11,), generator=g)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shards_equal_the_whole(split: list[int], softcap: float | None, masked: bool, dtype: torch.dtype) -> None:
    """Values on every rank, the gradient of each shard, and the sum over shards of the gradient of hidden."""
    hidden, weight, bias, targets = problem(dtype)
    mask = torch.arange(11) % 4 != 1 if masked else None
    g_logp, g_entropy = torch.randn(2, 11)
    options = {"temperature": 0.8, "softcap": softcap, "mask": mask}

    whole = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    want = linear_logp(whole[0], whole[1], targets, bias=whole[2], **options)
    ((g_logp * want.logp).sum() + (g_entropy * want.entropy).sum()).backward()

    starts = [0, *torch.tensor(split).cumsum(0).tolist()]
    shards = [(weight[a:b].clone().requires_grad_(), bias[a:b].clone().requires_grad_()) for a, b in pairwise(starts)]
    mine = [partials(hidden, w, targets, bias=b, vocab_start=start, **options) for (w, b), start in zip(shards, starts)]
    combined = reduce(combine, mine)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(finish(combined).logp, want.logp.detach(), **tolerance)

    d_hidden = torch.zeros_like(hidden, dtype=torch.float64)
    for (w, b), start in zip(shards, starts):
        h = hidden.clone().requires_grad_()
        out = shard_logp(h, w, targets, combined=combined, bias=b, vocab_start=start, **options)
        torch.testing.assert_close(out.logp, want.logp, **tolerance)
        torch.testing.assert_close(out.entropy, want.entropy, **tolerance)
        ((g_logp * out.logp).sum() + (g_entropy * out.entropy).sum()).backward()
        assert h.grad is not None
        d_hidden += h.grad.double()
    rounding = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else tolerance
    assert whole[0].grad is not None
    torch.testing.assert_close(d_hidden, whole[0].grad.double(), **rounding)
    torch.testing.assert_close(torch.cat([w.grad for w, _ in shards]), whole[1].grad, **rounding)
    torch.testing.assert_close(torch.cat([b.grad for _, b in shards]), whole[2].grad, **rounding)


@given(cuts=st.lists(st.integers(0, 33), min_size=2, max_size=2).map(sorted), scale=st.sampled_from([0.1, 1.0, 300.0]))
def test_combine_is_associative_and_commutative(cuts: list[int], scale: float) -> None:
    hidden, weight, _, targets = problem()
    bounds = [0, *cuts, 33]
    a, b, c = (partials(hidden * scale, weight[i:j], targets, vocab_start=i) for i, j in pairwise(bounds))
    whole = partials(hidden * scale, weight, targets)
    for order in (combine(combine(a, b), c), combine(a, combine(b, c)), combine(combine(c, a), b)):
        for x, y in zip(order, whole, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_the_empty_part_is_the_identity() -> None:
    hidden, weight, _, targets = problem()
    some = partials(hidden, weight, targets)
    nothing = Partials(*no_partials(11, dtype=torch.float64, device=torch.device("cpu")))
    for merged in (combine(some, nothing), combine(nothing, some)):
        for x, y in zip(merged, some, strict=True):
            assert torch.equal(x, y)
    assert (torch.stack(finish(combine(nothing, nothing))) == 0).all()


def test_statistics_by_hand() -> None:
    """Logits log 1, log 2, log 4: max log 4, sum 1/4 + 1/2 + 1, dot 1/4 log 1/4 + 1/2 log 1/2."""
    z = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).log()
    got = partials(torch.ones(1, 1, dtype=torch.float64), z[:, None], torch.tensor([1]))
    want = [z[2], torch.tensor(1.75), (0.25 * (z[0] - z[2]) + 0.5 * (z[1] - z[2])), z[1]]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.squeeze(), y.double())
    p = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) / 7
    torch.testing.assert_close(finish(got).logp.squeeze(), p[1].log())
    torch.testing.assert_close(finish(got).entropy.squeeze(), -(p * p.log()).sum())


def test_statistics_carry_no_gradient() -> None:
    hidden, weight, _, targets = problem()
    assert not any(x.requires_grad for x in partials(hidden.requires_grad_(), weight.requires_grad_(), targets))
