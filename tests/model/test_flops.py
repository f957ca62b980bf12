"""The FLOPs of a token beside those that torch counts, and the model FLOPs utilization."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.evaluate import Clock
from rlkit.model import flops

NUM = 24  # tokens


def counted(model):
    """Per token, in matrix products with weights: torch counts those of queries and keys apart."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(0, 50, (1, NUM))).logits.sum().backward()
    products = counter.get_flop_counts()["Global"]
    return sum(n for op, n in products.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm)) / NUM


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_that_torch_counts(tied):
    model = tiny_model(tiny_tokenizer(), hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert counted(model) == flops.train_flops(model)
    model.model.layers[1].mlp.requires_grad_(False)  # gradients pass through it
    assert counted(model) == flops.train_flops(model)


def test_the_share_of_attention_is_that_of_the_products_that_torch_counts():
    model = tiny_model(tiny_tokenizer(), hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=48)
    model.set_attn_implementation("eager")  # all pairs: twice those of causal attention
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(0, 50, (1, NUM)))
    products = counter.get_flop_counts()["Global"]
    pairs, matrices = products[torch.ops.aten.bmm], products[torch.ops.aten.mm]
    assert flops.attention_share(model) == pytest.approx(pairs / NUM**2 / (matrices / NUM))
    model.config.layer_types = ["full_attention", "sliding_attention", "linear_attention"]
    assert flops.attention_share(model) == pytest.approx(pairs / 3 / NUM**2 / (matrices / NUM))


def test_experts_count_where_a_token_goes():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes, num_key_value_heads=2, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2
    )
    model = Qwen3MoeForCausalLM(config)
    attention, router, experts, head = 4 * 16 * 16, 16 * 8, 2 * 3 * 16 * 24, 64 * 16
    assert flops.train_flops(model) == 6 * (attention + router + experts + head)


def test_utilization_is_the_share_of_the_peak(monkeypatch):
    model = tiny_model(tiny_tokenizer(), hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
    assert flops.peak_tokens(model, dtype="bf16") is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    peak = flops.peak_tokens(torch.nn.ModuleDict({"policy": model, "critic": model}), dtype="bf16")
    assert peak == pytest.approx(9.89e14 / 2 / flops.train_flops(model))
    assert flops.peak_tokens(model, dtype="fp32") is None
    assert flops.peak_tokens(torch.nn.Linear(2, 2), dtype="bf16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another")
    assert flops.peak_tokens(model, dtype="bf16") is None
    monkeypatch.undo()
    now = iter([0.0, 1.0, 3.0, 5.0])
    monkeypatch.setattr("rlkit.loops.evaluate.time.perf_counter", lambda: next(now))
    clock = Clock()
    clock.lap("rollout")
    clock.lap("train")
    times = clock.times(num_tokens=100, peak=400.0, passes=3)
    assert times["time/mfu"] == 100 * 3 / (2.0 * 400.0)
    assert times["time/tokens_per_s"] == 20
