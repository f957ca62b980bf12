"""Metrics that add exactly over micro-batches and ranks. The type of a metric defines its reduction, never its key.

>>> a = {"reward": mean(torch.tensor([1.0, 0.0])), "length": largest(torch.tensor([3.0, 9.0]))}
>>> finalize(merge(a, {"reward": mean(torch.tensor([1.0]))}))
{'reward': 0.6666666666666666, 'length': 9.0}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit._util.tensors import check_mask, check_same_shape, check_tensor


class Mean(NamedTuple):
    """A sum and a count. Both stay on the device, in fp64, until `finalize`."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # shadows tuple.count, which is never called


class Max(NamedTuple):
    """A maximum; -inf over no entries, which `finalize` omits."""

    value: Tensor


class Min(NamedTuple):
    """A minimum; +inf over no entries, which `finalize` omits."""

    value: Tensor


Metric = Mean | Max | Min
Metrics = dict[str, Metric]


def mean(x: Tensor | float, *, mask: Tensor | None = None, weights: Tensor | None = None) -> Mean:
    """Mean of the unmasked entries, or the weighted mean `sum(w x) / sum(w)`. Detached."""
    x = _detached(x)
    check_mask(mask, x=x)
    if weights is not None:
        check_tensor(weights=weights)
        check_same_shape(x=x, weights=weights)
    w = torch.ones_like(x) if weights is None else weights.detach().to(x)
    if mask is not None:
        x, w = torch.where(mask, x, 0.0), torch.where(mask, w, 0.0)
    return Mean((w * x).sum(), w.sum())


def largest(x: Tensor | float, *, mask: Tensor | None = None) -> Max:
    """Largest unmasked entry."""
    return Max(_extreme(x, mask, -torch.inf).amax())


def smallest(x: Tensor | float, *, mask: Tensor | None = None) -> Min:
    """Smallest unmasked entry."""
    return Min(_extreme(x, mask, torch.inf).amin())


def merge(*many: Mapping[str, Metric]) -> Metrics:
    """Merge dicts of metrics: sums and counts of means add, extremes are compared. Their keys may differ."""
    out: Metrics = {}
    for metrics in many:
        for key, new in metrics.items():
            old = out.get(key)
            _check_metric(key, new)
            if old is None:
                out[key] = new
            elif type(old) is not type(new):
                kinds = f"a {type(old).__name__} in one dict and a {type(new).__name__} in another"
                raise TypeError(f"metric {key!r} is {kinds}")
            elif isinstance(old, Mean) and isinstance(new, Mean):
                out[key] = Mean(old.total + new.total, old.count + new.count)
            elif isinstance(old, Max):
                out[key] = Max(torch.maximum(old.value, new[0]))
            else:
                out[key] = Min(torch.minimum(old[0], new[0]))
    return out


def all_reduce(metrics: Metrics, *, group: torch.distributed.ProcessGroup | None = None) -> Metrics:
    """Reduce the metrics over all ranks of `group` with three collectives. All ranks must hold the same keys.

    NaN on any rank gives NaN. Whether a backend's MAX keeps a NaN depends on the order of the ranks, so the NaNs of
    extremes are counted along with the means.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return metrics
    extremes = {k: m for k, m in metrics.items() if not isinstance(m, Mean)}
    nans = {f"{k} is nan": Mean(m[0].isnan().double(), torch.zeros_like(m[0])) for k, m in extremes.items()}
    out = metrics = {**metrics, **nans}
    op = torch.distributed.ReduceOp
    kinds: list[tuple[Any, Any]] = [(Mean, op.SUM), (Max, op.MAX), (Min, op.MIN)]
    for kind, reduce_op in kinds:
        keys = sorted(k for k, m in metrics.items() if isinstance(m, kind))
        if keys:
            flat = stacked([part for k in keys for part in metrics[k]])
            torch.distributed.all_reduce(flat, op=reduce_op, group=group)
            parts = flat.view(len(keys), -1).unbind()
            out = {**out, **{k: kind._make(part.unbind()) for k, part in zip(keys, parts, strict=True)}}
    for k, m in extremes.items():
        has_nan: Any = out.pop(f"{k} is nan")
        out[k] = type(m)(torch.where(has_nan.total > 0, torch.nan, out[k][0]))
    return out


def finalize(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The metrics as Python floats, read from the device in one copy.

    Metrics over no entries are omitted, so a NaN in the result was measured.
    """
    if not metrics:
        return {}
    for key, metric in metrics.items():
        _check_metric(key, metric)
    read = iter(stacked([part for metric in metrics.values() for part in metric]).tolist())
    out: dict[str, float] = {}
    for key, metric in metrics.items():
        if isinstance(metric, Mean):
            total, count = next(read), next(read)
            if count:
                out[key] = total / count
        elif (value := next(read)) != (-math.inf if isinstance(metric, Max) else math.inf):
            out[key] = value
    return out


def _check_metric(key: str, metric: object) -> None:
    if not isinstance(metric, Mean | Max | Min):
        raise TypeError(f"metric {key!r} is {type(metric).__name__}: write mean(x), largest(x) or smallest(x)")


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Stack scalars from mixed devices, on the GPU if any is there."""
    device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
    return torch.stack([x.to(device) for x in values])


def _detached(x: Tensor | float) -> Tensor:
    return x.detach().double() if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)


def _extreme(x: Tensor | float, mask: Tensor | None, identity: float) -> Tensor:
    x = _detached(x)
    check_mask(mask, x=x)
    x = x if mask is None else torch.where(mask, x, identity)
    return torch.cat([x.flatten(), x.new_full((1,), identity)])
