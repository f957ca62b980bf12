"""Log-probabilities from a vocabulary-sharded head: gathers `[4, T]` per rank, no logits."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.kernels.linear_logp import Partials, combine, partials, shard_logp
from rlkit.parallel.collectives import Shared, all_gather
from rlkit.types import LogProbs


def sharded_linear_logp(
    hidden: Float[Tensor, "T D"], weight: Tensor, targets: Int[Tensor, "T"], *, bias: Tensor | None, **options: Any
) -> LogProbs:
    """`linear_logp` where `weight` (and `bias`) is a DTensor sharded along the vocabulary.

    `hidden` and `targets` are the same on every rank of its mesh. `options` are the temperature, softcap and mask. The
    statistics of all shards are merged in rank order, so results are bit-identical on all ranks. The gradient of
    `hidden` is complete on every rank, that of `weight` covers the rank's rows; both require that all ranks compute the
    same loss.

    Differs: from the vocabulary-parallel cross entropies of Megatron-style systems (verl, slime, NeMo), which store
    `[T, V / tp]` logits and all-reduce three times; here there is one all-gather of four numbers per token.
    """
    group = weight.device_mesh.get_group()  # type: ignore[attr-defined]
    per_rank = -(-weight.shape[0] // dist.get_world_size(group))  # DTensor shards like torch.chunk: last ones shorter
    options["vocab_start"] = min(dist.get_rank(group) * per_rank, weight.shape[0])
    options["bias"] = None if bias is None else bias.to_local()  # type: ignore[attr-defined]
    weight = weight.to_local()  # type: ignore[attr-defined]
    mine = torch.stack(partials(hidden, weight, targets, **options))[None]
    combined = reduce(combine, [Partials(*x.unbind()) for x in all_gather(mine, group)])
    return shard_logp(Shared.apply(hidden, group), weight, targets, combined=combined, **options)


def is_sharded(weight: Tensor) -> bool:
    """Whether a head's weight is sharded along the vocabulary."""
    return hasattr(weight, "device_mesh") and weight.placements[0].is_shard(0)  # type: ignore[attr-defined]
