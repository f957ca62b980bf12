"""The kernels of a decoding step against loops in fp64."""

import pytest
import torch
from decode_cases import CASES

from rlkit.kernels.decode import triton


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    CASES[name]("cpu", torch.float32, "triton")


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_the_number_of_parts_changes_nothing(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "num_splits", lambda *_: splits)
    CASES["attention, grouped, 600 places"]("cpu", torch.float32, "triton")
