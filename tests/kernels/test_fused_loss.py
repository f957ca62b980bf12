"""fused_loss equals the same loss on linear_logp's output, in fewer products, for any per-token or sequence loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.kernels.linear_logp import chunked, fused_loss, linear_logp
from rlkit.types import LogProbs


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def clipped(out: LogProbs, old_logp: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    ratio = (out.logp - old_logp).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return weights * (-surrogate - 0.01 * out.entropy)


def no_entropy(out: LogProbs, old_logp: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    return -weights * advantages * (out.logp - old_logp).exp()


def only_entropy(out: LogProbs, old_logp: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    return weights * out.entropy.square()


def constant(out: LogProbs, old_logp: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    return weights * old_logp


def sequence_ratio(out: LogProbs, old_logp: Tensor, advantages: Tensor, weights: Tensor, cu_seqlens: Tensor) -> Tensor:
    lens = cu_seqlens.diff()
    total = torch.segment_reduce(out.logp - old_logp, "sum", offsets=cu_seqlens, initial=0)
    ratio = (total / lens.clamp(min=1)).exp().repeat_interleave(lens)
    return -weights * advantages * ratio


def problem(
    rows: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """[hidden, weight, bias], [old_logp, advantages, weights], targets."""
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((rows, 6), (vocab, 6), (vocab,))]
    targets = torch.randint(vocab, (rows,), generator=g)
    old = linear_logp(tensors[0], tensors[1], targets, bias=tensors[2]).logp + 0.3 * torch.randn(rows, generator=g)
    return tensors, [old, torch.randn(rows, generator=g), torch.rand(rows, generator=g)], targets


def both(
    tensors: list[Tensor],
    data: list[Tensor],
    targets: Tensor,
    loss_fn: Callable[..., Tensor],
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss, logp, entropy and gradients (upstream gradient 2.5): fused, and generic."""
    results = []
    for fuse in (True, False):
        hidden, weight, bias = leaves = [x.detach().clone().requires_grad_() for x in tensors]
        bounds = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        if fuse:
            loss, logp, entropy = fused_loss(
                hidden, weight, targets, bias=bias, loss_fn=loss_fn, row_data=data, mask=mask, **bounds, **options
            )
        else:
            out = linear_logp(hidden, weight, targets, bias=bias, mask=mask, **options)
            keep = torch.ones(len(targets), dtype=torch.bool) if mask is None else mask
            if bounds:
                bounds = {"cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.long), keep.cumsum(0)])[cu_seqlens]}
            loss = loss_fn(LogProbs(*(x[keep] for x in out)), *(x[keep] for x in data), **bounds).sum()
            logp, entropy = out
        grads = torch.autograd.grad(2.5 * loss, leaves, allow_unused=True) if loss.requires_grad else (None,) * 3
        grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves)]
        results.append([loss.detach(), logp.detach(), entropy.detach(), *grads])
    return results[0], results[1]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CPU_MIN_ROWS", 5)
    monkeypatch.setattr(chunked, "CPU_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunked, "CPU_TILE_BYTES", 5 * 16 * 8)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loss_fn", [clipped, no_entropy, only_entropy, constant])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "temperature": 0.7}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_equals_the_generic_path(loss_fn: Callable[..., Tensor], options: dict[str, Any], masked: bool) -> None:
    tensors, data, targets = problem(23, 37)
    data[2][::6] = 0.0  # no gradient: these rows leave inside a chunk
    mask = torch.arange(23) % 5 != 2 if masked else None
    if mask is not None:
        tensors[0][~mask] = math.nan
        data[0][~mask] = math.nan
    got, want = both(tensors, data, targets, loss_fn, mask, **options)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@given(
    rows=st.integers(0, 20),
    vocab=st.integers(1, 40),
    chunk=st.integers(1, 9),
    tile=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_any_shape(rows: int, vocab: int, chunk: int, tile: int, seed: int) -> None:
    tensors, data, targets = problem(rows, vocab, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CPU_MIN_ROWS", chunk)
        patch.setattr(chunked, "CPU_CHUNK_BYTES", 0)
        patch.setattr(chunked, "CPU_TILE_BYTES", tile * 8)
        got, want = both(tensors, data, targets, clipped)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_sequence_losses_with_whole_sequences(masked: bool) -> None:
    """Chunks end where sequences end; one sequence longer than a chunk, two empty ones, and masked tokens."""
    tensors, data, targets = problem(23, 37)
    cu = torch.tensor([0, 3, 3, 12, 14, 15, 23, 23])
    mask = torch.arange(23) % 5 != 2 if masked else None
    got, want = both(tensors, data, targets, sequence_ratio, mask, cu)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cu", [[0, 0], [0, 0, 9], [0, 9, 9], [0, 0, 9, 9, 17], [0, 4, 4, 13]])
@pytest.mark.usefixtures("small_chunks", "poisoned")
def test_empty_sequences_beside_one_longer_than_a_chunk(cu: list[int]) -> None:
    """A chunk of empty sequences alone has no gradient to write."""
    tensors, data, targets = problem(cu[-1], 37)
    got, want = both(tensors, data, targets, sequence_ratio, None, torch.tensor(cu))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_chunks")
def test_low_precision_sums_once(dtype: torch.dtype) -> None:
    """The weight's gradient is rounded once, however many chunks it is summed over (Liger#1391)."""
    tensors, data, targets = problem(200, 19, dtype=dtype)
    got, _ = both(tensors, data, targets, clipped)
    truth, _ = both([x.double() for x in tensors], data, targets, clipped)
    eps = torch.finfo(dtype).eps
    for x, y in zip(got, truth):
        bound = (eps if x.dtype == dtype else 1e-6) * y.abs() + 3e-6 * y.abs().max() + 1e-6
        assert ((x.double() - y).abs() <= bound).all()
    assert [x.dtype for x in got] == [torch.float32] * 3 + [dtype] * 3


class Sized(TorchDispatchMode):
    """Dtypes of the tensors with this shape that any operation made."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.dtypes = shape, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.shape == self.shape:
                self.dtypes.add(x.dtype)
        return out


@pytest.mark.parametrize("rows", [5, 11])
@pytest.mark.usefixtures("small_chunks")
def test_one_chunk_makes_the_weights_gradient_in_its_dtype(rows: int) -> None:
    """Several sum it in fp32."""
    tensors, data, targets = problem(rows, 40, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors[:2]]
    with Sized(leaves[1].shape) as sized:
        fused_loss(*leaves, targets, loss_fn=clipped, row_data=data).loss.backward()
    assert sized.dtypes == ({torch.bfloat16} if rows == 5 else {torch.bfloat16, torch.float32})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 5, 17])
@pytest.mark.parametrize("alive", ["all", "none", "the last", "the first"])
@pytest.mark.usefixtures("small_chunks", "poisoned")
def test_the_first_chunk_with_a_gradient_writes_and_the_others_add(dtype: torch.dtype, rows: int, alive: str) -> None:
    """Whichever chunk that is, or none: old content of the memory never reaches a gradient."""
    tensors, data, targets = problem(rows, 37, dtype=dtype)
    kept = {"all": range(rows), "none": (), "the last": range(rows)[-1:], "the first": range(rows)[:1]}[alive]
    data[2][[i for i in range(rows) if i not in kept]] = 0.0
    got, want = both(tensors, data, targets, clipped)
    eps = max(torch.finfo(dtype).eps, 1e-10)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=4 * eps * max(1.0, float(y.abs().max()) if rows else 0.0))
    assert alive == "none" or not rows or got[4].abs().max() > 0


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.usefixtures("small_chunks", "poisoned")
def test_one_frozen_tensor(frozen: int) -> None:
    tensors, data, targets = problem(17, 37)
    leaves = [x.requires_grad_(i != frozen) for i, x in enumerate(tensors)]
    loss = fused_loss(*leaves[:2], targets, bias=leaves[2], loss_fn=clipped, row_data=data).loss
    (2.5 * loss).backward()
    _, want = both([x.detach() for x in tensors], data, targets, clipped)
    for i, (x, y) in enumerate(zip(leaves, want[3:])):
        if i == frozen:
            assert x.grad is None
        else:
            torch.testing.assert_close(x.grad, y, rtol=1e-11, atol=1e-11)


def test_a_weight_of_less_precision_than_the_sums() -> None:
    """fp64 hidden states and an fp32 weight: its gradient is the fp64 sum, rounded once."""
    (hidden, weight, _), data, targets = problem(9, 12)
    single = weight.float().requires_grad_()
    fused_loss(hidden, single, targets, loss_fn=clipped, row_data=data).loss.backward()
    exact = single.detach().double().requires_grad_()
    fused_loss(hidden, exact, targets, loss_fn=clipped, row_data=data).loss.backward()
    assert single.grad is not None
    assert exact.grad is not None
    assert torch.equal(single.grad, exact.grad.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_upstream_gradient_is_not_rounded_itself(dtype: torch.dtype) -> None:
    """1 / 3 in bf16 is off by 0.2%; the product of the stored gradient and 1 / 3 is rounded once."""
    (hidden, weight, bias), data, targets = problem(9, 12, dtype=dtype)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    grads = []
    for upstream in (1.0, 1 / 3):
        loss = fused_loss(hidden, weight, targets, bias=bias, loss_fn=clipped, row_data=data).loss
        grads.append(torch.autograd.grad(upstream * loss, leaves))
    for one, third in zip(*grads):
        torch.testing.assert_close(third.double(), one.double() / 3, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-7)
        assert dtype == torch.float16 or torch.equal(third, (one.double() / 3).to(dtype))


class Products(TorchDispatchMode):
    """Multiplications in matrix products, counted here: torch's counter ignores the in-place ones."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            self.count += left.numel() * right.shape[1]
        return func(*args, **(kwargs or {}))


def products(run: Callable[[], Any]) -> int:
    with Products() as counter:
        run()
    return counter.count


@pytest.mark.usefixtures("small_chunks")
def test_three_products_and_fewer_for_rows_that_leave() -> None:
    (hidden, weight, _), data, targets = problem(40, 50, dtype=torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    one = 40 * 50 * 6

    def run(mask: Tensor | None = None, weights: Tensor = data[2]) -> int:
        row_data = (data[0], data[1], weights)
        return products(
            lambda: fused_loss(
                hidden, weight, targets, loss_fn=no_entropy, row_data=row_data, mask=mask
            ).loss.backward()
        )

    half = torch.arange(40) % 2 == 0
    assert run() == 3 * one
    assert run(mask=half) == 3 * one // 2
    assert run(weights=torch.where(half, data[2], 0.0)) == 2 * one


def test_frozen_tensors_and_no_grad() -> None:
    (hidden, weight, _), data, targets = problem(9, 12)
    out = fused_loss(hidden, weight.requires_grad_(), targets, loss_fn=clipped, row_data=data)
    out.loss.backward()
    assert hidden.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        quiet = fused_loss(hidden, weight, targets, loss_fn=clipped, row_data=data)
    assert torch.equal(quiet.loss, out.loss.detach())
    assert not quiet.loss.requires_grad
    with torch.inference_mode():
        assert torch.equal(fused_loss(hidden, weight, targets, loss_fn=clipped, row_data=data).loss, quiet.loss)


def test_gradients_are_returned_once() -> None:
    (hidden, weight, _), data, targets = problem(9, 12)
    loss = fused_loss(hidden, weight.requires_grad_(), targets, loss_fn=clipped, row_data=data).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already consumed"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    """Not a first one that looks like a constant to the second."""
    (hidden, weight, _), data, targets = problem(9, 12)
    loss = fused_loss(hidden, weight.requires_grad_(), targets, loss_fn=clipped, row_data=data).loss
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_a_loss_scale_brings_back_what_fp16_cannot_hold() -> None:
    """Gradients of 1e-9 are 0 in fp16; the loss scale that would lift them arrives after they were computed."""
    (hidden, weight, bias), _, targets = problem(9, 12, dtype=torch.float16)
    mask = torch.arange(9) != 4
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    loss = fused_loss(hidden, weight, targets, bias=bias, mask=mask, loss_fn=lambda out: 1e-9 * out.logp).loss
    got = torch.autograd.grad(2.0**26 * loss, leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = torch.autograd.grad(linear_logp(*exact[:2], targets, bias=exact[2], mask=mask).logp.sum(), exact)
    for x, y in zip(got, want):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x.double(), 2.0**26 * 1e-9 * y, rtol=2e-3, atol=1e-5)


def test_losses_that_couple_rows_are_refused() -> None:
    (hidden, weight, _), data, targets = problem(10, 12)

    def run(loss_fn: Callable[..., Tensor], **options: Any) -> Any:
        return fused_loss(hidden, weight, targets, loss_fn=loss_fn, row_data=data, **options)

    def ratio_of_all(out: LogProbs, old: Tensor, advantages: Tensor, w: Tensor) -> Tensor:
        return -w * advantages * (out.logp - old).mean().exp()

    def coupled_sequences(out: LogProbs, old: Tensor, advantages: Tensor, w: Tensor, cu_seqlens: Tensor) -> Tensor:
        return ratio_of_all(out, old, advantages, w)

    with pytest.raises(ValueError, match="pass cu_seqlens"):
        run(ratio_of_all)
    for running_sum in (lambda out, *_: out.logp.cumsum(0), lambda out, *_: out.logp.flip(0).cumsum(0).flip(0)):
        with pytest.raises(ValueError, match="does not depend on the other rows"):
            run(running_sum)
    with pytest.raises(ValueError, match="does not depend on the other sequences"):
        run(coupled_sequences, cu_seqlens=torch.tensor([0, 4, 10]))
    for other, found in ((lambda *a: clipped(*a).sum(), r"\[\]"), (lambda *a: None, "a NoneType")):
        with pytest.raises(ValueError, match=f"one loss per row, .*got {found}"):
            run(other)


def test_errors_name_the_argument() -> None:
    (hidden, weight, _), data, targets = problem(10, 12)
    with pytest.raises(ValueError, match=r"row_data\[1\] must have first axis T = 10"):
        fused_loss(hidden, weight, targets, loss_fn=clipped, row_data=(data[0], data[1][:3], data[2]))
    with pytest.raises(ValueError, match="cu_seqlens must end at the number of tokens"):
        fused_loss(hidden, weight, targets, loss_fn=clipped, row_data=data, cu_seqlens=torch.tensor([0, 3]))


def test_small_and_large_problems_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generic path keeps small problems; fused_loss must equal it in either regime."""
    tensors, data, targets = problem(16, 30)
    kept, _ = both(tensors, data, targets, clipped)
    monkeypatch.setattr(chunked, "KEEP_BYTES", 0)
    _, tiled = both(tensors, data, targets, clipped)
    for x, y in zip(kept, tiled):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
