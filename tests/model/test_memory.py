"""The paper count of memory against transformers' own parameters, a real forward, and meta models over many ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from rlkit.model.memory import LEAST_TOKENS, Layout, fitted, shape_of, step_bytes
from rlkit.parallel.pipeline import stage_cuts

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("benchmarks_memory", ROOT / "benchmarks" / "memory.py")
memory = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = memory
SPEC.loader.exec_module(memory)


@pytest.mark.parametrize("name", memory.MODELS)
def test_parameter_counts_equal_transformers(name):
    shape = memory.MODELS[name]
    with torch.device("meta"):
        model = memory.build(shape)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape_of(model.config) == shape


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma2", "Gemma3"])
def test_sizes_of_other_families_are_near(kind):
    import transformers as hf

    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 1024, "vocab_size": 1000, "head_dim": 64, "tie_word_embeddings": True}
    config = getattr(hf, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    assert shape_of(config).parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=2e-3)


@pytest.mark.slow_cases("Qwen2-dtype1", "Qwen3-MoE-dtype1", "Qwen3-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", memory.SMALL)
def test_activation_sizes_equal_a_forward(name, dtype):
    shape = memory.SMALL[name]
    counted = shape.activation_bytes(size=dtype.itemsize) + dtype.itemsize * shape.heads * shape.head_dim
    assert memory.measured_activation_bytes(shape, dtype=dtype) == pytest.approx(counted, rel=0.02)


def test_what_the_layout_changes():
    large, experts = memory.MODELS["Qwen2.5-72B"], memory.MODELS["Qwen3-30B-A3B"]
    (parts,) = step_bytes(large, Layout(8))
    assert parts["states"] == pytest.approx(16 * 72.7e9 / 8, rel=0.01)
    (offloaded,) = step_bytes(large, replace(Layout(8), offload=True))
    assert offloaded["states"] == 0
    (kept,) = step_bytes(large, replace(Layout(8), reshard_after_forward=False))
    assert kept["gathered"] - parts["gathered"] == 2 * (large.layers - 2) * large.layer_parameters
    (alone,) = step_bytes(large, Layout(1))
    ends = 2 * large.vocab * large.hidden
    assert alone["gathered"] == 2 * large.parameters + 2 * ends  # a copy, and gradients of the ends
    (whole,), (shared,) = (step_bytes(experts, Layout(8, ep=ep)) for ep in (1, 8))
    assert whole["states"] == shared["states"]
    assert shared["gathered"] < 0.7 * whole["gathered"]


def test_stages_of_a_pipeline():
    """Each has a copy of a tied weight at the ends only, and holds a micro-batch for itself and each later stage."""
    tied = replace(memory.MODELS["Qwen3-8B"], tied=True)
    for shape in (tied, memory.MODELS["Qwen2.5-72B"], memory.MODELS["Qwen3-30B-A3B"]):
        with torch.device("meta"):
            model = memory.build(shape)
        stages = shape.stages(4)
        assert list(accumulate((stage.layers for stage in stages), initial=0)) == stage_cuts(model, 4)
        copies = shape.tied * shape.vocab * shape.hidden
        assert sum(stage.parameters for stage in stages) == shape.parameters + copies
        found = step_bytes(shape, Layout(8, pp=4))
        kept = [parts["activations"] - shape.activation_bytes() * 32768 for parts in found]  # beside one layer
        inputs = [2 * shape.hidden * stage.layers * 32768 for stage in stages]
        assert kept == pytest.approx([4 * inputs[0], 3 * inputs[1], 2 * inputs[2], inputs[3]])
        assert [bool(parts["loss"]) for parts in found] == [False, False, False, True]


AT_SCALE = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist, transformers as hf
from torch.testing._internal.distributed.fake_pg import FakeStore
from rlkit.model.parallelize import parallelize
from rlkit.parallel import mesh
mesh.timeout_of = lambda _: timedelta(seconds=60)  # the fake backend has no options
kind, config, world, sizes = json.loads(sys.argv[1])
stages, found = sizes.get("pp", 1), []
for rank in range(0, world, world // stages):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with torch.device("meta"):
        model = getattr(hf, kind + "ForCausalLM")(getattr(hf, kind + "Config")(**config))
    cut = parallelize(model, mesh.make_mesh(mesh.Parallel(**sizes)), dtype=torch.bfloat16)
    assert all(hasattr(p, "placements") for p in cut.parameters()), "a parameter is on every rank"
    found.append(sum(p.to_local().numel() for p in cut.parameters()))
    dist.destroy_process_group()
print(json.dumps(found))
"""
DENSE = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
DENSE |= {"intermediate_size": 29568, "vocab_size": 152064, "tie_word_embeddings": False}
TIED = DENSE | {"num_hidden_layers": 24, "tie_word_embeddings": True}
EXPERTS = {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4}
EXPERTS |= {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
EXPERTS |= {"head_dim": 128, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("kind", "config", "world", "sizes"),
    [
        pytest.param("Qwen2", DENSE, 64, {"shard": 8, "tp": 8}, marks=pytest.mark.slow),
        pytest.param("Qwen2", DENSE, 64, {"shard": 16, "cp": 4}, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", EXPERTS, 512, {"shard": 512, "ep": 8}, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", EXPERTS, 512, {"shard": 128, "tp": 4, "ep": 8}, marks=pytest.mark.slow),
        pytest.param("Qwen2", TIED, 64, {"shard": 8, "tp": 2, "pp": 4}, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", EXPERTS, 512, {"shard": 128, "pp": 4, "ep": 8}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_many_holds_what_is_counted(kind, config, world, sizes):
    """72 B parameters over 64 ranks and 235 B over 512, on the meta device: bytes of a rank of each stage to 0.2%."""
    import transformers as hf

    given = json.dumps([kind, config, world, sizes])
    done = subprocess.run([sys.executable, "-c", AT_SCALE, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shape = shape_of(getattr(hf, f"{kind}Config")(**config))
    layout = Layout(world, **{name: n for name, n in sizes.items() if name != "shard"})
    states = [parts["states"] for parts in step_bytes(shape, layout)]
    assert [16 * count for count in json.loads(done.stdout)] == pytest.approx(states, rel=2e-3)


def test_what_does_not_fit_gets_checkpointing_then_fewer_tokens():
    shape, gib = memory.MODELS["Qwen3-8B"], 1 << 30
    asked = Layout(1, tokens=16_384, checkpointing=False)
    need = lambda way: sum(step_bytes(shape, way)[0].values())
    assert fitted(shape, asked, room=need(asked)) == asked
    saved = replace(asked, checkpointing=True)
    assert fitted(shape, asked, room=need(asked) - 1) == saved
    less = fitted(shape, asked, room=need(saved) - 1)
    assert less == replace(saved, tokens=8192)
    assert need(less) < need(saved) - 1
    assert fitted(shape, asked, room=need(replace(saved, tokens=LEAST_TOKENS)) - 1) is None
    assert fitted(shape, asked, room=80 * gib) is None  # 16 bytes for each of 8 B weights
