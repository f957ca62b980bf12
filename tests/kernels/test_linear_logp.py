"""linear_logp against fp64 truth by plain log_softmax: values, all gradients, and known bugs of fused heads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import Size, assert_three_way, truth
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.kernels.linear_logp import chunked, linear_logp, ops, which_impl

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"softcap": 2.0, "temperature": 0.7},
    {"bias": True, "softcap": 3.0},
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def use_tiles(patch: pytest.MonkeyPatch, rows: int = 5, columns: int = 16) -> None:
    """Nothing kept, and many small tiles."""
    patch.setattr(chunked, "KEEP_BYTES", 0)
    patch.setattr(chunked, "TILE_ROWS", rows)
    patch.setattr(chunked, "CPU_TILE_BYTES", rows * columns * 4)


@pytest.fixture(params=["kept", "tiled"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiled":
        use_tiles(monkeypatch)
    return request.param


def problem(
    rows: int, vocab: int, dim: int, *, dtype: torch.dtype = torch.float64, bias: bool = False, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """[hidden, weight(, bias)] and targets."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(rows, dim), (vocab, dim), *([(vocab,)] if bias else [])]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    return tensors, torch.randint(vocab, (rows,), generator=g)


def ours(targets: Tensor, **options: Any) -> Callable[..., Any]:
    return lambda hidden, weight, bias=None: linear_logp(hidden, weight, targets, bias=bias, **options)


def with_grads(
    run: Callable[..., Any], tensors: list[Tensor], dtype: torch.dtype, g_logp: Tensor, g_entropy: Tensor | None
) -> dict[str, Tensor]:
    """Values and gradients for given upstream gradients."""
    leaves = [x.to(dtype).detach().clone().requires_grad_() for x in tensors]
    logp, entropy = run(*leaves)
    loss = (g_logp.to(logp.dtype) * logp).sum()
    if g_entropy is not None:
        loss = loss + (g_entropy.to(entropy.dtype) * entropy).sum()
    grads = dict(zip(["hidden", "weight", "bias"], torch.autograd.grad(loss, leaves)))
    return {"logp": logp.detach(), "entropy": entropy.detach(), **grads}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [True, False])
def test_three_way_oracle(mode: str, options: dict[str, Any], dtype: torch.dtype, entropy: bool) -> None:
    options = dict(options)
    tensors, targets = problem(23, 127, 32, dtype=dtype, bias=options.pop("bias", False))
    assert_three_way(ours(targets, **options), targets, tensors, Size("cpu", 23, 1, 1).slopes(entropy), **options)


@pytest.mark.parametrize("offset", [1000.0, -1000.0])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_large_common_offset_and_peaked_rows(mode: str, offset: float, scale: float) -> None:
    """A hidden unit that adds a constant to every logit (pytorch#195829); rows with nearly all mass on one entry."""
    (hidden, weight), targets = problem(20, 90, 16, dtype=torch.float32)
    hidden, weight = (
        torch.cat([hidden * scale, torch.full((20, 1), offset)], 1),
        torch.cat([weight, torch.ones(90, 1)], 1),
    )
    targets = torch.where(torch.arange(20) % 2 == 0, (hidden @ weight.T).argmax(1), targets)
    assert_three_way(ours(targets), targets, [hidden, weight], Size("cpu", 20, 1, 1).slopes())


def test_a_common_offset_costs_no_digits(mode: str) -> None:
    """logp and entropy with every logit moved by 1000 differ only by the rounding of the logits themselves (6e-5)."""
    (hidden, weight), targets = problem(50, 64, 8, dtype=torch.float32)
    quarter = [(x * 4).round() / 4 for x in (hidden, weight)]  # logits exact in fp32, with and without the offset
    plain = linear_logp(*quarter, targets)
    moved = linear_logp(*quarter, targets, bias=torch.full((64,), 1000.0))
    for a, b in zip(plain, moved):
        assert (a - b).abs().max() < 2e-6


@given(
    rows=st.integers(0, 19),
    vocab=st.integers(1, 70),
    dim=st.integers(1, 9),
    tile=st.tuples(st.integers(1, 7), st.integers(1, 20)),
    kept=st.booleans(),
    seed=st.integers(0, 99),
    present=st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_any_shape(
    rows: int, vocab: int, dim: int, tile: tuple[int, int], kept: bool, seed: int, present: float | None
) -> None:
    """All sizes of problems and tiles; masked rows give 0 and no gradient."""
    tensors, targets = problem(rows, vocab, dim, bias=True, seed=seed)
    g = torch.Generator().manual_seed(seed)
    upstream = torch.randn(2, rows, generator=g, dtype=torch.float64)
    mask = None if present is None else torch.rand(rows, generator=g) < present
    factor = torch.ones(rows, dtype=torch.float64) if mask is None else mask.double()

    def masked(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(factor * x for x in truth(targets)(*leaves))

    with pytest.MonkeyPatch.context() as patch:
        if not kept:
            use_tiles(patch, *tile)
        got = with_grads(ours(targets, mask=mask), tensors, torch.float64, *upstream)
    want = with_grads(masked, tensors, torch.float64, *upstream)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_by_finite_differences(mode: str, options: dict[str, Any], impl: str) -> None:
    options = dict(options)
    tensors, targets = problem(6, 19, 3, bias=options.pop("bias", False))
    mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    leaves = [x.requires_grad_() for x in tensors]
    torch.autograd.gradcheck(ours(targets, mask=mask, impl=impl, **options), leaves)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_masked_rows_never_enter(mode: str, impl: str) -> None:
    """NaN and foreign ids at masked rows; the rest has the bits of a run without those rows."""
    tensors, targets = problem(12, 40, 8, dtype=torch.float32)
    mask = torch.arange(12) % 3 != 1
    poisoned = tensors[0].clone()
    poisoned[~mask] = math.nan
    g_logp, g_entropy = torch.randn(2, 12)
    foreign = torch.where(mask, targets, -100)
    got = with_grads(ours(foreign, mask=mask, impl=impl), [poisoned, tensors[1]], torch.float32, g_logp, g_entropy)
    alone = with_grads(
        ours(targets[mask], impl=impl), [tensors[0][mask], tensors[1]], torch.float32, g_logp[mask], g_entropy[mask]
    )
    for name in ("logp", "entropy", "hidden"):
        assert torch.equal(got[name][mask], alone[name])
        assert (got[name][~mask] == 0).all()
    assert torch.equal(got["weight"], alone["weight"])


def test_rows_without_upstream_gradient_leave_before_the_backward(mode: str) -> None:
    """A row with g_logp = g_entropy = 0 is not multiplied by 0: NaN in it reaches no gradient."""
    tensors, targets = problem(12, 40, 8, dtype=torch.float32)
    dead = torch.arange(12) % 4 == 2
    mask = torch.arange(12) != 5
    poisoned = tensors[0].clone()
    poisoned[dead] = math.nan
    g_logp, g_entropy = torch.randn(2, 12)
    g_logp[dead], g_entropy[dead] = 0.0, 0.0
    g_logp[0], g_entropy[1] = 0.0, 0.0  # half a gradient keeps a row
    got = with_grads(ours(targets, mask=mask), [poisoned, tensors[1]], torch.float32, g_logp, g_entropy)
    rest = mask & ~dead
    alone = with_grads(
        ours(targets[rest]), [tensors[0][rest], tensors[1]], torch.float32, g_logp[rest], g_entropy[rest]
    )
    torch.testing.assert_close(got["weight"], alone["weight"])
    torch.testing.assert_close(got["hidden"][rest], alone["hidden"])
    assert (got["hidden"][dead] == 0).all()


def test_a_nan_in_a_live_row_is_seen(mode: str) -> None:
    tensors, targets = problem(12, 40, 8, dtype=torch.float32)
    tensors[0][4] = math.nan
    for x in linear_logp(*tensors, targets):
        assert x.isnan().nonzero().tolist() == [[4]]


def test_no_gradient_at_all(mode: str) -> None:
    tensors, targets = problem(4, 9, 3)
    got = with_grads(ours(targets), tensors, torch.float64, torch.zeros(4), torch.zeros(4))
    assert (got["hidden"] == 0).all()
    assert (got["weight"] == 0).all()


def test_split_rows_add_up(mode: str) -> None:
    """Micro-batches: values are those of the whole, gradients of the weight add up."""
    tensors, targets = problem(30, 50, 8)
    g_logp, g_entropy = torch.randn(2, 30, dtype=torch.float64)
    whole = with_grads(ours(targets), tensors, torch.float64, g_logp, g_entropy)
    parts = [
        with_grads(ours(targets[p]), [tensors[0][p], tensors[1]], torch.float64, g_logp[p], g_entropy[p])
        for p in (slice(0, 7), slice(7, 8), slice(8, 30))
    ]
    for name in ("logp", "entropy", "hidden"):
        torch.testing.assert_close(torch.cat([p[name] for p in parts]), whole[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(p["weight"] for p in parts), whole["weight"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab", [1, 2, 127, 32003])
def test_vocabulary_of_any_size(mode: str, vocab: int) -> None:
    tensors, targets = problem(3, vocab, 4, dtype=torch.float32)
    if mode == "tiled" and vocab > 1000:
        targets[0] = vocab - 1
    assert_three_way(ours(targets), targets, tensors, Size("cpu", 3, 1, 1).slopes())


@pytest.mark.parametrize("digits", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("vocab", [127, 32003])
def test_the_oracle_sees_one_tensor_in_half_precision(digits: torch.dtype, which: int, vocab: int) -> None:
    """The bound on rounding is not so wide that fp16 (as precise as tf32) or bf16 products pass for fp32."""
    tensors, targets = problem(3, vocab, 4, dtype=torch.float32)
    coarse = lambda *x: ours(targets)(*(t.to(digits).float() if i == which else t for i, t in enumerate(x)))
    with pytest.raises(AssertionError, match="beyond its rounding"):
        assert_three_way(coarse, targets, tensors, Size("cpu", 3, 1, 1).slopes())


def test_one_entry_has_no_choice(mode: str) -> None:
    (hidden, weight), targets = problem(5, 1, 4, dtype=torch.float32)
    out = linear_logp(hidden, weight, targets)
    assert (out.logp == 0).all()
    assert (out.entropy == 0).all()


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_banned_and_very_negative_logits(mode: str, impl: str) -> None:
    """A bias of -inf removes an entry exactly; -1e4 everywhere changes nothing (SkyRL#2141 had NaN there)."""
    tensors, targets = problem(8, 40, 4, dtype=torch.float32, bias=True)
    banned = torch.zeros(40, dtype=torch.bool)
    banned[[3, 17, 39]] = True
    kept_ids = (~banned).nonzero()[:, 0]
    targets = kept_ids[targets % len(kept_ids)]
    low = torch.where(banned, -math.inf, tensors[2] - 1e4)
    g_logp, g_entropy = torch.randn(2, 8)
    got = with_grads(ours(targets, impl=impl), [tensors[0], tensors[1], low], torch.float32, g_logp, g_entropy)
    short = [tensors[0].double(), tensors[1][~banned].double(), low[~banned].double()]
    want = with_grads(truth(torch.searchsorted(kept_ids, targets)), short, torch.float64, g_logp, g_entropy)
    for name in ("logp", "entropy", "hidden"):
        assert (got[name].double() - want[name]).abs().max() < 5e-3, name
    assert (got["weight"][banned] == 0).all()
    assert (got["weight"][~banned].double() - want["weight"]).abs().max() < 5e-3


def test_frozen_tensors_get_no_gradient(mode: str) -> None:
    for wants in ((True, False), (False, True)):
        tensors, targets = problem(7, 20, 4)
        leaves = [x.requires_grad_(w) for x, w in zip(tensors, wants)]
        out = linear_logp(*leaves, targets)
        (out.logp.sum() + out.entropy.sum()).backward()
        both = with_grads(ours(targets), tensors, torch.float64, torch.ones(7), torch.ones(7))
        for x, wanted, name in zip(leaves, wants, ("hidden", "weight")):
            assert (x.grad is not None) == wanted
            if x.grad is not None:
                assert torch.equal(x.grad, both[name])


class Largest(TorchDispatchMode):
    """Number of elements of the largest new tensor that any operation made, inside our operators too."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.numel = 0
        self.given = {x.untyped_storage().data_ptr() for x in given}
        own = (ops.logp_op, ops.partials_op, ops.backward_op)
        self.bodies = {f._opoverload.name(): f._init_fn for f in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in self.bodies:
            with self:
                return self.bodies[func.name()](*args)
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.given:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_the_logits_are_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 32, 64)
    (hidden, weight), targets = problem(256, 1000, 16, dtype=torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with Largest(hidden, weight) as largest:
        out = linear_logp(hidden, weight, targets)
        (out.logp.sum() + out.entropy.sum()).backward()
    assert largest.numel == weight.numel()  # the gradient of the weight
    with Largest(hidden, weight) as plain:
        truth(targets)(hidden, weight)
    assert plain.numel == 256 * 1000


def test_a_frozen_head_allocates_nothing_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, 32, 64)
    (hidden, weight), targets = problem(64, 1000, 16, dtype=torch.float32)
    with Largest(hidden, weight) as largest:
        linear_logp(hidden.requires_grad_(), weight, targets).logp.sum().backward()
    assert largest.numel <= 3 * 32 * 64  # the tile buffers


@pytest.mark.slow
def test_operators_pass_opcheck(mode: str) -> None:
    for options in ({}, {"bias": True}):
        tensors, targets = problem(6, 20, 3, dtype=torch.float32, **options)
        leaves = [x.requires_grad_() for x in tensors]
        bias = leaves[2] if options else None
        mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool() if options else None
        softcap = 2.0 if options else None
        args = (*leaves[:2], targets, bias, mask, 0.9, softcap)
        torch.library.opcheck(ops.logp_op, (*args, mode == "kept", "chunked"))
        detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        torch.library.opcheck(ops.partials_op, (*detached, 0, "chunked"))
        stats = ops.partials_op(*detached, 0, "chunked")
        torch.library.opcheck(ops.shard_op, (*args, 0, stats, "chunked"))


def test_compiles_to_one_graph(mode: str) -> None:
    tensors, targets = problem(9, 33, 4, bias=True)
    g_logp, g_entropy = torch.randn(2, 9, dtype=torch.float64)
    mask = torch.arange(9) != 4
    run = ours(targets, mask=mask, temperature=1.3)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = with_grads(compiled, tensors, torch.float64, g_logp, g_entropy)
    want = with_grads(run, tensors, torch.float64, g_logp, g_entropy)
    for name in want:
        assert torch.equal(got[name], want[name])


def test_same_bits_twice_and_whatever_else_is_asked_for(mode: str) -> None:
    """Old log-probs recomputed without a gradient are those of the training pass: a ratio of exactly 1."""
    (hidden, weight), targets = problem(40, 60, 8, dtype=torch.float32)
    with torch.no_grad():
        old = linear_logp(hidden, weight, targets)
    now = linear_logp(hidden.requires_grad_(), weight.requires_grad_(), targets)
    assert torch.equal(old.logp, now.logp)
    assert torch.equal(old.entropy, now.entropy)


def test_dtypes(mode: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        tensors, targets = problem(3, 7, 4, dtype=dtype, bias=True)
        got = with_grads(ours(targets.int()), tensors, dtype, torch.ones(3), None)
        computed = torch.float64 if dtype == torch.float64 else torch.float32
        assert [x.dtype for x in got.values()] == [computed, computed, dtype, dtype, dtype]
    tensors, targets = problem(3, 7, 4, dtype=torch.float32)
    mixed = [tensors[0].bfloat16().requires_grad_(), tensors[1].requires_grad_()]
    linear_logp(*mixed, targets).logp.sum().backward()
    assert [x.grad.dtype for x in mixed if x.grad is not None] == [torch.bfloat16, torch.float32]
    for impl in ("chunked", "reference"):  # one tensor in fp64 is enough
        assert linear_logp(*tensors, targets, bias=tensors[1][:, 0].double(), impl=impl).logp.dtype == torch.float64


def test_errors_name_the_argument() -> None:
    (hidden, weight), targets = problem(3, 7, 4)
    assert which_impl(hidden, weight) == "chunked"
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("flatten batch dimensions", lambda: linear_logp(hidden[None], weight, targets)),
        (r"hidden must be \[T, D\] and weight \[V, D\]", lambda: linear_logp(hidden, weight[:, 1:], targets)),
        (r"targets must be integers of shape \[3\]", lambda: linear_logp(hidden, weight, targets[:2])),
        (r"targets must be in \[0, 7\)", lambda: linear_logp(hidden, weight, targets * 0 + 7)),
        (r"bias must have shape \[7\]", lambda: linear_logp(hidden, weight, targets, bias=hidden[:, 0])),
        ("temperature must be > 0", lambda: linear_logp(hidden, weight, targets, temperature=0.0)),
        ("softcap must be > 0", lambda: linear_logp(hidden, weight, targets, softcap=0.0)),
        ("impl must be one of", lambda: linear_logp(hidden, weight, targets, impl="fast")),
    ]
    for match, call in cases:
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="mask must be bool"):
        linear_logp(hidden, weight, targets, mask=torch.ones(3))


def test_autocast_changes_nothing(mode: str) -> None:
    """The dtypes of the inputs decide, forward and backward."""
    tensors, targets = problem(30, 50, 8, dtype=torch.float32, bias=True)
    upstream = tuple(torch.randn(2, 30))
    want = with_grads(ours(targets), tensors, torch.float32, *upstream)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_grads(ours(targets), tensors, torch.float32, *upstream)
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("pair", [(True, True), (False, True), (False, False)])
def test_full_sums_leave_torchs_settings_as_they_were(pair: tuple[bool, bool]) -> None:
    """Each is (16-bit sums, split-K): only the first is switched off, also after an error."""
    names = [f"allow_{x}_reduced_precision_reduction" for x in ("bf16", "fp16")]
    read = lambda: [tuple(getattr(torch.backends.cuda.matmul, n + end) for end in ("", "_split_k")) for n in names]
    try:
        setattr(torch.backends.cuda.matmul, names[0], pair)
        before = read()
        with chunked.full_sums():
            assert read() == [(False, pair[1]), (False, True)]
        assert read() == before == [pair, (True, True)]
        with contextlib.suppress(KeyError), chunked.full_sums():
            raise KeyError
        assert read() == before
    finally:
        setattr(torch.backends.cuda.matmul, names[0], True)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_a_mask_on_the_cpu_for_tensors_that_are_elsewhere(impl: str) -> None:
    """On a device without values; `test_gpu_kernels.py` compares those."""
    elsewhere = torch.device("meta")
    hidden, weight = (torch.empty(n, 4, device=elsewhere, requires_grad=True) for n in (6, 9))
    targets, mask = torch.empty(6, dtype=torch.long, device=elsewhere), torch.arange(6) % 2 == 0
    out = linear_logp(hidden, weight, targets, mask=mask, impl=impl)
    (out.logp + out.entropy).sum().backward()
    assert hidden.grad is not None
    assert out.logp.device == hidden.grad.device == elsewhere
    assert out.logp.shape == (6,)
    with pytest.raises(ValueError, match=r"mask must have the shape of rows_of_hidden, \[6\], got \[5\]"):
        linear_logp(hidden, weight, targets, mask=mask[:5], impl=impl)
    here = [torch.empty(x.shape, dtype=x.dtype) for x in (hidden, weight, targets)]
    with pytest.raises(ValueError, match="mask must be on the device of rows_of_hidden, cpu, got meta"):
        linear_logp(*here, mask=mask.to(elsewhere), impl=impl)


def test_operators_that_ask_the_device_stay_out_of_cuda_graphs() -> None:
    """`mode="reduce-overhead"` records CUDA graphs; a device sync inside one is an error."""
    for name in ("linear_logp", "linear_logp_partials", "linear_logp_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.rlkit, name).default.tags
