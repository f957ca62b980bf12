"""Numerical laws: precision, finiteness, derivatives, purity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkit.testing.cases import Case, cast, replaced
from rlkit.testing.law import Law, law, own_cases, same
from rlkit.testing.strategies import cases
from rlkit.testing.subject import Outcome, Subject, random_upstream, run, tensors

__all__ = ["detached", "differentiable", "dtypes", "finite", "gradcheck", "no_gradient_by", "pure"]


@law()
def dtypes(s: Subject, case: Case) -> None:
    """bf16 and fp16 are computed and returned in fp32, fp64 stays fp64; int32 and int64 cu_seqlens are equivalent."""
    has_floats = any(x.is_floating_point() for x in case.streams.values())
    case = _off_the_grid(s, case)  # on it, sums and differences are exact in bf16
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        want = torch.float64 if dtype == torch.float64 else torch.float32
        low, wide = cast(case, dtype), cast(cast(case, dtype), want)
        for x, y in zip(tensors(s(low)), tensors(s(wide)), strict=True):
            if has_floats and s.axis != "metrics" and x.is_floating_point() and x.dtype != want:
                raise AssertionError(f"{_name(dtype)} inputs give a {_name(x.dtype)} result, expected {_name(want)}")
            same(x, y, f"the result for {_name(dtype)} inputs")
    other = torch.int32 if case.cu_seqlens.dtype == torch.int64 else torch.int64
    for x, y in zip(tensors(s(case._replace(cu_seqlens=case.cu_seqlens.to(other)))), tensors(s(case)), strict=True):
        same(x, y, f"the result for {_name(other)} cu_seqlens")


@law(draw=lambda s: own_cases(s))  # other cases: a function that writes into its arguments has changed the laws' own
def pure(s: Subject, case: Case) -> None:
    """Equal arguments give bit-identical results, arguments are not modified, and the global RNG is not used."""
    before = {k: x.clone() for k, x in case.streams.items()}
    mask, state = case.mask.clone(), torch.get_rng_state()
    first, second = run(s, case), run(s, case)
    same_outcome(second, first, "the {} of the second call")
    s(case)
    for name, x in before.items():
        same(case.streams[name], x, f"the argument {name} after the call")
    same(case.mask, mask, "the argument mask after the call")
    if not torch.equal(torch.get_rng_state(), state):
        raise AssertionError("the call drew from the global random state")


@law(draw=lambda s: cases(s.streams, max_seqs=3, max_len=3, extreme=True))
def finite(s: Subject, case: Case) -> None:
    """Huge, tiny and zero inputs give finite results and gradients in fp32."""
    out = run(s, cast(case, torch.float32))
    for x in out.outputs if s.axis != "metrics" else []:
        if not x.isfinite().all():
            raise AssertionError(f"the result is {_worst(x)}")
    for name, g in out.grads.items():
        if not g.isfinite().all():
            raise AssertionError(f"the gradient w.r.t. {name} is {_worst(g)}")


@law()
def gradcheck(s: Subject, case: Case) -> None:
    """In fp64, autograd's gradient equals the finite difference along a random direction of each argument."""
    case = _off_the_grid(s, case)
    outcome = run(s, case)
    noise = 4e-9 * sum(float(x.abs().sum()) for x in outcome.outputs if x.is_floating_point())  # of large sums
    random = case.random()
    for name, g in outcome.grads.items():
        if not g.any() and not _attached(s, case, name):
            continue
        direction = torch.rand(g.shape, generator=random, dtype=torch.float64) - 0.5
        step = 1e-6
        high, low = (_weighted_sum(s, case, name, direction * h) for h in (step, -step))
        slope, derivative = (high - low) / (2 * step), (g * direction).sum()
        same(derivative, slope, f"the derivative along {name}", rtol=1e-5, atol=1e-6 + noise)


@law()
def differentiable(s: Subject, case: Case) -> None:
    """The result has a gradient w.r.t. the trained argument: log_ratio or logp, otherwise the first one."""
    if not _attached(s, case, s.trained):
        raise AssertionError(f"the result has no gradient w.r.t. {s.trained}")


@law()
def detached(s: Subject, case: Case) -> None:
    """The result is detached from all inputs: it is a weight, a target or a measurement."""
    for name, x in case.streams.items():
        if x.is_floating_point() and _attached(s, case, name):
            raise AssertionError(f"the result has a gradient w.r.t. {name}")


def no_gradient_by(*names: str) -> Law:
    """The law that the named arguments are targets: they get no gradient."""

    @law()
    def no_gradient_by(s: Subject, case: Case) -> None:
        """Targets and detached weights get no gradient."""
        for name in names:
            if _attached(s, case, name):
                raise AssertionError(f"the result has a gradient w.r.t. {name}")

    return no_gradient_by


def same_outcome(got: Outcome, want: Outcome, label: str, compare: Callable[..., None] = same) -> None:
    """Equal results and gradients, bit for bit or as `compare` has it; `label` has `{}` for what is compared."""
    for x, y in zip(got.outputs, want.outputs, strict=True):
        compare(x, y, label.format("result"))
    for name, g in want.grads.items():
        compare(got.grads[name], g, label.format(f"gradient w.r.t. {name}"))


def fixed_case(s: Subject, *, lens: tuple[int, ...] = (3, 0, 1, 4), seed: int = 0) -> Case:
    """One case: sequences of `lens`, a third of the tokens masked, random values on the grid."""
    random = torch.Generator().manual_seed(seed)
    total, num = sum(lens), len(lens)
    rows = {"T": total, "N": num}

    def draw(stream: Any) -> Tensor:
        shape = (rows[stream.axis], *stream.size)
        if stream.dtype == torch.bool:
            return torch.rand(shape, generator=random) < 0.5
        steps = torch.randint(0, int((stream.high - stream.low) / stream.step) + 1, shape, generator=random)
        return (stream.low + steps * stream.step).to(stream.dtype)

    drawn = {name: draw(stream) for name, stream in s.streams.items()}
    return Case(
        tokens={k: x for k, x in drawn.items() if s.streams[k].axis == "T"},
        seqs={k: x for k, x in drawn.items() if s.streams[k].axis == "N"},
        mask=torch.arange(total) % 3 != 1,
        cu_seqlens=torch.tensor([0, *lens]).cumsum(0),
        group_ids=torch.arange(num) % 2,
        seed=seed,
    )


def _off_the_grid(s: Subject, case: Case) -> Case:
    """The case with values shifted slightly into each stream's range: away from kinks and the ends of the range."""
    random = case.random()

    def move(name: str, x: Tensor) -> Tensor:
        stream = s.streams[name]
        inside = stream.low + (stream.high - stream.low) * torch.rand(x.shape, generator=random, dtype=torch.float64)
        return 0.97 * x + 0.03 * inside

    return replaced(case, **{k: move(k, x) for k, x in case.streams.items() if x.is_floating_point()})


def _weighted_sum(s: Subject, case: Case, name: str, change: Tensor) -> Tensor:
    changed = replaced(case, **{name: case.streams[name] + change})
    outputs = tensors(s(changed, whole=case))
    parts = [(x * g).sum().double() for x, g in zip(outputs, random_upstream(case, outputs)) if x.is_floating_point()]
    return torch.stack(parts).sum()


def _attached(s: Subject, case: Case, name: str) -> bool:
    """Whether the result depends on this argument according to autograd."""
    leaves = {k: x.clone().requires_grad_() for k, x in case.streams.items() if x.is_floating_point()}
    if not (outputs := [x.sum().double() for x in tensors(s(replaced(case, **leaves), whole=case)) if x.requires_grad]):
        return False
    return torch.autograd.grad(torch.stack(outputs).sum(), leaves[name], allow_unused=True)[0] is not None


def _worst(x: Tensor) -> str:
    return str(x[~x.isfinite()][0].item())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
