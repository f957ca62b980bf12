"""linear_logp against fp64 truth by plain log_softmax: values, every gradient, and the ways a fused head can go wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.kernels.linear_logp import chunked, linear_logp

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"softcap": 2.0, "temperature": 0.7},
    {"bias": True, "softcap": 3.0},
]


@pytest.fixture(params=["kept", "tiled"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both regimes of the chunked path: logits kept for the backward, and many small tiles."""
    if request.param == "tiled":
        monkeypatch.setattr(chunked, "KEEP_BYTES", 0)
        monkeypatch.setattr(chunked, "ROW_BLOCK", 5)
        monkeypatch.setattr(chunked, "VOCAB_BLOCK", 16)
    return request.param


def problem(
    rows: int, vocab: int, dim: int, dtype: torch.dtype, bias: bool, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, dim), (vocab, dim), *([(vocab,)] if bias else [])]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    return tensors, torch.randint(vocab, (rows,), generator=g)


def plain(
    tensors: list[Tensor], targets: Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The materialised computation in the dtype of its inputs."""
    z = tensors[0] @ tensors[1].T
    if len(tensors) == 3:
        z = z + tensors[2]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def with_grads(
    run: Any, tensors: list[Tensor], dtype: torch.dtype, g_logp: Tensor, g_entropy: Tensor | None
) -> list[Tensor]:
    leaves = [x.to(dtype).detach().clone().requires_grad_() for x in tensors]
    logp, entropy = run(leaves)
    loss = (g_logp.to(logp.dtype) * logp).sum()
    if g_entropy is not None:
        loss = loss + (g_entropy.to(entropy.dtype) * entropy).sum()
    return [logp.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [True, False])
def test_three_way_oracle(mode: str, options: dict[str, Any], dtype: torch.dtype, entropy: bool) -> None:
    """Error against fp64 truth at most 1.5 times that of the materialised computation in the same dtype."""
    options = dict(options)
    tensors, targets = problem(23, 127, 32, dtype, options.pop("bias", False))
    g = torch.Generator().manual_seed(1)
    g_logp, g_entropy = torch.randn(23, generator=g), torch.randn(23, generator=g) if entropy else None

    def ours(x: list[Tensor]) -> Any:
        return linear_logp(x[0], x[1], targets, bias=x[2] if len(x) == 3 else None, **options)

    def materialised(x: list[Tensor]) -> Any:
        return plain(x, targets, **options)

    truth = with_grads(materialised, tensors, torch.float64, g_logp, g_entropy)
    same = with_grads(materialised, tensors, dtype, g_logp, g_entropy)
    got = with_grads(ours, tensors, dtype, g_logp, g_entropy)
    tiny = 1e-13 if dtype == torch.float64 else 4 * torch.finfo(torch.float32).eps
    for name, t, s, x in zip(["logp", "entropy", "hidden", "weight", "bias"], truth, same, got):
        size = t.abs().max()
        assert (x.double() - t).abs().max() <= 1.5 * (s.double() - t).abs().max() + tiny * size, name


def test_output_dtypes() -> None:
    for dtype, out in itertools.product([torch.bfloat16, torch.float16, torch.float32], [torch.float32]):
        tensors, targets = problem(3, 7, 4, dtype, False)
        assert {x.dtype for x in linear_logp(tensors[0], tensors[1], targets)} == {out}
