"""Sends every public function through Triton's real launcher, for an sm_90 that is not there: all but the launch.

    python tests/kernels/launch_kernels.py

What `compile_kernels.py` does not see: that the arguments which the functions pass bind to the kernels' parameters, are
specialised (sizes of 1 become constants, odd ones lose their alignment) and compile so. Values are not looked at.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rlkit.kernels import _triton
from rlkit.kernels.linear_logp import linear_logp
from rlkit.kernels.linear_scan import linear_scan
from rlkit.kernels.logits_logp import logits_logp

LAUNCHES: Counter[str] = Counter()
RUN = JITFunction.run


class NoDevice:
    """A driver that reports its architecture only."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
    LAUNCHES[kernel.__name__] += 1
    return RUN(kernel, *args, **(options | {"warmup": True}))


def heads(dtype: torch.dtype, rows: int, vocab: int, **options: Any) -> None:
    h, w, b = (torch.randn(s).to(dtype).requires_grad_() for s in ((rows, 8), (vocab, 8), (vocab,)))
    targets, mask = torch.randint(vocab, (rows,)), torch.arange(rows) % 3 != 1
    linear_logp(h, w, targets, bias=b, mask=mask, **options).logp.sum().backward()
    out = linear_logp(h, w, targets, **options)
    (out.logp + out.entropy).sum().backward()
    logits = torch.randn(rows, vocab).to(dtype).requires_grad_()
    logits_logp(logits * 1, targets.int(), mask=mask, inplace_backward=True, **options).logp.sum().backward()
    logits_logp(logits, targets, **options).entropy.sum().backward()


def scans(num_tokens: int, reverse: bool) -> None:
    a, b = (torch.rand(num_tokens, requires_grad=True) for _ in range(2))
    cu = torch.tensor([0, 0, num_tokens], dtype=torch.int32)
    linear_scan(a, b, reverse=reverse).sum().backward()
    linear_scan(a, b, cu_seqlens=cu, x_end=torch.ones(2), reverse=reverse).sum().backward()


def main() -> None:
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    _triton.preferred = lambda *_: True
    _triton.require = lambda *_: None
    sizes = [(1, 1), (3, 127), (1030, 9000)]
    options: list[dict[str, Any]] = [{}, {"softcap": 30, "temperature": 0.7}]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for (rows, vocab), option in product(sizes, options):
            heads(dtype, rows, vocab, **option)
    for num_tokens, reverse in product((1, 5, 2048, 5000), (True, False)):
        scans(num_tokens, reverse)
    print(dict(LAUNCHES))


if __name__ == "__main__":
    main()
