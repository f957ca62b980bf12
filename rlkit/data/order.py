"""The order in which a training run visits its rows: a pure function of a seed and a step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import lru_cache


def epoch_order(n: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of `range(n)` that depends on (n, seed, epoch) and on nothing else.

    The indices are sorted by one uniform key each, drawn from Python's `random.Random.random()`, whose sequence for a
    given seed is fixed across Python versions and machines (a library's `shuffle` or `permutation` need not be).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 (the number of rows), got {n}")
    return list(_order(n, seed, epoch))


def batch_indices(n: int, *, batch_size: int, seed: int, step: int) -> list[int]:
    """The rows of one step: a pure function of its arguments, so a resumed run needs only the step number.

        stream[step * batch_size : (step + 1) * batch_size],   stream = epoch_order(0) + epoch_order(1) + ...

    No row is dropped at the end of an epoch: the batch is completed from the next one. So every row comes exactly once
    in each epoch of n, every batch is full, and a batch over an epoch's end (or larger than n) may hold a row twice.

    Differs: torch's `DataLoader(shuffle=True)`, on which TRL and verl build, draws its order from a generator whose
    state must be saved or replayed, and it drops or shortens the last batch of an epoch.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(
            f"n and batch_size must be at least 1, got n={n} (the number of rows), batch_size={batch_size}"
        )
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    positions = range(step * batch_size, (step + 1) * batch_size)
    return [_order(n, seed, position // n)[position % n] for position in positions]


def batches(n: int, *, batch_size: int, seed: int, start_step: int = 0) -> Iterator[list[int]]:
    """`batch_indices` for start_step, start_step + 1, ... without end."""
    batch_indices(n, batch_size=batch_size, seed=seed, step=start_step)
    return (batch_indices(n, batch_size=batch_size, seed=seed, step=step) for step in itertools.count(start_step))


@lru_cache(maxsize=4)
def _order(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    uniform = random.Random(f"{seed}/{epoch}").random
    keys = [uniform() for _ in range(n)]
    return tuple(sorted(range(n), key=keys.__getitem__))
