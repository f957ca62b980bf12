"""What the preference losses share: the type of a pair's tensors, and the range of a smoothing."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Pairs = Float[Tensor, "*pairs"]
PairMask = Bool[Tensor, "*pairs"] | None


def check_between(low: float, high: float, **values: float) -> None:
    """Each number lies in [low, high]; NaN does not."""
    for name, x in values.items():
        if not low <= x <= high:
            raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {x}")


def smoothed_nll(x: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of the preference probability sigmoid(x) with a label that is wrong with probability e.

    -(1 - e) log sigmoid(x) - e log sigmoid(-x)
    """
    if label_smoothing == 0:
        return -F.logsigmoid(x)
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)
