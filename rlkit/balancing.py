"""Micro-batches of one token budget: which sequences go together."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from rlkit.segments import seq_lens
from rlkit.types import Batch


class Plan(NamedTuple):
    """How sequences were put into micro-batches: `bins` of sequence indices, the fullest one's tokens (`makespan`), and
    the `bound` that no partition into as many bins can beat (the mean load, or the largest indivisible piece)."""

    bins: list[list[int]]
    makespan: int
    bound: int


def plan_microbatches(batch: Batch, *, max_tokens: int, ranks: int = 1, whole_groups: bool = False) -> Plan:
    """Balanced micro-batches of at most `max_tokens` tokens, a shared prefix counted once in each.

    Groups stay whole where they fit, and are cut into as few pieces as fit where they do not. Pieces go, longest first,
    to the least loaded bin (longest processing time first: makespan <= 4/3 of the optimum, Graham 1969), over the
    fewest bins that keep the budget. With several data parallel `ranks` their number is a multiple of theirs, some
    possibly empty, and groups are cut smaller where that makes the ranks more even: a cut costs one more prompt, and
    waiting for the fullest rank costs more. With `whole_groups` no group is ever cut: a loss that couples its samples.

    Errors: ValueError when one sequence with its prompt exceeds `max_tokens`, or one group that must stay whole.
    """
    pieces = _pieces(batch, max_tokens, limit=max_tokens)
    num_groups = batch.group_ids.unique().numel()
    if whole_groups and len(pieces) > num_groups:
        raise ValueError(f"max_tokens={max_tokens} is less than one whole group; raise it or lower the length limits")
    if ranks == 1 or whole_groups or not pieces:
        return _assign(pieces, max_tokens, ranks)
    share = sum(cost for cost, _ in pieces) // ranks
    cuts = {min(max_tokens, max(1, share // parts)) for parts in (1, 2, 4, 8, 16, 32)}
    plans = [
        _assign(_pieces(batch, max_tokens, limit=limit), max_tokens, ranks) for limit in sorted(cuts, reverse=True)
    ]
    return min(plans, key=lambda plan: plan.makespan * len(plan.bins))


def _assign(pieces: list[tuple[int, list[int]]], max_tokens: int, ranks: int) -> Plan:
    """Longest piece first, to the least loaded of the fewest bins that keep the budget."""
    if not pieces:
        return Plan([], 0, 0)
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    total = sum(cost for cost, _ in pieces)
    fewest = math.ceil(total / (max_tokens * ranks))
    for num_bins in range(fewest * ranks, (math.ceil(len(pieces) / ranks) + 1) * ranks, ranks):
        heap: list[tuple[int, int, list[int]]] = [(0, b, []) for b in range(num_bins)]
        for cost, members in pieces:
            load, b, held = heap[0]
            held.extend(members)
            heapq.heapreplace(heap, (load + cost, b, held))
        makespan = max(load for load, _, _ in heap)
        if makespan <= max_tokens:
            break
    bins = [sorted(held) for _, _, held in sorted(heap, key=lambda entry: entry[1])]
    return Plan(bins, makespan, max(pieces[0][0], math.ceil(total / num_bins)))


def _pieces(batch: Batch, max_tokens: int, *, limit: int) -> list[tuple[int, list[int]]]:
    """(tokens, sequences) of each group, cut where it has more than `limit` tokens, unless by a single sequence."""
    lens = seq_lens(batch.cu_seqlens).tolist()
    prefix_lens = seq_lens(batch.prefix_cu).tolist()
    prefix_ids, group_ids = batch.prefix_ids.tolist(), batch.group_ids.tolist()
    pieces: list[tuple[int, list[int]]] = []
    cost, members, prefixes, group = 0, [], set(), None  # type: ignore[var-annotated]
    for i in sorted(range(len(lens)), key=lambda i: (group_ids[i], i)):
        if lens[i] + prefix_lens[prefix_ids[i]] > max_tokens:
            raise ValueError(
                f"max_tokens={max_tokens} is less than sequence {i} with its prompt: "
                f"{lens[i]} + {prefix_lens[prefix_ids[i]]} tokens; raise max_tokens or lower the length limits"
            )
        extra = lens[i] + (0 if prefix_ids[i] in prefixes else prefix_lens[prefix_ids[i]])
        if members and (group_ids[i] != group or cost + extra > limit):
            pieces.append((cost, members))
            cost, members, prefixes = 0, [], set()
            extra = lens[i] + prefix_lens[prefix_ids[i]]
        group = group_ids[i]
        prefixes.add(prefix_ids[i])
        cost, members = cost + extra, [*members, i]
    return [*pieces, (cost, members)] if members else pieces
