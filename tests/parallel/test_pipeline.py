"""Where layers are cut into pipeline stages: against all cuts, and against FLOPs counted by torch."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.parallel.pipeline import cut_layers, stage_cuts


def stage_costs(costs, cuts, head):
    found = [sum(costs[a:b]) for a, b in pairwise(cuts)]
    return [*found[:-1], found[-1] + head]


def all_cuts(num_layers, stages):
    return [[0, *inner, num_layers] for inner in combinations(range(1, num_layers), stages - 1)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 40))
def test_no_cut_is_more_even(costs, stages, head):
    """Of all cuts the smallest largest stage, then the smallest second, ...; then the earliest ends."""
    stages = min(stages, len(costs))
    every = all_cuts(len(costs), stages)
    best = min(every, key=lambda cuts: (sorted(stage_costs(costs, cuts, head))[::-1], cuts))
    assert cut_layers(costs, stages, head=head) == best


def test_a_large_head_leaves_one_layer():
    assert cut_layers([1] * 10, 4, head=100) == [0, 3, 6, 9, 10]
    assert cut_layers([1, 1], 2, head=100) == [0, 1, 2]
    with pytest.raises(ValueError, match="pp=3 needs at least as many layers; the model has 2"):
        cut_layers([1, 1], 3, head=100)


def qwen3(layers, hidden, heads, intermediate, *, tied=False):
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        intermediate_size=intermediate, vocab_size=151936, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def test_models_are_cut_by_the_cost_of_their_head():
    """Qwen3-8B's head costs as much as 3.2 layers, the tied one of Qwen3-0.6B as much as 9.9."""
    assert stage_cuts(qwen3(36, 4096, 32, 12288), 4) == [0, 10, 20, 30, 36]
    small = qwen3(28, 1024, 16, 3072, tied=True)
    assert stage_cuts(small, 4) == [0, 9, 18, 27, 28]
    small.lm_head = None
    small.score = torch.nn.Linear(1024, 1, bias=False)  # a critic's costs nothing
    assert stage_cuts(small, 4) == [0, 7, 14, 21, 28]


def moe():
    config = Qwen3MoeConfig(
        vocab_size=263, hidden_size=32, num_hidden_layers=6, mlp_only_layers=[0, 3], intermediate_size=120, head_dim=8,
        num_attention_heads=8, num_key_value_heads=4, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config)
    made.set_experts_implementation("eager")
    return made


@pytest.mark.parametrize("make", [moe, lambda: tiny_model(tiny_tokenizer(), layers=5, hidden=32)])
def test_costs_are_the_flops_that_torch_counts(make):
    """Of matrix products without those of attention (bmm), for every number of stages."""
    made = make().eval()
    made.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made(input_ids=torch.arange(16)[None], use_cache=False)
    flops = {name: counts.get(torch.ops.aten.mm, 0) for name, counts in counter.get_flop_counts().items()}
    kind = type(made).__name__
    costs = [flops[f"{kind}.model.layers.{i}"] for i in range(len(made.model.layers))]
    assert len({*costs}) == (2 if make is moe else 1)
    for stages in range(1, len(costs) + 1):
        assert stage_cuts(made, stages) == cut_layers(costs, stages, head=flops[f"{kind}.lm_head"])
