"""Multiple objectives: scalarisations to train on, and Pareto fronts to choose from. Larger is better.

Scalarisations map rewards `[N, K]`, one column per objective, to `[N]`. Except for `normalize_then_sum` (see
`rlkit.advantages`) they depend on the scale of each column: bring the columns to a common scale first, e.g. by weights.
Functions on fronts take points `[M, K]`, e.g. one evaluated checkpoint per row. NaN raises on the CPU.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.tensors import check_float, check_no_nan, readable, upcast
from rlkit.advantages import normalize_then_sum

__all__ = [
    "Archive",
    "archive_init",
    "archive_insert",
    "dominates",
    "hypervolume",
    "lexicographic",
    "normalize_then_sum",
    "num_dominating",
    "pareto_mask",
    "smooth_tchebycheff",
    "tchebycheff",
    "weighted_sum",
]


def weighted_sum(rewards: Float[Tensor, "N K"], *, weights: Float[Tensor, "K"]) -> Float[Tensor, "N"]:
    """Linear scalarisation.

        s_i = sum_k w_k r_ik

    Limits:   one weight 1 and the others 0 gives that reward. Its maximisers lie on the convex hull of the front: no
              weights reach a concave part of it, see `tchebycheff`.
    """
    rewards, weights = _checked(rewards, weights=weights)
    return rewards @ weights


def tchebycheff(
    rewards: Float[Tensor, "N K"], *, weights: Float[Tensor, "K"], ideal: Float[Tensor, "K"], slope: float = 0.0
) -> Float[Tensor, "N"]:
    """Minus the largest weighted distance to the ideal point: only the worst objective counts.

        d_ik = w_k (ideal_k - r_ik)          s_i = -max_k d_ik - slope sum_k d_ik

    `ideal` is at least as good as any attainable value of each objective (a common choice: the best so far). Every
    Pareto-optimal point maximises s for some weights, also on concave parts of the front. A small `slope` (the
    augmented form) excludes weakly dominated maximisers.

    Limits:   at the ideal point s = 0; s / slope tends to `weighted_sum` up to a constant as slope -> infinity.
    Reference: Steuer & Choo 1983, https://doi.org/10.1007/BF02591870; Miettinen, Nonlinear Multiobjective Optimization
    """
    if not slope >= 0:
        raise ValueError(f"slope must be at least 0, got {slope}")
    distance = _weighted_distance(rewards, weights, ideal)
    return -distance.amax(1) - slope * distance.sum(1)


def smooth_tchebycheff(
    rewards: Float[Tensor, "N K"], *, weights: Float[Tensor, "K"], ideal: Float[Tensor, "K"], temperature: float
) -> Float[Tensor, "N"]:
    """`tchebycheff` with a soft maximum: every objective has some weight, the worst one the most.

        s_i = -temperature logsumexp_k(w_k (ideal_k - r_ik) / temperature)

    Limits:   temperature -> 0 is `tchebycheff`, from below by at most temperature log K; temperature -> infinity is the
              weighted mean, up to constants.
    Reference: Lin et al. 2024, https://arxiv.org/abs/2402.19078
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return -temperature * torch.logsumexp(_weighted_distance(rewards, weights, ideal) / temperature, 1)


def lexicographic(rewards: Float[Tensor, "N K"]) -> Float[Tensor, "N"]:
    """The share of the other rows that a row precedes: by the first objective, ties by the second, and so on.

        s_i = 1 / (N - 1) sum_{j != i} [r_i > r_j] + [r_i = r_j] / 2          > compares the rows as words

    The rows are those of one group. An objective only decides between answers equal in all before it.
    Limits:   a single row gives 0.5; K = 1 is the rank, scaled to [0, 1]; an increasing map of a column changes
              nothing.
    """
    (rewards,) = _checked(rewards)
    above = torch.zeros(len(rewards), len(rewards), dtype=rewards.dtype, device=rewards.device)
    for x in reversed(rewards.unbind(1)):  # an earlier objective overrules the later ones
        above = torch.where(x[:, None] == x, above, (x[:, None] - x).sign())
    return (above.sum(1) / max(1, len(rewards) - 1) + 1) / 2


def dominates(a: Float[Tensor, "*batch K"], b: Float[Tensor, "*batch K"]) -> Bool[Tensor, "*batch"]:
    """Whether a is at least as good as b in every objective and better in one. The leading axes broadcast.

    A point does not dominate an equal point. NaN raises ValueError (on the CPU).
    """
    check_no_nan(None, a=a, b=b)
    return (a >= b).all(-1) & (a > b).any(-1)


def num_dominating(points: Float[Tensor, "M K"]) -> Int[Tensor, "M"]:
    """The number of points that dominate each point: 0 on the front. O(M^2 K) time, O(M^2) memory."""
    (points,) = _checked(points, "points")
    columns = points.unbind(1)
    no_worse = torch.ones(points.shape[0], points.shape[0], dtype=torch.bool, device=points.device)
    better = torch.zeros_like(no_worse)
    for x in columns:
        no_worse = no_worse & (x[:, None] >= x)
        better = better | (x[:, None] > x)
    return (no_worse & better).sum(0)


def pareto_mask(points: Float[Tensor, "M K"]) -> Bool[Tensor, "M"]:
    """True for the points that no other point dominates: the Pareto front. Equal points are all in or all out."""
    return num_dominating(points) == 0


def hypervolume(points: Float[Tensor, "M K"], *, reference: Float[Tensor, "K"]) -> Float[Tensor, ""]:
    """Hypervolume indicator: the volume that the points dominate above `reference`.

        volume of the union of the boxes [reference, point]

    A point that is not better than the reference in every objective adds nothing. Detached. Exact, in fp64: one sweep
    for two objectives; for more, `moocore` (C, extra `pareto`) if it is installed, otherwise slicing along the last
    objective, O(M^(K-1)): fast enough for tens of points and up to five objectives.

    Limits:   one point gives the product of its distances; a dominated point adds nothing; invariant to a common shift
              of points and reference.
    Reference: Zitzler & Thiele 1998, https://doi.org/10.1007/BFb0056872; slicing: While et al. 2006,
               https://doi.org/10.1109/TEVC.2005.851275; https://github.com/multi-objective/moocore
    """
    points, reference = _checked(points, "points", reference=reference)
    gains = (points - reference).detach().double()
    gains = gains[(gains > 0).all(1)]
    if gains.shape[0] == 0:
        return gains.new_zeros(())
    if gains.shape[1] <= 2:
        return _sweep(gains)
    try:
        import moocore
    except ImportError:
        return _slices(gains[pareto_mask(gains)])
    volume = moocore.hypervolume(gains.cpu().numpy(), ref=[0.0] * gains.shape[1], maximise=True)
    return torch.tensor(float(volume), dtype=torch.float64, device=gains.device)


class Archive(NamedTuple):
    """A Pareto front with one item per point (e.g. a step, a path): plain data, sorted by the first objective."""

    points: tuple[tuple[float, ...], ...]
    items: tuple[Any, ...]


def archive_init() -> Archive:
    """An empty archive."""
    return Archive((), ())


def archive_insert(archive: Archive, point: tuple[float, ...], item: Any, *, max_size: int | None = None) -> Archive:
    """A new archive with the point, without the points it dominates; the same archive if the point is dominated.

    A point equal to an archived one is dropped, and the older item stays. Beyond `max_size` the point with the smallest
    crowding distance is removed, but never the best point of an objective, so the front keeps its ends; where
    `max_size` has no room for these, the new point goes.

    Reference: Deb et al. 2002 (NSGA-II), https://doi.org/10.1109/4235.996017, section III-B
    """
    point = tuple(float(x) for x in point)
    if any(x != x for x in point):
        raise ValueError(f"point must not contain NaN, got {point}")
    if archive.points and len(point) != len(archive.points[0]):
        raise ValueError(
            f"point must have {len(archive.points[0])} objectives, as archived points do, got {len(point)}"
        )
    if max_size is not None and max_size < 1:
        raise ValueError(f"max_size must be at least 1, got {max_size}")
    if any(_no_worse(old, point) for old in archive.points):
        return archive
    entries = [(p, i) for p, i in zip(archive.points, archive.items) if not _no_worse(point, p)]
    entries = sorted([*entries, (point, item)], key=lambda entry: entry[0], reverse=True)
    while max_size is not None and len(entries) > max_size:
        crowding = _crowding([p for p, _ in entries])
        old = [x == inf and p != point for x, (p, _) in zip(crowding, entries)]
        entries.pop(min(range(len(entries)), key=lambda i: (crowding[i], old[i])))
    return Archive(tuple(p for p, _ in entries), tuple(i for _, i in entries))


def _no_worse(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return all(x >= y for x, y in zip(a, b))


def _crowding(points: list[tuple[float, ...]]) -> list[float]:
    """Sum over objectives of the gap between a point's two neighbours, in units of the range; infinite at the ends."""
    distance = [0.0] * len(points)
    for k in range(len(points[0])):
        column = [p[k] for p in points]
        order = sorted(range(len(points)), key=column.__getitem__)
        spread = column[order[-1]] - column[order[0]]
        for before, i, after in zip(order, order[1:], order[2:]):
            distance[i] += (column[after] - column[before]) / spread if spread > 0 else 0.0
        distance[order[0]] = distance[order[-1]] = float("inf")
    return distance


def _sweep(gains: Tensor) -> Tensor:
    """Exact volume for one or two objectives: in descending order of the first, rises of the second add strips."""
    if gains.shape[1] == 1:
        return gains.amax()
    width, height = gains[gains[:, 0].argsort(descending=True)].unbind(1)
    top = height.cummax(0).values
    return (width * top.diff(prepend=top.new_zeros(1))).sum()


def _slices(gains: Tensor) -> Tensor:
    """Exact volume: sum of slabs between neighbouring values of the last objective, each by recursion on the rest."""
    if gains.shape[1] <= 2:
        return _sweep(gains)
    gains = gains[gains[:, -1].argsort(descending=True)]
    levels = gains[:, -1].tolist()
    volume = gains.new_zeros(())
    for i, (high, low) in enumerate(zip(levels, [*levels[1:], 0.0])):
        if high > low:
            volume = volume + (high - low) * _slices(gains[: i + 1, :-1])
    return volume


def _weighted_distance(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    rewards, weights, ideal = _checked(rewards, weights=weights, ideal=ideal)
    return weights * (ideal - rewards)


def _checked(points: Tensor, name: str = "rewards", **per_objective: Tensor) -> list[Tensor]:
    """The points `[N, K]` and the `[K]` tensors, checked, in one dtype."""
    check_float(**{name: points}, **per_objective)
    if points.ndim != 2 or points.shape[1] == 0:
        raise ValueError(f"{name} must have shape [N, K], one column per objective, got {list(points.shape)}")
    points = upcast(points)
    for other, x in per_objective.items():
        if x.shape != points.shape[1:]:
            raise ValueError(
                f"{other} must have one entry per objective, {list(points.shape[1:])}, got {list(x.shape)}"
            )
    for label, x in {name: points, **per_objective}.items():
        if readable(x) and x.isnan().any():
            raise ValueError(f"{label} must not contain NaN")
    return [points, *(x.to(points.dtype) for x in per_objective.values())]
