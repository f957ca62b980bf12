"""Laws of advantage estimators: equality with a loop, symmetries, and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkit.testing.cases import Case, replaced, tokens_of
from rlkit.testing.law import Law, law, near
from rlkit.testing.subject import Subject, tensors

__all__ = ["centred", "equals_loop", "limit", "rewards_raise", "scales", "shift_invariant", "stated_scale"]


def equals_loop(loop: Callable[..., Any]) -> Law:
    """The law that the function equals `loop`, written for one sequence (or one group) in Python floats.

    `loop` gets by name a list per token stream (without masked tokens), a float per sequence-level value, and the
    subject's options. For a function without `cu_seqlens` it gets lists per group, or of all tokens. It returns a list,
    or a tuple with one list per output.
    """

    @law()
    def equals_loop(s: Subject, case: Case) -> None:
        """The vectorised function equals its definition, a loop over one sequence or group in Python floats."""
        got = tensors(s(case))
        want = [torch.zeros_like(x, dtype=torch.float64) for x in got]
        for index, arguments in _units(s, case):
            result = loop(**arguments, **s.options)
            lists = result if isinstance(result, tuple) else (result,)
            for out, values in zip(want, lists, strict=True):
                out[index] = torch.tensor(values, dtype=torch.float64)
        for x, y in zip(got, want, strict=True):
            near(x, y, "the result")

    return equals_loop


def limit(other: Callable[[Case], Any], *, note: str, **arguments: Any) -> Law:
    """The law that, with `arguments`, the function equals `other(case)`.

    Each of `arguments` is a constant or a function of the case: `limit(.., lam=1.0, log_ratio=lambda case: ..)`.
    """

    def check(s: Subject, case: Case) -> None:
        fixed = {k: x(case) if callable(x) else x for k, x in arguments.items()}
        streams = {k: stream for k, stream in s.streams.items() if k not in fixed}
        special = replace(s, options={**s.options, **fixed}, streams=streams)
        rest = case._replace(
            tokens={k: x for k, x in case.tokens.items() if k in streams},
            seqs={k: x for k, x in case.seqs.items() if k in streams},
        )
        for x, y in zip(tensors(special(rest, whole=case)), tensors(other(case)), strict=True):
            near(x, y, f"the result in the limit ({note})")

    return Law(name=f"limit: {note}", statement=f"In the limit, {note}.", check=check)


@law(needs=("rewards",))
def rewards_raise(s: Subject, case: Case) -> None:
    """A larger reward never lowers the advantage of the token (or sequence) that earned it."""
    axis, rewards, before = s.streams["rewards"].axis, case.streams["rewards"], tensors(s(case))
    earners = case.mask.nonzero() if axis == "T" and s.takes("mask") else torch.arange(rewards.shape[0]).unsqueeze(1)
    for row in earners:
        index = tokens_of(case, row) if (axis, s.axis) == ("N", "T") else row
        raised = replaced(case, rewards=rewards.index_add(0, row, torch.ones_like(rewards[row])))
        for x, y in zip(tensors(s(raised, whole=case)), before, strict=True):
            for got, want in zip(x[index].tolist(), y[index].tolist(), strict=True):
                if got < want - 1e-9:
                    where = f"with the reward at {row.item()} larger by 1"
                    raise AssertionError(f"{where} the result falls from {want:.6g} to {got:.6g} there")


@law(needs=("group_ids",))
def shift_invariant(s: Subject, case: Case) -> None:
    """Adding a constant to a group's rewards changes nothing."""
    shift = torch.randint(-8, 9, (case.num_seqs,), generator=case.random()).double()[case.group_ids]
    rewards = case.seqs["rewards"]
    shifted = replaced(case, rewards=rewards + shift.reshape(-1, *[1] * (rewards.ndim - 1)))
    for x, y in zip(tensors(s(shifted)), tensors(s(case)), strict=True):
        near(x, y, "the result with each group's rewards shifted")


def scales(*, degree: int, names: Sequence[str] = ("rewards",)) -> Law:
    """The law that scaling the named streams by a factor scales the result by its `degree`-th power."""

    @law()
    def scales(s: Subject, case: Case) -> None:
        """Scaling the rewards (and values) by a factor scales the result by the stated power of the factor."""
        factor = 3.0
        scaled = replaced(case, **{k: factor * x for k, x in case.streams.items() if k in names})
        for x, y in zip(tensors(s(scaled)), tensors(s(case)), strict=True):
            near(x, factor**degree * y, f"the result with {' and '.join(names)} times {factor:g}")

    return scales


@law(needs=("group_ids", "rewards"))
def stated_scale(s: Subject, case: Case) -> None:
    """Tripled rewards triple the advantages, or leave them unchanged; unchanged ones have standard deviation 1.

    The deviation is of a group or of the batch, biased or unbiased; an `eps` of at most 1e-3 is within the tolerance.
    """
    factor, (got,) = 3.0, tensors(s(case))
    (scaled,) = tensors(s(replaced(case, rewards=factor * case.seqs["rewards"])))
    if torch.allclose(scaled, factor * got, rtol=1e-6, atol=1e-9):
        return
    near(scaled, got, f"the result is not {factor:g} times as large; with rewards times {factor:g} it", tolerance=1e-2)
    for group in case.group_ids.unique():
        mine = got[case.group_ids == group]
        stds = [x.std(correction=k).item() for x in (mine, got) for k in (0, 1) if len(x) > k]
        if mine.any() and not any(abs(x - 1) < 1e-2 for x in stds):
            raise AssertionError(f"the standard deviation of group {int(group)} is {stds[0]:.6g}, expected 1")


@law(needs=("group_ids",))
def centred(s: Subject, case: Case) -> None:
    """The advantages of each group sum to 0."""
    (got,) = tensors(s(case))
    for group in case.group_ids.unique():
        near(got[case.group_ids == group].sum(), torch.zeros((), dtype=torch.float64), "the sum over a group")


def _units(s: Subject, case: Case) -> list[tuple[Tensor, dict[str, Any]]]:
    """For each sequence or group (for an elementwise function: all tokens), its indices, and its values by name."""
    out = []
    if s.takes("cu_seqlens"):
        for i in range(case.num_seqs):
            index = tokens_of(case, torch.tensor([i]))
            index = index[case.mask[index]] if s.takes("mask") else index
            values = {k: x[index].tolist() for k, x in case.tokens.items()}
            out.append((index, values | {k: x[i].item() for k, x in case.seqs.items()}))
        return out
    if not s.takes("group_ids"):
        index = case.mask.nonzero().squeeze(1) if s.takes("mask") else torch.arange(case.num_tokens)
        return [(index, {k: x[index].tolist() for k, x in case.tokens.items()})]
    for group in case.group_ids.unique():
        members = (case.group_ids == group).nonzero().squeeze(1)
        out.append((members, {k: x[members].tolist() for k, x in case.seqs.items()}))
    return out
