import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import segments

lens_strategy = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def cu_of(lens):
    return segments.cumulative(torch.tensor(lens))


@given(lens_strategy, st.data())
def test_sums_and_means_against_a_loop(lens, data):
    n = sum(lens)
    x = torch.tensor(data.draw(st.lists(st.floats(-9, 9), min_size=n, max_size=n)), dtype=torch.float64)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    x = x.where(mask, float("nan"))
    parts, masks = x.split(lens), mask.split(lens)
    cu = cu_of(lens)
    sums = [sum(v.item() for v, m in zip(p, k, strict=True) if m) for p, k in zip(parts, masks, strict=True)]
    counts = [int(k.sum()) for k in masks]
    torch.testing.assert_close(segments.sum_per_seq(x, cu_seqlens=cu, mask=mask).tolist(), [float(s) for s in sums])
    assert segments.seq_count(mask, cu_seqlens=cu).tolist() == counts
    means = [s / c if c else 0.0 for s, c in zip(sums, counts, strict=True)]
    torch.testing.assert_close(segments.mean_per_seq(x, cu_seqlens=cu, mask=mask).tolist(), means)
    assert segments.seq_ids(cu, num_tokens=n).tolist() == [i for i, k in enumerate(lens) for _ in range(k)]
    assert segments.seq_positions(cu, num_tokens=n).tolist() == [j for k in lens for j in range(k)]
    value = torch.arange(len(lens), dtype=torch.float64)
    assert segments.broadcast_to_tokens(value, cu_seqlens=cu).tolist() == [
        i for i, k in enumerate(lens) for _ in range(k)
    ]


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-9, 9)), max_size=12))
def test_groups_in_any_order(members):
    ids = torch.tensor([7 * g for g, _ in members], dtype=torch.long)
    x = torch.tensor([v for _, v in members], dtype=torch.float64)
    for i, total in enumerate(segments.group_sum(x, group_ids=ids).tolist()):
        assert total == pytest.approx(sum(v for g, v in members if g == members[i][0]))
        assert segments.group_count(ids)[i] == sum(g == members[i][0] for g, _ in members)


def test_gradient_of_a_mean_is_uniform_and_zero_at_masked_nan():
    x = torch.tensor([1.0, float("nan"), 3.0, 4.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    segments.mean_per_seq(x, cu_seqlens=cu_of([3, 1]), mask=mask).sum().backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5, 1.0]


def test_precision():
    cu = cu_of([2, 1])
    assert segments.sum_per_seq(torch.ones(3, dtype=torch.bfloat16), cu_seqlens=cu).dtype == torch.float32
    assert segments.sum_per_seq(torch.ones(3, dtype=torch.float64), cu_seqlens=cu.int()).dtype == torch.float64


@pytest.mark.parametrize(
    ("cu", "error", "message"),
    [
        (torch.tensor([1, 3]), ValueError, "cu_seqlens must start at 0, got 1"),
        (torch.tensor([0, 2]), ValueError, "cu_seqlens must end at the number of tokens, 3, got 2"),
        (torch.tensor([0, 2, 1, 3]), ValueError, "cu_seqlens must be non-decreasing"),
        (torch.tensor([0.0, 3.0]), TypeError, "cu_seqlens must be int32 or int64"),
    ],
)
def test_bad_cu_seqlens(cu, error, message):
    with pytest.raises(error, match=message):
        segments.sum_per_seq(torch.ones(3), cu_seqlens=cu)


def test_bad_masks():
    with pytest.raises(TypeError, match=r"mask must be bool .* use mask.bool\(\)"):
        segments.sum_per_seq(torch.ones(3), cu_seqlens=cu_of([3]), mask=torch.ones(3))
    with pytest.raises(ValueError, match=r"mask must have the shape of x, \[3\], got \[2\]"):
        segments.sum_per_seq(torch.ones(3), cu_seqlens=cu_of([3]), mask=torch.ones(2, dtype=torch.bool))


def test_invalid_bounds_raise():
    with pytest.raises(ValueError, match="cu_seqlens must start at 0, got 1"):
        segments.broadcast_to_tokens(torch.ones(2), cu_seqlens=torch.tensor([1, 2, 4]), num_tokens=3)
    with pytest.raises(ValueError, match="cu_seqlens must end at the number of tokens, 5, got 3"):
        segments.seq_positions(torch.tensor([0, 3]), num_tokens=5)
    with pytest.raises(ValueError, match="x must be on the device of cu_seqlens, cpu, got meta"):
        segments.sum_per_seq(torch.ones(3, device="meta"), cu_seqlens=torch.tensor([0, 3]))
