"""Balanced micro-batches under a token budget."""

from __future__ import annotations

import heapq
import math
from bisect import bisect, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rlkit._util.tensors import check_count
from rlkit.segments import seq_lens
from rlkit.types import Batch

Piece = tuple[int, list[int]]  # tokens, sequences
_EVEN = 0.02  # acceptable imbalance, as a fraction of a rank's tokens; less would split more groups than it gains
_PARTNERS = 4  # number of least loaded bins that are tried for an exchange


class Plan(NamedTuple):
    """A partition into micro-batches: `bins` of sequence indices, the tokens of the fullest bin (`makespan`), and a
    lower `bound` on the makespan of any partition into that many bins (the mean load with every prompt counted once, or
    the largest sequence with its prompt)."""

    bins: list[list[int]]
    makespan: int
    bound: int


class _Lens(NamedTuple):
    """Tokens and prefix index of each sequence, tokens of each prefix. Index -1 (the last entry): none, of 0 tokens."""

    seqs: list[int]
    prefix_ids: list[int]
    prefix: list[int]


@dataclass(eq=False)
class _Bin:
    """Total tokens, (length, index) of the sequences in order of length, and the number of sequences per prefix."""

    load: int
    members: list[tuple[int, int]]
    prefixes: Counter[int]


def plan_microbatches(
    batch: Batch, *, max_tokens: int, ranks: int = 1, whole_groups: bool = False, attention: float = 0.0
) -> Plan:
    """Balanced micro-batches of at most `max_tokens` tokens; a shared prefix is counted once in each.

    A group stays whole if it fits, else it is split into the fewest pieces that fit. Each piece, longest first, goes
    to the least loaded bin (longest processing time first: makespan <= 4/3 of the optimum, Graham 1969), over the
    fewest bins that keep the budget (within 2% above 64 bins per rank).

    Data parallel `ranks` wait for the most loaded one. So the number of bins is a multiple of `ranks` (some may be
    empty), and sequences are exchanged between the fullest and the emptiest bins while that reduces the imbalance,
    although splitting a group costs one more prompt. Rank r gets `bins[r::ranks]`: bins of similar load run at the same
    time, and the rank with the fullest bin alternates. With `whole_groups` no group is split, for a loss that couples
    the samples of a group.

    The budget is of tokens, which take the memory. What takes the time is the work, of a sequence of n tokens after a
    prompt of p, and of the prompt:

        n + attention n (p + n / 2)         p + attention p^2 / 2

    with `attention` of `rlkit.model.flops.attention_share`. Bins of similar work run at the same time: at 0 those of
    similar tokens. Of log-normal lengths up to 35,000 and 104,000 tokens on 8 and 16 ranks, a model of 8 B parameters
    then does 12 to 21% less work one after the other (counted by `benchmarks/packing.py`).

    Errors: ValueError when one sequence with its prompt exceeds `max_tokens`, or one group that must stay whole.
    Differs: verl partitions single sequences (Karmarkar-Karp), so a group's prompt is computed on several ranks.
    """
    lens, group_ids = _lens(batch), batch.group_ids.tolist()
    check_count(max_tokens=max_tokens)
    pieces = _pieces(lens, group_ids, max_tokens)
    if not pieces:
        return Plan([], 0, 0)
    if whole_groups and len(pieces) > len(set(group_ids)):
        raise ValueError(f"max_tokens={max_tokens} is less than one whole group; raise it or lower the length limits")
    fewest = math.ceil(sum(cost for cost, _ in pieces) / (max_tokens * ranks))
    step = math.ceil(fewest / 64) * ranks
    for num_bins in range(fewest * ranks, len(pieces) + ranks + step, step):
        bins = _longest_first(pieces, num_bins)
        if ranks > 1 and not whole_groups:
            bins = _evened(bins, lens, max_tokens, ranks)
        if bins[-1][0] <= max_tokens:
            break
    makespan, bins = bins[-1][0], bins[::-1]
    if attention and ranks > 1:
        bins.sort(key=lambda held: _work(held[1], lens, attention), reverse=True)
    rows = [bins[i : i + ranks][:: -1 if i // ranks % 2 else 1] for i in range(0, num_bins, ranks)]
    largest = largest_piece(batch, whole_groups=whole_groups)
    bound = max(largest, math.ceil((batch.num_tokens + batch.prefix_tokens.numel()) / num_bins))
    return Plan([sorted(members) for row in rows for _, members in row], makespan, bound)


def largest_piece(batch: Batch, *, whole_groups: bool = False) -> int:
    """Tokens of the largest sequence with its prompt, or of the largest group: the least `max_tokens` that holds it."""
    lens = _lens(batch)
    if not whole_groups:
        return max(length + lens.prefix[p] for length, p in zip(*lens[:2]))
    pieces = _pieces(lens, batch.group_ids.tolist(), batch.num_tokens + batch.prefix_tokens.numel())
    return max((cost for cost, _ in pieces), default=0)


def _lens(batch: Batch) -> _Lens:
    return _Lens(
        [*seq_lens(batch.cu_seqlens).tolist(), 0],
        [*batch.prefix_ids.tolist(), -1],
        [*seq_lens(batch.prefix_cu).tolist(), 0],
    )


def _pieces(lens: _Lens, group_ids: list[int], max_tokens: int) -> list[Piece]:
    """The groups, split where one has more than `max_tokens` tokens; the longest piece first."""
    pieces: list[Piece] = []
    cost, members, prefixes = 0, [], set()  # type: ignore[var-annotated]
    for i in sorted(range(len(group_ids)), key=lambda i: (group_ids[i], i)):
        length, prefix = lens.seqs[i], lens.prefix[lens.prefix_ids[i]]
        if length + prefix > max_tokens:
            raise ValueError(
                f"max_tokens={max_tokens} is less than sequence {i} with its prompt: "
                f"{length} + {prefix} tokens; raise max_tokens or lower the length limits"
            )
        extra = length + (0 if lens.prefix_ids[i] in prefixes else prefix)
        if members and (group_ids[i] != group_ids[members[-1]] or cost + extra > max_tokens):
            pieces.append((cost, members))
            cost, members, prefixes, extra = 0, [], set(), length + prefix
        prefixes.add(lens.prefix_ids[i])
        cost, members = cost + extra, [*members, i]
    return sorted([*pieces, (cost, members)] if members else pieces, key=lambda piece: (-piece[0], piece[1]))


def _work(members: list[int], lens: _Lens, attention: float) -> float:
    """The work of a bin, in tokens without attention."""
    prefixes = {i: lens.prefix[lens.prefix_ids[i]] for i in members}
    keys = sum(lens.seqs[i] * (p + lens.seqs[i] / 2) for i, p in prefixes.items())
    once = [lens.prefix[p] for p in {lens.prefix_ids[i] for i in members}]
    return sum(lens.seqs[i] for i in members) + sum(once) + attention * (keys + sum(p * p for p in once) / 2)


def _longest_first(pieces: list[Piece], num_bins: int) -> list[Piece]:
    """Assign each piece, longest first, to the least loaded bin; the bins in order of load."""
    heap: list[tuple[int, int, list[int]]] = [(0, b, []) for b in range(num_bins)]
    for cost, members in pieces:
        load, b, held = heap[0]
        held += members
        heapq.heapreplace(heap, (load + cost, b, held))
    return [(load, held) for load, _, held in sorted(heap)]


def _evened(packed: list[Piece], lens: _Lens, max_tokens: int, ranks: int) -> list[Piece]:
    """Move a sequence from the fullest bin to one of the emptiest, or swap two, until balanced or no move helps.

    Bins that run at the same time are neighbours in the order of loads. So the total time that ranks wait for the most
    loaded one is at most the difference between the fullest and the emptiest bin.
    """
    bins = [
        _Bin(load, sorted((lens.seqs[i], i) for i in held), Counter(lens.prefix_ids[i] for i in held))
        for load, held in packed
    ]
    total = sum(held.load for held in bins)
    while bins[-1].load > max_tokens or bins[-1].load - bins[0].load > _EVEN * total / ranks:
        a = bins[-1]
        tries = ((min(_exchanges(a, b, lens), default=(a.load, -1, -1)), b) for b in bins[:_PARTNERS] if b is not a)
        (_, i, j), b = next((move for move in tries if move[0][0] < a.load), ((0, -1, -1), a))
        if b is a:
            break
        bins.remove(a)
        bins.remove(b)
        total -= a.load + b.load
        a.load, b.load = _loads(a, b, i, j, lens)
        total += a.load + b.load
        for source, target, moved in ((a, b, i), (b, a, j)):
            if moved >= 0:
                source.members.remove((lens.seqs[moved], moved))
                insort(target.members, (lens.seqs[moved], moved))
                source.prefixes[lens.prefix_ids[moved]] -= 1
                target.prefixes[lens.prefix_ids[moved]] += 1
        insort(bins, a, key=lambda held: held.load)
        insort(bins, b, key=lambda held: held.load)
    return [(held.load, [i for _, i in held.members]) for held in bins]


def _exchanges(a: _Bin, b: _Bin, lens: _Lens) -> Iterable[tuple[int, int, int]]:
    """Yield `(max load after, i, j)` for moving i from a to b, alone (j = -1) or swapped with the best-matching j."""
    gap = a.load - b.load
    for length, i in a.members:
        if length < gap:
            yield max(_loads(a, b, i, -1, lens)), i, -1
        at = bisect(b.members, (length - gap // 2, -1))
        for _, j in b.members[max(0, at - 1) : at + 1]:
            yield max(_loads(a, b, i, j, lens)), i, j


def _loads(a: _Bin, b: _Bin, i: int, j: int, lens: _Lens) -> tuple[int, int]:
    """Loads of a and b after moving i from a to b and j from b to a."""
    p, q, moved = lens.prefix_ids[i], lens.prefix_ids[j], lens.seqs[i] - lens.seqs[j]
    if p == q:
        return a.load - moved, b.load + moved
    p_length, other = lens.prefix[p], lens.prefix[q]
    return (
        a.load - moved - p_length * (a.prefixes[p] == 1) + other * (a.prefixes[q] == 0),
        b.load + moved + p_length * (b.prefixes[p] == 0) - other * (b.prefixes[q] == 1),
    )
