"""The packed batch on which laws are checked, and its transformations: reorder, split, pad, poison, cast."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit.packing import to_padded
from rlkit.segments import cumulative, seq_ids, seq_lens


class Stream(NamedTuple):
    """Values of one tensor argument: drawn from [low, high], legal in [hard_low, hard_high], one row per axis entry.

    `axis` is "T" (tokens, or any elementwise shape) or "N" (sequences); `size` are further axes, e.g. the vocabulary.
    If `focus` is set, a third of the numbers are drawn from [-focus, focus], in steps eight times finer, and a third
    from a range six times as wide.
    """

    low: float = -4.0
    high: float = 4.0
    hard_low: float = -math.inf
    hard_high: float = math.inf
    step: float = 0.125
    focus: float = 0.0
    axis: str = "T"
    size: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64


class Case(NamedTuple):
    """A packed batch with the streams that one function reads, in fp64. `seed` seeds further draws of a law."""

    tokens: Mapping[str, Tensor]
    seqs: Mapping[str, Tensor]
    mask: Bool[Tensor, "T"]
    cu_seqlens: Int[Tensor, "N1"]
    group_ids: Int[Tensor, "N"]
    seed: int

    @property
    def streams(self) -> dict[str, Tensor]:
        """All streams by name."""
        return {**self.tokens, **self.seqs}

    def __getattr__(self, name: str) -> Tensor:
        """A stream by its name: `case.advantages` is `case.streams["advantages"]`."""
        streams = {} if name.startswith("__") else self.streams
        if name not in streams:
            raise AttributeError(f"the case has no stream {name!r}; its function takes {sorted(streams)}")
        return streams[name]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.mask.numel()

    @property
    def num_seqs(self) -> int:
        """N."""
        return self.cu_seqlens.numel() - 1

    @property
    def ratio(self) -> Float[Tensor, "T"]:
        """exp(log_ratio), or exp(logp - old_logp) where the function takes those."""
        x = self.tokens.get("log_ratio")
        return (self.tokens["logp"] - self.tokens["old_logp"] if x is None else x).exp()

    def random(self) -> torch.Generator:
        """A new generator; the same numbers for the same case."""
        return torch.Generator().manual_seed(self.seed)


class Vocab(NamedTuple):
    """Logits over a small vocabulary of the policy, the reference, and the policy that sampled."""

    policy: Float[Tensor, "V"]
    ref: Float[Tensor, "V"]
    old: Float[Tensor, "V"]


def replaced(case: Case, **streams: Tensor) -> Case:
    """The case with the named streams replaced; names of other streams are ignored."""
    tokens = {k: streams.get(k, x) for k, x in case.tokens.items()}
    return case._replace(tokens=tokens, seqs={k: streams.get(k, x) for k, x in case.seqs.items()})


def take_tokens(case: Case, index: Int[Tensor, "M"]) -> Case:
    """The tokens `index`, in that order, as one sequence: for elementwise functions."""
    tokens = {k: x[index] for k, x in case.tokens.items()}
    cu = torch.tensor([0, index.numel()], dtype=case.cu_seqlens.dtype)
    return case._replace(tokens=tokens, mask=case.mask[index], cu_seqlens=cu)


def tokens_of(case: Case, index: Int[Tensor, "M"]) -> Int[Tensor, "U"]:
    """The indices of all tokens of the sequences `index`, in that order."""
    spans = [torch.arange(int(case.cu_seqlens[i]), int(case.cu_seqlens[i + 1])) for i in index.tolist()]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *spans])


def take_seqs(case: Case, index: Int[Tensor, "M"]) -> Case:
    """The sequences `index`, in that order; group ids are made dense again."""
    tokens = tokens_of(case, index)
    return case._replace(
        tokens={k: x[tokens] for k, x in case.tokens.items()},
        seqs={k: x[index] for k, x in case.seqs.items()},
        mask=case.mask[tokens],
        cu_seqlens=cumulative(seq_lens(case.cu_seqlens)[index]),
        group_ids=case.group_ids[index].unique(return_inverse=True)[1],
    )


def smaller(case: Any) -> Iterator[Any]:
    """Every case with one sequence or one token removed; nothing for other kinds of cases."""
    if not isinstance(case, Case):
        return
    for i in range(case.num_seqs if case.num_seqs > 1 else 0):
        yield take_seqs(case, torch.tensor([j for j in range(case.num_seqs) if j != i], dtype=torch.int64))
    for t in range(case.num_tokens if case.num_tokens > 1 else 0):
        rest = torch.tensor([u for u in range(case.num_tokens) if u != t], dtype=torch.int64)
        yield take_tokens(case, rest)._replace(cu_seqlens=case.cu_seqlens - (case.cu_seqlens > t).to(case.cu_seqlens))


def shuffled(case: Case, num: int) -> Int[Tensor, "num"]:
    """A permutation of 0 .. num - 1, fixed by the case."""
    return torch.randperm(num, generator=case.random())


def partition(case: Case, ids: Int[Tensor, "M"]) -> list[Int[Tensor, "U"]]:
    """Split the indices of `ids` into four micro-batches, some possibly empty; equal ids stay together."""
    num = int(ids.max()) + 1 if ids.numel() else 0
    part = torch.randint(0, 4, (num,), generator=case.random())
    return [(part[ids] == i).nonzero().squeeze(1) for i in range(4)]


def poisoned(
    case: Case, names: Sequence[str], *, tokens: Bool[Tensor, "T"] | None = None, seqs: Bool[Tensor, "N"] | None = None
) -> Case:
    """NaN, inf and -inf in the named float streams, at the given tokens and sequences."""
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
    random = case.random()  # one generator for all streams, so that infinities of two streams do not always cancel

    def spoil(x: Tensor, where: Tensor | None) -> Tensor:
        if where is None or not x.is_floating_point():
            return x
        values = bad[torch.randint(0, 3, (x.shape[0],), generator=random)].to(x.dtype)
        column = (slice(None), *[None] * (x.ndim - 1))
        return torch.where(where[column], values[column], x)

    return case._replace(
        tokens={k: spoil(x, tokens) if k in names else x for k, x in case.tokens.items()},
        seqs={k: spoil(x, seqs) if k in names else x for k, x in case.seqs.items()},
    )


def cast(case: Case, dtype: torch.dtype) -> Case:
    """All float streams in `dtype`."""
    floats = {k: x.to(dtype) for k, x in case.streams.items() if x.is_floating_point()}
    return replaced(case, **floats)


class Padded(NamedTuple):
    """A case with tokens in rows `[N, L]`, and the mask of real tokens."""

    case: Case
    is_real: Bool[Tensor, "N L"]


def padded(case: Case) -> Padded:
    """The same tokens in rows, in order, with NaN padding (mask False) before, between and after them."""
    lens = seq_lens(case.cu_seqlens)
    width = int(lens.max()) + 2 if lens.numel() else 2
    is_real = torch.zeros(case.num_seqs, width, dtype=torch.bool)
    random = case.random()
    for row, length in enumerate(lens.tolist()):
        is_real[row, torch.randperm(width, generator=random)[:length]] = True

    def pad(x: Tensor) -> Tensor:
        return to_padded(x, padding_mask=is_real, fill=math.nan if x.is_floating_point() else 0)[0]

    cu = torch.arange(case.num_seqs + 1, dtype=case.cu_seqlens.dtype) * width
    rows = {k: pad(x) for k, x in case.tokens.items()}
    return Padded(case._replace(tokens=rows, mask=pad(case.mask), cu_seqlens=cu), is_real)


def flattened(case: Case) -> Case:
    """Rows `[N, L, ..]` concatenated: padding becomes masked tokens of packed sequences."""
    return case._replace(tokens={k: x.flatten(0, 1) for k, x in case.tokens.items()}, mask=case.mask.flatten())


def constant_in_seqs(x: Tensor, case: Case) -> Tensor:
    """Each token gets the value of its sequence's first token."""
    first = case.cu_seqlens[:-1].long()[seq_ids(case.cu_seqlens, num_tokens=case.num_tokens)]
    return x[first]


def describe(case: Any, *, hide: Collection[str] = ()) -> str:
    """The case as one line per tensor, without those named in `hide`."""
    if isinstance(case, Vocab):
        lines = case._asdict()
    elif isinstance(case, Case):
        lines = {**case.streams, "mask": case.mask.int(), "cu_seqlens": case.cu_seqlens, "group_ids": case.group_ids}
    else:
        return f"    {case}"
    lines = {name: x for name, x in lines.items() if name not in hide}
    width = max(map(len, lines), default=0)
    return "\n".join(f"    {name:{width}} = {short(x)}" for name, x in lines.items())


def short(x: Tensor) -> str:
    """A tensor's values with six digits."""
    if x.ndim == 0:
        return f"{x.item() + 0.0:.6g}"  # no -0
    return "[" + ", ".join(short(row) for row in x) + "]"
