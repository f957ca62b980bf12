import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.data.order import (
    Leg,
    Part,
    batch_indices,
    batches,
    epoch_order,
    is_skipped,
    mixed_index,
    mixed_place,
    next_skips,
    resumed,
    to_save,
)


@given(n=st.integers(1, 9), batch_size=st.integers(1, 20), seed=st.integers(0, 2**40), start=st.integers(0, 30))
def test_batches_are_slices_of_the_stream_of_epochs(n, batch_size, seed, start):
    stop = (start + 3) * batch_size
    stream = [i for epoch in range(stop // n + 1) for i in epoch_order(n, seed=seed, epoch=epoch)]
    for epoch in range(stop // n + 1):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))
    iterator = batches(n, batch_size=batch_size, seed=seed, start_step=start)
    for step in range(start, start + 3):
        expected = stream[step * batch_size : (step + 1) * batch_size]
        assert next(iterator) == expected == batch_indices(n, batch_size=batch_size, seed=seed, step=step)


def test_the_order_is_fixed_and_changes_with_seed_and_epoch():
    assert epoch_order(8, seed=0, epoch=0) == [0, 3, 7, 4, 1, 5, 2, 6]
    orders = [epoch_order(50, seed=s, epoch=e) for s in range(4) for e in range(4)]
    assert len({tuple(o) for o in orders}) == 16
    # seed 1 in epoch 2 and seed 12 in epoch 0, e.g., share no stream: the pair is keyed, not its sum or its digits
    assert epoch_order(50, seed=1, epoch=23) != epoch_order(50, seed=12, epoch=3)


def test_the_order_is_uniform():
    counts = [[0] * 4 for _ in range(4)]
    for epoch in range(4000):
        for place, row in enumerate(epoch_order(4, seed=7, epoch=epoch)):
            counts[row][place] += 1
    chi2 = sum((c - 1000) ** 2 / 1000 for row in counts for c in row)
    assert chi2 < 30  # 9 degrees of freedom: 30 is exceeded once in 2000


def test_what_epoch_order_returns_is_the_callers_own():
    epoch_order(5, seed=3, epoch=0).reverse()
    assert sorted(epoch_order(5, seed=3, epoch=0)) == list(range(5))
    first = epoch_order(5, seed=3, epoch=0)
    first[0] = 99
    assert 99 not in epoch_order(5, seed=3, epoch=0)


PARTS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=4)


@given(parts=PARTS, seed=st.integers(0, 2**40), length=st.integers(1, 60))
def test_a_mixture_holds_the_shares_at_any_length_and_each_part_in_passes(parts, seed, length):
    rows = [mixed_index(position, parts=parts, seed=seed) for position in range(length)]
    total, first = sum(weight for _, weight in parts), 0
    for before, (n, weight) in enumerate(parts):
        own = [row - first for row in rows if first <= row < first + n]
        assert abs(len(own) - length * weight / total) <= 1 + before
        passes = range(len(own) // n + 1)
        stream = [i for epoch in passes for i in epoch_order(n, seed=seed, epoch=epoch, part=before)]
        assert own == stream[: len(own)]
        first += n
    assert sum(n for n, _ in parts) == first
    assert {*rows} <= {*range(first)}


def test_one_part_is_the_plain_order_and_batches_mix():
    n, parts = 7, [(3, 2.0), (4, 1.0)]
    plain = batch_indices(n, batch_size=5, seed=3, step=2)
    assert plain == batch_indices(n, batch_size=5, seed=3, step=2, parts=[(n, 9.0)])
    mixed = batch_indices(n, batch_size=6, seed=3, step=2, parts=parts)
    assert sum(row < 3 for row in mixed) == 4
    assert next(batches(n, batch_size=6, seed=3, start_step=2, parts=parts)) == mixed


def test_parts_that_are_not_those_of_the_rows_are_refused():
    for parts, message in (
        ([(3, 1.0)], "parts hold 3 rows, and there are 4"),
        ([(3, 1.0), (1, 0.0)], "above 0, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_indices(4, batch_size=1, seed=0, step=0, parts=parts)


def tried(teaches, *, longest, passes, parts=((4, 1.0), (2, 3.0))):
    """row -> the passes in which it is tried, if all rows that do not rest are tried in the order of the stream."""
    found, skips = {}, {}
    for position in range(passes * 8):  # the second part is passed over 3 times as often, and is half as large
        row, lap = mixed_place(position, parts=parts, seed=0)
        if not is_skipped(skips, row, lap):
            found.setdefault(row, []).append(lap)
            skips = next_skips(skips, [(row, lap, teaches(row, lap))], longest=longest)
    return found


def test_a_row_that_teaches_nothing_rests_twice_as_long_each_time_and_comes_back():
    found = tried(lambda row, lap: row % 2 == 0, longest=8, passes=40)
    assert found[1] == found[3] == [0, 2, 5, 10, 19]  # rests of 1, 2, 4, 8 and 8 passes
    assert found[5][:6] == [0, 2, 5, 10, 19, 28]
    assert found[0] == found[2] == [*range(20)]
    assert found[4] == [*range(120)]


def test_a_row_that_teaches_again_is_tried_in_every_pass_and_then_rests_for_one():
    found = tried(lambda row, lap: 5 <= lap < 8, longest=3, passes=30)
    assert found[0] == [0, 2, 5, 6, 7, 8, 10, 13]  # 8 + 1 + 1, 10 + 1 + 2, then rests of 3


def test_bad_arguments_fail_at_the_call():
    with pytest.raises(ValueError, match="n must be at least 1"):
        epoch_order(0, seed=0, epoch=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        batches(3, batch_size=0, seed=0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        batches(3, batch_size=1, seed=0, start_step=-1)


def visited(parts, places, leg=Leg()):
    return [mixed_index(place, parts=parts, seed=0, leg=leg) for place in places]


A, B, GROWN = Part(8, 1.0, "a.jsonl 1"), Part(20, 1.0, "b.jsonl 2"), Part(11, 1.0, "a.jsonl 3")


def test_unchanged_data_goes_on_as_without_an_interruption():
    for parts in ([A], [A._replace(weight=2.0), B]):
        saved = to_save(parts, Leg(), position=13)
        leg, said = resumed(saved, parts, position=13)
        assert (leg, said) == (Leg(), [])
        assert resumed(to_save(parts, leg, position=20), parts, position=20)[0] == Leg()


@pytest.mark.parametrize("new", [B, GROWN])
def test_a_new_or_changed_file_begins_at_its_first_row(new):
    leg, said = resumed(to_save([A], Leg(), position=5), [new], position=5)
    assert visited([new], range(5, 5 + new.size), leg) == epoch_order(new.size, seed=0, epoch=0)
    assert said == [f"data: {new.source.split()[0]} is new or has changed: it begins at its first row"]
    again = to_save([new], leg, position=9)
    assert resumed(again, [new], position=9) == (leg, []), "it goes on from there, in silence"
    assert visited([new], range(9, 12), leg) == epoch_order(new.size, seed=0, epoch=0)[4:7]


def test_each_part_of_a_mixture_has_a_place_of_its_own():
    """A file that is added begins at 0, one that stays goes on, also where it stands elsewhere now."""
    before = visited([A], range(5))
    parts = [B._replace(weight=3.0), A]
    leg, said = resumed(to_save([A], Leg(), position=5), parts, position=5)
    rows = visited(parts, range(5, 5 + 12), leg)
    assert [row for row in rows if row < 20] == epoch_order(20, seed=0, epoch=0, part=1)[:9]
    after = [row - 20 for row in rows if row >= 20]
    assert before + after == epoch_order(8, seed=0, epoch=0), "the pass over the first file is completed"
    assert said[1] == "data: a.jsonl goes on after 5 rows"


@pytest.mark.parametrize("sizes", [(60, 60), (60, 70)])
def test_parallel_parts_do_not_meet(sizes):
    """The orders were those of one seed, also in parts of other sizes: row i of each came in the same batch."""
    n, m = sizes
    stream = [mixed_index(place, parts=[(n, float(n)), (m, float(m))], seed=3) for place in range(n + m)]
    assert sorted(stream) == [*range(n + m)]
    first, second = [row for row in stream if row < n], [row - n for row in stream if n <= row < 2 * n]
    place = {row: i for i, row in enumerate(second)}
    pairs = [(i, place[row]) for i, row in enumerate(first)]
    agree = [(a[1] < b[1]) for i, a in enumerate(pairs) for b in pairs[i + 1 :]]
    assert 0.35 < sum(agree) / len(agree) < 0.65, "as of two independent orders: 0.5, sd 0.044"


def test_a_part_keeps_its_order_where_others_leave():
    c = Part(6, 1.0, "c.jsonl 4")
    saved = to_save([A, c], Leg(), position=4)
    leg, _ = resumed(saved, [c], position=4)
    assert visited([c], range(4, 8), leg) == epoch_order(6, seed=0, epoch=0, part=1)[2:]
    leg, _ = resumed(to_save([c], leg, position=8), [B, c], position=8)  # B is new, and 1 is taken
    rows = visited([B, c], range(8, 16), leg)
    assert [row for row in rows if row < 20] == epoch_order(20, seed=0, epoch=0)[:4]
    saved.pop("orders")  # a checkpoint of an earlier version, whose parts had one order
    leg, _ = resumed(saved, [A, c], position=4)
    rows = visited([A, c], range(4, 12), leg)
    assert [row - 8 for row in rows if row >= 8] == epoch_order(6, seed=0, epoch=0)[2:]


def test_a_file_that_was_moved_is_the_same():
    moved = A._replace(source="elsewhere/x.jsonl 1")
    assert resumed(to_save([A], Leg(), position=5), [moved], position=5) == (Leg(), [])


def test_another_weight_or_batch_size_moves_no_file():
    parts = [A._replace(weight=3.0), B]
    leg, said = resumed(to_save([A, B], Leg(), position=8), parts, position=8)
    assert leg == Leg(8, (4, 4))
    assert not said
    leg, _ = resumed(to_save([A], Leg(), position=6), [A], position=9)  # 3 steps of 2, then of 3
    assert visited([A], range(9, 11), leg) == epoch_order(8, seed=0, epoch=0)[6:]


@pytest.mark.parametrize(("names", "begins"), [("a.jsonl", False), ("b.jsonl data.jsonl", True), (None, False)])
def test_a_checkpoint_without_places_is_judged_by_the_names_of_its_files(names, begins):
    leg, said = resumed(None, [A], position=5, names=names)
    assert leg == (Leg(5, (0,)) if begins else Leg())
    assert bool(said) == begins


def test_parts_without_files_keep_their_order():
    assert resumed(to_save([(8, 1.0)], Leg(), position=5), [(9, 1.0)], position=5) == (Leg(), [])
    assert resumed(to_save((), Leg(), position=5), (), position=8) == (Leg(), [])
