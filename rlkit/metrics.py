"""Metrics that add exactly over micro-batches and ranks. The type says how to reduce, never the key.

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

from rlkit._tensors import check_mask


class Mean(NamedTuple):
    """A sum and how many things were summed. Both stay on the device, in fp64, until `finalize`."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # shadows tuple.count, which nobody calls


class Max(NamedTuple):
    """A largest value; -inf when there was none, which `finalize` leaves out."""

    value: Tensor


class Min(NamedTuple):
    """A smallest value; +inf when there was none, which `finalize` leaves out."""

    value: Tensor


Metric = Mean | Max | Min
Metrics = dict[str, Metric]


def mean(x: Tensor | float, *, mask: Tensor | None = None, weights: Tensor | None = None) -> Mean:
    """Mean of the (masked-in) entries, or the weighted mean `sum(w x) / sum(w)`; no gradient flows."""
    x = _detached(x)
    check_mask(mask, x=x)
    w = torch.ones_like(x) if weights is None else weights.detach().to(x)
    if mask is not None:
        x, w = torch.where(mask, x, 0.0), torch.where(mask, w, 0.0)
    return Mean((w * x).sum(), w.sum())


def largest(x: Tensor | float, *, mask: Tensor | None = None) -> Max:
    """Largest (masked-in) entry."""
    return Max(_extreme(x, mask, -torch.inf).amax())


def smallest(x: Tensor | float, *, mask: Tensor | None = None) -> Min:
    """Smallest (masked-in) entry."""
    return Min(_extreme(x, mask, torch.inf).amin())


def merge(*many: Mapping[str, Metric]) -> Metrics:
    """One dict of metrics from several: means add, extremes compare. Keys may differ between them."""
    out: Metrics = {}
    for metrics in many:
        for key, new in metrics.items():
            old = out.get(key)
            if old is None:
                out[key] = new
            elif type(old) is not type(new):
                raise TypeError(f"metric {key!r} is a {type(old).__name__} here and a {type(new).__name__} there")
            elif isinstance(old, Mean) and isinstance(new, Mean):
                out[key] = Mean(old.total + new.total, old.count + new.count)
            elif isinstance(old, Max):
                out[key] = Max(torch.maximum(old.value, new[0]))
            else:
                out[key] = Min(torch.minimum(old[0], new[0]))
    return out


def all_reduce(metrics: Metrics, *, group: torch.distributed.ProcessGroup | None = None) -> Metrics:
    """The same metrics over all ranks of `group`; three collectives in all. Every rank must hold the same keys.

    A NaN on any rank stays NaN: whether a backend's MAX keeps one depends on the order of the ranks, so that they are
    counted beside the means.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return metrics
    extremes = {k: m for k, m in metrics.items() if not isinstance(m, Mean)}
    nans = {f"{k} is nan": Mean(m[0].isnan().double(), torch.zeros_like(m[0])) for k, m in extremes.items()}
    out = metrics = {**metrics, **nans}
    op = torch.distributed.ReduceOp
    kinds: list[tuple[Any, Any]] = [(Mean, op.SUM), (Max, op.MAX), (Min, op.MIN)]
    for kind, how in kinds:
        keys = sorted(k for k, m in metrics.items() if isinstance(m, kind))
        if keys:
            flat = stacked([part for k in keys for part in metrics[k]])
            torch.distributed.all_reduce(flat, op=how, group=group)
            parts = flat.view(len(keys), -1).unbind()
            out = {**out, **{k: kind._make(part.unbind()) for k, part in zip(keys, parts, strict=True)}}
    for k, m in extremes.items():
        has_nan: Any = out.pop(f"{k} is nan")
        out[k] = type(m)(torch.where(has_nan.total > 0, torch.nan, out[k][0]))
    return out


def finalize(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers, read from the device in one copy.

    What there was nothing of (a mean over no token, the largest of none) is left out, so a NaN in the result is one
    that was measured.
    """
    if not metrics:
        return {}
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


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Of numbers on the host and on a device, on the device: `torch.stack` does not take both."""
    device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
    return torch.stack([x.to(device) for x in values])


def _detached(x: Tensor | float) -> Tensor:
    return x.detach().double() if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)


def _extreme(x: Tensor | float, mask: Tensor | None, nothing: float) -> Tensor:
    x = _detached(x)
    check_mask(mask, x=x)
    x = x if mask is None else torch.where(mask, x, nothing)
    return torch.cat([x.flatten(), x.new_full((1,), nothing)])
