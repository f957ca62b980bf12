"""Input preparation shared by all losses: check, upcast, and zero masked positions."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit._util.tensors import check_float, check_given, check_mask, check_same_shape, masked, readable, traced, upcast


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
        _check_no_ratio(first, mask)
        _check_sign(first)
    return tuple(masked(upcast(x), mask) for x in tensors.values())


def targets(*given: Tensor, **prediction: Tensor) -> list[Tensor]:
    """The targets of a loss, detached; ValueError where they have a gradient and the prediction, which is first, has
    none."""
    ((name, x),) = prediction.items()
    if not x.requires_grad and any(target.requires_grad for target in given):
        raise ValueError(f"{name} has no gradient, and what follows it has one: {name} is the first argument")
    return [target.detach() for target in given]


def _check_no_ratio(log_ratio: Tensor, mask: Tensor | None) -> None:
    """ValueError for values that are ratios: 1 on-policy, and at no token far below (CPU, outside compilation).

    The mean of a true ratio over samples is 1, so its logarithm is not at least 0.5 at each of many tokens, but for a
    policy that a few steps of a large size have moved far, where it is on average above 2. One value may stand at all
    tokens of a sequence: the sum of its log-ratios.
    """
    if not readable(log_ratio):
        return
    x = log_ratio.detach() if mask is None else log_ratio.detach()[mask]
    if x.numel() < 16 or not (x.min() >= 0.5 and x.mean() <= 2):
        return
    if (x == 1).all() or x.unique().numel() >= (2 if ((x - 1).abs() < 1e-5).all() else 64):
        fault = f"log_ratio is at least {x.min():.3g} at all {x.numel()} tokens: is it a ratio?"
        raise ValueError(f"{fault} Give its logarithm, logp - old_logp")


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
