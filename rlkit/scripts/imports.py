"""What makes the imports of a run fast: nothing here changes what a run computes.

A run in one process on a CPU starts without torch's compiler and DTensor, which take seconds and 100 MB to import.
transformers imports `torch._dynamo` (with triton, sympy and the inductor) for decorators of functions that only a
compiled model runs, and `torch.distributed.tensor` for layouts that only several ranks have. PyTorch's optimizers and
custom operators import `torch._dynamo` to be skipped by it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import rlkit
from rlkit.files import cache_folder, replace_file

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


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage in the block: imports and data make objects that stay, and a fifth of the time looks at them.

    If the block imports torch, later collections do not look at its objects either. In a process that had torch before,
    such as a notebook, they do: an earlier model may be among them.
    """
    enabled, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first and "torch" in sys.modules:
            gc.freeze()
        if enabled:
            gc.enable()


class _Names(SourceFileLoader):
    """Both finder and loader of `transformers.utils.import_utils`, whose `define_import_structure` it replaces."""

    def __init__(self) -> None:
        """Its name and path are set when it is found."""

    def find_spec(self, name: str, path: Any = None, *_: Any) -> ModuleSpec | None:
        if name != "transformers.utils.import_utils":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            super().__init__(spec.loader.name, spec.loader.path)
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if callable(define := getattr(module, "define_import_structure", None)):
            module.define_import_structure = partial(_remembered, define)  # type: ignore[attr-defined]


def remember_names() -> None:
    """Keep the names in transformers' model files for its next import, which reads all 1,100 files to find them: 0.2 s.

    They are in `$XDG_CACHE_HOME/rlkit` (default `~/.cache`), for this version and state of the folders of the models.
    Call it before transformers is imported; after that it does nothing.
    """
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, _Names())


def _remembered(define: Callable[..., Any], path: Any, prefix: str | None = None) -> Any:
    """`define(path, prefix)`, from the disk where the folders of all models were read before."""
    folder = os.path.dirname(path) if os.path.isfile(path) else str(path)
    if os.path.basename(folder) != "models":
        return define(path, prefix=prefix)
    with os.scandir(folder) as entries:  # a new file changes the time of its folder
        state = sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries)
    key = [rlkit.__version__, getattr(sys.modules["transformers"], "__version__", None), folder, *map(list, state)]
    file = cache_folder() / "transformers.json"
    start = f"{prefix}." if prefix else ""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_bytes())
        if kept["key"] == key:
            return _names(kept["found"], start)
    names = define(folder)
    found = [[sorted(needs), {n: sorted(x) for n, x in modules.items()}] for needs, modules in names.items()]
    if _names(found) != names:
        return define(path, prefix=prefix)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps({"key": key, "found": found}).encode())
    return _names(found, start)


def _names(found: list[Any], start: str = "") -> dict[frozenset[str], dict[str, set[str]]]:
    """{packages that are needed: {module: names}}, as transformers finds them in its files; `start` begins a module."""
    return {frozenset(needs): {start + n: set(x) for n, x in modules.items()} for needs, modules in found}
