"""Problems of a given size on a device, their reference solution, and the tolerance of a kernel."""

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


def rounding(
    tensors: list[Tensor], targets: Tensor, upstream: Any, *, temperature: float = 1.0, softcap: float | None = None
) -> list[Tensor]:
    """What rounding may cost each output of `with_grads`, elementwise, to first order, for any order of summation.

    A sum of n terms costs u sqrt(n) sum|terms|, about three standard deviations of the random walk that the roundings
    of its partial sums make (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019); u is half an eps of the precision
    that computes. A bound that a machine's own order of summation sets would hold on that machine alone.
    """
    dtype = tensors[0].dtype
    u = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    u_stored = torch.finfo(dtype).eps / 2
    if _triton.INTERPRETED and dtype == torch.bfloat16:
        u_stored *= 2  # the interpreter cuts fp32 off to bf16 instead of rounding it
    x, *head = [t.double() for t in tensors]
    z, z_error = x, torch.zeros_like(x)
    if head:
        bias = head[1] if len(head) > 1 else torch.zeros_like(head[0][:, 0])
        z = x @ head[0].T + bias
        z_error = u * math.sqrt(x.shape[1] + 1) * (x.abs() @ head[0].abs().T + bias.abs())
    y = z if softcap is None else softcap * torch.tanh(z / softcap)
    slope = torch.ones_like(z) if softcap is None else 1 - (y / softcap) ** 2
    y_error = slope * z_error + (0 if softcap is None else 4 * u * y.abs())
    bend = 0.0 if softcap is None else 2 * y.abs() / softcap**2 * y_error  # of the slope itself
    y, y_error = y / temperature, (y_error + 2 * u * y.abs()) / temperature
    lse, logp, p = torch.logsumexp(y, 1, True), torch.log_softmax(y, 1), torch.softmax(y, 1)
    entropy = (p * logp.abs()).sum(1, True)
    root = math.sqrt(z.shape[1])
    lse_error = (p * y_error).sum(1, True) + u * (root + lse.abs() + entropy)
    logp_error = y_error + lse_error + 2 * u * logp.abs()
    entropy_error = (p * logp_error * (1 + logp.abs())).sum(1, True) + 2 * u * (root + 1) * entropy
    a = upstream[0].double()[:, None]
    b = torch.zeros_like(a) if upstream[1] is None else upstream[1].double()[:, None]
    d = a * (torch.nn.functional.one_hot(targets, z.shape[1]) - p) - b * p * (logp + entropy)
    d_error = a.abs() * p * logp_error + 4 * u * d.abs()
    d_error += (
        b.abs() * p * (logp_error * (1 + (logp + entropy).abs()) + entropy_error + 2 * u * (logp.abs() + entropy))
    )
    d_error = (slope * d_error + d.abs() * bend) / temperature + u_stored * d.abs() * slope / temperature
    d = (d * slope / temperature).abs()
    bounds = [logp_error.gather(1, targets[:, None])[:, 0], entropy_error[:, 0]]
    if not head:
        return [*bounds, d_error]
    columns = u * math.sqrt(len(x))
    grads = [
        (d_error + u * root * d) @ head[0].abs() + u_stored * d @ head[0].abs(),
        (d_error + columns * d).T @ x.abs() + u_stored * d.T @ x.abs(),
        (d_error + columns * d).sum(0) + u_stored * d.sum(0),
    ]
    return [*bounds, *grads[: len(tensors)]]


def assert_three_way(
    ours: Callable[..., Any], targets: Tensor, tensors: list[Tensor], upstream: Any, **options: Any
) -> None:
    """Error against fp64 at most 1.5 times that of the plain computation in the same dtype, plus `rounding`."""
    plain = truth(targets, **options)
    want = with_grads(plain, [x.double() for x in tensors], upstream)
    same, got = with_grads(plain, tensors, upstream), with_grads(ours, tensors, upstream)
    bounds = rounding(tensors, targets, upstream, **options)
    computed = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    for i, (w, s, x, bound) in enumerate(zip(want, same, got, bounds, strict=True)):
        excess = (x.double() - w).abs() - bound
        allowed = 1.5 * (s.double() - w).abs().max()
        assert excess.max() <= allowed, f"output {i}: {excess.max():.3g} beyond its rounding, {allowed:.3g} allowed"
        assert x.dtype == (computed if i < 2 else tensors[i - 2].dtype)
