"""The policy's weights as the rollout engine wants them: full tensors under their Hugging Face names, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


@torch.no_grad()
def stream_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter; tied ones once. An engine that shares the model's memory leaves it unread."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
