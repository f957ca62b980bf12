"""Scalarisations against formulas, fronts against all pairs, hypervolume against counted cells, archive as a value."""

import itertools
import json
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import objectives as O

COORDINATE = st.integers(-3, 6)


def points_of(num_objectives, max_size=7):
    return st.lists(st.tuples(*[COORDINATE] * num_objectives), min_size=1, max_size=max_size)


def tensor(points):
    return torch.tensor(points, dtype=torch.float64)


def better(a, b):
    return all(x >= y for x, y in zip(a, b)) and a != b


@given(points_of(3))
def test_fronts_against_all_pairs(points):
    x = tensor(points)
    counts = [sum(better(q, p) for q in points) for p in points]
    assert O.num_dominating(x).tolist() == counts
    assert O.pareto_mask(x).tolist() == [c == 0 for c in counts]
    pairs = O.dominates(x[:, None], x[None])
    assert pairs.tolist() == [[better(p, q) for q in points] for p in points]


def cells(points, reference):
    """Unit cells of the integer grid that some point dominates."""
    axes = [range(r, 7) for r in reference]
    return sum(any(all(c < x for c, x in zip(cell, p)) for p in points) for cell in itertools.product(*axes))


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 4])
@given(data=st.data())
def test_hypervolume_counts_cells(num_objectives, data):
    points = data.draw(points_of(num_objectives))
    reference = data.draw(st.tuples(*[st.integers(-2, 2)] * num_objectives))
    expected = cells(points, reference)
    kept = sys.modules.get("moocore")
    sys.modules["moocore"] = None  # the way without the library
    try:
        volume = O.hypervolume(tensor(points), reference=tensor(reference))
    finally:
        if kept is None:
            del sys.modules["moocore"]
        else:
            sys.modules["moocore"] = kept
    assert volume.dtype == torch.float64
    assert volume.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_objectives", [2, 3, 4, 5])
def test_hypervolume_with_moocore(num_objectives):
    moocore = pytest.importorskip("moocore")
    g = torch.Generator().manual_seed(0)
    points, reference = (
        torch.randn(25, num_objectives, generator=g).double(),
        torch.full((num_objectives,), -1.0).double(),
    )
    expected = moocore.hypervolume(points.numpy(), ref=reference.numpy(), maximise=True)
    assert O.hypervolume(points, reference=reference).item() == pytest.approx(float(expected), rel=1e-10)
    gains = (points - reference)[((points - reference) > 0).all(1)]
    assert O._slices(gains).item() == pytest.approx(float(expected), rel=1e-10)


def test_hypervolume_limits():
    one = O.hypervolume(torch.tensor([[2.0, 3.0, 5.0]]), reference=torch.zeros(3))
    assert one.item() == 30.0
    assert O.hypervolume(torch.tensor([[2.0, -1.0]]), reference=torch.zeros(2)).item() == 0.0
    assert O.hypervolume(torch.zeros(0, 3), reference=torch.zeros(3)).item() == 0.0
    g = torch.Generator().manual_seed(1)
    x, ref = torch.rand(12, 3, generator=g).double(), torch.zeros(3).double()
    volume = O.hypervolume(x, reference=ref)
    close = lambda a: torch.testing.assert_close(a, volume, rtol=1e-10, atol=0)
    close(O.hypervolume(x[O.pareto_mask(x)], reference=ref))
    close(O.hypervolume(x + 7, reference=ref + 7))
    close(O.hypervolume(x * torch.tensor([2.0, 3.0, 0.5]), reference=ref) / 3)
    close(O.hypervolume(x[torch.randperm(12, generator=g)][:, [2, 0, 1]], reference=ref))
    assert O.hypervolume(torch.cat([x, torch.ones(1, 3).double()]), reference=ref).item() == pytest.approx(1.0)


def test_scalarisations():
    r = torch.tensor([[1.0, 4.0], [3.0, 0.0], [2.0, 2.0]], dtype=torch.float64)
    w, ideal = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert O.weighted_sum(r, weights=w).tolist() == [1.5, 1.5, 1.5]
    assert O.tchebycheff(r, weights=w, ideal=ideal).tolist() == [-1.0, -1.0, -0.5]
    assert O.tchebycheff(r, weights=w, ideal=ideal, slope=0.1).tolist() == pytest.approx([-1.1, -1.1, -0.6])
    for t in (0.01, 1.0, 5.0):
        rows = [[0.5 * (3 - a), 0.25 * (4 - b)] for a, b in r.tolist()]
        expected = [-t * math.log(sum(math.exp(d / t) for d in row)) for row in rows]
        smooth = O.smooth_tchebycheff(r, weights=w, ideal=ideal, temperature=t)
        assert smooth.tolist() == pytest.approx(expected)
    hard = O.tchebycheff(r, weights=w, ideal=ideal)
    gap = hard - O.smooth_tchebycheff(r, weights=w, ideal=ideal, temperature=0.1)
    assert ((gap >= -1e-12) & (gap <= 0.1 * math.log(2) + 1e-12)).all()
    assert O.tchebycheff(ideal[None], weights=w, ideal=ideal).item() == 0.0
    assert O.weighted_sum(r.bfloat16(), weights=w.float()).dtype == torch.float32


def test_tchebycheff_reaches_what_no_weighted_sum_does():
    """A concave front: the middle point is never best under any weights of a sum, but is under Tchebycheff."""
    front = torch.tensor([[1.0, 0.0], [0.4, 0.4], [0.0, 1.0]])
    assert O.pareto_mask(front).all()
    for a in torch.linspace(0, 1, 21):
        assert O.weighted_sum(front, weights=torch.stack([a, 1 - a])).argmax() != 1
    assert O.tchebycheff(front, weights=torch.ones(2), ideal=torch.ones(2)).argmax() == 1


def test_normalize_then_sum_is_the_same_function():
    from rlkit.advantages import normalize_then_sum

    assert O.normalize_then_sum is normalize_then_sum


@given(points_of(2, max_size=12), st.randoms())
def test_archive_is_the_front_of_all_inserted_points(points, random):
    archive = O.archive_init()
    for i, p in enumerate(points):
        before = archive
        frozen = (tuple(before.points), tuple(before.items))
        archive = O.archive_insert(archive, p, i)
        assert (before.points, before.items) == frozen
    front = {p for p in points if not any(better(q, p) for q in points)}
    assert set(archive.points) == front
    assert len(archive.points) == len(front)
    for p, i in zip(archive.points, archive.items):
        assert points[i] == p
        assert points.index(p) == i  # of equal points the first stays
    assert list(archive.points) == sorted(archive.points, reverse=True)
    restored = json.loads(json.dumps(archive._asdict()))
    assert [tuple(p) for p in restored["points"]] == list(archive.points)
    again = O.archive_init()
    shuffled = list(dict.fromkeys(points))
    random.shuffle(shuffled)
    for p in shuffled:
        again = O.archive_insert(again, p, None)
    assert again.points == archive.points


def test_archive_keeps_its_ends_and_its_spread():
    archive = O.archive_init()
    for x in (0.0, 10.0, 5.0, 5.1, 2.5, 7.5):
        archive = O.archive_insert(archive, (x, 10.0 - x), x, max_size=5)
    assert set(archive.items) >= {0.0, 10.0, 2.5, 7.5}
    assert len(archive.items) == 5
    assert O.archive_insert(archive, (4.0, 4.0), "dominated", max_size=5) is archive
    assert O.archive_insert(archive, (11.0, 11.0), "best", max_size=1).items == ("best",)
    first = O.archive_insert(O.archive_init(), (1.0, 0.0), "first")
    assert O.archive_insert(first, (0.0, 1.0), "new", max_size=1) == first  # both are ends
    assert O.archive_insert(first, (2.0, -1.0), "new", max_size=1) == first
    best = O.archive_insert(archive, (11.0, 11.0), "best")
    assert best == O.Archive(((11.0, 11.0),), ("best",))


def test_a_full_archive_keeps_both_ends_of_every_objective():
    draw = torch.rand(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = [tuple(p) for p in (draw / draw.sum(1, keepdim=True)).tolist()]  # on a plane: none dominates another
    archive = O.archive_init()
    for p in points:
        archive = O.archive_insert(archive, p, None, max_size=6)
    assert len(archive.points) == 6
    for k in range(3):
        column = lambda p, k=k: p[k]
        assert {max(points, key=column), min(points, key=column)} <= {*archive.points}


def test_errors_name_the_argument():
    r, w = torch.rand(4, 2), torch.rand(2)

    def fails(match, f, *args, error=ValueError, **k):
        with pytest.raises(error, match=match):
            f(*args, **k)

    fails("rewards must have shape", O.weighted_sum, r[0], weights=w)
    fails("weights must have one entry per objective", O.weighted_sum, r, weights=torch.rand(3))
    fails("ideal must have one entry per objective", O.tchebycheff, r, weights=w, ideal=torch.rand(1))
    fails("slope must be at least 0", O.tchebycheff, r, weights=w, ideal=w, slope=-1.0)
    fails("temperature must be positive", O.smooth_tchebycheff, r, weights=w, ideal=w, temperature=0.0)
    fails("points must be a floating", O.pareto_mask, r.long(), error=TypeError)
    fails("points must not contain NaN", O.pareto_mask, r * math.nan)
    fails("reference must have one entry", O.hypervolume, r, reference=torch.zeros(3))
    archive = O.archive_insert(O.archive_init(), (1.0, 2.0), None)
    fails("point must have 2 objectives", O.archive_insert, archive, (1.0,), None)
    fails("point must not contain NaN", O.archive_insert, archive, (1.0, math.nan), None)
    fails("max_size must be at least 1", O.archive_insert, archive, (3.0, 3.0), None, max_size=0)


@given(points_of(3))
def test_lexicographic_is_the_share_of_rows_that_a_row_precedes(points):
    got = O.lexicographic(tensor(points)).tolist()
    for i, row in enumerate(points):
        others = [q for j, q in enumerate(points) if j != i]
        wins = sum((row > q) + 0.5 * (row == q) for q in others)
        assert got[i] == pytest.approx(wins / len(others) if others else 0.5)
