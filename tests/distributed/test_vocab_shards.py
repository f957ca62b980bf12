"""The log-prob kernels with the vocabulary cut unevenly over two and three ranks."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlkit.kernels.linear_logp import Partials, combine, linear_logp, partials, shard_logp
from rlkit.kernels.logits_logp import logits_logp
from rlkit.kernels.logits_logp import partials as logits_partials
from rlkit.kernels.logits_logp import shard_logp as logits_shard

CUTS = {2: [0, 5, 37], 3: [0, 22, 23, 37]}
OPTIONS = {"temperature": 0.8, "softcap": 3.0}


def problem(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """hidden, weight, bias, targets, mask, and what arrives from above for logp and entropy."""
    g = torch.Generator().manual_seed(0)
    shapes = ((11, 6), (37, 6), (37,), (2, 11))
    hidden, weight, bias, upstream = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    return hidden, weight, bias, torch.randint(37, (11,), generator=g), torch.arange(11) % 4 != 1, *upstream


def together(mine: Partials) -> Partials:
    """Statistics of the whole vocabulary, on every rank the same bits."""
    stacked = torch.stack(mine)
    shards = [torch.empty_like(stacked) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, stacked)
    return reduce(combine, [Partials(*x) for x in shards])


def on_shards(rank: int, world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    hidden, weight, bias, targets, mask, g_logp, g_entropy = problem(dtype)
    part = slice(CUTS[world][rank], CUTS[world][rank + 1])
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[part], bias[part])]
    options = {**OPTIONS, "mask": mask, "vocab_start": part.start}
    combined = together(partials(*leaves[:2], targets, bias=leaves[2], **options))
    out = shard_logp(*leaves[:2], targets, combined=combined, bias=leaves[2], **options)
    d_hidden, d_weight, d_bias = torch.autograd.grad((g_logp * out.logp + g_entropy * out.entropy).sum(), leaves)
    d_hidden = d_hidden.double()
    dist.all_reduce(d_hidden)
    logits = (hidden @ weight[part].T + bias[part]).requires_grad_()
    combined = together(logits_partials(logits, targets, **options))
    again = logits_shard(logits, targets, combined=combined, **options)
    (d_logits,) = torch.autograd.grad((g_logp * again.logp + g_entropy * again.entropy).sum(), logits)
    values = {"logp": out.logp.detach(), "entropy": out.entropy.detach(), "from logits": again.logp.detach()}
    return values | {"hidden": d_hidden, "weight": d_weight, "bias": d_bias, "logits": d_logits}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_equal_one_process(pool, world: int, dtype: torch.dtype) -> None:
    """Values with the same bits on all ranks; every gradient, with the hidden states' summed over the ranks."""
    hidden, weight, bias, targets, mask, g_logp, g_entropy = problem(dtype)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    out = linear_logp(*leaves[:2], targets, bias=leaves[2], mask=mask, **OPTIONS)
    d_hidden, d_weight, d_bias = torch.autograd.grad((g_logp * out.logp + g_entropy * out.entropy).sum(), leaves)
    logits = (hidden @ weight.T + bias).requires_grad_()
    again = logits_logp(logits, targets, mask=mask, **OPTIONS)
    (d_logits,) = torch.autograd.grad((g_logp * again.logp + g_entropy * again.entropy).sum(), logits)

    got = pool(world).run(on_shards, dtype)
    exact = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    rounded = exact if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    for rank in got:
        torch.testing.assert_close(rank["logp"], out.logp.detach(), **exact)
        torch.testing.assert_close(rank["entropy"], out.entropy.detach(), **exact)
        torch.testing.assert_close(rank["from logits"], again.logp.detach(), **rounded)
        torch.testing.assert_close(rank["hidden"], d_hidden.double(), **rounded)
        assert torch.equal(rank["logp"], got[0]["logp"])
        assert torch.equal(rank["entropy"], got[0]["entropy"])
    torch.testing.assert_close(torch.cat([r["weight"] for r in got]), d_weight, **rounded)
    torch.testing.assert_close(torch.cat([r["bias"] for r in got]), d_bias, **rounded)
    torch.testing.assert_close(torch.cat([r["logits"] for r in got], 1), d_logits, **rounded)
