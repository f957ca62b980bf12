"""The torch operators of a decoding step against loops in fp64."""

import pytest
import torch
from decode_cases import CASES

from rlkit.kernels import decode


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    CASES[name]("cpu", torch.float32, "reference")


def test_the_default_on_a_cpu_is_the_reference() -> None:
    x = torch.randn(2, 8)
    torch.testing.assert_close(decode.silu_mul(x), decode.silu_mul(x, impl="reference"), rtol=0, atol=0)


@pytest.mark.parametrize(("dim", "group", "fits"), [(64, 7, True), (128, 64, True), (80, 1, False), (64, 65, False)])
def test_shapes_that_fit(dim: int, group: int, fits: bool) -> None:
    assert decode.fits_kernels(torch.bfloat16, heads=2 * group, kv_heads=2, head_dim=dim) is fits
    assert not decode.fits_kernels(torch.float32, heads=2 * group, kv_heads=2, head_dim=dim)
