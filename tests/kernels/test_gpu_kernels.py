"""Every kernel on a CUDA device, in every dtype, against fp64; tools/gpu/programme.py runs it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from decode_cases import CASES as DECODE_CASES
from oracles import Size, with_grads
from row_cases import DTYPES, ROW_CASES
from torch import Tensor

from rlkit.kernels.linear_logp import linear_log_kept_mass, linear_logp, which_impl
from rlkit.kernels.linear_scan import linear_scan
from rlkit.kernels.linear_scan import ops as scan_ops
from rlkit.kernels.linear_scan import which_impl as which_scan
from rlkit.kernels.logits_logp import logits_logp
from rlkit.kernels.logits_logp import which_impl as which_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: run tools/gpu/programme.py A on a machine that has one"
    ),
]
SIZES = {  # blocks of 1024 rows and 8192 columns that are not whole; odd rows; a vocabulary that no tile divides
    "small": Size("cuda", 130, 127, 64),
    "aligned": Size("cuda", 1300, 9008, 64),
    "odd": Size("cuda", 2500, 32_003, 512),
}


@pytest.fixture(autouse=True)
def _seeded_and_poisoned() -> Iterator[None]:
    """What the allocator hands out next holds NaN, from the pool of small blocks and from that of large ones.

    After an illegal access nothing works in a process any more: pytest-xdist then starts another for the next tests.
    """
    torch.manual_seed(0)
    if torch.cuda.is_available():
        held = [torch.full((n,), math.nan, device="cuda") for n in [1 << 17] * 64 + [1 << 27]]
        del held
    yield
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        os._exit(1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROW_CASES)
def test_row_case(name: str, size: str) -> None:
    ROW_CASES[name](SIZES[size])


def test_triton_is_what_runs() -> None:
    x = torch.ones(3, 4, device="cuda")
    assert which_impl(x, x) == which_logits(x) == which_scan(x[0]) == "triton"
    assert which_impl(x.double(), x.double()) == "chunked"


def test_more_rows_than_a_grid_axis_has() -> None:
    """70,000 rows (Liger-Kernel#1294), and more than 2^31 logits."""
    logits = torch.randn(70_000, 40_000, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(40_000, (70_000,), device="cuda")
    out = logits_logp(logits, targets)
    for rows in (slice(0, 50), slice(69_950, 70_000)):
        want = torch.log_softmax(logits[rows].double(), -1).gather(1, targets[rows, None])[:, 0]
        torch.testing.assert_close(out.logp[rows].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_forward_and_backward(dtype: torch.dtype) -> None:
    """Blocks and the weight's gradient, and neither [T, V] nor a second [V, D]."""
    (hidden, weight, _), targets = Size("cuda", 2048, 150_000, 1024).problem(dtype)
    weight = weight.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logp(hidden, weight, targets).logp.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before - weight.nbytes
    assert extra < 400 << 20
    assert extra < weight.nbytes


@pytest.mark.parametrize("ones", [False, True])
def test_a_mask_on_the_cpu_costs_no_wait(ones: bool) -> None:
    (hidden, weight, _), targets = SIZES["aligned"].problem(torch.bfloat16)
    mask = torch.arange(hidden.shape[0]) % 3 != 1
    mask = mask | ones
    run = lambda h, w, where: linear_logp(h, w, targets, mask=where)
    want = with_grads(lambda h, w: run(h, w, mask.cuda()), [hidden, weight], SIZES["aligned"].slopes())
    got = with_grads(lambda h, w: run(h, w, mask), [hidden, weight], SIZES["aligned"].slopes())
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(hidden, weight, mask)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_mass(dtype: torch.dtype) -> None:
    """Against a full sort in fp64; entries that bf16 rounds across the limit move it by their own probability."""
    (hidden, weight, bias), _ = Size("cuda", 300, 5000, 64).problem(dtype)
    got = linear_log_kept_mass(hidden, weight, bias=bias, top_p=0.8, temperature=0.9).exp().double()
    p = ((hidden.double() @ weight.double().T + bias.double()) / 0.9).softmax(-1).sort(-1, descending=True).values
    before = p.cumsum(-1) - p
    want = torch.where(before < 0.8, p, 0.0).sum(-1)
    edge = torch.where(before < 0.8, p, 1.0).amin(-1)
    assert ((got - want).abs() <= edge + 1e-5).all()
    assert ((got - want).abs() <= 1e-5).double().mean() > 0.9


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("lens", [[1], [2048], [2049], [5, 0, 4096, 1, 0], [1] * 3000, [2_500_000, 3, 500_000]])
def test_linear_scan(lens: list[int], reverse: bool) -> None:
    total = sum(lens)
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda")
    a = (torch.rand(total, device="cuda") * 0.999).requires_grad_()
    b, x_end = (
        torch.randn(total, device="cuda").requires_grad_(),
        torch.randn(len(lens), device="cuda").requires_grad_(),
    )
    got = linear_scan(a, b, cu_seqlens=cu, x_end=x_end, reverse=reverse)
    g = torch.randn(total, device="cuda")
    ours = [got, *torch.autograd.grad(got, (a, b, x_end), g)]
    leaves = [x.detach().cpu().double().requires_grad_() for x in (a, b, x_end)]
    want = linear_scan(*leaves[:2], cu_seqlens=cu.cpu(), x_end=leaves[2], reverse=reverse, impl="blocked")
    true = [want, *torch.autograd.grad(want, leaves, g.cpu().double())]
    for x, y in zip(ours, true, strict=True):
        torch.testing.assert_close(x.detach().cpu().double(), y.detach(), rtol=1e-4, atol=1e-4)
    again = linear_scan(a, b, cu_seqlens=cu, x_end=x_end, reverse=reverse)
    assert torch.equal(got, again)


@pytest.mark.parametrize("reverse", [True, False])
def test_a_nan_stays_in_its_segment(reverse: bool) -> None:
    lens = [3000, 3000, 3000]
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda")
    a, clean = torch.rand(9000, device="cuda"), torch.randn(9000, device="cuda")
    bad = clean.clone()
    bad[4500] = math.nan
    keep = torch.ones(9000, dtype=torch.bool, device="cuda")
    keep[3000:6000] = False
    runs = []
    for b in (bad, clean):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        x = linear_scan(*leaves, cu_seqlens=cu, reverse=reverse)
        runs.append((x, *torch.autograd.grad(x[keep].sum(), leaves)))
    assert runs[0][0].isnan().any()
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x[keep], y[keep])
    assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DECODE_CASES)
def test_decoding(name: str, dtype: torch.dtype) -> None:
    DECODE_CASES[name]("cuda", dtype, "triton")
    DECODE_CASES[name]("cuda", dtype, "reference")


def test_one_compiled_graph() -> None:
    size = Size("cuda", 30, 500, 64)
    (hidden, weight, _), targets = size.problem()
    a, b = torch.rand(100, device="cuda").requires_grad_(), torch.randn(100, device="cuda").requires_grad_()
    cu = torch.tensor([0, 30, 100], device="cuda")
    torch.library.opcheck(scan_ops.scan_op, (a, b, cu, None, False, "triton"))

    def step(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_logp(h, w, targets, temperature=1.3)
        traced = linear_scan(out.entropy.detach().sigmoid(), out.logp, reverse=False)
        return traced, logits_logp(h @ w.T, targets).entropy

    want = with_grads(step, [hidden, weight], size.slopes())
    for mode in (None, "reduce-overhead"):  # the second records CUDA graphs, around what asks the device
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(3):
            for x, y in zip(with_grads(compiled, [hidden, weight], size.slopes()), want, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one() -> None:
    for name in ("rows_without_upstream_gradient_leave", "inputs_that_are_not_in_line"):
        ROW_CASES[name](SIZES["small"]._replace(device="cuda:1"))
