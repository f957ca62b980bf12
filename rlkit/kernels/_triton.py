"""Selection of an implementation, and checks that Triton can run. Triton is not imported: it is optional and slow."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from rlkit._util.extras import MissingExtra

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEEDED = "impl='triton' needs triton: pip install triton"
INSTALLED = find_spec("triton") is not None  # installed with torch's CUDA wheels
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once, when kernels are first imported


def preferred(*tensors: Tensor | None) -> bool:
    """Whether to use Triton for these tensors by default: CUDA, not fp64, and Triton is installed."""
    present = [x for x in tensors if x is not None]
    return INSTALLED and all(x.is_cuda and x.dtype in DTYPES for x in present)


def choose(impl: str | None, names: tuple[str, ...], default: str, *tensors: Tensor | None) -> str:
    """`impl`, or `default` for None. Unknown names, and "triton" where it cannot run, raise."""
    if impl is not None and impl not in names:
        raise ValueError(f"impl must be one of {list(names)}, got {impl!r}")
    if impl == "triton":
        require(*tensors)
    return default if impl is None else impl


def require(*tensors: Tensor | None) -> None:
    """Raise if Triton kernels cannot run on these tensors; there is no silent fallback."""
    if not INSTALLED:
        raise MissingExtra(NEEDED)
    for x in tensors:
        if x is not None and x.is_floating_point() and x.dtype not in DTYPES:
            raise TypeError(f"impl='triton' takes fp32, bf16 and fp16, got {x.dtype}; use impl=None")
        if x is not None and not x.is_cuda and not (INTERPRETED and x.device.type == "cpu"):
            raise ValueError(
                f"impl='triton' needs CUDA tensors, got one on {x.device}; use impl=None, or set TRITON_INTERPRET=1 "
                "before the first import to run its kernels in Triton's interpreter on the CPU"
            )
