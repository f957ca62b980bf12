"""Input preparation shared by all losses: check, upcast, and zero masked positions."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from rlkit._util.tensors import (
    check_float,
    check_given,
    check_mask,
    check_no_ratio,
    check_same_shape,
    masked,
    readable,
    traced,
    upcast,
)


def prepared(mask: Tensor | None, **tensors: Tensor) -> tuple[Tensor, ...]:
    """Check the tensors; return them in the order given, in fp32 or fp64, 0 where the mask is False."""
    check_given(**tensors)
    check_float(**tensors)
    check_same_shape(**tensors)
    name, first = next(iter(tensors.items()))
    check_mask(mask, **{name: first})
    data = {"log_ratio": "advantages", "logp": "ref_logp"}.get(name, "")
    given = tensors.get(data)
    if given is not None and given.requires_grad and (not first.requires_grad or given is first):
        raise ValueError(
            f"{data} has a gradient{'' if first.requires_grad else f' and {name} has none'}: the order is "
            f"({name}, {data}), and advantages that are computed from values, and log-probs of a reference, need "
            ".detach()"
        )
    if name == "log_ratio":
        check_no_ratio(first, mask)
        _check_sign(first)
    elif name in ("logp", "entropy"):
        _check_which(first, mask, name, above=name == "logp")
    return tuple(masked(upcast(x), mask) for x in tensors.values())


def targets(*given: Tensor, **prediction: Tensor) -> list[Tensor]:
    """The targets of a loss, detached; ValueError where they have a gradient and the prediction, which is first, has
    none."""
    ((name, x),) = prediction.items()
    if not x.requires_grad and any(target.requires_grad for target in given):
        raise ValueError(f"{name} has no gradient, and what follows it has one: {name} is the first argument")
    return [target.detach() for target in given]


def _check_which(x: Tensor, mask: Tensor | None, name: str, *, above: bool) -> None:
    """ValueError for probabilities instead of log-probs, and for log-probs instead of entropies: the sign of all values
    of many is the other one (CPU, outside compilation)."""
    if not readable(x):
        return
    values = x.detach() if mask is None else x.detach()[mask]
    if values.numel() >= 16 and (values > 0 if above else values < 0).all():
        meant = "probabilities? A log-prob is at most 0" if above else "log-probs? An entropy is at least 0"
        raise ValueError(
            f"{name} is {'above' if above else 'below'} 0 at all {values.numel()} tokens: are these {meant}"
        )


def _check_sign(log_ratio: Tensor) -> None:
    """ValueError for old_logp - logp: a difference of which the second term alone has a gradient."""
    last = None if traced() else log_ratio.grad_fn
    terms = [node is not None for node, _ in last.next_functions] if last else []
    if last and last.name().startswith("SubBackward") and terms == [False, True]:
        raise ValueError("log_ratio is a constant minus what has a gradient: its sign is logp - old_logp")


def check_cap(max_weight: float) -> None:
    """A bound of the ratio is at least 1, so that it does not scale the loss of on-policy tokens."""
    if max_weight is None or not max_weight >= 1:
        fix = f"; for a distance of {max_weight:g} give {1 + max_weight:g}" if max_weight and max_weight > 0 else ""
        raise ValueError(f"max_weight bounds the ratio, 1 on-policy: it must be at least 1, got {max_weight}{fix}")


def check_distances(low: float | Tensor, high: float | Tensor) -> None:
    """Warn of clip distances that look like bounds of the ratio, such as 0.8 and 1.2."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return
    above = 1 < high <= 1.5
    bounds = [(f"clip_low {low:g}", 1 - low)] * (0.5 <= low < 1 and (above or high < low))
    bounds += [(f"clip_high {high:g}", high - 1)] * above
    if bounds:
        given, meant = " and ".join(x for x, _ in bounds), " and ".join(f"{x:.3g}" for _, x in bounds)
        clipped = f"of a distance from 1, so the ratio is clipped to [{1 - low:.3g}, {1 + high:.3g}]"
        warnings.warn(f"{given}: {clipped}; for a bound of the ratio give {meant}", stacklevel=3)


def check_at_least(bound: float, **values: float | Tensor) -> None:
    """Each Python number is at least `bound` (NaN fails). Tensors are not checked: reading them costs a device sync."""
    for name, x in values.items():
        if x is None or (not isinstance(x, Tensor) and not x >= bound):
            raise ValueError(f"{name} must be at least {bound:g}, got {x}")


def check_positive(**values: float) -> None:
    """Each number is above 0 (NaN fails)."""
    for name, x in values.items():
        if x is None or not x > 0:
            raise ValueError(f"{name} must be positive, got {x}")


def check_between(low: float, high: float, **values: float) -> None:
    """Each number is in [low, high] (NaN fails)."""
    for name, x in values.items():
        if x is None or not low <= x <= high:
            raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {x}")


def check_probs(**values: Tensor) -> None:
    """Each is in [0, 1], where it is read for free (on the CPU)."""
    for name, x in values.items():
        if readable(x) and x.numel() and not (x.min() >= 0 and x.max() <= 1):
            raise ValueError(f"{name} must be in [0, 1], got {x.min().item()} to {x.max().item()}")


def check_one_number(**values: object) -> None:
    """Each is a Python number or a tensor of one entry: a tensor of several would be broadcast over the tokens."""
    for name, x in values.items():
        if isinstance(x, Tensor) and x.numel() != 1:
            raise ValueError(f"{name} must be one number for the whole batch, got a tensor of shape {list(x.shape)}")


def check_alone(name: str) -> None:
    """Raise if a statistic of the whole batch is missing while several ranks train, each on its share."""
    distributed = torch.distributed
    if torch.compiler.is_compiling() or not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() > 1:
        raise ValueError(
            f"{name} must be given when several ranks train: it is a statistic of the whole optimizer step's batch, "
            f"and this rank may hold only a part of it. If it holds the whole batch, pass the local value."
        )
