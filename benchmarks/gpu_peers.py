"""Fused vocabulary heads of other libraries, each under one signature, for `gpu_kernels.py`. Absent ones are left out.

Installed versions that these calls were written for: liger-kernel 0.8.5, cut-cross-entropy 25.1.1, trl 1.16.0,
verl 0.9.1. verl and TRL are loaded file by file: their top packages import Ray, tensordict and datasets. To have them:

    pip install --no-deps --target peers liger-kernel==0.8.5 cut-cross-entropy==25.1.1 trl==1.16.0 verl==0.9.1
    PYTHONPATH=peers python tools/gpu/programme.py A --out results
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

PACKAGES = ("liger-kernel", "cut-cross-entropy", "trl", "verl")
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # hidden, weight, targets -> logp, entropy
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets -> mean negative log-likelihood


def installed() -> dict[str, str]:
    """Version of each peer that is there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def about() -> dict[str, dict[str, str]]:
    """Which peers are there, and why others cannot be used."""
    left_out = {k: v for k, v in (heads() | losses() | from_logits()).items() if isinstance(v, str)}
    return {"peers": installed(), "left out": left_out}


def heads() -> dict[str, Head | str]:
    """Log-prob and entropy per token, both with gradients; a text says why one cannot be used."""
    makers = {"TRL, chunked": _trl, "verl": _verl, "Liger, scaled CE": _liger_scaled}
    return {name: _or_reason(make) for name, make in makers.items()}


def losses() -> dict[str, Loss | str]:
    """Cross entropy, the loss that is known in advance."""
    makers = {"Liger, fused linear CE": _liger, "apple CCE": _cce, "torch linear_cross_entropy": _torch}
    return {name: _or_reason(make) for name, make in makers.items()}


def from_logits() -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | str]:
    """Log-prob and entropy per token from logits."""
    return {"TRL": _or_reason(_trl_logits)}


def _or_reason(make: Callable[[], Callable]) -> Callable | str:
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def _trl() -> Head:
    module = _alone("trl.kernels.chunked_logprob", "trl")

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = module.ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32_768, None, 1.0, ("entropy",))
        return out[0], out[1]

    return run


def _trl_logits() -> Callable:
    return _alone("trl.kernels.logprob_entropy", "trl").selective_log_softmax_and_entropy


def _verl() -> Head:
    return _alone("verl.utils.kernel.linear_cross_entropy", "verl", "verl.utils").linear_cross_entropy


def _liger_scaled() -> Head:
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    fallback = module._FusedLinearPPOFallbackFunction
    try:
        chosen = module._resolve_implementation(torch.device("cuda"))
    except Exception:  # the SM90 kernel needs a package of its own
        chosen = fallback
    extra = () if chosen is fallback else (1,)

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        nll, entropy = chosen.apply(hidden, weight, targets, 1.0, -100, *extra, True)[:2]
        return -nll, entropy

    return run


def _liger() -> Loss:
    function = importlib.import_module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction
    return lambda hidden, weight, targets: function.apply(hidden, weight, targets)[0]


def _cce() -> Loss:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, targets: function(hidden, weight, targets)


def _torch() -> Loss:
    function = torch.nn.functional.linear_cross_entropy  # from 2.12 on
    return lambda hidden, weight, targets: function(hidden, weight, targets)


def _alone(name: str, *parents: str) -> types.ModuleType:
    """A module for which the `__init__` files of the `parents` are not run, the top package first."""
    top = parents[0]
    for package in parents:
        if package in sys.modules:
            continue
        spec = importlib.util.find_spec(top) if package == top else None
        places = sys.modules[top].__path__ if package != top else getattr(spec, "submodule_search_locations", None)
        if not places:
            raise ModuleNotFoundError(f"No module named {top!r}")
        stub = types.ModuleType(package)
        stub.__path__ = [p + package.removeprefix(top).replace(".", "/") for p in places]
        sys.modules[package] = stub
    return importlib.import_module(name)
