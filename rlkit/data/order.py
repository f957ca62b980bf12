"""The order in which a training run visits its rows: a pure function of a seed and a step."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Consecutive rows of the data: how many, their weight in the mixture, and whose files they are: names and, after
    the last blank, a number of their contents; "" where nobody knows."""

    size: int
    weight: float = 1.0
    source: str = ""


Parts = Sequence[tuple[int, float] | Part]


class Leg(NamedTuple):
    """A stretch of the stream: the parts are mixed as they are from place `first` on, when `taken` rows of each had
    been visited. A resumed run with other data begins a new one. `orders` are the numbers of the parts' orders (see
    `epoch_order`): a part keeps its own where others come or go. (): 0, 1, ..."""

    first: int = 0
    taken: tuple[int, ...] = ()
    orders: tuple[int, ...] = ()


Skips = Mapping[int, tuple[int, int]]  # row -> for how many passes it is skipped, and the pass in which it comes back
_PASSES = 3  # of a part whose orders are kept


def epoch_order(n: int, *, seed: int, epoch: int, part: int = 0) -> list[int]:
    """A permutation of `range(n)` that depends on (n, seed, epoch, part) and on nothing else.

    The indices are sorted by one uniform key each, drawn from Python's `random.Random.random()`, whose sequence for a
    given seed is fixed across Python versions and machines (a library's `shuffle` or `permutation` need not be).
    """
    if n < 1:
        raise ValueError(f"n must be at least 1 (the number of rows), got {n}")
    return list(_order(n, seed, epoch, part))


def batch_indices(n: int, *, batch_size: int, seed: int, step: int, parts: Parts = (), leg: Leg = Leg()) -> list[int]:
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
    return [mixed_index(position, parts=parts, seed=seed, leg=leg) for position in positions]


def mixed_index(position: int, *, parts: Parts, seed: int, leg: Leg = Leg()) -> int:
    """The row at a position of a stream that mixes parts of the data in fixed shares: a pure function.

    `parts` are (number of rows, weight) of consecutive parts of the rows. Any first m positions hold each part
    m * weight / (sum of weights) times, up to a fraction of one for each part before it: the shares are those of the
    weights at once, not only on average. Within a part the rows come as in `epoch_order`, each once in a pass over the
    part, so a small part with a large weight is repeated. Each part has an order of its own: rows of parallel files,
    such as translations, do not meet in one batch in every pass.

    The first part takes the positions at which floor(position * share) grows, and the others divide the rest likewise.
    """
    return mixed_place(position, parts=parts, seed=seed, leg=leg)[0]


def mixed_place(position: int, *, parts: Parts, seed: int, leg: Leg = Leg()) -> tuple[int, int]:
    """The row at a position of the stream of `mixed_index`, and the number of the pass over its part, from 0."""
    first, before, place = 0, leg.taken or (0,) * len(parts), position - leg.first
    now, after = (_taken(parts, place + more) for more in (0, 1))
    for (n, *_), order, old, taken, then in zip(parts, _orders(parts, leg), before, now, after, strict=True):
        if then > taken:
            return first + _order(n, seed, (old + taken) // n, order)[(old + taken) % n], (old + taken) // n
        first += n
    raise AssertionError("the last part has share 1")


def _taken(parts: Parts, place: int) -> list[int]:
    """How many of the first `place` rows of a stream are of each part."""
    left, counts = sum(Fraction(weight) for _, weight, *_ in parts), []
    for _, weight, *_ in parts:
        counts.append(math.floor(place * Fraction(weight) / left))
        left, place = left - Fraction(weight), place - counts[-1]
    return counts


def to_save(parts: Parts, leg: Leg, *, position: int) -> dict[str, Any]:
    """What a checkpoint holds of the order, after `position` rows of the stream."""
    taken = [a + b for a, b in zip(leg.taken or (0,) * len(parts), _taken(parts, position - leg.first), strict=True)]
    now = [[*[*part, ""][:3], num] for part, num in zip(parts, taken, strict=True)]
    orders = [*_orders(parts, leg)]
    return {"first": leg.first, "before": [*leg.taken], "position": position, "parts": now, "orders": orders}


def resumed(
    saved: Mapping[str, Any] | None, parts: Parts, *, position: int, names: str | None = None
) -> tuple[Leg, list[str]]:
    """The leg of a run that goes on at `position` of the stream, and what is to be reported.

    A part whose files are those of a part of the checkpoint (`saved`, of `to_save`) goes on after its last row. One
    with other contents, or new in the mixture, begins at the first row of its order. Without `saved`, the state of an
    earlier version, the `names` of that run's files decide, and where one is new all parts begin anew.
    """
    sources = [part[2] if len(part) > 2 else "" for part in parts]
    if saved is None and names is None:
        return Leg(), []
    before = [] if saved is None else saved["parts"]
    orders = (saved or {}).get("orders", [0] * len(before or parts))  # earlier versions had one order for all parts
    same = Leg(orders=_unless_plain(orders))
    if not all(sources) or not parts:
        return same if len(before) == len(parts) else Leg(), []
    if saved is None and all(f" {source.rpartition(' ')[0]} " in f" {names} " for source in sources):
        return same, []
    old = dict(zip(_keys([part[2] for part in before]), before, strict=True))
    keys = _keys(sources)
    weights = [(key, part[1]) for key, part in zip(keys, parts, strict=True)]
    if saved is not None and position == saved["position"] and weights == [(k, p[1]) for k, p in old.items()]:
        return same._replace(first=saved["first"], taken=tuple(saved["before"])), []
    stay = {key: number for key, number in zip(old, orders, strict=False) if key in keys}
    free = (number for number in itertools.count() if number not in stay.values())
    orders = [stay[key] if key in stay else next(free) for key in keys]
    taken = [old[key][3] if key in old else 0 for key in keys]
    said = [
        f"data: {source.rpartition(' ')[0]} "
        + (f"goes on after {num} rows" if key in old else "is new or has changed: it begins at its first row")
        for key, source, num in zip(keys, sources, taken, strict=True)
    ]
    return Leg(position, tuple(taken), _unless_plain(orders)), said if {*keys} != {*old} else []


def _orders(parts: Parts, leg: Leg) -> Sequence[int]:
    return leg.orders or range(len(parts))


def _unless_plain(orders: Sequence[int]) -> tuple[int, ...]:
    return () if [*orders] == [*range(len(orders))] else tuple(orders)


def _keys(sources: Sequence[str]) -> list[tuple[str, int]]:
    """The number of the contents of each source, and how many of the sources before it have the same."""
    numbers = [source.rpartition(" ")[2] for source in sources]
    return [(number, numbers[:i].count(number)) for i, number in enumerate(numbers)]


def next_skips(skips: Skips, outcomes: Iterable[tuple[int, int, bool]], *, longest: int) -> dict[int, tuple[int, int]]:
    """The skips after `outcomes`, (row, pass, whether it taught something) of rows that were tried.

        taught:       no skip
        else:         length' = min(max(1, 2 length), longest)        back' = pass + 1 + length'

    So a row that teaches nothing is skipped for 1 pass, and tried again; it is then skipped for 2, 4, 8 passes, at most
    `longest`, until it teaches something. `is_skipped` tells whether a row is.
    Differs: GRESO skips such a prompt at random, with a probability that grows with the number of such passes.
    Reference: arXiv:2506.02177 (GRESO)
    """
    new = {**skips}
    for row, lap, taught in outcomes:
        length, _ = new.pop(row, (0, 0))
        if not taught:
            length = min(max(1, 2 * length), longest)
            new[row] = (length, lap + 1 + length)
    return new


def is_skipped(skips: Skips, row: int, lap: int) -> bool:
    """Whether a row is skipped in a pass."""
    return row in skips and lap < skips[row][1]


def check_parts(n: int, parts: Parts) -> None:
    """ValueError for parts that are not those of n rows, are empty, or have a weight that is not above 0."""
    if parts and sum(size for size, *_ in parts) != n:
        raise ValueError(f"parts hold {sum(size for size, *_ in parts)} rows, and there are {n}")
    for size, weight, *_ in parts:
        if size < 1 or not 0 < weight < math.inf:
            raise ValueError(f"parts: each needs rows and a weight above 0, got {size} rows, weight {weight}")


def batches(
    n: int, *, batch_size: int, seed: int, start_step: int = 0, parts: Parts = (), leg: Leg = Leg()
) -> Iterator[list[int]]:
    """`batch_indices` for start_step, start_step + 1, ... without end."""
    at = partial(batch_indices, n, batch_size=batch_size, seed=seed, parts=parts, leg=leg)
    at(step=start_step)
    return (at(step=step) for step in itertools.count(start_step))


def _order(n: int, seed: int, epoch: int, part: int) -> Sequence[int]:
    return _orders_of(n, seed, part)(epoch)


@lru_cache(maxsize=1024)  # parts of mixtures
def _orders_of(n: int, seed: int, part: int) -> Callable[[int], Sequence[int]]:
    return lru_cache(maxsize=_PASSES)(partial(_shuffled, n, seed, part=part))


def _shuffled(n: int, seed: int, epoch: int, part: int) -> Sequence[int]:
    uniform = random.Random(f"{seed}/{epoch}" + f"/{part}" * (part > 0)).random
    keys = [uniform() for _ in range(n)]
    return array("Q", sorted(range(n), key=keys.__getitem__))
