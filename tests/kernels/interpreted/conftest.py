"""The Triton kernels on CPU tensors. `tests/kernels/test_interpreter.py` runs this folder in a process of its own."""

import os
from collections.abc import Iterator

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
