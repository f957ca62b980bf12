"""Routing replay: in a mixture of experts the trainer sends each token to the experts that the sampling engine chose.

An engine that computes in another precision chooses other experts for some tokens, and then its log-probs are of
another function. With the engine's choice (`Completion.experts`, in a batch `Batch.experts`) a layer computes

    indices = those of the engine            weights = scores[indices], normalised as the model does, with gradient

A router of transformers ends in `torch.topk`, whatever its scores are (softmax, sigmoid, with a bias, in groups), so
replacing the indices that `topk` returns inside of it replays the choice of every family. Tokens without a choice (-1)
keep the trainer's own. Used in packed forwards, under recomputation and expert parallelism too. Experts that the model
cannot replay are refused. Critics and teachers, which did not sample the batch, use their own routers.
Reference: arXiv:2510.11370. Differs: slime, verl and prime-rl replay by code for each model.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlkit._util.tensors import readable, uncompiled
from rlkit.parallel.attention import current_plan
from rlkit.types import Batch

_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_OWN_CHOICE = ("doge", "longcat_flash", "phimoe", "zaya")  # types that do not choose by one topk over all experts
_FLAG = "--enable-return-routed-experts"  # of SGLang and vLLM


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules that choose experts, in the order of the layers; [] for a dense model."""
    if not replays(model.config):
        return []
    choosers = [module for module in model.modules() if _chooses(cast(Any, type(module)))]
    return [m for m in choosers if not any(other is not m and other in {*m.modules()} for other in choosers)]


def num_experts(config: Any) -> int:
    """The number of routed experts of each layer; 0 for a dense model."""
    text = config.get_text_config()
    return max((getattr(text, name, None) or 0 for name in _COUNTS), default=0)


def replays(config: Any) -> bool:
    """Whether it is a mixture of experts whose choice can be replayed."""
    return num_experts(config) > 1 and config.get_text_config().model_type not in _OWN_CHOICE


def own_routing(batch: Batch) -> Batch:
    """The batch without the engine's experts: for a model other than the policy that sampled."""
    return replace(batch, experts=None, prefix_experts=None)


def check_experts(model: Any, experts: Int[Tensor, "T layers k"]) -> None:
    """Refuse a batch's experts that the model cannot replay: ValueError. `k` is checked by the routers.

    Ids are checked on CPU tensors. A pipeline stage may have no router.
    """
    kind, config = f"model type {model.config.model_type!r}", model.config.get_text_config()
    if not replays(model.config):
        fault = f"`experts`: {kind} has no router that replays them: start the server without {_FLAG}"
        raise ValueError(f"{fault}, or drop them by replace(batch, experts=None, prefix_experts=None)")
    count = next((m.forward.args[1][2] for m in model.modules() if _is_wrapped(m)), experts.shape[1])
    layers = {count, getattr(config, "num_hidden_layers", count)}
    if experts.shape[1] not in layers:
        expected = " or ".join(map(str, sorted(layers)))
        problem = f"`experts` must be [tokens, layers, k] with {expected} layers for {kind}"
        raise ValueError(f"{problem}, got {[*experts.shape]}")
    num = num_experts(model.config)
    if readable(experts) and experts.numel() and not (experts.min() >= -1 and experts.max() < num):
        got = f"got {experts.min().item()} to {experts.max().item()}"
        raise ValueError(f"`experts` must be below {num}, the experts of a layer of {kind}, or -1 (unknown): {got}")


def wrap_routers(model: nn.Module) -> None:
    """Let the routers replay the experts of a packed forward's batch, in place; elsewhere they are as before."""
    modules, names = routers(model), {module: name for name, module in model.named_modules()}
    for i, router in enumerate(modules):
        layer = next(map(int, re.findall(r"\.(\d+)\.", names[router])), i)
        if not _is_wrapped(router):
            router.forward = partial(_route, router.forward, (i, layer, len(modules)), num_experts(model.config))


def unwrap_routers(model: nn.Module) -> None:
    """Undo `wrap_routers`."""
    for module in filter(_is_wrapped, model.modules()):
        del module.forward


class Chosen(TorchFunctionMode):
    """Inside the block `topk` over all experts returns the indices `replay`, where these are not -1.

    `indices` are those that it returned last, and `replayed` whether `replay` had their number. A `topk` over groups of
    experts is left alone.
    """

    def __init__(self, num_experts: int, replay: Int[Tensor, "T k"] | None = None) -> None:
        super().__init__()
        self._num_experts, self._replay = num_experts, replay
        self.indices: Tensor | None = None
        self.replayed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._num_experts:
            return out
        self.replayed = self._replay is not None and out.indices.numel() == self._replay.numel()
        if self._replay is not None and self.replayed:
            indices = self._replay.view_as(out.indices)
            indices = torch.where(indices < 0, out.indices, indices)
            out = torch.return_types.topk((args[0].gather(-1, indices), indices))
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
    with Chosen(num_experts, plan.experts[:, column].long()) as chosen:
        out = router(*args, **options)
    if not chosen.replayed:
        kind = type(getattr(router, "__self__", router)).__name__
        k = "none" if chosen.indices is None else f"k = {chosen.indices.shape[-1]}"
        fault = "`experts` must be [tokens, layers, k] with the k of the model"
        raise ValueError(f"{fault}: {kind} chooses {k} of {num_experts}, got {[*plan.experts.shape]}")
    return out


@cache
def _chooses(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers.models."):
        return False
    try:  # an indexer chooses the keys of sparse attention
        return "Indexer" not in kind.__name__ and "topk(" in inspect.getsource(kind)
    except (OSError, TypeError):
        return False
