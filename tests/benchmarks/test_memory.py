"""The paper count of `benchmarks/memory.py` against transformers' own parameter counts and a real forward."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "memory.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_memory", PATH)
memory = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = memory
SPEC.loader.exec_module(memory)


@pytest.mark.parametrize("name", memory.MODELS)
def test_parameter_counts_equal_transformers(name):
    shape = memory.MODELS[name]
    with torch.device("meta"):
        model = memory.build(shape)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", memory.SMALL)
def test_activation_sizes_equal_a_forward(name, dtype):
    shape = memory.SMALL[name]
    counted = shape.activation_bytes(size=dtype.itemsize) + dtype.itemsize * shape.heads * shape.head_dim
    assert memory.measured_activation_bytes(shape, dtype=dtype) == pytest.approx(counted, rel=0.02)


def test_a_plan_states_what_fits_and_why():
    big, small = memory.Layout(8), memory.Layout(64, tp=8)
    row = memory.plan("Qwen2.5-72B", big)
    assert not row["fits"]
    assert "most for states" in row["why"]
    assert row["states"] == pytest.approx(16 * 72.7e9 / 8 / 2**30, rel=0.01)
    assert memory.plan("Qwen2.5-72B", small)["fits"]
    assert memory.plan("Qwen2.5-7B", big)["fits"]
    assert memory.plan("Qwen2.5-72B", replace(big, offload=True))["states"] == 0
    whole, shared = (memory.plan("Qwen3-30B-A3B", memory.Layout(8, ep=ep)) for ep in (1, 8))
    assert whole["states"] == shared["states"]
    assert shared["gathered"] < 0.7 * whole["gathered"]
