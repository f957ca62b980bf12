"""Problems of a size on a device, their plain solution, and the rule that says when a kernel is good enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.kernels import _triton

Upstream = tuple[Tensor, Tensor | None]


class Size(NamedTuple):
    """Where a problem lives and how large it is."""

    device: str
    rows: int
    vocab: int
    dim: int

    def problem(self, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> tuple[list[Tensor], Tensor]:
        """[hidden, weight, bias] (in `dtype`) and targets."""
        g = torch.Generator().manual_seed(seed)
        shapes = [(self.rows, self.dim), (self.vocab, self.dim), (self.vocab,)]
        tensors = [torch.randn(s, generator=g).to(self.device) for s in shapes]
        tensors[1] *= 3 / math.sqrt(self.dim)
        return [x.to(dtype) for x in tensors], torch.randint(self.vocab, (self.rows,), generator=g).to(self.device)

    def slopes(self, entropy: bool = True) -> Upstream:
        """Upstream gradients of logp and entropy."""
        g = torch.randn(2, self.rows, generator=torch.Generator().manual_seed(1)).to(self.device)
        return g[0], g[1] if entropy else None

    def every(self, n: int, at: int) -> Tensor:
        """True for one row in `n`."""
        return torch.arange(self.rows, device=self.device) % n == at


def truth(targets: Tensor, temperature: float = 1.0, softcap: float | None = None) -> Callable[..., Any]:
    """The plain computation, in the dtype of its inputs: from logits, or from hidden, weight and bias."""

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z = x if weight is None else x @ weight.T
        z = z if bias is None else z + bias
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        log_p = torch.log_softmax(z / temperature, -1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)

    return run


def with_grads(run: Callable[..., Any], tensors: list[Tensor], upstream: Any) -> list[Tensor]:
    """Both values, and the gradients of the tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    logp, entropy = run(*[x * 1 for x in leaves])
    loss = sum((g.to(y.dtype) * y).sum() for g, y in zip(upstream, (logp, entropy)) if g is not None)
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def assert_three_way(
    ours: Callable[..., Any], plain: Callable[..., Any], tensors: list[Tensor], upstream: Any, *, noise: float = 0.0
) -> None:
    """Error against fp64 at most 1.5 times that of the plain computation in the same dtype; `noise`, relative, is for
    problems so small that which of two rounded logits is luckier decides."""
    want = with_grads(plain, [x.double() for x in tensors], upstream)
    same, got = with_grads(plain, tensors, upstream), with_grads(ours, tensors, upstream)
    tiny = 16 * torch.finfo(torch.float32).eps + noise
    if _triton.INTERPRETED and tensors[0].dtype == torch.bfloat16:
        tiny = torch.finfo(torch.bfloat16).eps  # the interpreter cuts fp32 off to bf16 instead of rounding it
    for i, (w, s, x) in enumerate(zip(want, same, got, strict=True)):
        error, allowed = (x.double() - w).abs().max(), 1.5 * (s.double() - w).abs().max() + tiny * w.abs().max()
        assert error <= allowed, f"output {i}: {error:.3g} > {allowed:.3g}"
        assert x.dtype == (torch.float32 if i < 2 else tensors[i - 2].dtype)
