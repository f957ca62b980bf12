import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.metrics import Max, Mean, Min, finalize, largest, mean, merge, smallest, stacked

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


@given(numbers, st.integers(0, 12))
def test_any_split_adds_up_to_the_whole(xs, cut):
    parts = [torch.tensor(p) for p in (xs[:cut], xs[cut:]) if p]
    merged = merge(*({"mean": mean(p), "max": largest(p), "min": smallest(p)} for p in parts))
    out = finalize(merged)
    assert out["mean"] == pytest.approx(sum(xs) / len(xs), abs=1e-9)
    assert (out["max"], out["min"]) == (max(xs), min(xs))


def test_masks_and_weights():
    x, mask = torch.tensor([1.0, float("nan"), 5.0]), torch.tensor([True, False, True])
    out = finalize({"m": mean(x, mask=mask), "a": largest(x, mask=mask), "i": smallest(x, mask=mask)})
    assert out == {"m": 3.0, "a": 5.0, "i": 1.0}
    assert finalize({"w": mean(torch.tensor([1.0, 4.0]), weights=torch.tensor([3.0, 1.0]))}) == {"w": 1.75}


def test_metrics_over_no_entries_are_omitted_and_nan_is_kept():
    none = {"m": mean(torch.zeros(0)), "a": largest(torch.zeros(0)), "i": smallest(torch.zeros(0))}
    masked = {"w": mean(torch.ones(2), mask=torch.zeros(2, dtype=torch.bool))}
    wrong = {"nan": mean(torch.tensor([1.0, math.nan])), "inf": largest(torch.tensor([1.0, math.inf]))}
    out = finalize({"first": mean(2.0)} | none | masked | wrong | {"last": smallest(-3.0)})
    assert list(out) == ["first", "nan", "inf", "last"]
    assert math.isnan(out["nan"])
    assert (out["first"], out["inf"], out["last"]) == (2.0, math.inf, -3.0)
    assert finalize(merge(none, {"m": mean(4.0)})) == {"m": 4.0}


def test_one_key_has_one_type():
    with pytest.raises(TypeError, match="metric 'x' is a Mean in one dict and a Max in another"):
        merge({"x": mean(1.0)}, {"x": largest(1.0)})


def test_weights_have_the_shape_of_the_values():
    x = torch.tensor([1.0, 5.0])
    assert finalize({"a": mean(x, weights=torch.tensor([3, 1]))}) == {"a": 2.0}
    for weights, kind in ((torch.ones(2, 1), ValueError), (torch.ones(3), ValueError), ([1.0, 3.0], TypeError)):
        with pytest.raises(kind, match="weights must"):
            mean(x, weights=weights)


def test_the_type_defines_the_reduction():
    assert isinstance(mean(2.0), Mean)
    assert isinstance(largest(2.0), Max)
    assert isinstance(smallest(2.0), Min)
    assert not mean(torch.ones(2, requires_grad=True)).total.requires_grad


@pytest.mark.parametrize("metric", [largest, smallest])
def test_one_extreme_alone_is_read(metric):
    assert finalize({"x": metric(torch.tensor([3.0]))}) == {"x": 3.0}


def test_metrics_on_host_and_device_are_read_together():
    host, device = torch.ones(()), torch.ones((), device="meta")  # "meta" is a device without memory
    for values in ([host, device], [device, host]):
        assert stacked(values).device == device.device


def test_a_plain_number_is_told_how_to_be_a_metric():
    with pytest.raises(TypeError, match=r"metric 'baseline' is float: write mean\(x\), largest\(x\) or smallest\(x\)"):
        merge({"baseline": 0.5})
    with pytest.raises(TypeError, match=r"metric 'a' is Tensor: write mean\(x\)"):
        finalize({"a": torch.tensor([1.0, 5.0])})
