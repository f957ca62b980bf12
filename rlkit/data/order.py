"""The order in which a training run visits its rows: a pure function of a seed and a step."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial

Parts = Sequence[tuple[int, float]]  # (number of rows, weight) of consecutive parts of the rows
Rests = Mapping[int, tuple[int, int]]  # row -> the length of its rest in passes, and the pass in which it comes back


def epoch_order(n: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of `range(n)` that depends on (n, seed, epoch) and on nothing else.

    The indices are sorted by one uniform key each, drawn from Python's `random.Random.random()`, whose sequence for a
    given seed is fixed across Python versions and machines (a library's `shuffle` or `permutation` need not be).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 (the number of rows), got {n}")
    return list(_order(n, seed, epoch))


def batch_indices(n: int, *, batch_size: int, seed: int, step: int, parts: Parts = ()) -> list[int]:
    """The rows of one step: a pure function of its arguments, so a resumed run needs only the step number.

        stream[step * batch_size : (step + 1) * batch_size],   stream = epoch_order(0) + epoch_order(1) + ...

    No row is dropped at the end of an epoch: the batch is completed from the next one. So every row comes exactly once
    in each epoch of n, every batch is full, and a batch over an epoch's end (or larger than n) may hold a row twice.
    With `parts` the stream is that of `mixed_index`.

    Differs: torch's `DataLoader(shuffle=True)`, on which TRL and verl build, draws its order from a generator whose
    state must be saved or replayed, and it drops or shortens the last batch of an epoch.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(
            f"n and batch_size must be at least 1, got n={n} (the number of rows), batch_size={batch_size}"
        )
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    check_parts(n, parts)
    positions = range(step * batch_size, (step + 1) * batch_size)
    parts = parts or [(n, 1.0)]
    return [mixed_index(position, parts=parts, seed=seed) for position in positions]


def mixed_index(position: int, *, parts: Parts, seed: int) -> int:
    """The row at a position of a stream that mixes parts of the data in fixed shares: a pure function.

    `parts` are (number of rows, weight) of consecutive parts of the rows. Any first m positions hold each part
    m * weight / (sum of weights) times, up to a fraction of one for each part before it: the shares are those of the
    weights at once, not only on average. Within a part the rows come as in `epoch_order`, each once in a pass over the
    part, so a small part with a large weight is repeated.

    The first part takes the positions at which floor(position * share) grows, and the others divide the rest likewise.
    """
    return mixed_place(position, parts=parts, seed=seed)[0]


def mixed_place(position: int, *, parts: Parts, seed: int) -> tuple[int, int]:
    """The row at a position of the stream of `mixed_index`, and the number of the pass over its part, from 0."""
    first, left = 0, sum(Fraction(weight) for _, weight in parts)
    for n, weight in parts:
        share = Fraction(weight) / left
        taken = math.floor(position * share)
        if math.floor((position + 1) * share) > taken:
            return first + _order(n, seed, taken // n)[taken % n], taken // n
        first, left, position = first + n, left - Fraction(weight), position - taken
    raise AssertionError("the last part has share 1")


def rested(rests: Rests, outcomes: Iterable[tuple[int, int, bool]], *, longest: int) -> dict[int, tuple[int, int]]:
    """The rests after `outcomes`, (row, pass, whether it taught something) of rows that were tried.

        taught:       no rest
        else:         length' = min(max(1, 2 length), longest)        back' = pass + 1 + length'

    So a row that teaches nothing rests for 1 pass, and is tried again; it then rests for 2, 4, 8 passes, at most
    `longest`, until it teaches something. `is_resting` tells whether a row is passed over.
    Differs: GRESO skips such a prompt at random, with a probability that grows with the number of such passes.
    Reference: arXiv:2506.02177 (GRESO)
    """
    new = {**rests}
    for row, lap, taught in outcomes:
        length, _ = new.pop(row, (0, 0))
        if not taught:
            length = min(max(1, 2 * length), longest)
            new[row] = (length, lap + 1 + length)
    return new


def is_resting(rests: Rests, row: int, lap: int) -> bool:
    """Whether a row rests in a pass."""
    return row in rests and lap < rests[row][1]


def check_parts(n: int, parts: Parts) -> None:
    """ValueError for parts that are not those of n rows, are empty, or have a weight that is not above 0."""
    if parts and sum(size for size, _ in parts) != n:
        raise ValueError(f"parts hold {sum(size for size, _ in parts)} rows, and there are {n}")
    for size, weight in parts:
        if size < 1 or not 0 < weight < math.inf:
            raise ValueError(f"parts: each needs rows and a weight above 0, got {size} rows, weight {weight}")


def batches(n: int, *, batch_size: int, seed: int, start_step: int = 0, parts: Parts = ()) -> Iterator[list[int]]:
    """`batch_indices` for start_step, start_step + 1, ... without end."""
    at = partial(batch_indices, n, batch_size=batch_size, seed=seed, parts=parts)
    at(step=start_step)
    return (at(step=step) for step in itertools.count(start_step))


@lru_cache(maxsize=32)  # of each part of a mixture, and of the next pass
def _order(n: int, seed: int, epoch: int) -> Sequence[int]:
    uniform = random.Random(f"{seed}/{epoch}").random
    keys = [uniform() for _ in range(n)]
    return array("Q", sorted(range(n), key=keys.__getitem__))
