"""Routing replay: in a mixture of experts the trainer sends each token to the experts that the sampling engine chose.

An engine that computes in another precision chooses other experts for some tokens, and then its log-probs are of
another function. With the engine's choice (`Completion.experts`, in a batch `Batch.experts`) a layer computes

    indices = those of the engine            weights = scores[indices], normalised as the model does, with gradient

A router of transformers ends in `torch.topk`, whatever its scores are (softmax, sigmoid, with a bias, in groups), so
replacing the indices that `topk` returns inside of it replays the choice of every family. Tokens without a choice (-1)
keep the trainer's own. Used in packed forwards, under recomputation and expert parallelism too.
Reference: arXiv:2510.11370. Differs: slime, verl and prime-rl replay by code for each model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlkit._tensors import uncompiled
from rlkit.parallel.attention import current_plan

_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts, in the order of the layers; [] for a dense model."""
    if num_experts(model.config) < 2:
        return []
    found = [module for module in model.modules() if _chooses(cast(Any, type(module)))]
    return [m for m in found if not any(other is not m and other in {*m.modules()} for other in found)]


def num_experts(config: Any) -> int:
    """The number of routed experts of each layer; 0 for a dense model."""
    text = config.get_text_config()
    return max((getattr(text, name, None) or 0 for name in _COUNTS), default=0)


def wrap_routers(model: nn.Module) -> None:
    """Let the routers replay the experts of a packed forward's batch, in place; elsewhere they are as before."""
    found, names = routers(model), {module: name for name, module in model.named_modules()}
    for i, router in enumerate(found):
        layer = next(map(int, re.findall(r"\.(\d+)\.", names[router])), i)
        if not _is_wrapped(router):
            router.forward = partial(_route, router.forward, (i, layer, len(found)), num_experts(model.config))


def unwrap_routers(model: nn.Module) -> None:
    """Undo `wrap_routers`."""
    for module in filter(_is_wrapped, model.modules()):
        del module.forward


class Chosen(TorchFunctionMode):
    """Inside the block `topk` over all experts returns the indices `given`, where these are not -1.

    `indices` are those that it returned last. A `topk` over groups of experts is left alone.
    """

    def __init__(self, num_experts: int, given: Int[Tensor, "T k"] | None = None) -> None:
        super().__init__()
        self._num_experts, self._given = num_experts, given
        self.indices: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._num_experts:
            return out
        if self._given is not None and out.indices.numel() == self._given.numel():
            given = self._given.view_as(out.indices)
            given = torch.where(given < 0, out.indices, given)
            out = torch.return_types.topk((args[0].gather(-1, given), given))
        self.indices = out.indices
        return out


def _is_wrapped(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _route


@uncompiled  # a function mode is a graph break
def _route(router: Any, place: tuple[int, int, int], num_experts: int, *args: Any, **options: Any) -> Any:
    """`place`: the router's among the routers, its layer's among all layers, and the number of routers."""
    plan = current_plan()
    if plan is None or plan.experts is None:
        return router(*args, **options)
    index, layer, count = place
    column = index if plan.experts.shape[1] == count else layer  # an engine may report dense layers, too
    with Chosen(num_experts, plan.experts[:, column].long()):
        return router(*args, **options)


@cache
def _chooses(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers.models."):
        return False
    try:
        return "topk(" in inspect.getsource(kind)
    except (OSError, TypeError):
        return False
