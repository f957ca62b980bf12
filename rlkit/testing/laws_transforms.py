"""Laws of torch's program transforms: torch.compile, torch.func.grad, torch.func.vmap, torch.export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis.strategies import just
from torch import Tensor

from rlkit.testing.cases import Case, replaced
from rlkit.testing.law import Law, law, near
from rlkit.testing.laws_numerics import fixed_case, same_outcome
from rlkit.testing.subject import LAYOUT, Outcome, Subject, random_upstream, run, tensors

__all__ = ["compiles", "exports", "func_grad", "vmaps"]

OTHER_LENS = (2, 4, 2, 0)  # a batch of as many tokens and sequences as `fixed_case` has


_one_case = partial(law, draw=lambda s: just(fixed_case(s)))


def compiles(*, backend: str = "aot_eager") -> Law:
    """The law that `torch.compile(fullgraph=True)` gives the same results and gradients."""

    @_one_case()
    def compiles(s: Subject, case: Case) -> None:
        """torch.compile(fullgraph=True) gives the same results and gradients."""
        torch.compiler.reset()
        fn: Callable[..., Any] = torch.compile(s.fn, fullgraph=True, backend=backend)
        same_outcome(run(replace(s, fn=fn), case), run(s, case), "the compiled {}", near)

    return compiles


@_one_case()
def func_grad(s: Subject, case: Case) -> None:
    """torch.func.grad gives the gradients of autograd."""
    outputs, grads = _functional(s, case)(case.streams, case.mask)
    same_outcome(Outcome(None, outputs, grads), run(s, case), "the torch.func.grad's {}", near)


@_one_case()
def vmaps(s: Subject, case: Case) -> None:
    """torch.func.vmap of torch.func.grad, over batches of one layout (cu_seqlens, group_ids), is a loop over them."""
    other = fixed_case(s, seed=1)._replace(mask=torch.arange(case.num_tokens) % 2 == 0)
    streams = {name: torch.stack([case.streams[name], other.streams[name]]) for name in case.streams}
    outputs, grads = torch.func.vmap(_functional(s, case))(streams, torch.stack([case.mask, other.mask]))
    for i, one in enumerate((case, other)):
        got = Outcome(None, [x[i] for x in outputs], {name: g[i] for name, g in grads.items()})
        upstream = random_upstream(case, got.outputs)
        same_outcome(got, run(s, one, whole=case, upstream=upstream), "the vmapped {}", near)


@_one_case()
def exports(s: Subject, case: Case) -> None:
    """torch.export of a module that calls it, run on another batch of the same shapes, gives its results there."""
    constants = {**s.options, **{name: f(case) for name, f in s.statistics.items()}}
    layout = {name: getattr(case, name) for name in LAYOUT if s.takes(name)}
    given = {**case.streams, **layout}
    program = torch.export.export(_Calls(s.fn, constants), (), kwargs=given).module()
    exported = replace(s, fn=lambda **streams: program(**{name: streams[name] for name in given}))
    for seed in (1, 2, 3):
        other = fixed_case(s, lens=OTHER_LENS, seed=seed)
        same_outcome(run(exported, other, whole=case), run(s, other, whole=case), "the exported {}", near)


class _Calls(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any], constants: dict[str, Any]):
        super().__init__()
        self.fn, self.constants = fn, constants

    def forward(self, **streams: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.fn(**streams, **self.constants)))


def _functional(s: Subject, case: Case) -> Callable[..., tuple[list[Tensor], dict[str, Tensor]]]:
    """Outputs and gradients by torch.func.grad as `run` has them, of streams and a mask in the layout of `case`."""
    upstream = random_upstream(case, tensors(s(case)))

    def call(streams: dict[str, Tensor], mask: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        def total(floats: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            outputs = tensors(s(replaced(case, **{**streams, **floats})._replace(mask=mask), whole=case))
            parts = [(x * g).sum() for x, g in zip(outputs, upstream, strict=True) if x.is_floating_point()]
            return torch.stack([mask.new_zeros((), dtype=torch.float64), *parts]).sum(), outputs

        if not (floats := {name: x for name, x in streams.items() if x.is_floating_point()}):
            return total({})[1], {}
        grads, outputs = torch.func.grad(total, has_aux=True)(floats)
        return outputs, grads

    return call
