"""The Triton kernels on CPU tensors. `tests/kernels/test_interpreter.py` runs this folder in a process of its own."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def _seeded_and_poisoned() -> Iterator[None]:
    """Fresh memory holds NaN: a kernel that leaves an output unwritten, or reads one, is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def _language_patched_once() -> Iterator[None]:
    """Within a kernel: the interpreter looks through all of triton.language at every call of a device function."""
    from triton import language
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(fn: Callable[..., Any]) -> Any:
        key = tuple(any(x is module for x in fn.__globals__.values()) for module in (language, language.core))
        if key in patched:
            return None
        patched.add(key)
        scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (restore(), patched.discard(key))  # only kernels do
        return scope

    interpreter._patch_lang = once
    yield
    interpreter._patch_lang = patch
