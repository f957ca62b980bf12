"""Laws of packed batches, for losses and estimators: masks, segments, groups, order, padding, splits."""

from __future__ import annotations

import torch
from hypothesis.strategies import just
from torch import Tensor

from rlkit.metrics import merge
from rlkit.packing import from_padded
from rlkit.segments import seq_count, seq_ids
from rlkit.testing import cases
from rlkit.testing.cases import Case
from rlkit.testing.law import law, near, same
from rlkit.testing.laws_numerics import fixed_case, same_outcome
from rlkit.testing.subject import Subject, random_upstream, run, tensors

__all__ = [
    "additive", "all_count", "group_isolation", "group_labels", "mask_isolation", "masked_is_zero", "nan_shows",
    "nothing_to_train_on", "padded_is_packed", "permutation", "segment_isolation", "shape", "singleton_is_zero",
    "sums_to_one",
]  # fmt: skip

COUNTING = (5, 0, 1, 4, 2, 3, 6, 1)  # the batch of `all_count`: groups of four, long and short sequences


@law()
def shape(s: Subject, case: Case) -> None:
    """There is one result per token (per sequence, for a function of sequences)."""
    if s.axis not in ("T", "N"):
        return
    rows = case.num_tokens if s.axis == "T" else case.num_seqs
    for x in tensors(s(case)):
        if x.ndim == 0 or x.shape[0] != rows:
            why = "leave the reduction to the caller" if x.ndim == 0 else "pass `axis`, or annotate the return type"
            raise AssertionError(f"the result has shape {list(x.shape)}, expected [{rows}]: {why}")


@law(needs=("mask",))
def mask_isolation(s: Subject, case: Case) -> None:
    """NaN and infinities at masked positions change neither value nor gradient, and get no gradient."""
    clean, dirty = run(s, case), run(s, cases.poisoned(case, list(case.tokens), tokens=~case.mask))
    same_outcome(dirty, clean, "the {} with NaN and inf at masked positions")
    for name, g in clean.grads.items():
        if name in case.tokens:
            same(g[~case.mask], torch.zeros_like(g[~case.mask]), f"the gradient w.r.t. {name} at masked positions")


@law(needs=("mask",))
def masked_is_zero(s: Subject, case: Case) -> None:
    """The result of a token is 0 where the mask is False."""
    for x in tensors(s(case)) if s.axis == "T" else []:
        same(x[~case.mask], torch.zeros_like(x[~case.mask]), "the result at masked positions")


@law()
def permutation(s: Subject, case: Case) -> None:
    """Permuting the sequences (tokens, for an elementwise function) permutes the results."""
    order = cases.shuffled(case, case.num_tokens if s.elementwise else case.num_seqs)
    permuted = cases.take_tokens(case, order) if s.elementwise else cases.take_seqs(case, order)
    tokens = order if s.elementwise else cases.tokens_of(case, order)
    index = {"T": tokens, "N": order}.get(s.axis, slice(None))
    for got, want in zip(tensors(s(permuted)), tensors(s(case)), strict=True):
        near(got, want[index] if want.ndim else want, "the result in another order")


@law(needs=("cu_seqlens",), axes=("T", "N"))
def segment_isolation(s: Subject, case: Case) -> None:
    """A sequence's result does not depend on other sequences, even if they hold NaN."""
    mine = cases.shuffled(case, case.num_seqs)[:1]
    _isolated(s, case, torch.isin(torch.arange(case.num_seqs), mine), "of a sequence beside NaN")


@law(needs=("group_ids",), axes=("T", "N"))
def group_isolation(s: Subject, case: Case) -> None:
    """A group's result does not depend on other groups, even if they hold NaN."""
    mine = case.group_ids == case.group_ids[cases.shuffled(case, case.num_seqs)[0]]
    _isolated(s, case, mine, "of a group beside NaN")


@law(needs=("group_ids",))
def group_labels(s: Subject, case: Case) -> None:
    """Renumbering the groups changes nothing."""
    relabelled = cases.shuffled(case, case.num_seqs)[case.group_ids]
    for got, want in zip(tensors(s(case._replace(group_ids=relabelled))), tensors(s(case)), strict=True):
        near(got, want, "the result with groups renumbered")


@law(needs=("mask",))
def padded_is_packed(s: Subject, case: Case) -> None:
    """Padding (masked tokens) before, between and after the tokens changes nothing: gaps neither decay nor leak."""
    rows, is_real = cases.padded(case)
    views = [cases.flattened(rows), rows] if s.elementwise else [cases.flattened(rows)]
    for view in views:
        for x, y in zip(tensors(s(view, whole=case)), tensors(s(case)), strict=True):
            if s.axis == "T":
                x = from_padded(x.reshape(*is_real.shape, *x.shape[view.mask.ndim :]), padding_mask=is_real)[0][0]
            near(x, y, "the result with padding")


@law()
def additive(s: Subject, case: Case) -> None:
    """Any split into micro-batches and ranks gives the same results, sums and gradients, up to fp64 rounding."""
    ids = case.group_ids if s.takes("group_ids") else torch.arange(case.num_tokens if s.elementwise else case.num_seqs)
    parts = cases.partition(case, ids)
    micros = [cases.take_tokens(case, part) if s.elementwise else cases.take_seqs(case, part) for part in parts]
    if s.axis == "metrics":
        merged = tensors(merge(*[s(micro, whole=case) for micro in micros]))
        for got, want in zip(merged, tensors(s(case)), strict=True):
            near(got, want, "a metric merged over micro-batches")
        return
    upstream = random_upstream(case, tensors(s(case)))
    whole, totals, pairs = run(s, case, upstream=upstream), [torch.zeros((), dtype=torch.float64) for _ in upstream], []
    for part, micro in zip(parts, micros):
        tokens = part if s.elementwise else cases.tokens_of(case, part)
        index = {"T": tokens, "N": part}.get(s.axis, slice(None))
        share = [g[index] if g.ndim else g for g in upstream]
        out = run(s, micro, whole=case, upstream=share)
        totals = [t + _total(x, g) for t, x, g in zip(totals, out.outputs, share, strict=True)]
        if s.axis in ("T", "N"):
            pairs += [(x, y[index], "the result of a micro-batch") for x, y in zip(out.outputs, whole.outputs)]
        for name, g in out.grads.items():
            want = whole.grads[name][tokens if name in case.tokens else part]
            pairs.append((g, want, f"the gradient w.r.t. {name} of a micro-batch"))
    for total, x, g in zip(totals, whole.outputs, upstream):
        near(total, _total(x, g), "the weighted sum over micro-batches")
    for got, want, label in pairs:
        near(got, want, label)


@law()
def nothing_to_train_on(s: Subject, case: Case) -> None:
    """Without a trainable token the results are 0 (no NaN), with gradient 0; an empty batch is legal."""
    none = torch.zeros(0, dtype=torch.int64)
    for x in tensors(s(cases.take_tokens(case, none) if s.elementwise else cases.take_seqs(case, none))):
        if s.axis in ("T", "N") and (x.ndim == 0 or x.shape[0] != 0):
            raise AssertionError(f"the result of an empty batch has shape {list(x.shape)}, expected [0]")
    if not s.takes("mask"):
        return
    out = run(s, case._replace(mask=torch.zeros_like(case.mask)))
    for x in out.outputs:
        if x.isnan().any() or (s.axis == "T" and x.any()):
            raise AssertionError(f"the result of a fully masked batch is {cases.short(x)}, expected 0")
    for name, g in out.grads.items():
        same(g, torch.zeros_like(g), f"the gradient w.r.t. {name} of a fully masked batch")


@law(draw=lambda s: just(fixed_case(s, lens=COUNTING)))
def all_count(s: Subject, case: Case) -> None:
    """The result depends on every argument, and on each single reward.

    With `cu_seqlens` it also depends on each single entry of the trained argument, so no token is ignored.
    """
    for name, stream in s.streams.items():
        rows = _trainable_rows(s, case, name)
        alone = name == "rewards" or (stream.dtype.is_floating_point and name == s.trained and s.takes("cu_seqlens"))
        for index in rows.split(1) if alone else [rows]:
            if not any(_counts(s, name, index, seed) for seed in range(64)):
                where = f" at {index.item()}" if alone else ""
                raise AssertionError(f"no other value of {name}{where} changes the result")


@law()
def nan_shows(s: Subject, case: Case) -> None:
    """NaN at a trainable position that affects the result gives NaN somewhere in it, or raises ValueError.

    Comparisons with NaN are False: `where(var > 0, x / std, 0)` turns one NaN into zeros for the whole batch.
    """
    random = case.random()
    for name, stream in s.streams.items():
        rows = _trainable_rows(s, case, name)
        if not stream.dtype.is_floating_point or not rows.numel():
            continue
        row = rows[torch.randint(rows.numel(), (1,), generator=random)]
        where = torch.zeros_like(case.streams[name], dtype=torch.bool)
        where[row] = torch.randperm(where[row].numel(), generator=random).view_as(where[row]) == 0
        try:
            outputs = tensors(s(_with_value(case, name, where, torch.nan)))
        except ValueError:
            continue
        if any(x.isnan().any() for x in outputs):
            continue
        steps = [stream.low + share * (stream.high - stream.low) for share in (0.0, 0.3, 0.6, 1.0)]
        results = [tensors(s(_with_value(case, name, where, value))) for value in steps]
        if any(not torch.equal(x, y) for other in results for x, y in zip(other, results[0], strict=True)):
            text = ", ".join(cases.short(x) for x in outputs)
            raise AssertionError(f"with NaN in {name} at {row.item()} the result is {text}, expected NaN")


@law(needs=("mask",))
def sums_to_one(s: Subject, case: Case) -> None:
    """The weights of a whole batch sum to 1, or to 0 if nothing is trainable."""
    (weights,) = tensors(s(case))
    near(weights.sum().double(), case.mask.any().double(), "the sum of the weights", tolerance=1e-6)


@law(needs=("group_ids",))
def singleton_is_zero(s: Subject, case: Case) -> None:
    """A group of one, and a group whose rewards are all equal, has advantage exactly 0."""
    alone = case._replace(group_ids=torch.arange(case.num_seqs))
    rewards = case.streams["rewards"]
    first = torch.stack([(case.group_ids == g).int().argmax() for g in case.group_ids])
    equal = cases.replaced(case, rewards=rewards[first])
    for equals, label in ((alone, "a singleton group"), (equal, "a group of equals")):
        for x in tensors(s(equals)):
            same(x, torch.zeros_like(x), f"the advantage of {label}")


def _isolated(s: Subject, case: Case, mine: Tensor, condition: str) -> None:
    """Check that the results of sequences `mine` are unchanged if all unconstrained values of the others are NaN."""
    on_tokens = mine[seq_ids(case.cu_seqlens, num_tokens=case.num_tokens)]
    free = [name for name, stream in s.streams.items() if stream.hard_low != 0]
    dirty = cases.poisoned(case, free, tokens=~on_tokens, seqs=~mine)
    where = on_tokens if s.axis == "T" else mine
    for x, y in zip(tensors(s(dirty, whole=case)), tensors(s(case)), strict=True):
        near(x[where], y[where], f"the result {condition}")


def _trainable_rows(s: Subject, case: Case, name: str) -> Tensor:
    """The rows of a stream that may affect the result: trainable tokens, or sequences with a trainable token."""
    rows = s.streams[name].axis
    if not s.takes("mask"):
        return torch.arange(case.num_tokens if rows == "T" else case.num_seqs)
    on = case.mask if rows == "T" else seq_count(case.mask, cu_seqlens=case.cu_seqlens) > 0
    return on.nonzero().squeeze(1)


def _counts(s: Subject, name: str, index: Tensor, seed: int) -> bool:
    """Whether `name` at `index` affects the result of one random batch, by its gradient or by changing its value."""
    case, other = (fixed_case(s, lens=COUNTING, seed=k) for k in (seed, seed + 100))
    base = run(s, case)
    if name in base.grads and base.grads[name][index].any():
        return True
    changed = case.streams[name].index_copy(0, index, other.streams[name][index])
    got = tensors(s(cases.replaced(case, **{name: changed}), whole=case))
    return not all(torch.equal(x, y) for x, y in zip(got, base.outputs, strict=True))


def _with_value(case: Case, name: str, where: Tensor, value: float) -> Case:
    return cases.replaced(case, **{name: case.streams[name].masked_fill(where, value)})


def _total(x: Tensor, weights: Tensor) -> Tensor:
    return (x.double() * weights).sum()
