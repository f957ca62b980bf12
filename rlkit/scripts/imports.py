"""Start a run in one process on a CPU without torch's compiler and DTensor, which take seconds and 100 MB to import.

transformers imports `torch._dynamo` (with triton, sympy and the inductor) for decorators of functions that only a
compiled model runs, and `torch.distributed.tensor` for layouts that only several ranks have. PyTorch's optimizers and
custom operators import `torch._dynamo` to be skipped by it.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"  # transformers imports it; it needs nothing of the package


class _Deferred(ModuleType):
    """`torch._dynamo` before it is executed: decorators return the function. Any other attribute executes it."""

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        return (lambda fn: fn) if fn is None else fn

    assume_constant_result = allow_in_graph = disable

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        pass

    class eval_frame:
        """Checkpoints ask whether a module is compiled."""

        OptimizedModule: type = type("OptimizedModule", (), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _execute(self)
        return getattr(self, name)


class _Submodules:
    """An import finder: before a submodule of a deferred package is imported, the package is executed."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        package = sys.modules.get(_COMPILER)
        if name.startswith(f"{_COMPILER}.") and name != _ALONE and isinstance(package, _Deferred):
            _execute(package)
            return ModuleSpec(name, self) if name in sys.modules else None  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The submodule that the package has just imported."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It is executed already."""


def _execute(package: ModuleType) -> None:
    package.__class__ = ModuleType
    assert package.__spec__ is not None
    assert package.__spec__.loader is not None
    package.__spec__.loader.exec_module(package)


def defer_compiler() -> None:
    """Execute `torch._dynamo` when it is first used, and import no DTensor with transformers.

    For one process on a CPU. Call it before transformers' model classes are imported; after that, or in a process of
    `torchrun`, it does nothing.
    """
    if _COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules or "RANK" in os.environ:
        return
    import torch
    import transformers.utils.import_utils

    spec = find_spec(_COMPILER)
    assert spec is not None
    package = module_from_spec(spec)
    package.__class__ = _Deferred
    sys.modules[_COMPILER] = torch._dynamo = package
    sys.meta_path.insert(0, _Submodules())
    for module in (transformers.utils, transformers.utils.import_utils):
        module.is_torch_distributed_available = lambda: False  # type: ignore[attr-defined]
